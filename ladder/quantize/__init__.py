"""Dense checkpoints to quantized ones: `ladder quantize`."""
