"""Generation in one process: company does not matter, streams add up, stops stop, ranks agree."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ladder import LLM, SamplingParams
from ladder.devices import cpu_multiplies_bfloat16
from ladder.engine.options import EngineOptions
from ladder.engine.setup import Setup
from ladder.engine.text import Text
from ladder.errors import LadderError
from tests.checkpoints import END, byte_tokenizer, tiny
from tests.threads import threaded

PROMPTS = ["a", "Never wait for the network", "x" * 90, [5, 17, 9]]
SHARED = ("standard", "ladder", "parallel", "ladder-2", "ladder-1-2", "standard:2 ladder:2")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("wiring", SHARED)
def test_the_same_tokens_at_every_degree(directory: Path, wiring: str) -> None:
    params = SamplingParams(max_new_tokens=8)
    answers = []
    for tp in (1, 2, 4, 8):
        with threaded(directory, wiring=wiring, tp=tp) as llm:
            answers.append([result.token_ids for result in llm.generate(PROMPTS, params)])
    assert all(answer == answers[0] for answer in answers)
    assert len({tuple(line) for line in answers[0]}) == len(PROMPTS)


def test_wirings_differ_and_the_checkpoint_chooses(directory: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=24)
    answers = set()
    for wiring in SHARED:
        with LLM(directory, wiring=wiring) as llm:
            answers.add(tuple(llm.generate(["abc"], params)[0].token_ids))
    assert len(answers) == len(SHARED)
    with LLM(tiny(tmp_path, "ladder")) as wired, LLM(directory, wiring="ladder") as asked:
        assert wired.generate(["abc"], params) == asked.generate(["abc"], params)
    with LLM(tmp_path, wiring="standard") as back, LLM(directory) as plain:
        assert back.generate(["abc"], params) == plain.generate(["abc"], params)


@pytest.mark.parametrize("params", [SamplingParams(40), SamplingParams(40, 0.9, 50, 0.95, seed=3)], ids=str)
def test_company_does_not_matter(directory: Path, params: SamplingParams) -> None:
    with LLM(directory, max_num_seqs=3) as llm:
        together = llm.generate(PROMPTS, params)
        alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
    assert together == alone


def test_a_stream_adds_up_to_the_results(directory: Path) -> None:
    params = SamplingParams(30, temperature=1.0, seed=1)
    with LLM(directory) as llm:
        results = llm.generate(PROMPTS, params)
        texts, tokens, reasons = [""] * 4, [[] for _ in PROMPTS], [None] * 4  # type: ignore[var-annotated]
        for chunk in llm.stream(PROMPTS, params):
            assert reasons[chunk.index] is None  # nothing after the last
            texts[chunk.index] += chunk.text or ""
            tokens[chunk.index] += chunk.token_ids
            reasons[chunk.index] = chunk.finish_reason  # type: ignore[call-overload]
    assert [(r.text, r.token_ids, r.finish_reason) for r in results] == list(zip(texts, tokens, reasons, strict=True))


def test_finish_reasons(tmp_path: Path) -> None:
    with LLM(tiny(tmp_path / "plain")) as llm:
        free = llm.generate(["abc"], SamplingParams(30))[0]
        assert (len(free.token_ids), free.finish_reason) == (30, "length")
        # the context of 512 ends a request as well
        full = llm.generate([[1] * 500], SamplingParams(30))[0]
        assert (len(full.token_ids), full.finish_reason) == (12, "length")
    end = free.token_ids[11]
    with LLM(tiny(tmp_path / "end", eos=(end, END))) as llm:
        ended = llm.generate(["abc", "xyz"], SamplingParams(30))[0]
        assert ended.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
        assert ended.finish_reason == "stop"


def test_stop_texts(directory: Path) -> None:
    with LLM(directory) as llm:
        free = llm.generate(["abc"], SamplingParams(60))[0]
        text = free.text or ""
        stop = text[20:23]
        stopped = llm.generate(["abc"], SamplingParams(60, stop=("not in there", stop)))[0]
        assert stopped.text == text[: text.index(stop)] and stopped.finish_reason == "stop"
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
        streamed = "".join(c.text or "" for c in llm.stream(["abc"], SamplingParams(60, stop=(stop,))))
        assert streamed == stopped.text


@pytest.mark.parametrize("stop", [(), ("lo w",), ("ö",), ("zz", "o"), ("x\ufffd",)])
@pytest.mark.parametrize("text", ["hello wörld €uro 🎈 end", "🎈", "zzz zz", ""])
def test_text_grows_by_whole_characters(text: str, stop: tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer()
    grown = Text(tokenizer, stop)
    pieces = []
    for token in tokenizer(text).input_ids:
        pieces.append(grown.add(token))
        if grown.stopped:
            break
    pieces.append(grown.finish())
    expected = min((text.split(word)[0] for word in stop), key=len, default=text)
    assert "".join(pieces) == grown.text == expected
    assert grown.stopped == any(word in text for word in stop)
    assert not any("\ufffd" in piece for piece in pieces)


def test_any_stop_texts_are_found_where_they_begin_first() -> None:
    """Of two letters, so that beginnings of a stop text are in it again; beside Python's own search."""
    draw, tokenizer = random.Random(0), byte_tokenizer()
    for _ in range(300):
        text = "".join(draw.choices("ab", k=draw.randrange(1, 40)))
        stop = tuple("".join(draw.choices("ab", k=draw.randrange(1, 9))) for _ in range(draw.randrange(1, 4)))
        grown, given = Text(tokenizer, stop), ""
        for number, token in enumerate(tokenizer(text).input_ids, 1):
            given += grown.add(token)
            begun = [at for word in stop if (at := text[:number].find(word)) >= 0]
            if begun:
                assert grown.stopped and given == text[: min(begun)]
                break
            held = text[:number].removeprefix(given)
            assert given + held == text[:number] and not grown.stopped
            longest = max(len(word[:n]) for word in stop for n in range(len(word)) if text[:number].endswith(word[:n]))
            assert len(held) == longest, "as much is held back as may begin a stop text, and no more"


