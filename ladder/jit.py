"""Triton, where it is installed. Kernels import it from here, so that their references work without it."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


class _Absent:
    """Enough of Triton to import a file of kernels. Callers check PRESENT before they launch one."""

    constexpr: Any = None

    @staticmethod
    def jit(kernel: Any = None, **_: Any) -> Any:
        return kernel or (lambda kernel: kernel)


PRESENT = find_spec("triton") is not None
triton: Any = import_module("triton") if PRESENT else _Absent()
tl: Any = import_module("triton.language") if PRESENT else _Absent()
cuda: Any = import_module("triton.language.extra.cuda") if PRESENT else _Absent()
