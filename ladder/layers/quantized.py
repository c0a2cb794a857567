"""Quantized matrices: codes of 8 or 4 bits, and scales that groups of inputs share.

Checkpoints differ in names, packing and in which weights share a scale. All become one form when they are read:

    w[o, i] = (code[o, i] - zero[o, i // group]) * scale[o, i // group]

A layout is a row in LAYOUTS: which tensors a checkpoint of that kind has, and how they are brought into this form.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ladder.config.quantization import Storage
from ladder.errors import LadderError
from ladder.layers.shard import Piece, Shard
from ladder.layers.weight import RUN, Packed, StoredWeight

CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
MIDDLE = 8  # the zero of symmetric 4-bit codes, which are 0 to 15
AT_A_TIME = 1 << 22  # weights that are dequantized together: their float32 values take more memory than the result
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the place of each of eight outputs in a word
INT32, INTEGERS = frozenset({torch.int32}), frozenset({torch.int32, torch.int64})


class Quantized(StoredWeight):
    """Codes [outputs, inputs], of int4 two in a byte, the second `run` inputs after the first; scales and zeros
    [outputs, groups].

    Of int4 without stored zeros the zero is 8, of the others 0.
    """

    def __init__(
        self,
        storage: Storage,
        outputs: int,
        inputs: int,
        bias: bool,
        dtype: torch.dtype,
        pieces: Iterable[Piece],
        groups: int = 1,
    ) -> None:
        super().__init__(outputs, inputs, bias, dtype, pieces, groups)
        self.storage = storage
        for piece in self.pieces:
            _check_shape(piece, storage)
        four, shared = storage.kind == "int4", -(-inputs // storage.group) if storage.group else 1
        self.run = 1 if inputs % (2 * RUN) else RUN
        kind = dtype if four else torch.float32
        # zeros: a head may have more rows than its checkpoint
        codes = torch.zeros(outputs, inputs // 2 if four else inputs, dtype=CODES[storage.kind])
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(torch.zeros(outputs, shared, dtype=kind), requires_grad=False)
        self.zeros: nn.Parameter | None = None
        if storage.zero:
            self.zeros = nn.Parameter(torch.zeros(outputs, shared, dtype=torch.uint8), requires_grad=False)

    def multiply(self, x: Tensor, group: int | None = None) -> Tensor:
        if group is None:
            return F.linear(x, self.dequantized(), self.bias)
        rows = self.outputs // self.groups
        return F.linear(x, self.dequantized(group * rows, (group + 1) * rows))

    def dequantized(self, first: int = 0, last: int | None = None) -> Tensor:
        """Rows of the matrix, all unless told, in the model's dtype; computed in float32."""
        last = self.outputs if last is None else last
        out = torch.empty(last - first, self.inputs, dtype=self.dtype, device=self.codes.device)
        step = max(1, AT_A_TIME // self.inputs)
        for start in range(first, last, step):
            rows = slice(start, min(start + step, last))
            out[rows.start - first : rows.stop - first] = self._rows(rows)
        return out

    def _rows(self, rows: slice) -> Tensor:
        wide = torch.promote_types(self.dtype, torch.float32)
        codes = self.codes[rows]
        if self.storage.kind == "int4":
            pairs = codes.unflatten(1, (-1, self.run))
            codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
        values, scales = numbers(codes).to(wide), self._spread(self.scales[rows]).to(wide)
        if self.zeros is not None:
            values -= self._spread(self.zeros[rows])
        elif self.storage.kind == "int4":
            values -= MIDDLE
        return values.mul_(scales)

    def _spread(self, shared: Tensor) -> Tensor:
        """[rows, groups] -> [rows, inputs], or [rows, 1] where there is one group."""
        if not self.storage.group:
            return shared
        return shared.repeat_interleave(self.storage.group, dim=1)[:, : self.inputs]

    @property
    def packed(self) -> Packed | None:
        if self.storage.kind == "int4" and self.run != RUN:
            return None
        several = self.scales.shape[1] > 1
        group = self.storage.group if several else self.inputs
        if several and (group < 32 or group & (group - 1)):  # kernels' tiles are powers of two, each of one group
            return None
        zeros = None if self.zeros is None else self.zeros.data
        bits = 4 if self.storage.kind == "int4" else 8
        return Packed(self.codes.data, self.scales.data, zeros, bits, group, self.storage.activations, self.rows_alike)

    @property
    def rows_alike(self) -> int:
        """Outputs that share their scales: those of a block, where every piece begins with a whole one."""
        starts = [start for piece in self.pieces for start in (piece.at, piece.rows.start)]
        alike = self.storage.rows > 1 and starts and not any(start % self.storage.rows for start in starts)
        return self.storage.rows if alike else 1

    def shards(self) -> Iterator[Shard]:
        for piece in self.pieces:
            yield from LAYOUTS[self.storage.layout](self, piece)
            yield from self.bias_shards(piece)


def _check_shape(piece: Piece, storage: Storage) -> None:
    outputs, inputs = piece.shape
    shape, where = f"[{outputs}, {inputs}]", f"{piece.name} is stored as {storage}"
    if piece.transposed:
        raise LadderError(f"{where}: quantized matrices that are stored transposed are not supported")
    if storage.word > 1 and (inputs % storage.unit or (storage.layout in ("awq", "gptq") and outputs % 8)):
        raise LadderError(f"{where}, into which its shape {shape} cannot be divided")


def numbers(codes: Tensor) -> Tensor:
    """Codes as numbers in float32. On a CPU torch converts fp8 one number at a time, and moving bits is much faster:
    those of e4m3, seven places further left, are a float16 whose exponent is less by 8.
    """
    if codes.dtype != torch.float8_e4m3fn or codes.device.type != "cpu":
        return codes.float()
    bits = codes.contiguous().view(torch.int8)
    # NaN, 127 of either sign, has other bits in float16; the largest bits are found faster than equal ones
    if bits.numel() and max(int(bits.amax()), int(bits.view(torch.uint8).amax()) - 128) == 127:
        return codes.float()
    wide = bits.to(torch.int16)
    wide <<= 7
    wide &= ~(1 << 14)
    return wide.view(torch.float16).float().mul_(256)


# --- layouts --------------------------------------------------------------------------------------------------------


def _compressed(weight: Quantized, piece: Piece, scale: str = "weight_scale") -> Iterator[Shard]:
    """weight and weight_scale; of int4 weight_packed [outputs, inputs / 8] with eight inputs in an int32, weight_shape,
    and weight_zero_point [outputs / 8, groups] with eight outputs in one. Packed codes of 8 bits are four in an int32.
    """
    storage, name, (outputs, inputs), here = weight.storage, piece.name, piece.shape, _here(piece)
    if storage.word > 1:
        shape, index = (outputs, inputs // storage.word), (piece.rows, _over(piece.columns, storage.word))
        codes = (lambda x: _pairs(_fours(x), weight.run)) if storage.kind == "int4" else _eights
        yield Shard(f"{name}.weight_packed", shape, index, weight.codes.data[here], codes, INT32)
        sizes = partial(torch.tensor, piece.shape)
        nothing = weight.codes.data[:0, 0]
        yield Shard(f"{name}.weight_shape", (2,), (slice(0, 2),), nothing, types=INTEGERS, holds=sizes)
    else:
        types = frozenset({CODES[storage.kind]})
        yield Shard(f"{name}.weight", piece.shape, (piece.rows, piece.columns), weight.codes.data[here], types=types)
    total, groups = _groups(piece, storage)
    if not storage.rows:
        yield Shard(f"{name}.{scale}", (1,), (slice(0, 1),), weight.scales.data[here])
    else:
        rows, shape = _over(piece.rows, storage.rows), (-(-outputs // storage.rows), total)
        repeat = partial(_repeated, piece, storage.rows)
        yield Shard(f"{name}.{scale}", shape, (rows, groups), weight.scales.data[here], repeat)
    if weight.zeros is not None:
        shape, index = (-(-outputs // 8), total), (_over(piece.rows, 8), groups)
        unpack = partial(_unpacked, piece, None, 0)
        name = f"{name}.weight_zero_point"
        yield Shard(name, shape, index, weight.zeros.data[here].t(), lambda x: unpack(x.t()), INT32)


def _awq(weight: Quantized, piece: Piece) -> Iterator[Shard]:
    """qweight [inputs, outputs / 8] and qzeros [groups, outputs / 8], eight outputs in an int32, in an order of its
    own; scales [groups, outputs].
    """
    storage, (outputs, inputs), here, rows = weight.storage, piece.shape, _here(piece), _over(piece.rows, 8)
    unpack, (total, groups) = partial(_unpacked, piece, AWQ_ORDER, 0), _groups(piece, storage)
    codes, shape, index = weight.codes.data[here], (inputs, outputs // 8), (piece.columns, rows)
    yield Shard(f"{piece.name}.qweight", shape, index, codes, lambda x: _pairs(unpack(x).t(), weight.run), INT32)
    yield _scales(weight, piece)
    assert weight.zeros is not None
    shape = (total, outputs // 8)
    yield Shard(f"{piece.name}.qzeros", shape, (groups, rows), weight.zeros.data[here].t(), unpack, INT32)


def _gptq(weight: Quantized, piece: Piece) -> Iterator[Shard]:
    """qweight [inputs / 8, outputs], eight inputs in an int32; qzeros [groups, outputs / 8], eight outputs in one, each
    less by one than it means; scales [groups, outputs]; g_idx [inputs], each input's group.
    """
    storage, (outputs, inputs), here, rows = weight.storage, piece.shape, _here(piece), _over(piece.rows, 8)
    unpack, (total, groups) = partial(_unpacked, piece, None, 1), _groups(piece, storage)
    codes, index, run = weight.codes.data[here], (_over(piece.columns, 8), piece.rows), weight.run
    shape = (inputs // 8, outputs)
    yield Shard(f"{piece.name}.qweight", shape, index, codes, lambda x: _pairs(_fours(x.t()), run), INT32)
    yield _scales(weight, piece)
    nothing, name, shape = weight.codes.data[:0, 0], f"{piece.name}.qzeros", (total, outputs // 8)
    if weight.zeros is not None:
        yield Shard(name, shape, (groups, rows), weight.zeros.data[here].t(), unpack, INT32)
    else:
        yield Shard(name, shape, (groups, rows), nothing, lambda x: _symmetric(name, unpack(x)), INT32)
    order = partial(_group_numbers, inputs, storage.group)
    yield Shard(f"{piece.name}.g_idx", (inputs,), (slice(0, inputs),), nothing, types=INTEGERS, holds=order)


LAYOUTS: dict[str, Callable[[Quantized, Piece], Iterator[Shard]]] = {
    "compressed": _compressed,
    "packed": _compressed,
    "fp8": partial(_compressed, scale="weight_scale_inv"),
    "awq": _awq,
    "gptq": _gptq,
}


def _scales(weight: Quantized, piece: Piece) -> Shard:
    """scales [groups, outputs]"""
    total, groups = _groups(piece, weight.storage)
    target = weight.scales.data[_here(piece)].t()
    return Shard(f"{piece.name}.scales", (total, piece.shape[0]), (groups, piece.rows), target)


# --- slices ---------------------------------------------------------------------------------------------------------


def _here(piece: Piece) -> slice:
    """The rank's rows that a piece becomes."""
    return slice(piece.at, piece.at + piece.rows.stop - piece.rows.start)


def _over(part: slice, unit: int) -> slice:
    """The units that contain a part."""
    return slice(part.start // unit, -(-part.stop // unit))


def _groups(piece: Piece, storage: Storage) -> tuple[int, slice]:
    """How many groups the inputs of a checkpoint's matrix have, and which of them a piece has."""
    if not storage.group:
        return 1, slice(0, 1)
    return -(-piece.shape[1] // storage.group), _over(piece.columns, storage.group)


def _repeated(piece: Piece, unit: int, shared: Tensor) -> Tensor:
    """[units of outputs, groups] -> [rows of the piece, groups]."""
    first, count = piece.rows.start % unit, piece.rows.stop - piece.rows.start
    return shared.repeat_interleave(unit, dim=0)[first : first + count]


def _fours(words: Tensor) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, 8 n], four bits in each, the lowest first."""
    rows, count = words.shape
    pairs = words.contiguous().view(-1).view(torch.uint8).view(rows, 4 * count)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)


def _eights(words: Tensor) -> Tensor:
    """int32 [rows, n] -> int8 [rows, 4 n], the lowest eight bits first; as they are stored, zero is 128."""
    return words.contiguous().view(torch.int8) ^ -128


def _unpacked(piece: Piece, order: list[int] | None, plus: int, words: Tensor) -> Tensor:
    """int32 [n, units of eight outputs] -> uint8 [n, rows of the piece], each `plus` a number."""
    fours = _fours(words).view(*words.shape, 8)
    fours = (fours if order is None else fours[..., order]).flatten(1)
    first, count = piece.rows.start % 8, piece.rows.stop - piece.rows.start
    return fours[:, first : first + count] + plus


def _pairs(codes: Tensor, run: int) -> Tensor:
    """[rows, inputs] -> [rows, inputs / 2], two in a byte: inputs that are `run` apart."""
    low, high = codes.reshape(len(codes), -1, 2, run).unbind(2)
    return (low | high << 4).flatten(1)


def _symmetric(name: str, zeros: Tensor) -> Tensor:
    """Nothing, where all zeros are those of symmetric codes."""
    if bool((zeros != MIDDLE).any()):
        raise LadderError(f"{name!r} has other values than those of symmetric weights, which config.json calls for")
    return zeros.new_empty(0)


def _group_numbers(inputs: int, group: int) -> Tensor:
    return torch.arange(inputs) // (group or inputs)
