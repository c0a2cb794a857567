"""The next token: the likeliest one, or one that is drawn, on the GPU and for a whole batch."""
