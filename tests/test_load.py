"""ladder load: what is sent and when, the figures by arithmetic, failures by kind, and that nothing is lost."""

import json
import math
import random
import signal
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ladder.client.endpoint import Endpoint
from ladder.client.stream import Events, read_piece
from ladder.client.transport import Chunks
from ladder.errors import LadderError, install
from ladder.load.arrivals import Arrivals
from ladder.load.exchange import Outcome
from ladder.load.lengths import Lengths
from ladder.load.load import load
from ladder.load.options import LoadOptions
from ladder.load.run import Run as LoadRun
from ladder.load.slo import meets, parse_slo
from ladder.load.summary import percentile, remarks, summary
from ladder.load.workload import Planned, plan
from tests.endpoint import FakeEndpoint

Run = Callable[..., tuple[int, str, str]]


def silent(done: int, total: int, what: str) -> None:
    pass


def lines(path: Path, measure: str) -> list[dict[str, Any]]:
    return [row for line in path.read_text().splitlines() if (row := json.loads(line))["measure"] == measure]


def loaded(endpoint: FakeEndpoint, out: Path, **options: Any) -> dict[str, Any]:
    """The line of one run of 20 requests."""
    given = {"requests": 20, "prompt_length": "5-9", "output_length": "4", "warm_up": 0, **options}
    [line] = load(LoadOptions(endpoint.url, out=out, **given), lambda: {"chip": "abacus", "commit": "abc"}, silent)
    return line


# --- what is sent, and when -----------------------------------------------------------------------------------------


def test_poisson_arrivals() -> None:
    times = Arrivals(rate=50.0).times(20_000, seed=3)
    gaps = [b - a for a, b in pairwise(times)]
    # an exponential distribution's mean and standard deviation are the same; both are estimated to within 1/sqrt(n)
    assert times[0] == 0 and min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.05)
    assert sum(gap > 0.02 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.02)
    assert times == Arrivals(rate=50.0).times(20_000, seed=3) != Arrivals(rate=50.0).times(20_000, seed=4)
    assert Arrivals(rate=math.inf).times(3, 0) == [0.0, 0.0, 0.0]


def test_lengths() -> None:
    drawn = [Lengths.parse("128-1024", "x").draw(random.Random(n)) for n in range(2000)]
    assert 128 <= min(drawn) < 140 and 1010 < max(drawn) <= 1024
    assert Lengths.parse("512", "x").draw(random.Random(0)) == 512
    wide = [Lengths.parse("lognormal:300,0.8", "x").draw(random.Random(n)) for n in range(4000)]
    assert statistics.median(wide) == pytest.approx(300, rel=0.08)
    assert statistics.stdev(map(math.log, wide)) == pytest.approx(0.8, rel=0.05)
    assert Lengths.parse("lognormal:1,2", "x").draw(random.Random(0)) >= 1


def test_the_same_seed_is_the_same_requests(tmp_path: Path) -> None:
    with FakeEndpoint() as one, FakeEndpoint() as two, FakeEndpoint() as other:
        loaded(one, tmp_path / "a.jsonl", seed=5, concurrency=(1,))
        loaded(two, tmp_path / "b.jsonl", seed=5, concurrency=(1,))
        loaded(other, tmp_path / "c.jsonl", seed=6, concurrency=(1,))
    assert one.bodies == two.bodies != other.bodies
    assert len({json.dumps(body["prompt"][:3]) for body in one.bodies[1:]}) > 15  # no common beginnings


