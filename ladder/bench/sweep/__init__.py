"""`ladder bench`: sizes, TP degrees, batches, links and wirings, measured side by side."""
