"""Rotary embedding's settings."""

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
    kind: str = "default"  # default, linear, llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, like the next two
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if not (0 < self.theta < math.inf and 0 < self.factor < math.inf and self.original_context > 0):
            raise LadderError(f"rotary base {self.theta} and factor {self.factor} must be positive numbers")
        if not 0 <= self.low_freq_factor < self.high_freq_factor < math.inf:
            raise LadderError(f"low_freq_factor {self.low_freq_factor} must be below {self.high_freq_factor}")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], context: int) -> "Rope":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
        keys = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
        theta = float(keys.get("rope_theta", raw.get("rope_theta", cls.theta)))
        kind = keys.get("rope_type", keys.get("type", "default"))
        if kind == "default":
            return cls(theta)
        if kind == "linear":
            return cls(theta, kind, float(need(keys, "factor")))
        if kind == "llama3":
            factor, low, high = (float(need(keys, k)) for k in ("factor", "low_freq_factor", "high_freq_factor"))
            return cls(theta, kind, factor, low, high, int(keys.get("original_max_position_embeddings", context)))
        raise LadderError(f"rotary scaling {kind!r} is not supported: known are default, linear, llama3")

    def to_hf(self) -> dict[str, Any]:
        keys: dict[str, Any] = {"rope_theta": self.theta, "rope_type": self.kind}
        if self.kind != "default":
            keys["factor"] = self.factor
        if self.kind == "llama3":
            keys |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
            keys["original_max_position_embeddings"] = self.original_context
        return keys