def test_what_a_request_says(run: Run, tmp_path: Path) -> None:
    flags = "--requests 3 --prompt-length 7 --output-length 2-3 --temperature 0.5 --top-k 4 --ignore-eos --warm-up 2"
    with FakeEndpoint() as endpoint:
        out = tmp_path / "new" / "load.jsonl"
        status, printed, err = run(
            "load", endpoint.url + "/v1/", *flags.split(), "--out", out, "--api-key", "sk-1", "--json"
        )
    assert status == 0, err
    probe, *warm, _, _, last = endpoint.bodies
    assert probe["max_tokens"] == 1 and len(probe["prompt"]) == 4 and len(warm) == 2
    assert last["model"] == "fake" and last["stream"] is True and last["stream_options"] == {"include_usage": True}
    assert (last["temperature"], last["top_k"], last["ignore_eos"]) == (0.5, 4, True) and "top_p" not in last
    assert len(last["prompt"]) == 7 and all(16 <= id < 1000 for id in last["prompt"]) and last["max_tokens"] in (2, 3)
    assert all("authorization: Bearer sk-1" in head for head in endpoint.heads)
    assert "sk-1" not in out.read_text() + printed + err
    [line] = lines(out, "load")
    assert json.loads(printed) == line and line["prompt_tokens"] == 21 and line["chip"] and "commit" in line
    assert line["sampling"] == {"temperature": 0.5, "top_k": 4, "ignore_eos": True}


def test_words_where_ids_are_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FakeEndpoint(ids=False) as endpoint:
        line = loaded(endpoint, tmp_path / "load.jsonl", prompt_length="103")
    assert line["prompt_kind"] == "words" and "takes no token ids" in caplog.text
    assert len(endpoint.bodies[-1]["prompt"].split()) == 50  # the endpoint counts 3 + 2 x 50
    assert line["prompt_tokens"] == 20 * 103
    with FakeEndpoint() as endpoint:
        line = loaded(endpoint, tmp_path / "load.jsonl", api="chat", prompt_length="103")
    assert endpoint.bodies[-1]["messages"][0]["role"] == "user" and line["prompt_tokens"] == 20 * 103
    assert line["completed"] == 20 and line["output_tokens"] == 80


def test_closed_loop(tmp_path: Path) -> None:
    with FakeEndpoint(gap=0.005) as endpoint:
        line = loaded(endpoint, tmp_path / "load.jsonl", concurrency=(3,))
    assert endpoint.most == 3 and line["arrivals"] == "closed" and line["completed"] == 20
    with FakeEndpoint(ttft=0.3) as endpoint:
        loaded(endpoint, tmp_path / "load.jsonl")  # all at once
    assert endpoint.most == 20


