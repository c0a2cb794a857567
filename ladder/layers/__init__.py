"""Layers of a decoder, each holding one rank's shard. No layer communicates: what must be summed is returned as a partial sum."""
