"""What a model is: its dimensions, its family's habits, and its wiring. From and to Hugging Face's config.json.

A family is a row in the table at the end of this file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ladder.config.fields import read_config, read_json, token_ids, whole_number
from ladder.config.lock import locked, ranks_of, unlocked, wiring_of
from ladder.config.rope import Rope
from ladder.errors import LadderError
from ladder.wiring import Wiring

# Beyond any model, but small enough for arithmetic: a typing error should cost a sentence, not the memory.
LARGEST = {"hidden": 1 << 20, "layers": 4096, "heads": 1 << 16, "kv_heads": 1 << 16, "ffn": 1 << 24, "vocab": 1 << 24}
LARGEST |= {"context": 1 << 30}
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Family:
    """What a model_type implies beyond its dimensions; `None` for a bias: config.json decides."""

    architecture: str
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    windows: str = "none"  # none; all: every layer has the window; listed: layer_types or max_window_layers say which
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' own, where config.json is silent


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
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; empty: none has one
    bos: int | None = None
    eos: tuple[int, ...] = ()
    dtype: str = "float32"
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
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.layers)
        if not self.wiring.layers:
            object.__setattr__(self, "wiring", Wiring(("standard",) * self.layers))
        for window in self.windows:
            if window is not None and window < 1:
                raise LadderError(f"a sliding window must be at least 1, not {window}")
        for name, length in (("wiring", len(self.wiring.layers)), ("windows", len(self.windows))):
            if length != self.layers:
                raise LadderError(f"{name} is for {length} layers, the model has {self.layers}")

    @property
    def qk_norm(self) -> bool:
        return FAMILIES[self.family].qk_norm

    def rewired(self, pattern: str) -> "ModelConfig":
        """The same model with another wiring, given as text."""
        return replace(self, wiring=Wiring.parse(pattern, self.layers), ranks=1)

    def first(self, layers: int) -> "ModelConfig":
        """Only so many of its layers, under the standard wiring."""
        return replace(self, layers=layers, wiring=Wiring(()), ranks=1, windows=self.windows[:layers])

    def degrees(self) -> list[int]:
        """The numbers of ranks this model can be shared by."""
        return [size for size in range(1, self.heads + 1) if self._fits(size)]

    def _fits(self, size: int) -> bool:
        # fewer key/value heads than ranks: each is replicated, so the ranks must share them evenly
        kv = self.kv_heads % size == 0 or size % self.kv_heads == 0
        return kv and self.heads % size == 0 and self.ffn % size == 0

    def check_degree(self, size: int) -> None:
        """Refuse a number of ranks that cannot share this model."""
        if size < 1 or not self._fits(size):
            what = f"{self.heads} heads, {self.kv_heads} key/value heads and ffn {self.ffn}"
            works = ", ".join(str(n) for n in self.degrees())
            raise LadderError(f"{size} ranks cannot share {what} evenly: the degrees that work are {works}")

    @classmethod
    def named(cls, size: str) -> "ModelConfig":
        from ladder.config.sizes import SIZES  # which are made of this class

        if size not in SIZES:
            raise LadderError(f"unknown size {size!r}: known are {', '.join(SIZES)}")
        return SIZES[size]

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read config.json; end-of-text ids come from generation_config.json where there is one."""
        try:
            there = directory.is_dir()
        except OSError:  # a name that is too long, for one
            there = False
        if not there:
            raise LadderError(f"no such model directory: {str(directory)[:200]}")
        raw = read_config(directory)
        generation = directory / "generation_config.json"
        if generation.exists() and (eos := read_json(generation).get("eos_token_id")) is not None:
            raw["eos_token_id"] = eos
        try:
            return cls.from_hf(raw)
        except LadderError as error:
            raise LadderError(f"{directory / 'config.json'}: {error}") from None
        except (
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
        ) as error:  # a list where a number belongs, and the like
            raise LadderError(f"{directory / 'config.json'}: a value has the wrong type ({error})") from None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """A config.json's content, ours or a plain one."""
        raw = unlocked(raw)
        name = raw.get("model_type")
        if name not in FAMILIES:
            raise LadderError(f"unknown model family {name!r}: known are {', '.join(FAMILIES)}")
        family = FAMILIES[name]
        raw = {**family.defaults, **raw}
        if raw.get("quantization_config"):
            raise LadderError("quantized weights are not supported: save the model in bfloat16 or float32 first")
        if raw.get("staleness") not in (None, 1):
            raise LadderError("its adaptation is not finished: the layers' staleness is not 1 yet")
        if raw.get("hidden_act", "silu") != "silu":
            raise LadderError(f"activation {raw['hidden_act']!r} is not supported: only silu is")
        layers, heads = whole_number(raw, "num_hidden_layers"), whole_number(raw, "num_attention_heads")
        if layers > LARGEST["layers"]:
            raise LadderError(f"num_hidden_layers is {layers}, more than {LARGEST['layers']}")
        context = whole_number(raw, "max_position_embeddings")
        attention_bias = bool(raw.get("attention_bias", False))
        return cls(
            family=name,
            hidden=whole_number(raw, "hidden_size"),
            layers=layers,
            heads=heads,
            kv_heads=whole_number(raw, "num_key_value_heads", heads),
            ffn=whole_number(raw, "intermediate_size"),
            vocab=whole_number(raw, "vocab_size"),
            head_dim=whole_number(raw, "head_dim", 0),
            context=context,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=Rope.from_hf(raw, context),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
            windows=_windows(raw, family, layers),
            bos=raw.get("bos_token_id"),
            eos=token_ids(raw.get("eos_token_id")),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
            wiring=wiring_of(raw, layers),
            ranks=ranks_of(raw),
        )

    def to_hf(self) -> dict[str, Any]:
        """A config.json's content: plain for the standard wiring, else one that only software with wirings reads."""
        family = FAMILIES[self.family]
        raw: dict[str, Any] = {
            "architectures": [family.architecture],
            "model_type": self.family,
            "bos_token_id": self.bos,
            "dtype": self.dtype,
            "eos_token_id": list(self.eos) if len(self.eos) != 1 else self.eos[0],
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "max_position_embeddings": self.context,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": self.rope.to_hf(),
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
        }
        if not self.eos:
            raw["eos_token_id"] = None
        if family.qkv_bias is None:
            raw["attention_bias"] = self.qkv_bias
        if family.mlp_bias is None:
            raw["mlp_bias"] = self.mlp_bias
        if family.windows != "none":
            raw["sliding_window"] = next((window for window in self.windows if window is not None), None)
        if family.windows == "listed":
            raw["use_sliding_window"] = raw["sliding_window"] is not None
            raw["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in self.windows]
        if not self.wiring.is_standard:
            raw = locked({**raw, "wiring": str(self.wiring)})
            if self.ranks > 1:
                raw["wiring_ranks"] = self.ranks
        if ModelConfig.from_hf(raw) != self:  # say, a sliding window in a family that has none
            raise LadderError(f"no {self.family} config.json can say what this configuration says")
        return raw


def _windows(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if window is None or family.windows == "none":
        return ()
    if family.windows == "all":
        return (int(window),) * layers
    if not raw.get("use_sliding_window", False):
        return ()
    if types := raw.get("layer_types"):
        return tuple(int(window) if kind == "sliding_attention" else None for kind in types)
    first = int(raw["max_window_layers"])
    return tuple(int(window) if layer >= first else None for layer in range(layers))


_QWEN = {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_MISTRAL = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", defaults={"max_position_embeddings": 2048}),
    "mistral": Family("MistralForCausalLM", False, False, False, windows="all", defaults=_MISTRAL),
    "qwen2": Family("Qwen2ForCausalLM", True, False, False, windows="listed", defaults=_QWEN),
    "qwen3": Family(
        "Qwen3ForCausalLM", mlp_bias=False, qk_norm=True, windows="listed", defaults={**_QWEN, "head_dim": 128}
    ),
}
