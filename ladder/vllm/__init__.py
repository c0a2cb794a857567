"""The vLLM host: wired models inside vLLM's engine, by a plugin that vLLM finds when it starts."""
