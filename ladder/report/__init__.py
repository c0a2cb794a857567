"""`ladder report`: measurements as one page and as pictures."""
