"""Models that run on `transformers`' definitions with this engine's attention and KV cache."""
