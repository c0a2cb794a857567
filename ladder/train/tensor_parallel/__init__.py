"""Training the native decoder under tensor parallelism: `ladder train --tp` on ranks that torchrun started."""
