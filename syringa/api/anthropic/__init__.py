"""Anthropic's Messages API: bodies become generation requests, and events become messages and stream events."""
