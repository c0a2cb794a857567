"""The library's matrix products, for any number of rows: x W^T + b."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.kernels.quantized.fp8 import fp8_product
from ladder.layers.weight import Packed, Weight


def library_product(x: Tensor, weight: Weight, matrix: Tensor | Packed | None, out: Tensor | None = None) -> Tensor:
    """`matrix`: the weight's, as it is or dequantized; or still packed, to be multiplied by fp8 activations; None: the
    weight has a product of its own.
    """
    if isinstance(matrix, Packed):
        y = fp8_product(x, matrix, out)
    elif matrix is not None and out is not None:
        y = torch.mm(x, matrix.t(), out=out)
    else:
        y = weight.multiply(x) if matrix is None else F.linear(x, matrix, weight.bias)
        return y if out is None else out.copy_(y)
    return y if weight.bias is None else y.add_(weight.bias)