def test_long_stop_texts_take_no_time() -> None:
    """They are looked for by the thread that serves all requests."""
    tokenizer, stop = byte_tokenizer(), ("a" * 1_000_000 + "b", "ab" * 500_000)
    tokens = tokenizer("a" * 10_000).input_ids
    begin = time.process_time()
    grown = Text(tokenizer, stop)
    pieces = [grown.add(token) for token in tokens]
    assert time.process_time() - begin < 5 and not any(pieces)  # minutes, where each token compares everything
    assert len(grown.finish()) == 10_000


def test_unfinished_bytes_appear_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    grown = Text(tokenizer, ())
    assert [grown.add(token) for token in tokenizer("🎈").input_ids[:3]] == ["", "", ""]
    assert "\ufffd" in grown.finish()


def test_a_tokenizer_written_in_python_gives_the_same_pieces() -> None:
    """transformers has some that are not of the tokenizers library, and cannot stream."""

    class Plain:
        decode = staticmethod(byte_tokenizer().decode)

    tokens = byte_tokenizer()("hello wörld €uro 🎈 end").input_ids
    fast, plain = Text(byte_tokenizer(), ("end",)), Text(Plain(), ("end",))
    assert [fast.add(token) for token in tokens] == [plain.add(token) for token in tokens]
    assert fast.stopped and plain.stopped and fast.finish() == plain.finish()