def test_requests_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    rows: list[Any] = [{"prompt": "Once upon", "max_tokens": 3}, {"prompt": [5, 17, 9]}, {"prompt_tokens": 6}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    with FakeEndpoint() as endpoint:
        line = loaded(endpoint, tmp_path / "load.jsonl", requests_file=file, requests=4, concurrency=(1,))
    _, first, second, third, fourth = endpoint.bodies
    assert (first["prompt"], first["max_tokens"]) == ("Once upon", 3) == (fourth["prompt"], fourth["max_tokens"])
    assert second["prompt"] == [5, 17, 9] and second["max_tokens"] == 4 and len(third["prompt"]) == 6
    assert line["requests"] == 4 and line["prompt_length"] == "file" and line["prompt_tokens"] == 7 + 3 + 6 + 7
    assert len(plan(LoadOptions("x", requests_file=file))) == 3


# --- figures --------------------------------------------------------------------------------------------------------


def outcome(index: int, sent: float, tokens: list[float], ended: float, **more: Any) -> Outcome:
    return Outcome(index, sent, sent, tokens, ended, **more)


def test_times_of_a_request() -> None:
    one = outcome(0, 10.0, [10.5, 10.6, 10.8, 11.1], 11.2)
    assert (one.ttft_ms, one.e2e_ms, one.output_tokens) == (pytest.approx(500), pytest.approx(1200), 4)
    assert one.tpot_ms == pytest.approx(200) and one.itl_ms == pytest.approx([100, 200, 300])
    one.usage_tokens = 7  # several tokens in an event
    assert one.tpot_ms == pytest.approx(100) and one.output_tokens == 7
    assert outcome(0, 0, [1.0], 1.0).tpot_ms is None and outcome(0, 0, [], 1.0).ttft_ms is None


def test_summary_by_arithmetic() -> None:
    """Ten requests in 5 s: TTFT 100 to 1000 ms, TPOT 10 to 100 ms."""
    good = [
        outcome(n, n * 0.1, [n * 0.1 + 0.1 * (n + 1) + 0.01 * (n + 1) * k for k in range(5)], 4.0) for n in range(9)
    ]
    bad = outcome(9, 0.9, [], 1.0, error="status 500")
    made = LoadRun(Arrivals(rate=2.0), 10, 0.0, [*good, bad], [0.0] * 99 + [0.05], sent=10, ended=5.0, cpu=1.0)
    line = summary(made, [Planned(8, 100)] * 10, parse_slo("ttft=500ms,tpot=0.041s"))
    assert (line["completed"], line["failed"], line["errors"]) == (9, 1, {"status 500": 1})
    assert line["requests_per_s"] == 9 / 5 and line["output_tokens_per_s"] == 45 / 5
    assert line["total_tokens_per_s"] == (900 + 45) / 5
    assert line["ttft_ms_p50"] == pytest.approx(500) and line["ttft_ms_p90"] == pytest.approx(820)
    assert line["tpot_ms_p50"] == pytest.approx(50) and line["tpot_ms_p99"] == pytest.approx(89.2)
    assert line["itl_ms_mean"] == pytest.approx(50) and line["e2e_ms_p50"] == pytest.approx(3600)
    assert line["goodput_per_s"] == pytest.approx(4 / 5) and line["goodput_share"] == pytest.approx(0.4)
    assert line["client_cpu_share"] == 0.2 and line["lag_ms_max"] == 50 and line["rate"] == 2
    said = " ".join(remarks(line))
    assert "1 by status 500" in said and "outputs ended early: 45 tokens of 72" in said and "no usage" in said
    assert "client itself" not in said
    assert "client itself was slow" in " ".join(remarks(line | {"lag_ms_p99": 30.0}))
    assert "client itself was slow" in " ".join(remarks(line | {"client_cpu_share": 0.97}))
    json.dumps(line, allow_nan=False)


def test_a_row_for_each_run(run: Run, tmp_path: Path) -> None:
    flags = ["--requests", 4, "--output-length", 3, "--rate", "inf", "--concurrency", 2, "--warm-up", 0]
    with FakeEndpoint() as endpoint:
        status, out, _ = run("load", endpoint.url, *flags, "--slo", "e2e=60s", "--out", tmp_path / "load.jsonl")
    assert status == 0 and "all at once" in out and "2 at a time" in out and "goodput" in out
    assert [row["arrivals"] for row in lines(tmp_path / "load.jsonl", "load")] == ["at once", "closed"]
    assert len(lines(tmp_path / "load.jsonl", "load request")) == 8


def test_percentiles_and_objectives() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], p) for p in (0, 50, 90, 100)] == pytest.approx([1, 2.5, 3.7, 4])
    assert percentile([7.0], 99) == 7.0
    assert parse_slo("ttft=200ms, e2e=3s") == {"ttft": 200.0, "e2e": 3000.0}
    assert meets({"ttft": 200.0}, {"ttft": 200.0}) and not meets({"ttft": 200.0}, {"ttft": 200.1})
    assert meets({"tpot": 1.0}, {"tpot": None})


def test_an_empty_run_has_a_line() -> None:
    line = summary(
        LoadRun(Arrivals(concurrency=1), 5, 0.0, ended=1.0, interrupted=True), [Planned(1)] * 5, {"ttft": 1.0}
    )
    assert line["ttft_ms_p50"] is None and line["goodput_share"] is None and line["completed"] == 0
    assert any("5 were not sent" in remark for remark in remarks(line))


