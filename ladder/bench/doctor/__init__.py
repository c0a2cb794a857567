"""`ladder doctor`: what this machine can do, which wiring suits it, and what to install for the rest."""
