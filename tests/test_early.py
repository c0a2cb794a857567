"""What is known of a model before torch is imported: lengths of sequences, and what is refused at once."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ladder.cli import app
from ladder.config.early import check_pattern, early_config, sequence_length
from ladder.data.texts import tokenize
from ladder.devices import surely_cpu
from ladder.errors import LadderError
from ladder.scan.early import check_early, check_original
from ladder.train.options import TrainingOptions
from ladder.wiring import Wiring
from tests.checkpoints import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"))


def test_sequences_are_as_long_as_the_model_allows() -> None:
    assert [sequence_length(None, context) for context in (512, 8192, None)] == [512, 1024, 1024]
    assert [sequence_length(2048, context) for context in (8192, None)] == [2048, 2048]
    with pytest.raises(LadderError, match=r"^--seq-len 513 is more than the model.s context of 512: give a"):
        sequence_length(513, 512)
    options = TrainingOptions(tokens=4096, batch=2)
    assert (options.length, options.within(512).length, options.within(None).seq_len) == (1024, 512, 1024)
    assert (options.steps, options.within(512).steps, options.within(512).counted) == (2, 4, ("tokens", 1024))


def test_what_is_known_of_an_original(model: Path, tmp_path: Path) -> None:
    config = early_config(model)
    assert config is not None and config.context == 512
    assert check_early(str(model), "ladder", None) == (Wiring.parse("ladder", config.layers), 512)
    assert check_early("org/name", "ladder", 4096) is None and early_config(tmp_path) is None
    with pytest.raises(LadderError, match="more than the model's context of 512"):
        check_early(str(model), "ladder", 4096)
    with pytest.raises(LadderError, match="is wired already: name its original"):
        check_original("m", Wiring.parse("ladder", 4), "ladder", None, 512)
    with pytest.raises(LadderError, match="covers more than the model's"):
        check_pattern("ladder:99", model)
    with pytest.raises(LadderError, match="the nearest is 'ladder'"):
        check_pattern("lader", "org/name")


# --- command lines --------------------------------------------------------------------------------------------------

NO_MODEL = "no model 'nothing': there is no such directory, and one of the hub is named as in org/name"
NO_DIRECTORY = "no model 'nothing': there is no such directory"
NO_CONFIG = "has no config.json: name the directory of a model"
A_SIZE = "tiny is a named size, which has no weights: name a directory"
LONG, DEEP = "--seq-len 5000 is more than the model's context of 512", "covers more than the model's 4 layers"
UNKNOWN, LINK, DEVICE = "unknown wiring 'lader'", "unknown link 'slow'", "unknown device 'gpu'"
# command line -> what is said; the words in capitals are files
AT_ONCE = {
    "data X nothing": "either a tokenizer",
    "data X TEXT": "either a tokenizer",
    "data X nothing --vocab 300": "no such file: nothing",
    "data X TEXT --tokenizer nothing": "no such tokenizer directory",
    "convert nothing X": NO_MODEL,
    "convert TOKENS X --wiring ladder": NO_CONFIG,
    "convert MODEL X --wiring lader": UNKNOWN,
    "convert MODEL X --wiring ladder:9": DEEP,
    "eval MODEL": "nothing to measure",
    "eval nothing --text TEXT": NO_MODEL,
    "eval TOKENS --text TEXT": NO_CONFIG,
    "eval MODEL --text nothing": "no such file: nothing",
    "eval MODEL --text TEXT --tokens 0": "tokens must be at least 1",
    "eval MODEL --text TEXT --new-tokens 8": "--new-tokens is for --continuations",
    "eval MODEL --text TEXT --wiring ladder:9": DEEP,
    "eval MODEL --text TEXT --window 5000": "window is 5000 tokens: it must be from 1 to the model's context, 512",
    "eval MODEL --text TEXT --continuations 2": "give --text and --source, and no other --engine",
    "eval MODEL --text TEXT --source MODEL --continuations 2 --new-tokens 0": "new-tokens must be at least 1",
    "eval MODEL --text TEXT --source MODEL --continuations 2 --prompt-tokens 500": "the model's context of 512",
    "eval MODEL --text TEXT --device gpu": DEVICE,
    "scan nothing --data TEXT": NO_MODEL,
    "scan TOKENS --data TEXT": NO_CONFIG,
    "scan MODEL --data nothing": "no such file: nothing",
    "scan MODEL --data TOKENS": "is a folder: a scan wants a file of text",
    "scan MODEL --data TEXT --seq-len 5000": LONG,
    "scan MODEL --data TEXT --wiring desync-2x": "depends on the number of ranks",
    "scan MODEL --data TEXT --wiring standard": "every layer of the model is under standard already",
    "scan MODEL --data TEXT --budget -1": "it must be 0 or more",
    "scan MODEL --data TEXT --speed 1.2 --chip none": "unknown chip 'none'",
    "scan MODEL --data TEXT --device gpu": DEVICE,
    "fit nothing X --data TOKENS": NO_MODEL,
    "fit TOKENS X --data TOKENS": NO_CONFIG,
    "fit MODEL X --data nothing": "no such folder of tokens: nothing",
    "fit MODEL X --data TEXT": "TEXT is a file: name a folder of tokens",
    "fit MODEL X --data TOKENS --seq-len 5000": LONG,
    "fit MODEL X --data TOKENS --wiring ladder:9": DEEP,
    "fit MODEL X --data TOKENS --wiring standard": "there is nothing to fit",
    "fit MODEL X --data TOKENS --wiring desync-2x": "leaves partial sums on their ranks",
    "adapt nothing X --data TOKENS": NO_MODEL,
    "adapt MODEL X --data nothing": "no such folder of tokens: nothing",
    "adapt MODEL X --wiring lader": UNKNOWN,
    "adapt MODEL X --tokens 0": "tokens must be at least 1",
    "adapt MODEL X --data TOKENS --seq-len 5000": LONG,
    "adapt MODEL X --data TOKENS --wiring standard:3": "covers 3 layers, the model has 4",
    "adapt MODEL X --data TOKENS --method lora --lora-rank 100000": "is more than the model's width of 64",
    "adapt MODEL X --data TOKENS --teacher-top 100000": "is no part of a vocabulary of 320",
    "adapt MODEL X --data TOKENS --init-from nothing": "no such folder: nothing; ladder fit makes one",
    "train X --size tiny --data nothing": "no such folder of tokens: nothing",
    "train X --size tinny": "the nearest is 'tiny'",
    "train X": "give either --size or --recipe",
    "train X --size tiny --data TOKENS --seq-len 5000": LONG,
    "train X --size tiny --data TOKENS --wiring ladder:9": DEEP,
    "train X --size llama-3.1-405b --data TOKENS --device cpu": "this machine has",
    "quantize nothing X --format int4": NO_DIRECTORY,
    "quantize tiny X --format int4": A_SIZE,
    "quantize MODEL MODEL --format int4": "is there already: name a new folder",
    "quantize MODEL X --format int4 --calibrate nothing": "no such file: nothing",
    "quantize MODEL X --format int4 --calibrate TEXT --seq-len 5000": LONG,
    "generate": "no prompt",
    "generate --model nothing --prompt a": NO_MODEL,
    "generate --model TEXT --prompt a": "is a file: name the directory",
    "generate --model TOKENS --prompt a": NO_CONFIG,
    "generate --model tiny --prompt a": A_SIZE,
    "generate --model MDOEL --prompt a": "; the nearest is 'MODEL'",
    "generate --wiring lader --prompt a": UNKNOWN,
    "generate --model MODEL --wiring ladder:9 --prompt a": DEEP,
    "generate --model MODEL --tp 3 --prompt a": "3 ranks cannot share 8 heads",
    "generate --emulate-link slow --prompt a": LINK,
    "generate --device gpu --prompt a": DEVICE,
    "generate --comm-backend nccl --prompt a": "connects GPUs, the device is cpu",
    "generate --tuned nothing --prompt a": "no such file: nothing; ladder tune writes",
    "serve nothing": NO_MODEL,
    "serve TOKENS": NO_CONFIG,
    "serve MODEL --wiring lader": UNKNOWN,
    "serve nothing --engine vllm": NO_DIRECTORY,
    "chat nothing": NO_MODEL,
    "chat MODEL --wiring lader": UNKNOWN,
    "load http://127.0.0.1:9 --rate 0": "rate must be above 0",
    "trace --size nothing": "unknown size 'nothing'",
    "trace --model nothing": NO_DIRECTORY,
    "trace --wiring lader": UNKNOWN,
    "trace --out TEXT": "is a file: name a folder",
    "trace --size tiny --tp 3": "3 ranks cannot share",
    "trace --size tiny --context 5000": "context 5000 is more than the model's 512",
    "trace --size tiny --batch 100000000": "give a smaller --batch",
    "trace --size tiny --emulate-link slow": LINK,
    "trace --device gpu": DEVICE,
    "tune X --size nothing": "unknown size 'nothing'",
    "tune X --tp 3": "3 ranks cannot share",
    "tune X --lanes 5": "lanes must be 1 or 2",
    "tune X --weights none": "unknown format of weights 'none'",
    "bench --size nothing": "unknown size 'nothing'",
    "bench --preset quick --tp 3": "3 ranks cannot share",
    "bench --preset quick --wiring lader": UNKNOWN,
    "bench --preset quick --emulate-link slow": "unknown link 'slow'",
    "bench --preset quick --new 100000": "are more than quick's context of",
    "report nothing": "no such file: nothing",
    "explore --chip none": "unknown chip 'none'",
    "explore --out TEXT/page.html": "cannot be made: ",
    "plan --tp x": "must be whole numbers",
    "plan --model nothing": NO_DIRECTORY,
    "plan --model tiny": A_SIZE,
    "list nothing": "unknown list 'nothing'",
    "demo --seconds 0": "seconds must be from 1",
    "doctor --nothing": "No such option",
}
ONE_BY_ONE = """
import sys
from ladder.cli import main
for line in sys.argv[1].splitlines():
    sys.argv = ["ladder", *line.split()]
    try:
        main()
    except SystemExit as left:
        assert left.code == 2, (line, left.code)
    heavy = {"torch", "transformers"} & sys.modules.keys()
    assert not heavy, (line, heavy)
"""


def test_every_verb_refuses_something_at_once() -> None:
    assert {line.split()[0] for line in AT_ONCE} == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_bad_command_lines_import_nothing(model: Path, tmp_path: Path) -> None:
    """Neither torch nor transformers, which take seconds, until the sentence is there."""
    (tmp_path / "MODEL").symlink_to(model)
    (tmp_path / "TEXT").write_text("It was a dark and stormy night.\n" * 20)
    tokenize([tmp_path / "TEXT"], tmp_path / "TOKENS", str(model))
    command = [sys.executable, "-c", ONE_BY_ONE, "\n".join(AT_ONCE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    told = done.stderr.splitlines()
    assert len(told) == len(AT_ONCE) and not (tmp_path / "X").exists()
    for line, expected, found in zip(AT_ONCE, AT_ONCE.values(), told, strict=True):
        assert expected in found, (line, found)


def test_whether_there_may_be_a_gpu(tmp_path: Path) -> None:
    assert surely_cpu("cpu", tmp_path) and surely_cpu("auto", tmp_path) and not surely_cpu("cuda", tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert surely_cpu("cpu", tmp_path) and not surely_cpu("auto", tmp_path)
