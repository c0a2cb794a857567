"""OpenAI-compatible HTTP on the engine."""
