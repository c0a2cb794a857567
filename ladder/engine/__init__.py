"""Generation: requests, sampling, text, and the ranks that compute."""
