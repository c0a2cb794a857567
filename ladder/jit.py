"""Triton where it is installed. Kernels take it from here, so that the references beside them work without it."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


class _Absent:
    """Enough of Triton for a file of kernels to be read. Nobody launches one who has looked at PRESENT."""

    constexpr: Any = None

    @staticmethod
    def jit(kernel: Any) -> Any:
        return kernel


PRESENT = find_spec("triton") is not None
triton: Any = import_module("triton") if PRESENT else _Absent()
tl: Any = import_module("triton.language") if PRESENT else _Absent()
cuda: Any = import_module("triton.language.extra.cuda") if PRESENT else _Absent()
