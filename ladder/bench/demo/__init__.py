"""`ladder demo`: what overlapping communication with computation is worth on this machine, shown as it is measured."""
