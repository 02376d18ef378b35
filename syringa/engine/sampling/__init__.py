"""Sampling: from a batch's logits to tokens and log-probabilities."""
