"""Layers of the native decoder on a CPU: linear layers, attention, KV cache, rotary embeddings."""
