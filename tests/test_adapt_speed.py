"""The program that measures `ladder adapt`: which groups time is put into, and when no kernel runs."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.autograd import DeviceType

from experiments.adapt_speed import SHAPES, busy, group_of, pieces, settings


@dataclass
class Span:
    start: float
    end: float


@dataclass
class Event:
    """As torch's profiler has them."""

    name: str
    device_type: Any = DeviceType.CPU
    cpu_parent: "Event | None" = None
    kernels: list[Any] = field(default_factory=list)
    time_range: Span | None = None
    self_cpu_time_total: float = 0.0


@dataclass
class Kernel:
    name: str
    duration: float


@pytest.mark.parametrize("name, around, group", [
    ("nvjet_tst_128x256_64x4", ["aten::mm"], "products"),
    ("nvjet_tst_128x256_64x4", ["aten::mm", "_FusedLoss"], "loss products"),
    ("triton_red_fused_0", ["triton_red_fused_0", "_FusedLoss"], "loss"),
    ("pytorch_flash::flash_bwd_kernel", ["aten::_flash_attention_backward"], "attention"),
    ("multi_tensor_apply_kernel", ["Optimizer.step#AdamW.step"], "optimizer"),
    ("Memcpy HtoD (Pinned -> Device)", ["aten::copy_"], "copies"),
    ("triton_poi_fused_add_mul_3", ["triton_poi_fused_add_mul_3"], "elementwise and norms"),
])  # fmt: skip
def test_groups(name: str, around: list[str], group: str) -> None:
    assert group_of(name, around) == group


def test_kernels_belong_to_the_calls_that_launched_them() -> None:
    loss = Event("_FusedLoss", self_cpu_time_total=5.0)
    product = Event("aten::mm", cpu_parent=loss, kernels=[Kernel("nvjet", 7.0)], self_cpu_time_total=2.0)
    kernel = Event("nvjet", DeviceType.CUDA, time_range=Span(0, 7))
    assert list(pieces([loss, product, kernel], True)) == [("nvjet", ["aten::mm", "_FusedLoss"], 7.0)]
    assert [each[::2] for each in pieces([loss, product, kernel], False)] == [("_FusedLoss", 5.0), ("aten::mm", 2.0)]


def test_time_without_kernels() -> None:
    spans = [Span(10, 20), Span(15, 18), Span(19, 25), Span(30, 40)]
    events = [Event("launch"), *(Event("kernel", DeviceType.CUDA, time_range=each) for each in spans)]
    assert busy(events) == (25.0, 30.0)


def test_settings_have_names_of_their_own() -> None:
    for shape in SHAPES.values():
        names = [setting.name for setting in settings(shape)]
        assert len(set(names)) == len(names) and max(each.size for each in settings(shape)) == max(shape.sizes)
