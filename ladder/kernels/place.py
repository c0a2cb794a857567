"""Where the tokens of a pass stand, a row each."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Steps:
    """For rows of tokens: in which slot of the cache, at which position, and that position's angles."""

    slots: Tensor  # [rows]
    positions: Tensor  # [rows]
    cos: Tensor  # [rows, head_dim / 2], like sin
    sin: Tensor
