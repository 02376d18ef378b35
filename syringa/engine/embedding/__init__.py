"""Embedding models and cross-encoders: token ids in, one vector per input out. No KV cache, no sampler, no grammar."""
