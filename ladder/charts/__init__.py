"""Charts: one description of each, drawn by Vega-Lite in a page and as a picture. No torch here."""
