"""`ladder chat`: a conversation in a terminal, with a local model or an endpoint."""