def test_bytes_that_are_no_characters_end_no_stream() -> None:
    """A byte-fallback decoder takes back characters when an invalid byte follows them: what comes later is right."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "b": 257}
    inner = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[assignment]
    grown = Text(PreTrainedTokenizerFast(tokenizer_object=inner), ())
    pieces = [grown.add(token) for token in (0x28, 0xF0, 256, 257, 256)]
    assert pieces[0] == "(" and pieces[-2:] == ["b", "a"] and grown.finish() == ""


@pytest.mark.parametrize("native, dtype, expected", [
    (False, "auto", "float32"),
    (True, "auto", "bfloat16"),
    (False, "bfloat16", "bfloat16"),
    (False, "float16", "float16"),
])  # fmt: skip
def test_auto_is_float32_where_a_cpu_has_no_bf16_products(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    native: bool,
    dtype: str,
    expected: str,
) -> None:
    tiny(tmp_path, dtype="bfloat16")
    monkeypatch.setattr("ladder.devices.cpu_multiplies_bfloat16", lambda: native)
    with caplog.at_level("INFO"):
        assert Setup(EngineOptions(tmp_path, dtype=dtype)).config.dtype == expected
    logged = [record.message for record in caplog.records]
    assert logged == ["dtype auto: float32 instead of bfloat16, this CPU has no bf16 products"] * (
        expected == "float32"
    )


@pytest.mark.parametrize("found, expected", [
    ({"avx512_bf16": True, "bf16": False}, True),
    ({"architecture": "arm64", "bf16": True}, True),
    ({"architecture": "arm64", "bf16": False, "sve_bf16": False}, False),
    ({"avx2": True}, False),
])  # fmt: skip
def test_which_cpus_multiply_bfloat16(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, object], expected: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert cpu_multiplies_bfloat16() is expected


def test_bfloat16_makes_no_noise(tmp_path: Path) -> None:
    """torch warns once a process about products of more than 8 rows on some CPUs: in a process of its own."""
    model = tiny(tmp_path)
    program = f"""
import warnings
from ladder import LLM, SamplingParams
warnings.simplefilter("error", UserWarning)
with LLM({str(model)!r}, dtype="bfloat16") as llm:
    llm.generate([[5, 17, 9] * 8], SamplingParams(2))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_python_faces_pitfalls(directory: Path) -> None:
    assert SamplingParams(stop="###").stop == ("###",)  # type: ignore[arg-type]
    with LLM(directory) as llm:
        with pytest.raises(LadderError, match=r"write \[prompt\]"):
            llm.generate("abc")
        with pytest.raises(LadderError, match="not whole numbers"):
            llm.generate([[1.7, 2]])  # type: ignore[list-item]
        with pytest.raises(LadderError, match="not valid UTF-8"):
            llm.generate(["\udcff"])
        two = zip(llm.stream(["abc"], SamplingParams(9)), llm.stream(["x"], SamplingParams(9)), strict=True)
        left, right = zip(*((a.token_ids[0], b.token_ids[0]) for a, b in two), strict=True)
        assert [list(left), list(right)] == [r.token_ids for r in llm.generate(["abc", "x"], SamplingParams(9))]


def test_seeds(directory: Path) -> None:
    with LLM(directory) as llm:
        answers = [llm.generate(["abc"], SamplingParams(20, 1.0, seed=seed))[0].token_ids for seed in (1, 1, 2)]
        free = [llm.generate(["abc"], SamplingParams(20, 1.0))[0].token_ids for _ in range(2)]
    assert answers[0] == answers[1] != answers[2]
    assert free[0] != free[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -2},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": 2**63},
        {"stop": ("",)},
    ],
    ids=str,
)
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(LadderError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_a_tokenizer_that_begins_texts(tmp_path: Path) -> None:
    tiny(tmp_path, tokenizer=False)
    byte_tokenizer(extra=3, begin=True).save_pretrained(tmp_path)
    with LLM(tmp_path) as llm:
        assert llm.setup.requests(["", "a"], SamplingParams())[0].tokens == (259,)
        assert llm.generate(["a"])[0].token_ids == llm.generate([[259, *byte_tokenizer()("a").input_ids]])[0].token_ids


def test_a_timed_link_takes_time_and_changes_nothing(directory: Path) -> None:
    """Eight sums, the embedding's and the logits' exchange: ten times 20 ms, one after the other."""
    from time import monotonic

    params = SamplingParams(1)
    with threaded(directory, tp=2) as free, threaded(directory, tp=2, emulate_link="20ms,1GB/s") as timed:
        expected = free.generate(["abc"], params)
        begin = monotonic()
        assert timed.generate(["abc"], params) == expected
        assert monotonic() - begin >= 0.2
