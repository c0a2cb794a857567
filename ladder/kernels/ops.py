"""What a forward pass asks for, by kernels or by their twins. Activations are rows: [batch or tokens, width]."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.errors import LadderError
from ladder.kernels.attend import Scratch, attend, attend_twin
from ladder.kernels.best import best, best_twin
from ladder.kernels.gemv import gemv, gemv_twin
from ladder.kernels.many import gate, rotate_write, rotate_write_twin
from ladder.kernels.norm import add_norm, add_norm_twin
from ladder.kernels.place import Steps
from ladder.kernels.skinny import skinny
from ladder.kernels.start import start, start_twin
from ladder.kernels.stream import Source
from ladder.kernels.table import MOST, Config, Gemv, Shape, Skinny, Split, Table, power_up_to

Norm = tuple[Tensor, float]  # gain, eps
Gains = tuple[Tensor, Tensor, float] | None  # of queries and keys by head, eps


class Ops(Protocol):
    """One forward pass's vocabulary."""

    def start(self, tokens: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor, first: int, flags: Tensor,
              ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip

    def norm(self, source: Source, norm: Norm) -> tuple[Tensor, Tensor]:
        """The normalized stream, and what the ranks agree on."""
        ...

    def norm_project(
        self,
        source: Source,
        norm: Norm,
        weight: Tensor,
        bias: Tensor | None,
        kernel: str,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The projection of the normalized stream, [splits, rows, outputs], and what the ranks agree on.

        `kernel` is qkv, gate_up (a pair) or head; only qkv may come in more than one split.
        """
        ...  # fmt: skip

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None, plus: Tensor | None, divisor: int) -> Tensor:
        """x W^T + bias + plus / divisor."""
        ...

    def attend(self, qkv: Tensor, place: Steps, gains: Gains, keys: Tensor, values: Tensor, heads: int,
               window: int | None) -> Tensor: ...  # fmt: skip

    def rotate_write(self, qkv: Tensor, place: Steps, gains: Gains, keys: Tensor, values: Tensor, heads: int,
                     ) -> Tensor: ...  # fmt: skip

    def gate(self, x: Tensor) -> Tensor: ...

    def best(self, logits: Tensor, first: int, count: int) -> Tensor: ...


class Twins:
    """Plain torch, anywhere."""

    start = staticmethod(start_twin)
    best = staticmethod(best_twin)
    attend = staticmethod(attend_twin)
    rotate_write = staticmethod(rotate_write_twin)

    def norm(self, source: Source, norm: Norm) -> tuple[Tensor, Tensor]:
        return add_norm_twin(source, *norm)

    def norm_project(self, source: Source, norm: Norm, weight: Tensor, bias: Tensor | None, kernel: str,
                     dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        pair = kernel == "gate_up"
        out = source.base.new_empty(1, len(source.base), weight.shape[0] // (1 + pair), dtype=dtype or weight.dtype)
        return out, gemv_twin(source, norm, weight, bias, pair, None, 1, out[0])

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None, plus: Tensor | None, divisor: int) -> Tensor:
        out = x.new_empty(len(x), weight.shape[0])
        gemv_twin(Source(x), None, weight, bias, False, plus, divisor, out)
        return out

    def gate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return F.silu(first) * second


class Kernels:
    """Triton, on a GPU. Up to `MOST` rows by our matrix kernels, more by the library's."""

    def __init__(self, table: Table, pdl: bool, cores: int = 0) -> None:
        self.table = table
        self.cores = cores  # the GPU's multiprocessors
        self.pdl = pdl  # programmatic dependent launch, which chips have from compute capability 9.0 on
        self._scratch: dict[tuple[int, int, int, int], Scratch] = {}

    @classmethod
    def on(cls, device: torch.device, more: dict[str, dict[Shape, Config]] | None = None) -> "Kernels":
        """With the table that came with the package for this chip, and what `more` says of chips by their names."""
        table = Table.of(torch.cuda.get_device_name(device))
        if more and table.chip not in more:
            raise LadderError(f"the table of tuned kernels has no line for this GPU, {table.chip}: run `ladder tune`")
        table.rows |= (more or {}).get(table.chip, {})
        chip = torch.cuda.get_device_properties(device)
        return cls(table, torch.version.hip is None and (chip.major, chip.minor) >= (9, 0), chip.multi_processor_count)

    def start(self, tokens: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor, first: int, flags: Tensor,
              ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return start(tokens, positions, frequencies, table, first, flags)

    def norm(self, source: Source, norm: Norm) -> tuple[Tensor, Tensor]:
        return add_norm(source, *norm, pdl=self.pdl and len(source.base) <= MOST)

    def norm_project(self, source: Source, norm: Norm, weight: Tensor, bias: Tensor | None, kernel: str,
                     dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        pair = kernel == "gate_up"
        config = self._config(kernel, len(source.base), weight, pair)
        if isinstance(config, Gemv):
            out = source.base.new_empty(1, 1, weight.shape[0] // (1 + pair), dtype=dtype or weight.dtype)
            return out, gemv(source, norm, weight, bias, pair, None, 1, out, config, self.pdl, self.cores)
        x, agreed = self.norm(source, norm)
        return self._several(x, weight, bias, pair, None, 1, dtype, config), agreed

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None, plus: Tensor | None, divisor: int) -> Tensor:
        config = self._config("row", len(x), weight, False)
        if isinstance(config, Gemv):
            out = x.new_empty(1, weight.shape[0])
            gemv(Source(x), None, weight, bias, False, plus, divisor, out, config, self.pdl)
            return out
        return self._several(x, weight, bias, False, plus, divisor, None, config)[0]

    def _several(self, x: Tensor, weight: Tensor, bias: Tensor | None, pair: bool, plus: Tensor | None, divisor: int,
                 dtype: torch.dtype | None, config: Skinny | None) -> Tensor:  # fmt: skip
        """[splits, rows, outputs]"""
        if config is None:
            y = F.linear(x, weight, bias)
            y = self.gate(y) if pair else y if plus is None else y + plus / divisor
            return y.to(dtype or y.dtype).unsqueeze(0)
        kind = torch.float32 if config.splits > 1 else dtype or x.dtype
        out = x.new_empty(config.splits, len(x), weight.shape[0] // (1 + pair), dtype=kind)
        skinny(x, weight, bias, pair, plus, divisor, out, config, self.pdl)
        return out

    def attend(self, qkv: Tensor, place: Steps, gains: Gains, keys: Tensor, values: Tensor, heads: int,
               window: int | None) -> Tensor:  # fmt: skip
        batch, (_, capacity, kv_heads, d) = qkv.shape[1], keys.shape
        config = self.table[Shape("attend", _bucket(batch), kv_heads, _bucket(capacity), bytes=keys.element_size())]
        assert isinstance(config, Split)
        key = (batch, heads, d, config.splits)
        if key not in self._scratch:  # one kernel after another uses it
            self._scratch[key] = Scratch.of(*key, qkv.device)
        return attend(qkv, place, gains, keys, values, heads, window, config, self._scratch[key], self.pdl)

    def rotate_write(self, qkv: Tensor, place: Steps, gains: Gains, keys: Tensor, values: Tensor, heads: int,
                     ) -> Tensor:  # fmt: skip
        return rotate_write(qkv, place, gains, keys, values, heads)

    def gate(self, x: Tensor) -> Tensor:
        return gate(x)

    def best(self, logits: Tensor, first: int, count: int) -> Tensor:
        return best(logits, first, count, self.pdl)

    def _config(self, kernel: str, rows: int, weight: Tensor, pair: bool) -> Gemv | Skinny | None:
        outputs, inputs = weight.shape[0] // (1 + pair), weight.shape[1]
        config = self.table[Shape(kernel, _bucket(rows), outputs, inputs, pair, weight.element_size())]
        assert not isinstance(config, Split)
        return config


def _bucket(rows: int) -> int:
    """Rows are tuned for by powers of two."""
    return power_up_to(2 * rows - 1)
