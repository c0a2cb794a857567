"""Launches the kernels of a forward pass: Triton or the reference. Activations are rows: [rows, width]."""

from dataclasses import replace

import torch
from torch import Tensor

from ladder.devices import converts_fp8
from ladder.errors import LadderError
from ladder.jit import triton
from ladder.kernels.activation import activate_rows
from ladder.kernels.attention.attend import Scratch, attend, attend_reference
from ladder.kernels.attention.attend_prompts import attend_prompts, attend_tiles_reference
from ladder.kernels.attention.rotary import rotate_write, rotate_write_reference
from ladder.kernels.both import both_reference, gemv_both, small_gemm_both
from ladder.kernels.embed import embed, embed_reference
from ladder.kernels.experts.products import expert_down, expert_up
from ladder.kernels.experts.router import route
from ladder.kernels.gemv import gemv, projected
from ladder.kernels.library import library_product
from ladder.kernels.norm import add_norm, add_norm_reference
from ladder.kernels.quantized.dequantize import dequantize
from ladder.kernels.quantized.fp8 import takes_fp8
from ladder.kernels.sampling.adjust import adjust, adjust_reference, note, note_reference
from ladder.kernels.sampling.argmax import argmax, argmax_reference, choose, choose_reference
from ladder.kernels.sampling.candidates import (
    candidates,
    candidates_reference,
    choose_candidate,
    choose_candidate_reference,
)
from ladder.kernels.sampling.sample import sample, sample_reference
from ladder.kernels.small_gemm import small_gemm
from ladder.kernels.stream import Source
from ladder.kernels.table import MOST, SHARED, Config, Gemv, Shape, SmallGemm, Split, Table, beside, power_up_to, reach
from ladder.layers.activation import activate
from ladder.layers.attention import Attention
from ladder.layers.cache import Metadata, PrefillMetadata
from ladder.layers.experts import ExpertMLP
from ladder.layers.norm import Norm
from ladder.layers.weight import AsOne, Packed, Weight

OTHER = 8 * 1024  # bytes of shared memory that attention needs beside its blocks


