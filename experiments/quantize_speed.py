"""Memory and speed of `ladder quantize` on a large checkpoint, beside its disk's own.

python -m experiments.quantize_speed MODEL [--formats fp8 int4] [--repeats N] > results/quantize_cpu.jsonl

MODEL is a folder of safetensors files, which are not in memory when a run begins; OUT is written beside it. One JSON
line per format, with medians: seconds until the checkpoint is written and on the disk; of these the command's own,
without its imports; its seconds of all cores, and how many cores other programs used meanwhile. Right after each run
the disk reads as many bytes and writes as many at the same time, without computing. The peak is of all resident memory,
mapped files included, the largest of the runs.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ladder.bench.machine import machine
from ladder.quantize.options import FORMATS

PIECE = 1 << 20


def forget(files: Iterable[Path]) -> None:
    """Files on the disk, and nowhere else."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def busy_seconds() -> float:
    """Of all cores and all programs, since the machine was started."""
    first = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
    user, nice, system, _, _, irq, softirq, steal = (int(each) for each in first.split()[1:9])  # without idle, waiting
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def command(*given: str) -> tuple[dict[str, float], str]:
    """Of one process of this Python: seconds, its seconds of all cores and its peak in MiB; and what it printed."""
    begin, busy = time.perf_counter(), busy_seconds()
    with tempfile.TemporaryFile() as printed:
        child = subprocess.Popen([sys.executable, *given], stdout=printed)
        _, status, used = os.wait4(child.pid, 0)
        seconds, busy = time.perf_counter() - begin, busy_seconds() - busy
        child.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        text = printed.read().decode()
    if child.returncode:
        raise SystemExit(child.returncode)
    own = used.ru_utime + used.ru_stime
    found = {"seconds": seconds, "cpu_seconds": own, "peak_mib": used.ru_maxrss / 1024}
    return found | {"other_cores": (busy - own) / seconds}, text


def disk_seconds(files: list[Path], out: Path, size: int) -> float:
    """Until the files are read, and `size` bytes are written and on the disk, both at the same time."""
    piece, buffer = os.urandom(PIECE), bytearray(PIECE)

    def write() -> None:
        with out.open("xb", buffering=0) as opened:
            for start in range(0, size, PIECE):
                opened.write(memoryview(piece)[: size - start])
            os.fsync(opened.fileno())

    forget(files)
    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write)
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass
        writing.result()
    seconds = time.perf_counter() - begin
    out.unlink()
    return seconds


def quantized(model: Path, work: Path, name: str, files: list[Path]) -> dict[str, float]:
    out = work / name
    forget(files)
    begin = time.perf_counter()
    found, text = command("-m", "ladder", "quantize", str(model), str(out), "--format", name, "--json")
    line = json.loads(text)
    written = list(out.iterdir())
    forget(written)
    seconds, size = time.perf_counter() - begin, sum(file.stat().st_size for file in written)
    shutil.rmtree(out)
    beside = disk_seconds(files, work / "plain", size)
    found |= {"seconds": seconds, "own_seconds": line["seconds"], "disk_seconds": beside}
    return found | {"bytes_before": line["bytes_before"], "bytes_after": line["bytes_after"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    files = sorted(given.model.glob("*.safetensors"))
    stamp = {"files": len(files), "repeats": given.repeats, **machine(torch.device("cpu"))}
    with tempfile.TemporaryDirectory(dir=given.model.parent) as work:
        imports = [command("-c", "import ladder.quantize.write")[0] for _ in range(given.repeats)]
        print(json.dumps({"measure": "imports", **summary(imports), **stamp}), flush=True)
        for name in given.formats:
            found = [quantized(given.model, Path(work), name, files) for _ in range(given.repeats)]
            line: dict[str, Any] = {"measure": "quantize", "format": name, **summary(found)}
            line["gb_s"] = round(line["bytes_before"] / line["seconds"] / 1e9, 3)
            line["times_disk"] = round(statistics.median(each["seconds"] / each["disk_seconds"] for each in found), 3)
            print(json.dumps(line | stamp), flush=True)


def summary(found: list[dict[str, float]]) -> dict[str, float]:
    """Medians, but of memory the most; and the least and the most seconds."""
    line = {key: round(statistics.median(each[key] for each in found), 2) for key in found[0]}
    line |= {key: int(found[0][key]) for key in line if key.startswith("bytes")}
    line["peak_mib"] = round(max(each["peak_mib"] for each in found))
    seconds = [each["seconds"] for each in found]
    return line | {"seconds_least": round(min(seconds), 2), "seconds_most": round(max(seconds), 2)}


if __name__ == "__main__":
    main()
