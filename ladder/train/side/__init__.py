"""Side networks: a small network beside a frozen model (Ladder Side-Tuning)."""

from ladder.train.side.model import SideConfig, SideModel, backbone_of

__all__ = ["SideConfig", "SideModel", "backbone_of"]
