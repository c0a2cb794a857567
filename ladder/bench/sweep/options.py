"""What `ladder bench` measures: presets as a table, and the options that the command line is made from.
No torch here.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from ladder.config import DTYPES, SIZES
from ladder.config.quantization import NAMED, format_names
from ladder.errors import LadderError, check_known
from ladder.options import check_types, option
from ladder.perf.arms import ARMS

REAL = "real"  # in place of a link's name: the backend as it is
MODES = ("auto", "ranks", "one-rank")
DEVICES = ("auto", "cpu", "cuda")
MOST = 1 << 20  # of anything: a typing error should cost a sentence


@dataclass(frozen=True)
class Preset:
    """A named protocol. In the name of an emulated link {tp} stands for the number of ranks."""

    size: tuple[str, ...] = ()
    arm: tuple[str, ...] = tuple(ARMS)
    tp: tuple[int, ...] = (2,)
    batch: tuple[int, ...] = (1,)
    emulate_link: tuple[str, ...] = (REAL,)
    weights: tuple[str, ...] = ("bf16",)
    prompt: int = 1024
    new: int = 512
    repetitions: int = 25
    device: str = "auto"


_SERVING = Preset(
    ("llama-3.1-70b",),
    tp=(8,),
    batch=(1, 16, 64),
    emulate_link=("nvlink_nccl", "nvlink_oneshot", "pcie_shm_tp{tp}"),
    new=1024,
)

PRESETS: dict[str | None, Preset] = {
    None: Preset(),
    # two processes on any CPU; its link takes about as long as a sub-block does on a core: one can hide the other;
    # two batches, so that a sweep that is interrupted has something to continue with
    "quick": Preset(
        ("quick",), batch=(1, 2), emulate_link=("5ms,10GB/s",), prompt=32, new=64, repetitions=12, device="cpu"
    ),
    # the paper's; peer-to-peer on and off
    "paper": Preset(
        ("llama-3-70b",), tp=(2, 4, 8), batch=(1, 4, 16, 64), emulate_link=("nvlink_nccl", "pcie_shm_tp{tp}")
    ),
    # what inference benchmarks use
    "1k1k": _SERVING,
    "8k1k": replace(_SERVING, prompt=8192),
}


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, on what, and where the lines go."""

    preset: str | None = option(None, "quick (two minutes on any CPU), paper, 1k1k or 8k1k; other flags override it.")
    size: tuple[str, ...] = option((), "A named size (may be given several times, like all of the next six).")
    arm: tuple[str, ...] = option((), f"One of {', '.join(ARMS)}, or any wiring; default: all of these.")
    wiring: tuple[str, ...] = option((), "The same as --arm.")
    tp: tuple[int, ...] = option((), "Number of ranks.")
    batch: tuple[int, ...] = option((), "Sequences at a time.")
    emulate_link: tuple[str, ...] = option(
        (), "A link to emulate: its name, or alpha,beta as in 50us,10GB/s; real: the backend as it is."
    )
    weights: tuple[str, ...] = option(
        (), f"Formats of the layers' matrices, as in fp8 or bf16,fp8,int4: {', '.join(NAMED)} (bf16: not quantized)."
    )
    prompt: int | None = option(None, "Tokens of each prompt.")
    new: int | None = option(None, "New tokens of each sequence.")
    repetitions: int | None = option(None, "Decode steps measured of each arm.")
    mode: str = option("auto", "ranks (a process each), one-rank (one GPU, an emulated link), or auto: what fits here.")
    device: str = option("auto", "cpu, cuda, or auto: the preset's, else a GPU where there is one.")
    dtype: str = option("auto", "auto (the size's; on a CPU float32), float32, bfloat16, float16 or float64.")
    layers: int | None = option(None, "Only this many of the model's layers; the results have both numbers.")
    out: Path = option(
        Path("bench.jsonl"),
        "File of JSON lines, appended cell by cell. What it has with as many repetitions is not measured again.",
    )
    json: bool = option(False, "The lines instead of the table.")

    def __post_init__(self) -> None:
        check_types(self)
        if self.preset is not None:
            check_known("preset", self.preset, [name for name in PRESETS if name])
        for what, known in (("mode", MODES), ("device", DEVICES), ("dtype", ("auto", *DTYPES))):
            check_known(what, getattr(self, what), known)
        for name, least in (("prompt", 1), ("new", 1), ("repetitions", 2), ("layers", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value <= MOST:
                raise LadderError(f"{name} must be from {least} to {MOST}, not {value}")
        for name in ("tp", "batch"):
            for value in getattr(self, name):
                if not 1 <= value <= MOST:
                    raise LadderError(f"{name} must be from 1 to {MOST}, not {value}")
        if not self.chosen.size:
            raise LadderError(f"nothing to measure: give --preset quick, or --size with one of {', '.join(SIZES)}")

    @property
    def chosen(self) -> Preset:
        """The preset with everything replaced that was given."""
        base = PRESETS[self.preset]
        given = {
            "size": self.size,
            "arm": tuple(dict.fromkeys((*self.arm, *self.wiring))),
            "weights": format_names(self.weights),
            "device": "" if self.device == "auto" else self.device,
            **{name: getattr(self, name) for name in ("tp", "batch", "emulate_link", "prompt", "new", "repetitions")},
        }
        return Preset(**{field.name: given[field.name] or getattr(base, field.name) for field in fields(Preset)})
