"""Ladder models that are as good as the originals: data, sensitivity, training, self-distillation, side networks."""
