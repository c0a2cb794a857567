"""`ladder trace`: when each sub-block of a decode step computed, and when each all-reduce ran."""
