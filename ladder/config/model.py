"""ModelConfig: a model's dimensions, its family, and its wiring."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ladder.config.families import FAMILIES, Family, Names
from ladder.config.quantization import Quantization
from ladder.config.rope import Rope
from ladder.errors import LadderError, check_known
from ladder.wiring import SubBlock, Wiring

# Beyond any model, but small enough for arithmetic: a typing error should cost a sentence, not the memory.
LARGEST = {"hidden": 1 << 20, "layers": 4096, "heads": 1 << 16, "kv_heads": 1 << 16, "ffn": 1 << 24, "vocab": 1 << 24}
LARGEST |= {"context": 1 << 30}
DTYPES = ("float32", "bfloat16", "float16", "float64")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")  # gelu_new is gelu_pytorch_tanh


@dataclass(frozen=True)
class Experts:
    """The MLP of most layers is a choice of `top_k` among `count` experts of inner width `ffn`."""

    count: int
    top_k: int
    ffn: int
    normalize: bool = True  # the chosen experts' weights add up to one
    dense_layers: tuple[int, ...] = ()  # layers with an ordinary MLP

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.count <= 1 << 16 or not 1 <= self.ffn <= LARGEST["ffn"]:
            raise LadderError(f"{self.top_k} of {self.count} experts of width {self.ffn}: these numbers do not fit")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. Built by name (`named`), from a directory (`from_directory`) or by hand."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    family: str = "llama"
    head_dim: int = 0  # 0: hidden / heads
    context: int = 4096
    norm_eps: float = 1e-5
    rope: Rope = Rope()
    local_rope: Rope | None = None  # of layers with a sliding window, where it is another one
    no_rope: tuple[int, ...] = ()  # layers without rotary embedding
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; empty: none has one
    activation: str = ""  # empty: the family's
    experts: Experts | None = None
    parallel: bool = False  # whether `standard` means that attention and MLP read the same stream
    variant: str = ""  # of the family's names
    shared_norm: bool = False  # a layer's MLP reads through the attention's norm, and has none of its own
    attention_scale: float | None = None  # scores are q k times this; None: 1 / sqrt(query_scalar)
    query_scalar: float | None = None  # None: head_dim
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what a sub-block adds to the stream
    logit_divisor: float = 1.0
    bos: int | None = None
    eos: tuple[int, ...] = ()
    dtype: str = "float32"
    weights: Quantization = Quantization()  # how the checkpoint stores each matrix
    wiring: Wiring = Wiring(())  # empty: standard
    ranks: int = 1  # the TP degree that a wiring whose function depends on it was trained for; 1: any

    def __post_init__(self) -> None:
        for name, most in LARGEST.items():
            if not 1 <= getattr(self, name) <= most:
                raise LadderError(f"{name} must be from 1 to {most}, not {getattr(self, name)}")
        if not 0 <= self.norm_eps < 1:
            raise LadderError(f"norm_eps must be from 0 to below 1, not {self.norm_eps}")
        if self.family not in FAMILIES:
            raise LadderError(f"unknown model family {self.family!r}: known are {', '.join(FAMILIES)}")
        if self.dtype not in DTYPES:
            raise LadderError(f"dtype {self.dtype!r} is not supported: known are {', '.join(DTYPES)}")
        if self.heads % self.kv_heads:
            raise LadderError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly")
        if not self.head_dim:
            if self.hidden % self.heads:
                raise LadderError(f"hidden size {self.hidden} is not a multiple of {self.heads} heads")
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.head_dim < 2 or self.head_dim % 2 or self.head_dim > LARGEST["hidden"]:
            raise LadderError(f"head size {self.head_dim} does not fit: rotary embedding needs pairs")
        for rope in (self.rope, self.local_rope or self.rope):
            if rope.dimensions(self.head_dim) % 2 or (self.head_dim - rope.dimensions(self.head_dim)) % 2:
                raise LadderError(f"{rope.share} of head size {self.head_dim} is no number of pairs to rotate")
            if rope.share != 1 and self.family_row.qk_norm:
                raise LadderError(f"{self.family}: norms of queries and keys need heads that are rotated as a whole")
            if rope.factors and len(rope.factors) != rope.dimensions(self.head_dim) // 2:
                raise LadderError(f"rotary scaling has {len(rope.factors)} factors for head size {self.head_dim}")
        self._fill("activation", FAMILIES[self.family].activation, "")
        self._fill("windows", (None,) * self.layers, ())
        self._fill("wiring", Wiring(("standard",) * self.layers), Wiring(()))
        self._fill("variant", next(iter(FAMILIES[self.family].variants), ""), "")
        if self.shared_norm:
            self._check_shared_norm()
        if self.activation not in ACTIVATIONS:
            raise LadderError(f"activation {self.activation!r} is not supported: known are {', '.join(ACTIVATIONS)}")
        for window in self.windows:
            if window is not None and window < 1:
                raise LadderError(f"a sliding window must be at least 1, not {window}")
        for name, length in (("wiring", len(self.wiring.layers)), ("windows", len(self.windows))):
            if length != self.layers:
                raise LadderError(f"{name} is for {length} layers, the model has {self.layers}")

    def _check_shared_norm(self) -> None:
        if self.family_row.variants or None in (self.family_row.names.attention_norm, self.family_row.names.mlp_norm):
            raise LadderError(f"shared_norm is not for {self.family}: it is for families with a norm before each block")

    def _fill(self, name: str, default: Any, empty: Any) -> None:
        if getattr(self, name) == empty:
            object.__setattr__(self, name, default)

    @property
    def family_row(self) -> Family:
        """The family's row."""
        return FAMILIES[self.family]

    @property
    def names(self) -> Names:
        """Where the family's checkpoints keep each tensor."""
        names = self.family_row.variants[self.variant] if self.family_row.variants else self.family_row.names
        return replace(names, mlp_norm=names.attention_norm) if self.shared_norm else names

    @property
    def scale(self) -> float:
        """What scores of attention are multiplied by."""
        if self.attention_scale is not None:
            return self.attention_scale
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def embedding_scale(self) -> float:
        return self.hidden**0.5 if self.family_row.root_embedding else self.embed_scale

    def rope_of(self, layer: int) -> Rope | None:
        """A layer's rotary embedding."""
        if layer in self.no_rope or self.names.positions is not None:
            return None
        return self.local_rope if self.local_rope is not None and self.windows[layer] is not None else self.rope

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def sub_blocks(self) -> tuple[tuple[SubBlock, SubBlock], ...]:
        """(attention, MLP) of every layer; `standard` is what the family was born with."""
        if not self.parallel:
            return self.wiring.sub_blocks()
        return Wiring(tuple("parallel" if row == "standard" else row for row in self.wiring.layers)).sub_blocks()

    @property
    def most_all_reduces(self) -> int:
        """Of a pass under any wiring: the embedding's, each sub-block's, and those of norms that span all heads."""
        return 1 + (2 + (self.family_row.qk_norm == "all")) * self.layers

    def rewired(self, pattern: str) -> "ModelConfig":
        """The same model with another wiring, given as text."""
        return replace(self, wiring=Wiring.parse(pattern, self.layers), ranks=1)

    def first(self, layers: int) -> "ModelConfig":
        """Only so many of its layers, under the standard wiring."""
        experts = self.experts
        if experts is not None:
            experts = replace(experts, dense_layers=tuple(n for n in experts.dense_layers if n < layers))
        kept = replace(self, layers=layers, wiring=Wiring(()), ranks=1, windows=self.windows[:layers])
        return replace(kept, experts=experts, no_rope=tuple(n for n in self.no_rope if n < layers))

    def degrees(self, expert_parallel: bool = False) -> list[int]:
        """The numbers of ranks this model can be shared by."""
        sizes = [size for size in range(1, self.heads + 1) if self._even(size, expert_parallel)]
        return [size for size in sizes if self._cut_group(size, expert_parallel) is None]

    def _even(self, size: int, expert_parallel: bool) -> bool:
        # fewer key/value heads than ranks: each is replicated, so the ranks must share them evenly
        kv = self.kv_heads % size == 0 or size % self.kv_heads == 0
        shared = [] if self.experts and not self.experts.dense_layers else [self.ffn]
        if self.experts is not None:
            shared.append(self.experts.count if expert_parallel else self.experts.ffn)
        return kv and self.heads % size == 0 and all(width % size == 0 for width in shared)

    @cached_property
    def _row_parallel(self) -> frozenset[tuple[int, int, bool]]:
        """Of quantized matrices whose inputs the ranks share: how many, the unit they are cut by, whether experts'."""
        found: set[tuple[int, int, bool]] = set()
        for layer in range(self.layers) if self.weights else ():
            names, prefix, experts = self.names, f"{self.names.layers}.{layer}.", self.has_experts(layer)
            found.add((self.heads * self.head_dim, self.weights.of(prefix + names.o).unit, False))
            down = names.expert_down.format(0) if experts else names.down  # all experts are stored alike
            width = self.experts.ffn if self.experts is not None and experts else self.ffn
            found.add((width, self.weights.of(prefix + down).unit, experts))
        return frozenset(found)

    def _cut_group(self, size: int, expert_parallel: bool) -> tuple[int, int] | None:
        """Inputs of a matrix and the group, inputs that share a scale, that so many ranks would cut."""
        for width, unit, experts in sorted(self._row_parallel):
            if size > 1 and width // size % unit and not (experts and expert_parallel):
                return width, unit
        return None

    def check_degree(self, size: int, expert_parallel: bool = False) -> None:
        """Refuse a number of ranks that cannot share this model."""
        if expert_parallel and self.experts is None:
            raise LadderError("expert parallelism is for models with experts, this one has none")
        works = "the degrees that work are " + ", ".join(str(n) for n in self.degrees(expert_parallel))
        if size < 1 or not self._even(size, expert_parallel):
            what = f"{self.heads} heads, {self.kv_heads} key/value heads and ffn {self.ffn}"
            if self.experts is not None:
                what += f", {self.experts.count} experts of ffn {self.experts.ffn}"
            raise LadderError(f"{size} ranks cannot share {what} evenly: {works}")
        if (cut := self._cut_group(size, expert_parallel)) is not None:
            raise LadderError(f"{size} ranks would cut the groups of {cut[1]} of a matrix's {cut[0]} inputs: {works}")

    @classmethod
    def named(cls, size: str) -> "ModelConfig":
        from ladder.config.sizes import SIZES  # which are made of this class

        check_known("size", size, SIZES)
        return SIZES[size]

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read config.json; end-of-text ids come from generation_config.json where there is one."""
        from ladder.config.hf import read_directory  # which makes this class

        return read_directory(directory)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """A config.json's content, ours or a plain one."""
        from ladder.config.hf import from_hf

        return from_hf(raw)

    def to_hf(self) -> dict[str, Any]:
        """A config.json's content: plain for the standard wiring, else one that only software with wirings reads."""
        from ladder.config.hf import to_hf

        return to_hf(self)
