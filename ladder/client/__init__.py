"""A client of OpenAI-compatible endpoints."""
