"""What the threads of a program share of an engine: its open requests, and the thread that computes and restarts."""
