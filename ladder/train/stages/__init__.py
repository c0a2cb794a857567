"""Stages of `ladder adapt` besides the training on the text: what comes before it, and what ends it."""
