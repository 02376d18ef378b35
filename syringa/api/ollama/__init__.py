"""Ollama's API: bodies become the requests of chat and completions, events become lines of JSON."""
