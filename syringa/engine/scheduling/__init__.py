"""Scheduling: which tokens each step computes, and the bookkeeping of the KV cache. Torch-free."""
