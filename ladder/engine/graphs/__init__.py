"""Forward passes as CUDA graphs, communication stream included."""
