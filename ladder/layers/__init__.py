"""Layers of a decoder, each one rank's shard. No layer communicates: what must be summed is returned as it is."""
