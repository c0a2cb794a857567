"""Thousands of changed checkpoints: none may end in a traceback, hang, or have a file outside of its folder opened.

python -m experiments.fuzz --number 2000 --out fuzz.jsonl
"""

import argparse
import json
import logging
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NoReturn

import torch

from tests.fuzzing import SLOW, Fuzzer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="The first seed.")
    parser.add_argument("--out", type=Path, help="A file to which the result is appended, as a JSON line.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("ladder").setLevel(logging.ERROR)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        fuzzer, known = Fuzzer(Path(folder)), 0
        for seed in range(given.first, given.first + given.number):
            signal.signal(signal.SIGALRM, lambda *_, seed=seed: _hangs(seed))
            signal.alarm(int(15 * SLOW))
            fuzzer.run(seed)
            signal.alarm(0)
            for failure in fuzzer.failures[known:]:
                print(failure, file=sys.stderr)
            known = len(fuzzer.failures)
            if seed % 100 == 99:
                print(
                    f"{seed + 1 - given.first}: {dict(fuzzer.ended)}, {len(fuzzer.failures)} failures", file=sys.stderr
                )
    line = {
        "what": "fuzz",
        "number": given.number,
        "first": given.first,
        "ended": dict(fuzzer.ended),
        "slowest_s": round(fuzzer.slowest, 2),
        "seconds": round(time.monotonic() - begin, 1),
        "failures": fuzzer.failures,
    }
    print(json.dumps(line))
    if given.out is not None:
        with given.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
    sys.exit(bool(fuzzer.failures))


def _hangs(seed: int) -> NoReturn:
    print(f"seed {seed} hangs", file=sys.stderr)
    sys.exit(3)


if __name__ == "__main__":
    main()
