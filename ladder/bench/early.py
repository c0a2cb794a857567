"""What `ladder tune` cannot do, whatever machine it runs on: refused before torch is imported. No torch here."""

from collections.abc import Sequence
from pathlib import Path

from ladder.config import ModelConfig
from ladder.config.quantization import named_format
from ladder.errors import LadderError
from ladder.files import check_file
from ladder.kernels.table import MOST, read_table


def check_tuning(out: Path, size: str, tp: int, batches: Sequence[int], lanes: int, weights: str) -> None:
    """Refuse what is not known or does not fit, and a file that is something else."""
    named_format(weights)
    ModelConfig.named(size).check_degree(tp)
    if not batches or not all(1 <= batch <= MOST for batch in batches):
        raise LadderError(f"batch must be from 1 to {MOST}")
    if lanes not in (1, 2):
        raise LadderError(f"lanes must be 1 or 2, not {lanes}")
    check_file(out)
    if out.exists():
        read_table(out)  # refuses what is no table, before anything is measured
