"""The command line: what it prints, and that bad input costs one sentence before any weight is read."""

import gzip
import json
import lzma
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from ladder import LLM, SamplingParams
from ladder.checkpoint import SINGLE, Directory
from ladder.cli import verbs
from ladder.cli.generate import Prompts
from ladder.engine.executors.torchrun import TorchrunRank
from ladder.errors import LadderError
from tests.checkpoints import byte_tokenizer, tiny

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"))


def test_json_lines(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("from a file\n\nand ünother\n", encoding="utf-8")
    arguments = ["--prompt", "abc", "--prompts-file", tmp_path / "prompts.txt", "--token-ids", "5,17,9"]
    status, out, err = run(
        "generate", "--model", model, *arguments, "--max-new-tokens", 9, "--json", "--max-num-seqs", 3
    )
    lines = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (0, "")
    with LLM(model) as llm:
        expected = llm.generate(["abc", "from a file", "and ünother", [5, 17, 9]], SamplingParams(9))
    assert lines == [vars(result) for result in expected]
    assert [list(line) for line in lines] == [
        ["prompt", "token_ids", "text", "finish_reason", "prompt_tokens", "sample", "logprobs"]
    ] * 4


def test_what_is_on_can_be_turned_off(run: Run, model: Path) -> None:
    told = [
        run("generate", "--model", model, "--prompt", "abc", "--max-new-tokens", 3, flag)
        for flag in ("--kernels", "--no-kernels")
    ]
    assert told[0] == told[1] and told[0][0] == 0
    assert run("generate", "--model", model, "--prompt", "abc", "--no-check")[0] == 2  # what is off has one spelling


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--size", "llama-3-70b", "--tp", 3), "llama|heads"),
        (("--batch", 65), "batch must be from 1 to 64"),
        (("--size", "nonsense"), "nonsense"),
    ],
)
def test_tuning_refuses(run: Run, tmp_path: Path, arguments: tuple[object, ...], words: str) -> None:
    status, out, err = run("tune", tmp_path / "table.jsonl", *arguments)
    assert (status, out) == (2, "") and re.search(words, err) and err.count("\n") == 1
    status, _, err = run("tune", Path(__file__) / "table.jsonl")
    assert status == 2 and "cannot be made" in err


def test_text_comes_in_the_order_of_the_prompts(run: Run, model: Path) -> None:
    arguments = ["--prompt", "abc", "--prompt", "x", "--max-new-tokens", 12, "--temperature", 0.8, "--seed", 4]
    status, out, _ = run("generate", "--model", model, *arguments)
    with LLM(model) as llm:
        results = llm.generate(["abc", "x"], SamplingParams(12, 0.8, seed=4))
    assert status == 0 and out == "".join(f"{result.text}\n" for result in results)


def test_every_flag_reaches_the_engine(run: Run, model: Path) -> None:
    flags = "--max-new-tokens 30 --temperature 0.9 --top-k 40 --top-p 0.9 --seed 8 --wiring ladder@1-2 --dtype float64"
    flags += " --device cpu --tp 2 --emulate-link 10us,1GB/s --json"
    _, out, _ = run("generate", "--model", model, "--prompt", "abc", *flags.split())
    with LLM(model, wiring="ladder@1-2", dtype="float64") as llm:
        free = llm.generate(["abc"], SamplingParams(30, 0.9, 40, 0.9, 8))[0]
        assert json.loads(out)["token_ids"] == free.token_ids
        stop = (free.text or "")[6:8]
        _, out, _ = run("generate", "--model", model, "--prompt", "abc", *flags.split(), "--stop", stop)
        assert json.loads(out)["text"] == (free.text or "").split(stop)[0]


def test_ids_need_no_tokenizer(run: Run, tmp_path: Path) -> None:
    tiny(tmp_path, tokenizer=False)
    status, out, _ = run("generate", "--model", tmp_path, "--token-ids", "5,17,9", "--max-new-tokens", 4, "--json")
    answer = json.loads(out)
    assert status == 0 and answer["prompt"] == [5, 17, 9] and answer["text"] is None and len(answer["token_ids"]) == 4
    _, out, _ = run("generate", "--model", tmp_path, "--token-ids", "5,17,9", "--max-new-tokens", 4)
    assert out.split() == [str(token) for token in answer["token_ids"]]


