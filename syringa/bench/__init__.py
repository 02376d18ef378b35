"""Benchmark OpenAI-compatible servers over HTTP. Imports neither torch nor the engine."""
