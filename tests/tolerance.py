"""How far two computations of the same numbers may be apart: from the arithmetic, not from a machine.

With u = eps / 2, the unit roundoff of a dtype, one operation has a relative error of at most u.

    summed    any order of adding n numbers is off by at most gamma(n) sum |x|, gamma(n) = n u / (1 - n u)
              (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), so two orders by at most twice that
    carried   n roundings on the way to a result of magnitude m are independent of each other: what they leave grows as
              sqrt(n) u m (Higham and Mary, SIAM J. Sci. Comput. 41, 2019). Two computations have 2 n; four standard
              deviations (DEVIATIONS) are allowed, where one rounding's own is at most u

`summed` is a bound: for losses, means and single sums. `carried` is for networks, where the bound would be a
thousand times what can happen. Their magnitudes are those of the largest entry: entries near zero come from large ones.
"""

import math

import torch
from torch import Tensor

DEVIATIONS = 4.0


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one operation."""
    return torch.finfo(dtype).eps / 2


def summed(terms: int, dtype: torch.dtype, total: float = 1.0) -> float:
    """Between two ways of adding `terms` numbers whose absolute values add up to `total`."""
    n = terms * unit(dtype)
    return 2 * n / (1 - n) * total


def carried(roundings: int, dtype: torch.dtype, magnitude: float = 1.0) -> float:
    """Between two computations of `roundings` roundings each, one on top of the other."""
    return DEVIATIONS * math.sqrt(2 * roundings) * unit(dtype) * magnitude


def forward(layers: int, width: int, tokens: int, dtype: torch.dtype = torch.float32) -> float:
    """Between two computations of a decoder's output, relative to its largest entry. `width`: its longest product.

    A layer has seven sums of at most `width` terms on its longest way (norm, QKV, scores, output projection, norm, gate
    or up, down), one over the tokens, and about sixteen single operations (rotary embedding, softmax, activation,
    gate, residual additions); after the layers come a norm and the head.
    """
    return carried(layers * (7 * width + tokens + 16) + 2 * width, dtype)


def backward(layers: int, width: int, tokens: int, dtype: torch.dtype = torch.float32) -> float:
    """Between two computations of its gradients: the forward pass, and each product twice on the way back."""
    return math.sqrt(3) * forward(layers, width, tokens, dtype)


def stored(layers: int, dtype: torch.dtype) -> float:
    """Between a decoder in half precision and the same in float32: products add up in float32, and are rounded once,
    when they are stored. Seven products and sixteen single operations a layer, as above.
    """
    return carried(layers * (7 + 16) + 2, dtype)


def trained(steps: int, layers: int, width: int, tokens: int, dtype: torch.dtype = torch.float32) -> float:
    """Between two runs of so many steps, relative to what they log: each step adds the roundings of its gradients."""
    return math.sqrt(steps) * backward(layers, width, tokens, dtype)


def moved(steps: int, layers: int, width: int, tokens: int) -> float:
    """Between the weights of two such runs of Adam in float32: root mean square, in learning rates times steps.

    Adam moves a weight by about the learning rate, in the direction of its gradient's sign. Of all gradients a share
    `backward` is smaller than its own rounding errors; these may have either sign, so their weights are up to two
    learning rates apart: a mean square of 4 backward.
    """
    return 2 * math.sqrt(trained(steps, layers, width, tokens))


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest entry that is expected; NaN where there is one."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(torch.float64).tiny))