def truncate(model: Path) -> None:
    (model / SINGLE).write_bytes((model / SINGLE).read_bytes()[:-9])


def corrupt(model: Path) -> None:
    (model / SINGLE).write_bytes(b"\x09" * 4000)


def other_family(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))


def larger_tokenizer(model: Path) -> None:
    byte_tokenizer(extra=100).save_pretrained(model)


def spoil_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{")


def no_tokenizer(model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()


def own_code(model: Path) -> None:
    """A tokenizer that wants to run a program of the directory's."""
    (model / "foreign.py").write_text("raise SystemExit('the directory ran its own code')")
    raw = {"auto_map": {"AutoTokenizer": ["foreign.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}
    (model / "tokenizer_config.json").write_text(json.dumps(raw))


def fifo(model: Path) -> None:
    (model / SINGLE).unlink()
    os.mkfifo(model / SINGLE)


def no_weights(model: Path) -> None:
    (model / SINGLE).unlink()


def as_it_is(model: Path) -> None:
    pass


BAD = [
    (no_weights, "", "has neither model.safetensors nor"),
    (truncate, "", "model.safetensors is truncated or corrupted"),
    (corrupt, "", "model.safetensors is truncated or corrupted"),
    (other_family, "", "unknown model family 'mamba': known are llama, mistral, qwen2, qwen3"),
    (larger_tokenizer, "", "vocabulary mismatch in .* go up to 356, the model has 320 tokens"),
    (spoil_tokenizer, "", "the tokenizer in .* cannot be read"),
    (no_tokenizer, "", "has no tokenizer: give the prompt as token ids"),
    (no_tokenizer, "--prompt= --token-ids 1 --stop x", "stop texts need a tokenizer"),
    (own_code, "", "the tokenizer in .* cannot be read"),
    (fifo, "", "model.safetensors is not a file"),
    (as_it_is, f"--model {'x' * 5000}", "no model 'xxx"),
    (as_it_is, "--prompt \udcff", "prompt 1 is not valid UTF-8"),
    (as_it_is, "--emulate-link 999s,1GB/s", "unknown link '999s,1GB/s'"),
    (as_it_is, "--wiring desync-1000000000x", "unknown wiring 'desync-1000000000x'"),
    (as_it_is, "--tp x", "Invalid value for '--tp'"),
    (as_it_is, "--seed 1.5", "Invalid value for '--seed'"),
    (as_it_is, "--bogus", "No such option.*--bogus"),
    (as_it_is, "--token-ids 1_0", "are not numbers"),
    (as_it_is, "--model nowhere", "no model 'nowhere': there is no such directory"),
    (as_it_is, "--wiring standard:1", "covers 1 layers, the model has 4"),
    (as_it_is, "--wiring ladder@4", "layers are 0 to 3"),
    (as_it_is, "--wiring rope", "unknown wiring 'rope'"),
    (as_it_is, "--tp 3", "3 ranks cannot share 8 heads.*the degrees that work are 1, 2, 4, 8"),
    (as_it_is, "--tp 0", "tp must be at least 1, not 0"),
    (as_it_is, "--emulate-link fast", "unknown link 'fast'"),
    (as_it_is, "--emulate-link 5us,0GB/s", "unknown link"),
    (as_it_is, "--dtype int8", "unknown dtype 'int8'"),
    (as_it_is, "--device tpu", "device 'tpu'"),
    (as_it_is, "--device cuda:99", "device 'cuda:99' is not there"),
    (as_it_is, f"--prompt {'x' * 512}", "prompt 1 has 512 tokens, which leaves no room in the model's context of 512"),
    (as_it_is, "--prompt=", "prompt 1 is empty"),
    (as_it_is, "--token-ids 1,2,x", "token ids '1,2,x' are not numbers"),
    (as_it_is, "--token-ids 1,320", "has the token 320, the model's vocabulary is 0 to 319"),
    (as_it_is, "--prompts-file nothing.txt", "no such file: nothing.txt"),
    (as_it_is, "--temperature -1", "temperature must be 0 or more"),
    (as_it_is, "--max-new-tokens 0", "max_new_tokens must be at least 1"),
]


@pytest.mark.parametrize("spoil, flags, message", BAD, ids=[f"{s.__name__} {f[:20]}".strip() for s, f, _ in BAD])
def test_bad_input_is_one_sentence(
    spoil: Callable[[Path], None],
    flags: str,
    message: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Directory, "read", read)
    spoil(tiny(tmp_path))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    status, out, err = run("generate", "--model", tmp_path, "--prompt", "abc", *flags.split())
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("ladder: ")
    assert re.search(message, err), err
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}


def test_empty_prompts_file(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    status, _, err = run("generate", "--model", model, "--prompts-file", tmp_path / "empty.txt")
    assert status == 2 and "empty.txt has no prompts" in err


def test_a_full_disk(model: Path) -> None:
    flags = ["generate", "--model", str(model), "--token-ids", "1,2", "--max-new-tokens", "2"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "ladder", *flags], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "No space left" in done.stderr and "Traceback" not in done.stderr


def test_no_prompt(run: Run, model: Path) -> None:
    assert run("generate", "--model", model) == (
        2, "", "ladder: no prompt: give --prompt, --prompts-file or --token-ids, or a text on standard input\n"
    )  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_that_are_not_finite(run: Run, tmp_path: Path, tp: int) -> None:
    tiny(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.layers.3.mlp.down_proj.weight"][0, 100] = torch.inf
    save_file(tensors, tmp_path / SINGLE)
    arguments = ("generate", "--model", tmp_path, "--prompt", "abc", "--tp", tp, "--max-new-tokens", 1)
    assert "the model's output is not finite" in run(*arguments)[2]
    status, out, err = run(*arguments, "--check")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "'model.layers.3.mlp.down_proj.weight' holds values that are not finite" in err


def test_the_installed_command(model: Path) -> None:
    """As users start it (as a module others start it here); a wrong flag is refused by its name."""
    command = [str(Path(sys.executable).with_name("ladder"))]
    flags = ["generate", "--model", str(model), "--token-ids", "1,2", "--max-new-tokens", "2", "--json"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["token_ids"]) == 2 and done.stderr == ""
    done = subprocess.run([*command, "generate", "--modle", "x"], capture_output=True, text=True)
    assert done.returncode == 2 and "--modle" in done.stderr
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert done.stdout == "ladder 0.1.0\n"


def test_a_bar_on_a_terminal(model: Path) -> None:
    """Standard error is a terminal here; elsewhere there is no bar, as the other tests' empty err shows."""
    ours, theirs = pty.openpty()
    flags = ["generate", "--model", str(model), "--token-ids", "1,2", "--max-new-tokens", "2"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    subprocess.run([sys.executable, "-m", "ladder", *flags], stderr=theirs, stdout=subprocess.PIPE, env=environment)
    os.close(theirs)
    assert b"loading weights" in os.read(ours, 100_000)
    os.close(ours)


def test_eval(run: Run, model: Path, tmp_path: Path) -> None:
    """Two wirings side by side, on a text and on a local task: as JSON, and as a table."""
    (tmp_path / "book.txt").write_text("Never wait for the network. " * 20)
    rows = [
        {"query": "Never", "choices": ["wait", "sleep"], "gold": 0},
        {"query": "A", "choices": ["b", "c"], "gold": 1},
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--wiring", "standard", "--wiring", "ladder", "--source", model]
    flags += ["--text", tmp_path / "book.txt", "--task", tmp_path / "mine.jsonl"]
    status, out, err = run("eval", model, *flags, "--json")
    assert (status, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    measures = ["perplexity", "kl", "greedy_agreement", "mine/acc", "mine/acc_norm"]
    assert [(line["wiring"], line["measure"]) for line in lines] == [
        (wiring, measure) for wiring in ("standard", "ladder") for measure in measures
    ]
    assert lines[1]["value"] == pytest.approx(0, abs=1e-6) and lines[6]["value"] > 0.01
    status, out, _ = run("eval", model, *flags)
    assert status == 0 and all(measure in out for measure in measures)
    for name, pack in {"book.gz": gzip.compress, "book.xz": lzma.compress}.items():  # the figures are the plain text's
        (tmp_path / name).write_bytes(pack((tmp_path / "book.txt").read_bytes()))
        _, packed, _ = run("eval", model, "--text", tmp_path / name, "--json")
        assert json.loads(packed)["value"] == lines[0]["value"]


@pytest.mark.parametrize("flags, message", [
    ((), "nothing to measure"),
    (("--text", "nowhere.txt"), "no such file: nowhere.txt"),
    (("--task", "no_such_task.jsonl"), "no such file"),
    (("--text", __file__, "--wiring", "rope"), "unknown wiring 'rope'"),
    (("--text", __file__, "--device", "moon"), "unknown device 'moon'"),
])  # fmt: skip
def test_eval_refuses(run: Run, model: Path, flags: tuple[str, ...], message: str) -> None:
    status, out, err = run("eval", model, *flags)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


@pytest.mark.parametrize("rank, drawn", [(None, True), (0, True), (1, False)])
def test_one_bar_of_many_ranks(rank: int | None, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs.Console, "is_terminal", True)
    own = None if rank is None else TorchrunRank(rank, 2, rank, 2)
    monkeypatch.setattr(verbs, "torchrun_rank", lambda: own)
    assert verbs._bar().disable is not drawn


@pytest.mark.parametrize("old, new", [
    ("--wire", "--comm-backend"),
    ("--link", "--emulate-link"),
    ("--batch", "--max-num-seqs"),
    ("--chunk", "--prefill-chunk"),
])  # fmt: skip
def test_old_options_are_refused_with_the_new_one_named(run: Run, model: Path, old: str, new: str) -> None:
    for given in ([old, "4"], [f"{old}=4"]):
        status, out, err = run("generate", "--model", model, "--prompt", "abc", *given)
        assert (status, out, err) == (2, "", f"ladder: {old} was renamed: use {new}\n")


def test_the_tables_of_renamed_options_name_options() -> None:
    """A verb has the new option, and the old one no longer."""
    commands = typer.main.get_command(verbs.app).commands  # type: ignore[attr-defined]
    for verb, table in verbs.RENAMED.items():
        options = {option for parameter in commands[verb].params for option in parameter.opts}
        for old, new in table.items():
            assert new in options and old not in options, (verb, old, new)


OLD_OPTIONS = [
    *[(verb, "--window", "--seq-len") for verb in ("fit", "scan", "adapt", "train")],
    *[(verb, "--micro", "--micro-batch-size") for verb in ("adapt", "train")],
    *[("adapt", "--begin", "--init-from"), ("adapt", "--rank", "--lora-rank")],
    *[(verb, "--link", "--emulate-link") for verb in ("trace", "bench")],
]


@pytest.mark.parametrize("verb, old, new", OLD_OPTIONS)
def test_old_options_of_other_verbs(run: Run, verb: str, old: str, new: str) -> None:
    assert run(verb, old, "4") == (2, "", f"ladder: {old} was renamed: use {new}\n")


@pytest.mark.parametrize("given, ids", [("1 2 3", None), ("1,2 3", None), ("1,,2", None), (" 5, 17 ,9 ", [5, 17, 9])])
def test_spaces_between_token_ids(given: str, ids: list[int] | None) -> None:
    prompts = Prompts(token_ids=(given,))
    if ids is not None:
        assert prompts.all() == [ids]
        return
    with pytest.raises(LadderError, match="are not numbers with commas between"):
        prompts.all()