def test_known_delays_are_measured(tmp_path: Path) -> None:
    """A sleep is never too short, so times have a floor; how much longer they may be depends on the machine."""
    with FakeEndpoint(ttft=0.2, gap=0.03) as endpoint:
        line = loaded(endpoint, tmp_path / "load.jsonl", output_length="5", rate=(100.0,), slo="ttft=30s,tpot=10s")
        strict = loaded(endpoint, tmp_path / "load.jsonl", output_length="5", slo="ttft=199ms")
    assert 199 < line["ttft_ms_p50"] < 2000 and 29 < line["tpot_ms_p50"] < 1000
    assert line["e2e_ms_p50"] > 199 + 4 * 29 and line["e2e_ms_p99"] < 1000 * line["duration_s"]
    assert (
        line["goodput_share"] == 1 and line["goodput_per_s"] == line["requests_per_s"] and strict["goodput_share"] == 0
    )
    assert line["tokens_from"] == "usage" and line["output_tokens"] == 100 and line["lag_ms_p99"] is not None
    rows = [row for row in lines(tmp_path / "load.jsonl", "load request") if row["run"] == line["run"]]
    assert len(rows) == 20 and {row["index"] for row in rows} == set(range(20))
    times = Arrivals(rate=100.0).times(20, 0)
    for row in rows:
        assert row["due_s"] == pytest.approx(times[row["index"]], abs=1e-5) and row["sent_s"] >= row["due_s"] - 1e-5
        assert len(row["itl_ms"]) == 4 and row["e2e_ms"] >= row["ttft_ms"] + sum(row["itl_ms"]) - 0.01
        assert row["tpot_ms"] == pytest.approx(sum(row["itl_ms"]) / 4, abs=0.01)


def test_tokens_by_events(tmp_path: Path) -> None:
    with FakeEndpoint(usage=False) as endpoint:
        line = loaded(endpoint, tmp_path / "load.jsonl", api="chat")
    assert line["tokens_from"] == "events" and line["output_tokens"] == 80  # the role's event is no token


# --- failures -------------------------------------------------------------------------------------------------------

FAULTS = {
    "500": "status 500",
    "reset": "connection lost",
    "no stream": "no stream",
    "midway": "connection lost",
    "early end": "closed midway",
    "broken": "broken stream",
    "error": "error in stream",
    "slow": "timeout",
}


