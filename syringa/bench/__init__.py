"""Measures servers of the OpenAI API over HTTP. No torch, and nothing of the engine."""
