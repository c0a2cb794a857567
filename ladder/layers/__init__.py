"""Layers of a decoder, each one rank's shard. No layer communicates: partial sums go to the residual stream."""
