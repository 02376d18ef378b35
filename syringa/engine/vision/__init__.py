"""Images in prompts: decoding, vision tower, placeholder tokens, caching."""