def test_errors_by_kind(tmp_path: Path) -> None:
    """Every other request fails, each in its own way; the rest is as good as without them."""
    names = list(FAULTS)
    with FakeEndpoint(fault=lambda number, body: names[number // 2] if number % 2 else None) as endpoint:
        line = loaded(
            endpoint,
            tmp_path / "load.jsonl",
            requests=16,
            model="fake",
            prompt_kind="tokens",
            concurrency=(1,),
            timeout=1.5,
        )
    assert line["errors"] == {**dict.fromkeys(FAULTS.values(), 1), "connection lost": 2}
    assert line["completed"] == 8 == line["failed"] and line["output_tokens"] == 32
    rows = {row["index"]: row for row in lines(tmp_path / "load.jsonl", "load request")}
    assert "out of order" in rows[1]["detail"] and rows[7]["output_tokens"] == 2 and rows[15]["ttft_ms"] is None


def test_no_connection(run: Run, tmp_path: Path) -> None:
    from tests.processes import free_port

    url = f"127.0.0.1:{free_port()}"
    status, out, err = run("load", url, "--out", tmp_path / "x")
    assert (status, out) == (1, "") and err.count("\n") == 1 and "no connection to http://127.0.0.1" in err
    assert not (tmp_path / "x").exists()
    flags = [
        "--model",
        "m",
        "--prompt-kind",
        "tokens",
        "--warm-up",
        0,
        "--requests",
        3,
        "--out",
        tmp_path / "x",
        "--json",
    ]
    status, out, err = run("load", url, *flags)
    assert status == 1 and json.loads(out)["errors"] == {"no connection": 3} and "3 by no connection" in err
    with FakeEndpoint(fault=lambda number, body: "500") as endpoint:
        status, out, err = run("load", endpoint.url, "--out", tmp_path / "y")
    assert (status, out) == (1, "") and "status 500: out of order" in err


def test_connections_that_the_endpoint_closed(tmp_path: Path) -> None:
    with FakeEndpoint(keep=False) as endpoint:
        line = loaded(endpoint, tmp_path / "load.jsonl", concurrency=(2,))
    assert line["completed"] == 20 and not line["errors"]
    with FakeEndpoint(idle=0.02) as endpoint:
        line = loaded(endpoint, tmp_path / "load.jsonl", requests=5, rate=(5.0,))
    assert line["completed"] == 5 and not line["errors"]


def test_ctrl_c_loses_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        if done == 5:
            signal.raise_signal(signal.SIGINT)

    with FakeEndpoint(fault=lambda number, body: "slow" if number > 8 else None) as endpoint:
        options = LoadOptions(
            endpoint.url, requests=20, output_length="3", warm_up=0, concurrency=(2, 4), out=tmp_path / "load.jsonl"
        )
        [line] = load(options, dict, interrupt)
    assert line["interrupted"] and 5 <= line["completed"] < 9 and line["ttft_ms_p50"] is not None
    assert line["sent"] == line["completed"] + line["unfinished"]
    assert len(lines(tmp_path / "load.jsonl", "load request")) == line["completed"]
    assert lines(tmp_path / "load.jsonl", "load") == [line]


def test_ctrl_c_on_the_command_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(number: int, body: dict[str, Any]) -> str | None:
        if number == 6:
            signal.pthread_kill(main, signal.SIGINT)
        return "slow" if number >= 6 else None

    import threading

    main = threading.main_thread().ident or 0
    with FakeEndpoint(fault=fault) as endpoint:
        flags = ["--requests", 9, "--concurrency", 1, "--warm-up", 0, "--model", "m", "--prompt-kind", "tokens"]
        status, out, err = run("load", endpoint.url, *flags, "--output-length", 3, "--out", tmp_path / "load.jsonl")
    assert status == 130 and "6 of 9 requests" in out and "stopped early: 1 requests were under way, 2 were not" in err


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, words", [
    ("--rate 0", "rate must be above 0"),
    ("--rate nan", "rate must be above 0"),
    ("--rate fast", "Invalid value for '--rate'"),
    ("--concurrency 0", "concurrency must be from 1"),
    ("--requests 0", "requests must be at least 1"),
    ("--prompt-length 9-3", "the smaller number first"),
    ("--prompt-length many", "prompt-length 'many' is no length: write 512, 128-1024"),
    ("--output-length lognormal:0,1", "the median must be from 1"),
    ("--slo ttft=200", "slo 'ttft=200' is not understood"),
    ("--slo speed=1s", "known are ttft, tpot, e2e"),
    ("--slo ttft=1s,ttft=2s", "not understood at 'ttft=2s'"),
    ("--api embeddings", "unknown api 'embeddings'"),
    ("--api chat --prompt-kind tokens", "the chat API takes no token ids"),
    ("--timeout 0", "timeout must be above 0"),
    ("--warm-up -1", "warm-up must be at least 0"),
    ("--vocab 10", "vocab must be at least 17"),
    ("--temperature nan", "temperature must be a number"),
    ("--api-key sk\n1", "printable ASCII"),
    ("--label=", "must not be empty"),
    ("--requests-file nowhere.jsonl", "no such file: nowhere.jsonl"),
    ("--requests-file FILE", "line 2 has neither prompt nor messages nor prompt_tokens"),
    ("--out DIRECTORY", "is a directory: name a file"),
    ("--out TEXT", "is no file of JSON lines"),
    ("--requests 100000000", "at most 10000000"),
    ("--bogus 1", "No such option"),
])  # fmt: skip
def test_refusals_before_anything_is_sent(run: Run, tmp_path: Path, flags: str, words: str) -> None:
    (tmp_path / "r.jsonl").write_text('{"prompt": "x"}\n{"max_tokens": 3}\n')
    (tmp_path / "text").write_text("Dear diary,")
    places = {"FILE": tmp_path / "r.jsonl", "DIRECTORY": tmp_path, "TEXT": tmp_path / "text"}
    given = [str(places.get(word, word)) for word in flags.split(" ")]
    with FakeEndpoint() as endpoint:
        extra = [] if "--out" in given else ["--out", tmp_path / "load.jsonl"]
        status, out, err = run("load", endpoint.url, *given, *extra)
    assert (status, out) == (2, "") and err.count("\n") == 1 and words in err, err
    assert endpoint.heads == [] and (tmp_path / "text").read_text() == "Dear diary,"


