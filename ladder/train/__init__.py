"""Training: self-distillation, from scratch, side networks, tensor parallelism."""
