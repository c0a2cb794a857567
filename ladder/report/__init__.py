"""ladder report: what was measured, as one page and as pictures."""
