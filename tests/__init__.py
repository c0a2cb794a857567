"""Tests. Parity with the oracle is the unit of proof."""
