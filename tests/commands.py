"""The commands of README.md and docs/: of which kind each is, and what makes it small enough for a test."""

import json
import shlex
import shutil
from pathlib import Path

import pyarrow.parquet
from transformers import ViTForImageClassification

from examples import images
from ladder.data.texts import tokenize
from ladder.hf.convert import convert
from ladder.quantize.options import QuantizeOptions
from ladder.quantize.write import quantize
from tests.blocks import ROOT, commands
from tests.scripts import example

# how a command is run: every one has one of these kinds, and every kind a test
KINDS = {
    "ladder": "by itself, in the test's process",
    "images": "with the other blocks of its page, in their order",
    "gpu": "up to the sentence with which it refuses a machine without one",
    "serve": "as a process that is asked, and then ended",
    "client": "against the servers that the pages start",
    "vllm engine": "up to what it hands over to vLLM; with vLLM itself: tests/vllm",
    "torchrun": "two ranks on one machine",
    "program": "python -m MODULE, python FILE: see PROGRAMS in tests/test_commands_processes.py",
    "pytest": "not run, since this is what runs it: its files and words exist",
    "vllm": "not run, as it is not ours: its options are those that `ladder serve --engine vllm` hands over",
    "make": "not run, since `make test` runs this: its targets exist",
    "pip": "not run, for want of a network: its extras exist; `make dist` installs what it installs",
}
FITTING = ("--tokens", "256", "--batch", "2", "--device", "cpu")
TRAINING = (*FITTING, "--eval-tokens", "128")
# appended to a verb's options, of which the last one counts: it then takes a second or a few
SMALL: dict[str, tuple[str, ...]] = {
    "adapt": TRAINING,
    "bench": ("--size", "tiny", "--prompt", "8", "--new", "2", "--repetitions", "2", "--device", "cpu"),
    "chat": ("--max-new-tokens", "2", "--seed", "4"),  # what is sampled by chance may be blank
    "demo": ("--seconds", "1", "--device", "cpu"),
    "eval": ("--limit", "2", "--window", "64"),
    "explore": (
        *("--size", "llama-3-8b", "--chip", "h200", "--tp", "8", "--link", "nvlink_nccl"),
        *("--batch", "1", "--prompt", "1024", "--weights", "bf16"),
    ),
    "fit": (*FITTING, "--dtype", "float32"),
    "generate": ("--max-new-tokens", "2"),
    "load": ("--requests", "3", "--prompt-length", "8", "--output-length", "4"),
    "quantize": ("--tokens", "256", "--batch", "2"),
    "scan": ("--tokens", "128", "--seq-len", "64", "--batch", "2", "--points", "2"),
    "serve": ("--port", "0"),
    "train": TRAINING,
}
PAPER = ("--layers", "1", "--batch", "1", "--arm", "standard", "--arm", "ladder")
IMAGES = ("--batch", "2", "--device", "cpu", "--dtype", "float32")
# values for which the stand-ins have too few layers, or a test too little time
INSTEAD = {
    ("--wiring", "standard:16 ladder:16"): "standard:2 ladder:2",
    ("--wiring", "standard:15 ladder:15"): "ladder",
    ("--recipe", "50M"): "embedded",
    ("--recipe", "paper-3B"): "embedded",
    ("--size", "quick"): "tiny",
    ("--continuations", "256"): "3",
}
RANKS = {("bench", "8"): "2", ("train", "4"): "2"}  # by verb and value of --tp


def kind(words: list[str]) -> str:
    if words[0] == "ladder":
        if words[1] == "tune" or "cuda" in words:
            return "gpu"
        if "vllm" in words:
            return "vllm engine"
        if words[1] == "load" or "load.jsonl" in words or any(word.startswith("http:") for word in words):
            return "client"
        if words[1] == "serve":
            return "serve"
        return "images" if "images.safetensors" in words else "ladder"
    if words[0] == "python":
        return "pytest" if "pytest" in words else "program"
    return words[0]


def of_kind(*kinds: str) -> dict[str, list[str]]:
    """Each once, wherever it stands; by the line that it is."""
    return {shlex.join(words): words for _, words in commands() if kind(words) in kinds}


def ladder_commands() -> dict[str, list[str]]:
    """By page and line: also those that torchrun starts."""
    found = {}
    for block, words in commands():
        if "ladder" in words and words[0] in ("ladder", "torchrun"):
            found[f"{block} {words[0]}"] = words[words.index("ladder") :]
    return found


def small(words: list[str]) -> list[str]:
    """`ladder VERB ...`, made small."""
    verb, before, found = words[1], "", []
    for word in words:
        found.append(RANKS.get((verb, word), word) if before == "--tp" else INSTEAD.get((before, word), word))
        before = word
    if "images.safetensors" in words:
        return [*found, *IMAGES, *(("--examples", "8") if verb == "adapt" else ())]
    if (verb == "quantize" and "--calibrate" not in words) or (verb == "explore" and "--out" not in words):
        return found
    found += SMALL.get(verb, ())
    if "--continuations" in words:
        found += ("--prompt-tokens", "8", "--new-tokens", "4")
    if verb == "bench" and "paper" in words:
        found += PAPER if "--tp" in words else (*PAPER, "--tp", "2")
    return found


def made(words: list[str]) -> Path | None:
    """The file or folder that a command is there to write."""
    if "--out" in words:
        return Path(words[words.index("--out") + 1])
    if words[1] in ("convert", "fit", "adapt", "quantize"):
        return Path(words[3])
    if words[1] in ("data", "train"):
        return Path(words[2])
    usual = {"bench": "bench.jsonl", "load": "load.jsonl", "report": "report", "demo": "ladder-demo.png"}
    return Path(usual[words[1]]) if words[1] in usual else None


def stand_ins(folder: Path) -> Path:
    """Everything that commands read, by the names that the pages use."""
    example("tiny_checkpoint", folder / "DIR")
    convert(str(folder / "DIR"), folder / "OUT", "ladder")
    for copy in ("FITTED", "ADAPTED", "my-ladder-model"):
        shutil.copytree(folder / "OUT", folder / copy)
    quantize(QuantizeOptions(folder / "OUT", folder / "QUANTIZED", format="int8"))
    (folder / "h100.jsonl").touch()  # a table of tuned kernels, with none in it
    (folder / "book.txt").write_text("It was a dark and stormy night; the rain fell in torrents.\n" * 100)
    (folder / "prompts.txt").write_text("Once upon a time\nIt was a dark night\n")
    (folder / "more.jsonl").write_text(json.dumps({"text": "and the rain fell in torrents " * 20}) + "\n")
    (folder / "mine.jsonl").write_text(json.dumps({"query": "a", "choices": ["b", "c"], "gold": 0}) + "\n")
    for secret in ("token", "key"):
        (folder / secret).write_text("0123456789abcdef" * 4)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a text " * 40]}), folder / "wiki.parquet")
    tokenize([folder / "book.txt"], folder / "TEXT", str(folder / "DIR"))
    ViTForImageClassification(images.config(layers=2)).save_pretrained(folder / "VIT")
    (folder / "results").mkdir()
    for name in ("bench_h200", "one_rank_steps"):
        shutil.copy(ROOT / "results" / f"{name}.jsonl", folder / "results")
    shutil.copy(ROOT / "results" / "bench_cpu_quick.jsonl", folder / "bench.jsonl")
    return folder


def put(stand_ins: Path, folder: Path) -> None:
    """A copy of every stand-in."""
    shutil.copytree(stand_ins, folder, dirs_exist_ok=True)
