"""Settings of the rotary embedding."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ladder.config.fields import need
from ladder.errors import LadderError


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base, and how its frequencies are stretched for longer contexts."""

    theta: float = 10_000.0
    kind: str = "default"  # default, linear, llama3, longrope
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, like the next
    high_freq_factor: float = 4.0
    original_context: int = 8192  # llama3 and longrope
    share: float = 1.0  # of a head's dimensions that are rotated, the first ones
    factors: tuple[float, ...] = ()  # longrope: each frequency is divided by its own, up to the original context
    long_factors: tuple[float, ...] = ()  # beyond it; kept for config.json, since contexts that long are refused
    magnitude: float = 1.0  # longrope: cos and sin are multiplied by it

    def __post_init__(self) -> None:
        if not (0 < self.theta < math.inf and 0 < self.factor < math.inf and self.original_context > 0):
            raise LadderError(f"rotary base {self.theta} and factor {self.factor} must be positive numbers")
        if not 0 <= self.low_freq_factor < self.high_freq_factor < math.inf:
            raise LadderError(f"low_freq_factor {self.low_freq_factor} must be below {self.high_freq_factor}")
        if not 0 < self.share <= 1:
            raise LadderError(f"the rotated share of a head must be above 0 and at most 1, not {self.share}")

    def dimensions(self, head_dim: int) -> int:
        """How many of a head's dimensions are rotated."""
        return int(head_dim * self.share)

    @classmethod
    def from_hf(cls, keys: Mapping[str, Any], context: int) -> "Rope":
        """Reads `rope_parameters` (transformers 5), or `rope_theta` joined with `rope_scaling` (before)."""
        theta, share = float(keys.get("rope_theta", cls.theta)), float(keys.get("partial_rotary_factor", 1.0))
        kind = keys.get("rope_type", keys.get("type", "default"))
        if kind == "default":
            return cls(theta, share=share)
        if kind == "linear":
            return cls(theta, kind, float(need(keys, "factor")), share=share)
        original = int(keys.get("original_max_position_embeddings", context))
        if kind == "llama3":
            factor, low, high = (float(need(keys, k)) for k in ("factor", "low_freq_factor", "high_freq_factor"))
            return cls(theta, kind, factor, low, high, original, share)
        if kind in ("longrope", "su"):
            short, long = (tuple(map(float, need(keys, key))) for key in ("short_factor", "long_factor"))
            ratio = float(keys.get("factor") or context / original)
            usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
            magnitude = float(keys.get("attention_factor") or usual)
            return cls(theta, "longrope", ratio, 1.0, 4.0, original, share, short, long, magnitude)
        raise LadderError(f"rotary scaling {kind!r} is not supported: known are default, linear, llama3, longrope")

    def to_hf(self) -> dict[str, Any]:
        keys: dict[str, Any] = {"rope_theta": self.theta, "rope_type": self.kind}
        if self.share != 1:
            keys["partial_rotary_factor"] = self.share
        if self.kind != "default":
            keys["factor"] = self.factor
        if self.kind == "llama3":
            keys |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "longrope":
            keys |= {"short_factor": list(self.factors), "long_factor": list(self.long_factors)}
            keys["attention_factor"] = self.magnitude
        if self.kind in ("llama3", "longrope"):
            keys["original_max_position_embeddings"] = self.original_context
        return keys
