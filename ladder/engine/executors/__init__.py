"""Executors: which processes compute, how they agree on what to do, and how a failure of one is found."""
