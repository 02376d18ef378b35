"""Model definitions: the native decoder, and `transformers`' definitions in `hf`."""
