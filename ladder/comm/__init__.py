"""Communicators: how the ranks of a tensor-parallel model add up what each of them computed."""
