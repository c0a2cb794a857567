"""Where models that are not decoders keep the parts of their layers: rows by model_type."""

from ladder.hf.layouts.encoder_decoders import ENCODER_DECODERS
from ladder.hf.layouts.encoders import ENCODERS
from ladder.hf.layouts.layout import LayerLayout
from ladder.hf.layouts.vision import VISION

NOT_DECODERS: dict[str, tuple[LayerLayout, ...]] = {**ENCODERS, **VISION, **ENCODER_DECODERS}

__all__ = ["NOT_DECODERS"]
