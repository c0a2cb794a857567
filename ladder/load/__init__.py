"""`ladder load`: requests against an OpenAI-compatible endpoint, and how long each of them took."""
