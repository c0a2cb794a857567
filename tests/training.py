"""Tiny tokens, models and runs for the tests of training; and runs in processes of their own, which can be killed.

The processes come from the server that `conftest.py` starts, which has imported everything once.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from ladder.cli import main
from ladder.data.texts import tokenize
from ladder.train.folder import complete_checkpoints
from ladder.train.options import AdaptOptions, TrainingOptions
from ladder.train.recipes import AdaptTrainingOptions
from tests.processes import world
from tests.tolerance import moved, trained

LIMIT = 120.0  # seconds for what would otherwise hang
SEQ_LEN, BATCH = 16, 8
VOCABULARY = 300
SHAPE = (3, 48, SEQ_LEN)  # of `model` below: layers, longest product, tokens
TINY = (4, 128, SEQ_LEN)  # of the size `tiny`
_WORDS = ("never", "wait", "for", "the", "network", "ladder", "of", "sums", "and", "streams", "over", "ranks", "read")


def tokens(folder: Path, seed: int = 1, texts: int = 60, vocab: int = VOCABULARY) -> Path:
    """A folder of shards of some thousand tokens, and its tokenizer."""
    draw = random.Random(seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".txt")
    file.write_text("\n\n\n".join(" ".join(draw.choice(_WORDS) for _ in range(60)) for _ in range(texts)))
    tokenize([file], folder, vocab=vocab)
    return folder


def config(**changes: Any) -> LlamaConfig:
    size = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": VOCABULARY,
    }  # fmt: skip
    return LlamaConfig(**{**size, "bos_token_id": 0, "eos_token_id": 0, **changes})


def model(folder: Path, data: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A random model with the tokenizer of `data`, strong enough that its wiring matters."""
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(config(**changes))
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    made.to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(data / "tokenizer").save_pretrained(folder)
    return folder


def training(data: Path, steps: int = 20, **changes: Any) -> TrainingOptions:
    """A run of so many steps."""
    rows = {"seq_len": SEQ_LEN, "batch": BATCH, "tokens": steps * SEQ_LEN * BATCH}
    often = {"log_every": 2, "eval_every": 5, "save_every": 4, "device": "cpu", "lr": 3e-3}
    return TrainingOptions(**{"data": data, "eval_tokens": 12 * SEQ_LEN, **rows, **often, **changes})


def adapting(data: Path, steps: int = 24, **changes: Any) -> TrainingOptions:
    """A run that learns fast, evaluated on its own data."""
    return training(data, steps, **{"valid": data, "eval_every": 6, "lr": 1e-2, **changes})


def distilling(model: object, out: Path, *more: Any, **changes: Any) -> AdaptOptions:
    """A run that begins with the original's weights and learns from the original alone."""
    return AdaptOptions(str(model), out, *more, **{"fit_tokens": 0, "lm_weight": 0.0, **changes})


def nats(steps: int = 1, shape: tuple[int, int, int] = SHAPE) -> float:
    """Between two computations of a loss after so many steps, of logits below ten; after one: of an evaluation."""
    return 10 * trained(steps, *shape)


def assert_moved_alike(one: dict[str, Tensor], other: dict[str, Tensor], lr: float, steps: int,
                       shape: tuple[int, int, int] = SHAPE) -> None:  # fmt: skip
    """The weights of two runs of Adam, each in root mean square."""
    assert one.keys() == other.keys()
    for name in one:
        apart = (one[name] - other[name]).double().square().mean().sqrt()
        assert apart <= moved(steps, *shape) * lr * steps, name


def silent(done: int, total: int, what: str) -> None:
    """A progress that is not shown."""


class Stop(Exception):
    """Raised in the middle of a run."""


def until(step: int, building: bool = False) -> Callable[[int, int, str], None]:
    """A progress that stops a run at a step; or the building of its teacher's cache."""

    def progress(done: int, total: int, what: str) -> None:
        if done >= step and building == (what == "running the original"):
            raise Stop

    return progress


def log(out: Path, key: str = "loss") -> list[tuple[int, float]]:
    """(step, value) of the lines of log.jsonl that have `key`."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line[key]) for line in lines if key in line]


def weights(out: Path, name: str = "model.safetensors") -> dict[str, Tensor]:
    return load_file(out / name)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- processes ------------------------------------------------------------------------------------------------------


def command(arguments: list[str], environment: dict[str, str], broken: str | None) -> None:
    """`ladder ARGUMENTS` in this process, which kills itself in the middle of writing the checkpoint `broken`."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    sys.argv = ["ladder", *arguments]
    write = torch.save

    def half(content: Any, file: Any, *more: Any, **named: Any) -> None:
        write(content, file, *more, **named)
        if broken is not None and broken in str(file) and ("optimizer" in str(file) or "rank-" in str(file)):
            os.truncate(file, 100)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
    main()


def flags(options: Any, verb: str = "") -> list[str]:
    """Options as the command line spells them, those without a name first."""
    usual = AdaptTrainingOptions if verb == "adapt" and isinstance(options, TrainingOptions) else type(options)
    named, bare = list[str](), list[str]()
    for name, entry in options.__dataclass_fields__.items():
        value = getattr(options, name)
        if entry.metadata.get("argument"):
            bare.append(str(value))
        elif value != getattr(usual, name):
            named += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return bare + named


def start(verb: str, *options: Any, ranks: int = 1, broken: str | None = None) -> list[ForkServerProcess]:
    """`ladder VERB` with these options, in a process or, as torchrun would, in several."""
    context = multiprocessing.get_context("forkserver")
    environment = [{}] if ranks == 1 else world(ranks)
    arguments = [verb, *(flag for group in options for flag in flags(group, verb))]
    found = [context.Process(target=command, args=(arguments, each, broken)) for each in environment]
    for process in found:
        process.start()
    return found


def end(processes: list[ForkServerProcess]) -> list[int | None]:
    """Exit statuses, the negative signal of those that were killed; nobody is left."""
    deadline = time.monotonic() + LIMIT
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def kill_behind_a_checkpoint(processes: list[ForkServerProcess], out: Path) -> int:
    """SIGKILL for all once there is a complete checkpoint and a step more in the log; returns the checkpoint's step."""
    deadline = time.monotonic() + LIMIT
    while True:
        found = complete_checkpoints(out / "checkpoints")
        step = int(found[-1].name.rpartition("-")[2]) if found else None
        text = (out / "log.jsonl").read_text() if step is not None else ""
        if step is not None and any(json.loads(line)["step"] > step for line in text.split("\n")[:-1]):
            break
        assert time.monotonic() < deadline and all(process.is_alive() for process in processes)
        time.sleep(0.002)
    for kind in (signal.SIGSTOP, signal.SIGKILL):  # all stand still first: none sees another die
        for process in processes:
            os.kill(int(process.pid), kind)
    assert set(end(processes)) == {-signal.SIGKILL}
    return step