@pytest.mark.parametrize("row, words", [
    ("[1]", "line 1 is not a JSON object"), ("{", "line 1 is not a JSON object"),
    ('{"prompt": ""}', "prompt must be a text"), ('{"prompt": [1, true]}', "prompt must be a text"),
    ('{"prompt": "x", "max_tokens": 0}', "max_tokens must be a whole number from 1"),
    ('{"prompt_tokens": "9"}', "prompt_tokens must be a whole number"), ('{"messages": []}', "are for the chat API"),
    ("", "has no requests"),
])  # fmt: skip
def test_refused_files(tmp_path: Path, row: str, words: str) -> None:
    (tmp_path / "r.jsonl").write_text(row)
    with pytest.raises(LadderError, match=words):
        plan(LoadOptions("localhost:1", requests_file=tmp_path / "r.jsonl"))


@pytest.mark.parametrize("url, base", [
    ("localhost:8000", "http://localhost:8000/v1"), ("http://h:1/", "http://h:1/v1"), ("https://h/v1", "https://h/v1"),
    ("https://h/api/v3/chat/completions", "https://h/api/v3"), ("http://[::1]:8000", "http://[::1]:8000/v1"),
])  # fmt: skip
def test_addresses(url: str, base: str) -> None:
    assert Endpoint.parse(url).base == base


@pytest.mark.parametrize(
    "url", ["", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://u:p@h", "http://a b", "h/?q"]
)
def test_refused_addresses(url: str) -> None:
    with pytest.raises(LadderError, match="endpoint"):
        Endpoint.parse(url)


def test_no_proxy_for_this_machine() -> None:
    assert Endpoint.parse("http://[::1]:1").local and Endpoint.parse("localhost:1").local
    assert not Endpoint.parse("https://example.org").local


def test_without_httpx(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    status, out, err = run("load", "localhost:1")
    assert (status, out) == (2, "") and f"needs httpx: {install('load')}" in err


# --- the wire format ------------------------------------------------------------------------------------------------


def cut(data: bytes, random: random.Random) -> list[bytes]:
    places = sorted(random.randrange(len(data) + 1) for _ in range(random.randrange(12)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def test_streams_may_be_cut_anywhere() -> None:
    drawn = random.Random(1)
    for _ in range(300):
        parts = [drawn.randbytes(drawn.randrange(1, 40)) for _ in range(drawn.randrange(1, 6))]
        coded = b"".join(b"%x;a=b\r\n" % len(part) + part + b"\r\n" for part in parts) + b"0\r\nx: y\r\n\r\n"
        chunks = Chunks()
        assert b"".join(chunks.feed(piece) for piece in cut(coded, drawn)) == b"".join(parts) and chunks.ended
        events = Events()
        text = b': hello\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:2\n\nid: 3\ndata: [DONE]\n\n'
        found = [event for piece in cut(text, drawn) for event in events.feed(piece)]
        assert found == [b'{"a": 1}', b"2"] and events.done


def test_pieces() -> None:
    usage = read_piece(b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": true}}')
    assert (usage.prompt_tokens, usage.output_tokens, usage.is_token) == (3, None, False)
    half = read_piece(b'{"choices": [{"text": "", "finish_reason": null}]}')
    assert half.is_token and not read_piece(b'{"choices": [{"text": "", "finish_reason": "stop"}]}').is_token
    thought = read_piece(b'{"choices": [{"delta": {"reasoning_content": "hm"}}], "usage": null}')
    assert thought.text == "hm" and thought.is_token
    for event in (b"[]", b"{", b'{"error": "x"}', b"\xff"):
        with pytest.raises(OSError, match="stream"):
            read_piece(event)
    for odd in (b"{}", b'{"choices": [3]}', b'{"choices": [{"text": 5, "delta": []}]}'):
        assert read_piece(odd).text == ""