class References:
    """Plain torch, anywhere: what each kernel must agree with."""

    embed = staticmethod(embed_reference)
    norm = staticmethod(add_norm_reference)
    attend = staticmethod(attend_reference)
    rotate_write = staticmethod(rotate_write_reference)
    activate = staticmethod(activate)
    argmax = staticmethod(argmax_reference)
    choose = staticmethod(choose_reference)
    adjust = staticmethod(adjust_reference)
    note = staticmethod(note_reference)
    sample = staticmethod(sample_reference)
    candidates = staticmethod(candidates_reference)
    choose_candidate = staticmethod(choose_candidate_reference)

    def norm_project(
        self, source: Source, norm: Norm | None, weight: Weight, kernel: str, activation: str | None = None,
        pair: bool = False, dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """f( W n(x) + bias ) of the stream x, [splits, rows, outputs], and what the ranks agree on.

        `kernel` is qkv, gate_up or head; only qkv may come in more than one split.
        """
        x, agreed = self.norm(source, norm)
        y = projected(x, weight, activation, pair, None, 1, 1.0)
        return y.to(dtype or y.dtype).unsqueeze(0), agreed

    def takes_both(self, both: AsOne, rows: int, pair: bool) -> bool:
        """Whether there is a kernel for two weights at once."""
        return True

    def norm_project_both(
        self, source: Source, norm: Norm | None, both: AsOne, activation: str, pair: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """W1 n(x) + bias, f( W2 n(x) + bias ) of the stream x, and what the ranks agree on."""
        x, agreed = self.norm(source, norm)
        return *both_reference(x, both, activation, pair), agreed

    def project(self, x: Tensor, weight: Weight, plus: Tensor | None, divisor: int, scale: float) -> Tensor:
        """scale (x W^T + bias) + plus / divisor."""
        return projected(x, weight, None, False, plus, divisor, scale)

    def library_matrix(self, x: Tensor, weight: Weight) -> Tensor | Packed | None:
        """What `library_product` multiplies x by."""
        return weight.dense

    def attend_prompts(
        self, turned: Tensor, block: Attention, metadata: PrefillMetadata, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attention of the rows that are a prompt's, whose `turned` queries, keys and values are in the cache, too;
        those of rows that are decoded are anything.
        """
        if not metadata.prompts:  # they are known only by their tiles
            return attend_tiles_reference(turned, block, metadata, keys, values)
        q, k, v = turned.split((block.heads, block.kv_heads, block.kv_heads), dim=1)
        y = block.over_pieces(q, k, v, metadata, keys, values)
        return torch.cat([y.new_empty(metadata.decoded, y.shape[1]), y]) if metadata.decoded else y

    def experts(self, x: Tensor, block: ExpertMLP, plus: Tensor | None, divisor: int) -> Tensor:
        """The experts' partial sum + plus / divisor."""
        y = block.apply_experts(x, *block.choose(x)) * block.residual_scale
        return y if plus is None else y + plus / divisor


class Kernels:
    """Triton, on a GPU. Up to `MOST` rows by our matrix kernels, more by the library's."""

    def __init__(
        self,
        table: Table,
        pdl: bool,
        cores: int = 0,
        lanes: int = 1,
        flags: bool = False,
        chip_pdl: bool | None = None,
        shared: int = SHARED,
        fp8: bool = False,
    ) -> None:
        self.table = table
        self.shared = shared  # bytes of a multiprocessor for what a program has under way
        self.fp8 = fp8  # the chip has products of fp8 numbers
        self.chip_pdl = pdl if chip_pdl is None else chip_pdl
        self.lanes = lanes  # that kernels run on at the same time
        self.flags = flags and lanes > 1  # and some of them poll the flags of all-reduces
        self.cores = cores  # the GPU's multiprocessors
        self.pdl = pdl  # programmatic dependent launch, which chips have from compute capability 9.0 on
        self._scratch: dict[tuple[int, int, int, int], Scratch] = {}

    @classmethod
    def on(cls, device: torch.device, more: dict[str, dict[Shape, Config]] | None = None) -> "Kernels":
        """With the table that came with the package for this chip, and what `more` says of chips by their names."""
        table = Table.of(torch.cuda.get_device_name(device))
        if more and table.chip not in more:
            raise LadderError(f"the table of tuned kernels has no line for this GPU, {table.chip}: run `ladder tune`")
        own = (more or {}).get(table.chip, {})
        # for shapes of which they say something the given rows replace those for two lanes, flags or not
        given = {replace(shape, flags=False) for shape in own}
        table.rows = {shape: row for shape, row in table.rows.items() if replace(shape, flags=False) not in given} | own
        chip = torch.cuda.get_device_properties(device)
        pdl = torch.version.hip is None and (chip.major, chip.minor) >= (9, 0)
        shared = getattr(chip, "shared_memory_per_block_optin", chip.shared_memory_per_block) - OTHER
        fp8 = torch.version.hip is None and converts_fp8(device)
        return cls(table, pdl, chip.multi_processor_count, shared=shared, fp8=fp8)

    def scheduled(self, lanes: int, pdl: bool, flags: bool) -> "Kernels":
        """The same for kernels of so many lanes, with programmatic launch where the chip has it and `pdl` says so.
        `flags`: of all-reduces, which kernels poll.
        """
        own = (self.chip_pdl, self.shared, self.fp8)
        return Kernels(self.table, self.chip_pdl and pdl, self.cores, lanes, flags, *own)

    embed = staticmethod(embed)
    rotate_write = staticmethod(rotate_write)
    activate = staticmethod(activate_rows)
    adjust = staticmethod(adjust)
    note = staticmethod(note)
    sample = staticmethod(sample)
    candidates = staticmethod(candidates)
    choose_candidate = staticmethod(choose_candidate)

    def norm(self, source: Source, norm: Norm | None) -> tuple[Tensor, Tensor]:
        return add_norm(source, norm, pdl=self.pdl and len(source.base) <= MOST)

    def norm_project(
        self, source: Source, norm: Norm | None, weight: Weight, kernel: str, activation: str | None = None,
        pair: bool = False, dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        config, matrix = self._config(kernel, len(source.base), weight, pair), _matrix(weight)
        if isinstance(config, Gemv) and matrix is not None:
            out = source.base.new_empty(1, 1, weight.outputs // (1 + pair), dtype=dtype or source.base.dtype)
            agreed = gemv(
                source, norm, matrix, weight.bias, activation, pair, None, 1, 1.0, out, config, self.pdl, self.cores
            )
            return out, agreed
        x, agreed = self.norm(source, norm)
        return self._several(x, weight, activation, pair, None, 1, 1.0, dtype, config), agreed

    def takes_both(self, both: AsOne, rows: int, pair: bool) -> bool:
        return self._config_of_both(both, rows, pair) is not None

    def norm_project_both(
        self, source: Source, norm: Norm | None, both: AsOne, activation: str, pair: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self._config_of_both(both, len(source.base), pair)
        if isinstance(config, Gemv):
            return gemv_both(source, norm, both, activation, pair, config, self.pdl, self.cores)
        assert isinstance(config, SmallGemm)
        x, agreed = self.norm(source, norm)
        return *small_gemm_both(x, both, activation, pair, config, self.pdl), agreed

    def _config_of_both(self, both: AsOne, rows: int, pair: bool) -> Config:
        if rows > MOST:
            return None
        (total, inputs), size = both.matrix.shape, both.matrix.element_size()
        outputs = both.first + (total - both.first) // (1 + pair)
        return self.table[Shape("both", _bucket(rows), outputs, inputs, pair, size, self.lanes, self.flags)]

    def project(self, x: Tensor, weight: Weight, plus: Tensor | None, divisor: int, scale: float) -> Tensor:
        config, matrix = self._config("row", len(x), weight, False), _matrix(weight)
        if isinstance(config, Gemv) and matrix is not None:
            out = x.new_empty(1, weight.outputs)
            source = Source(x)
            gemv(source, None, matrix, weight.bias, None, False, plus, divisor, scale, out, config, self.pdl)
            return out
        return self._several(x, weight, None, False, plus, divisor, scale, None, config)[0]

    def _several(
        self, x: Tensor, weight: Weight, activation: str | None, pair: bool, plus: Tensor | None, divisor: int,
        scale: float, dtype: torch.dtype | None, config: Config,
    ) -> Tensor:  # fmt: skip
        """[splits, rows, outputs]"""
        matrix = _matrix(weight)
        if dtype is not None and dtype != x.dtype and isinstance(matrix, Tensor) and config is None:  # the head
            return torch.mm(x, matrix.t(), out_dtype=dtype).unsqueeze(0)
        if matrix is None or not isinstance(config, SmallGemm):
            y = library_product(x, weight, self.library_matrix(x, weight))
            if activation is None:
                y = y if scale == 1 else y * scale
                y = y if plus is None else y + plus / divisor
            else:
                y = self.activate(y, activation, pair)
            return y.to(dtype or y.dtype).unsqueeze(0)
        if config.splits > 1 and activation is not None:
            raise ValueError("a product with an activation cannot be split")
        kind = torch.float32 if config.splits > 1 else dtype or x.dtype
        out = x.new_empty(config.splits, len(x), weight.outputs // (1 + pair), dtype=kind)
        small_gemm(x, matrix, weight.bias, activation, pair, plus, divisor, scale, out, config, self.pdl, self.shared)
        return out

    def library_matrix(self, x: Tensor, weight: Weight) -> Tensor | Packed | None:
        """A matrix that is quantized is dequantized, unless x is quantized, too."""
        matrix = _matrix(weight)
        if not isinstance(matrix, Packed) or (self.fp8 and takes_fp8(x, matrix)):
            return matrix
        return dequantize(matrix, weight.dtype)

    def attend(
        self, qkv: Tensor, block: Attention, metadata: Metadata, keys: Tensor, values: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Where `out` is given, it has a prompt's rows, too: any number of sequences has one of few configurations."""
        (_, kv_heads, d), size = keys.shape, block.dtype.itemsize
        batch = _bucket(qkv.shape[1] if out is None else beside(qkv.shape[1]))
        shape = Shape("attend", batch, kv_heads, reach(metadata.reach), False, size, self.lanes, self.flags)
        config = self.table[shape]
        assert isinstance(config, Split)
        config = config.within(self.shared, 2 * triton.next_power_of_2(d) * keys.element_size())
        key = (batch, block.heads, d, config.splits)
        if key not in self._scratch:  # one kernel after another uses it
            self._scratch[key] = Scratch.of(*key, qkv.device)
        qkv = qkv.contiguous()  # in prefill they may be parts of longer rows
        return attend(qkv, block, metadata, keys, values, config, self._scratch[key], self.pdl, out)

    def attend_prompts(
        self, turned: Tensor, block: Attention, metadata: PrefillMetadata, keys: Tensor, values: Tensor
    ) -> Tensor:
        if metadata.single:
            seen = metadata.prompts[0][1]
            if block.cap is None and (
                block.window is None or block.window >= seen
            ):  # the library has a kernel for this
                return References().attend_prompts(turned, block, metadata, keys, values)
        return attend_prompts(turned, block, metadata, keys, values, self.shared)

    def experts(self, x: Tensor, block: ExpertMLP, plus: Tensor | None, divisor: int) -> Tensor:
        up, down, router = block.up_proj.dense, block.down_proj.dense, block.router.dense
        if up is None or down is None or len(x) > MOST:
            return References().experts(x, block, plus, divisor)
        routing = route(x, router, block.top_k, block.normalize, self.pdl)
        hidden = expert_up(x, up, routing, block.first, block.local, block.activation, self.pdl)
        return expert_down(
            hidden, down, routing, block.first, block.local, plus, divisor, block.residual_scale, self.pdl
        )

    def argmax(self, logits: Tensor, first: int, count: int) -> Tensor:
        return argmax(logits, first, count, self.pdl)

    def choose(self, best: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, last: Tensor) -> Tensor:
        return choose(best, tokens, positions, slots, last, self.pdl)

    def _config(self, kernel: str, rows: int, weight: Weight, pair: bool) -> Config:
        matrix = _matrix(weight)
        if matrix is None:
            return None
        outputs, inputs = weight.outputs // (1 + pair), weight.inputs
        if isinstance(matrix, Tensor):
            size, bits, group = matrix.element_size(), 0, 0
        else:
            size, bits, group = 2, matrix.bits, matrix.group if matrix.group < inputs else 0
            if inputs % 4:  # they are read in words
                return None
        shape = Shape(kernel, _bucket(rows), outputs, inputs, pair, size, self.lanes, self.flags, bits, group)
        return self.table[shape]


Launch = References | Kernels


def _matrix(weight: Weight) -> Tensor | Packed | None:
    """What matrix kernels read of a weight."""
    return weight.packed if weight.dense is None else weight.dense


def _bucket(rows: int) -> int:
    """Rows are tuned for by powers of two."""
    return power_up_to(2 * rows - 1)
