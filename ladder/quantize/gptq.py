"""GPTQ: a matrix rounded so that what it computes from a text changes least, not each of its weights.

    argmin over codes and scales   sum over rows of  (q - w) H (q - w)^T          H = x^T x + ridge, over the inputs x

With H^-1 = U^T U, U upper triangular, inputs are rounded one after the other, and those behind make up for the error:

    e[j] = (w[j] - q[j]) / U[j, j]              w[k] -= e[j] U[j, k]   for k > j

The sum of all e[j]^2 is the error of the row as it was. So the scales of a group, which are chosen when the group is
reached, can be those of several that leave the least of it: int4 gains by scales that clip its largest weights.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ladder.config.quantization import Storage
from ladder.errors import LadderError
from ladder.layers.quantized import MIDDLE
from ladder.quantize.rounding import RANGES, Rounded, dequantized, round_to_nearest, scales_of, spread

# scales that are tried, as shares of the one that clips nothing
SHARES = {"int4": tuple(share / 100 for share in range(110, 55, -5))}
BLOCK = 32  # inputs whose errors reach the others of their group together
AT_A_TIME = 1 << 24  # weights of a group that are tried together, with each of its scales


def gptq(weight: Tensor, square: Tensor, storage: Storage, dtype: torch.dtype | None = None) -> Rounded:
    """`weight` [outputs, inputs], `square` H [inputs, inputs]; scales of `dtype`, the weight's own unless told.

    The error is never larger than that of rounding to the nearest codes.
    """
    dtype = dtype or weight.dtype
    weight, factor = weight.float(), _factor(square).to(weight.device, torch.float32)
    count = len(SHARES.get(storage.kind, (1,))) * (storage.group or weight.shape[1])
    rows = max(1, AT_A_TIME // count) if storage.rows == 1 else len(weight)
    parts = [_rounded(part, factor, square.to(factor), storage, dtype) for part in weight.split(rows)]
    return _joined(parts, dim=0)


def _factor(square: Tensor) -> Tensor:
    """U, in float64."""
    square = square.double()
    lower, bad = torch.linalg.cholesky_ex(square)
    found: Tensor = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)[0]
    if bad or not bool(found.isfinite().all() and (found.diagonal() > 0).all()):
        raise LadderError("the inputs of a matrix leave its rounding undetermined: give more --tokens")
    return found


def _rounded(weight: Tensor, factor: Tensor, square: Tensor, storage: Storage, dtype: torch.dtype) -> Rounded:
    rest, width = weight.clone(), storage.group or weight.shape[1]
    groups = []
    for start in range(0, weight.shape[1], width):
        here, behind = slice(start, start + width), slice(start + width, None)
        group, errors = _group(rest[:, here], factor[here, here], replace(storage, group=0), dtype)
        rest[:, behind] -= errors.mT @ factor[here, behind]
        groups.append(group)
    found = _joined(groups, dim=1)
    nearest = round_to_nearest(weight, storage, *scales_of(weight, storage, dtype))
    wrong = [_error(weight, each, square, storage) for each in (found, nearest)]
    return found if bool((wrong[0] <= wrong[1]).all()) else _chosen(wrong[0] <= wrong[1], found, nearest, storage)


def _group(weight: Tensor, factor: Tensor, storage: Storage, dtype: torch.dtype) -> tuple[Rounded, Tensor]:
    """Inputs that share scales, with the best of those tried: their codes, and their errors e [inputs, outputs]."""
    tried = [scales_of(weight * share, storage, dtype) for share in SHARES.get(storage.kind, (1.0,))]
    scales = torch.stack([spread(scale, weight.shape, storage)[:, 0].expand(len(weight)) for scale, _ in tried])
    least, largest = (torch.full_like(scales, each) for each in RANGES[storage.kind])
    if storage.zero:
        zeros = torch.stack([spread(zero, weight.shape, storage)[:, 0] for _, zero in tried if zero is not None])
        least, largest = least + MIDDLE - zeros, largest + MIDDLE - zeros
    values, errors = _inputs(weight.mT[:, None].repeat(1, len(tried), 1), factor, scales, least, largest, storage)
    wrong = _of_units(errors.square().sum(0), storage)  # [tried, units of outputs]
    best = wrong.argmin(0)
    each = best.repeat_interleave(storage.rows or len(weight))[: len(weight)].expand(1, 1, -1)
    values, errors = (x.gather(1, each.expand(len(x), 1, -1))[:, 0] for x in (values, errors))
    units = torch.arange(len(best), device=best.device)
    scale = torch.stack([scale for scale, _ in tried])[best, units]
    zero = torch.stack([zero for _, zero in tried if zero is not None])[best, units] if storage.zero else None
    return round_to_nearest(values.mT, storage, scale, zero), errors


def _inputs(
    rest: Tensor, factor: Tensor, scales: Tensor, least: Tensor, largest: Tensor, storage: Storage
) -> tuple[Tensor, Tensor]:
    """One input after the other: `rest` [inputs, tried, outputs] becomes its rounded values; and their errors e."""
    errors = torch.empty_like(rest)
    for start in range(0, len(rest), BLOCK):
        stop = min(start + BLOCK, len(rest))
        for at in range(start, stop):
            value = (rest[at] / scales).clamp_(least, largest)
            value = value.to(torch.float8_e4m3fn).to(value) if storage.kind == "fp8" else value.round_()
            value *= scales
            torch.sub(rest[at], value, out=errors[at]).div_(factor[at, at])
            rest[at] = value
            rest[at + 1 : stop].flatten(1).addr_(factor[at, at + 1 : stop], errors[at].flatten(), alpha=-1)
        rest[stop:].flatten(1).addmm_(factor[start:stop, stop:].mT, errors[start:stop].flatten(1), alpha=-1)
    return rest, errors


def _of_units(wrong: Tensor, storage: Storage) -> Tensor:
    """[..., outputs] -> [..., units of outputs], summed."""
    return torch.stack([part.sum(-1) for part in wrong.split(storage.rows or wrong.shape[-1], dim=-1)], dim=-1)


def _error(weight: Tensor, rounded: Rounded, square: Tensor, storage: Storage) -> Tensor:
    """Of each unit of outputs."""
    wrong = dequantized(rounded, storage, torch.float32) - weight
    return _of_units((wrong @ square * wrong).sum(1), storage)


def _chosen(first: Tensor, one: Rounded, other: Rounded, storage: Storage) -> Rounded:
    """Unit by unit of the outputs, one of two."""
    rows = first.repeat_interleave(storage.rows or len(one.codes))[: len(one.codes), None]
    codes = torch.where(rows, one.codes.view(torch.uint8), other.codes.view(torch.uint8)).view(one.codes.dtype)
    zeros = None if one.zeros is None or other.zeros is None else torch.where(rows, one.zeros, other.zeros)
    return Rounded(codes, torch.where(first[:, None], one.scales, other.scales), zeros)


def _joined(parts: list[Rounded], dim: int) -> Rounded:
    raw = [part.codes.view(torch.uint8) for part in parts]  # float8 cannot be joined everywhere
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Rounded(
        torch.cat(raw, dim).view(parts[0].codes.dtype),
        torch.cat([part.scales for part in parts], dim),
        torch.cat(zeros, dim) if zeros else None,
    )
