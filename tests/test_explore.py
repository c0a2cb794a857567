"""ladder explore: what is offered, what is answered and advised, the server, and the page as a file."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from experiments import explorer_measurements
from ladder.charts import library
from ladder.errors import LadderError, install
from ladder.explore import grid
from ladder.explore.advice import KEEP, TOO_SLOW, advice
from ladder.explore.answers import Answers
from ladder.explore.choices import WIRINGS, Choice, Offer
from ladder.explore.measured import Measured
from ladder.explore.options import ExploreOptions
from ladder.explore.page import page
from ladder.explore.server import HOST, Server
from ladder.perf.plan import plan, predict
from ladder.perf.timeline import timeline
from ladder.progress import workers

CHOICE = Choice("llama-3-70b", "h200", 8, "nvlink_nccl", 1, 1024, "bf16", 512)
TEXTS = {name: str(value) for name, value in CHOICE.__dict__.items()}
OFFER = Offer.of_a_file().with_(chip=("h200",), tp=(8, 1), batch=(1, 16), weights=("bf16",))
NOTHING_MEASURED = Measured([])


def answers(offer: Offer = OFFER, measured: Measured = NOTHING_MEASURED) -> Answers:
    return Answers(offer, measured, (5, 50))


def changed(**given: Any) -> Choice:
    return Choice(**{**CHOICE.__dict__, **given})


# --- timelines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wiring", [*WIRINGS, "hybrid", "desync-4x"])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_timeline_takes_as_long_as_its_layers(wiring: str, batch: int) -> None:
    d = changed(batch=batch).deployment(wiring)
    found, row = timeline(d, 4), predict(d)
    layers = row["tpot_ms"] * 1e3 - row["rest_us"]
    if wiring != "hybrid":  # whose halves differ; four layers: the period of desync-4x
        assert found.microseconds * 80 / 4 == pytest.approx(layers, rel=0.02)
    assert found.lanes == row["lanes"] and (found.first, found.layers) == (60, 4)
    for kind in ("attention", "MLP", "all-reduce"):
        bars = sorted((bar for bar in found.bars if bar.kind == kind), key=lambda bar: bar.begin)
        assert all(one.end <= other.begin + 1e-6 for one, other in pairwise(bars))
        assert all(-1e-6 <= bar.begin < bar.end <= found.microseconds + 1e-6 for bar in bars)
    for bar in found.bars:
        if bar.since is not None:  # an all-reduce is there when it is needed
            assert bar.since <= bar.begin + 1e-6
    reads = {bar.name: bar.after for bar in found.bars if bar.after is not None}
    wanted = {"standard": "attention 61", "ladder": "MLP 60", "ladder-2": "attention 60", "hybrid": "MLP 60"}
    if wiring in wanted:
        assert reads["MLP 61"] == wanted[wiring]
    if wiring == "none":
        assert not reads and not any(bar.kind in ("wait", "all-reduce") for bar in found.bars)


def test_standard_waits_for_every_all_reduce_and_one_gpu_for_none() -> None:
    found = timeline(CHOICE.deployment("standard"))
    waits = sum(bar.end - bar.begin for bar in found.bars if bar.kind == "wait")
    assert waits == pytest.approx(4 * predict(CHOICE.deployment("standard"))["all_reduce_us"], rel=0.01)
    alone = timeline(changed(size="llama-3-8b", tp=1).deployment("standard"))
    assert {bar.kind for bar in alone.bars if bar.end - bar.begin > 1e-6} == {"attention", "MLP"}
    assert all(bar.after is None for bar in alone.bars if bar.kind != "all-reduce")


# --- what is offered ------------------------------------------------------------------------------------------------


def test_options() -> None:
    offer = ExploreOptions(tp=("2,4",), link=("50us,10GB/s,nvlink_nccl", "pcie_shm_tp2"), weights=("fp8",)).offer()
    assert offer.tp == (2, 4) and offer.link == ("50us,10GB/s", "nvlink_nccl", "pcie_shm_tp2")
    assert offer.links("h200", 2) == offer.link
    assert offer.links("h200", 4) == offer.link[:2]  # a link named for 2 joins no other number
    assert offer.links("rtx-4090", 2) == ("50us,10GB/s", "pcie_shm_tp2")  # which has no NVLink
    assert OFFER.with_(link=("nvlink_nccl",)).links("rtx-4090", 2) == ("nvlink_nccl",)  # but was asked for
    assert offer.first() == Choice("llama-3-70b", "h200", 2, "50us,10GB/s", 1, 1024, "fp8", 512)
    assert ExploreOptions(chip=("141GB,4.8TB/s,989TFLOP/s",)).offer().chip == ("141GB,4.8TB/s,989TFLOP/s",)
    every = ExploreOptions().offer()
    assert "nvlink_nccl" not in every.links("h200", 16) and "ib_2node_nccl" in every.links("h200", 16)


@pytest.mark.parametrize(("flags", "reason"), [
    (["--size", "lama"], "unknown size 'lama'"), (["--chip", "x"], "unknown chip 'x'"),
    (["--link", "rope"], "unknown link 'rope'"), (["--tp", "many"], "--tp 'many' is not numbers"),
    (["--weights", "int3"], "int3"), (["--port", "70000"], "--port must be from 0 to 65535, not 70000"),
    (["--batch", "0"], "batch must be from 1 to a million"), (["--out", f"{__file__}/x.html"], "cannot be made"),
    (["nowhere.jsonl"], "no such file"), (["--new", "0"], "new must be from 1"),
    (["--out", "x.html", "--batch", ",".join(map(str, range(1, 200)))], "settings are too many for a file"),
])  # fmt: skip
def test_refusals(run: Callable[..., tuple[int, str, str]], flags: list[str], reason: str) -> None:
    status, out, err = run("explore", "--no-open", *flags)
    assert (status, out) == (2, "") and reason in err and err.count("\n") == 1


def test_without_the_library(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    status, _, err = run("explore", "--no-open")
    assert status == 2 and install("plot") in err


def test_a_port_that_is_taken(run: Callable[..., tuple[int, str, str]]) -> None:
    with Server(0, "", answers()) as server:
        status, _, err = run("explore", "--no-open", "--port", server.server_port)
    assert status == 2 and f"port {server.server_port} on {HOST} cannot be used" in err


# --- answers --------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_plan() -> None:
    found = answers().of(CHOICE)
    assert found["rows"] == plan([CHOICE.deployment(wiring) for wiring in WIRINGS])
    assert [step["wiring"] for step in found["timelines"]] == list(WIRINGS)
    refused = answers().of(changed(size="llama-3.1-405b", tp=1))
    assert "needs" in refused["refused"] and "rows" not in refused


def test_the_curve_goes_through_the_chosen_link() -> None:
    found = Answers(OFFER, NOTHING_MEASURED, (24,)).curve(CHOICE)
    rows = {row["wiring"]: row for row in answers().of(CHOICE)["rows"]}
    assert found["chosen"] == 24 and found["curves"].keys() == set(WIRINGS) - {"standard"}
    for wiring, ((alpha, speedup),) in found["curves"].items():
        assert alpha == 24 and speedup == pytest.approx(rows[wiring]["speedup"], rel=1e-4)


def test_the_frontier_has_the_rows_of_plan_and_nothing_beats_it() -> None:
    found = answers().frontier(changed(link="pcie_shm_tp8"))["points"]
    for wiring, points in found.items():
        assert {(point["tp"], point["batch"]) for point in points} == {(8, 1), (8, 16)}  # one GPU cannot hold it
        for point in points:
            row = predict(changed(link="pcie_shm_tp8", batch=point["batch"]).deployment(wiring))
            assert (point["user"], point["gpu"]) == (row["tokens_per_s_user"], row["tokens_per_s_gpu"])
            beaten = any(o["user"] > point["user"] and o["gpu"] > point["gpu"] for o in points)
            assert not (point["front"] and beaten)


def advised(choice: Choice) -> dict[str, Any]:
    found: dict[str, Any] = answers().of(choice)["advice"]
    return found


def test_advice() -> None:
    yes = advised(CHOICE)
    assert yes["verdict"] == "yes" and yes["headline"].startswith("Ladder gives 1.60")
    assert any("parallel-1" in words and "not been measured" in words for words in yes["reasons"])
    alone = advised(changed(size="llama-3-8b", tp=1))
    assert "on a single GPU" in alone["headline"] and "side by side" in alone["reasons"][0]
    nothing = advised(changed(size="llama-3-8b", tp=1, chip="h100"))  # whose engine has one lane
    assert nothing["verdict"] == "nothing" and "Ladder gives you nothing here" in nothing["headline"]
    assert "--engine ladder" in nothing["reasons"][0]
    slow = advised(changed(size="llama-3-8b", link="60s,1GB/s"))
    assert slow["verdict"] == "nothing" and TOO_SLOW in slow["reasons"]
    assert any(words.startswith("parallel would be 1.9") for words in slow["reasons"])  # half as many all-reduces
    rows = {row["wiring"]: row for row in answers().of(CHOICE)["rows"]}
    fast = {name: {**row, "speedup": 1.01, "exposed_ms": 0.01} for name, row in rows.items()}
    assert advice(fast)["reasons"][-1] == KEEP
    little = {name: {**row, "speedup": 1.06} for name, row in rows.items()}
    assert advice(little)["verdict"] == "little" and "only 1.06" in advice(little)["headline"]
    counted = advice(little, measured=1.2)  # what was measured counts, and the prediction is named beside it
    assert counted["verdict"] == "yes" and "1.20" in counted["headline"]
    assert "the prediction is 1.06" in counted["reasons"][0]


def test_measured_points() -> None:
    own = Measured.of([])
    here = own.here(CHOICE)
    assert here["ladder"]["y"] == pytest.approx(7.34 / 4.51, rel=0.15) and "one rank" in here["ladder"]["how"]
    points = own.speedups(CHOICE)
    assert {8, 24, 62} <= {point["alpha"] for point in points if point["wiring"] == "ladder"}
    assert all(point["alpha"] > 0 for point in points)
    alone = changed(size="llama-3-8b", tp=1)
    assert own.here(alone)["ladder"]["y"] > 1.05
    told, bare = (answers(measured=each).of(alone)["advice"] for each in (own, NOTHING_MEASURED))
    assert f"{own.here(alone)['ladder']['y']:.2f}" in told["headline"] and "That was measured" in told["reasons"][0]
    assert told["headline"] != bare["headline"] and "measured" not in " ".join(bare["reasons"])
    for other in ({"chip": "b200"}, {"weights": "int8"}, {"prompt": 8000}, {"batch": 3}):
        assert not own.speedups(changed(**other))
    assert {point["wiring"] for point in own.rates(CHOICE)} >= {"standard", "ladder", "none"}


def test_measurements_of_the_package_are_lines_of_the_results() -> None:
    lines = explorer_measurements.OUT.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == list(explorer_measurements.lines())


# --- the server -----------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(0, "<title>the page</title>", answers()) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: Server, path: str, **headers: str) -> tuple[int, str]:
    connection = HTTPConnection(HOST, server.server_port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_server(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/") == (200, "<title>the page</title>")
    status, text = get(server, f"/answer?{urlencode(TEXTS)}")
    assert status == 200 and json.loads(text) == json.loads(json.dumps(answers().of(CHOICE)))
    for path in ("/etc/passwd", "/../page.html", "/answer/x"):
        assert get(server, path)[0] == 404
    assert get(server, "/", Host="evil.example")[0] == 403  # a name that another site gave this address
    for given, reason in (({"tp": "many"}, "tp must be a number"), ({"x": "1"}, "unknown field 'x'"),
                          ({"link": "rope"}, "unknown link"), ({"tp": "3"}, "3")):  # fmt: skip
        status, text = get(server, f"/answer?{urlencode(TEXTS | given)}")
        assert status == 200 and reason in json.loads(text)["refused"]


def test_ctrl_c_ends_it_cleanly() -> None:
    command = [sys.executable, "-m", "ladder", "explore", "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and "exploring at http://127.0.0.1:" in process.stdout.readline()
    process.send_signal(2)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "stopped\n", "")


# --- a file ---------------------------------------------------------------------------------------------------------


def inside(text: str) -> dict[str, Any]:
    """The answers of a page that is a file."""
    found = re.search(r'"answers":"([^"]+)"', text)
    assert found is not None
    read: dict[str, Any] = json.loads(zlib.decompress(b64decode(found[1])))
    return read


def test_a_file_has_the_answers_of_the_server(tmp_path: Path) -> None:
    offer = OFFER.with_(size=("llama-3-70b",), link=("nvlink_nccl",), batch=(1,))
    told: list[tuple[int, int, str]] = []
    assert grid.write(offer, [], tmp_path / "page.html", lambda *step: told.append(step)) == 2
    text = (tmp_path / "page.html").read_text()
    found, own = inside(text), Answers(offer, Measured.of([]), grid.ALPHAS)
    assert found == json.loads(json.dumps({
        "answer": {CHOICE.key: own.of(CHOICE)}, "curve": {CHOICE.key: own.curve(CHOICE)},
        "frontier": {CHOICE.frontier_key: own.frontier(CHOICE)},
        "refused": {changed(tp=1).key: own.of(changed(tp=1))["refused"]},
    }))  # fmt: skip
    assert told[-1][:2] == (2, 2) and text.count("</script>") == 3 and "default-src 'none'" in text


def test_what_is_offered_is_harmless() -> None:
    text = page(OFFER.with_(chip=("1GB,1TB/s,1TFLOP/s",))).replace(library.program(), "")
    assert text.count("</script>") == 3
    with pytest.raises(LadderError, match="unknown chip"):
        OFFER.with_(chip=("</script>",))


def test_a_file_that_is_not_finished_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written before all answers are there, and then all of it."""
    written = tmp_path / "new" / "page.html"
    offer = OFFER.with_(size=("llama-3-8b",), chip=("h200",), tp=(1,), batch=(1,), weights=("bf16",))

    def stopped(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("ladder.explore.grid.page", stopped)
    with pytest.raises(KeyboardInterrupt):
        grid.write(offer, (), written, lambda *_: None)
    assert not written.exists()
    monkeypatch.setattr("ladder.explore.grid.page", lambda *_: "whole")
    grid.write(offer, (), written, lambda *_: None)
    assert written.read_text() == "whole" and list(written.parent.iterdir()) == [written]


def test_ctrl_c_ends_the_processes_that_make_a_file() -> None:
    """At once, rather than when they have completed all; and they leave it to the one that started them."""
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), workers(1) as submit:
        assert signal.SIGINT in submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result()
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        worker = submit(os.getpid).result()
        submit(time.sleep, 50)
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        while time.monotonic() - start < 30:
            os.kill(worker, 0)  # it is there still
            time.sleep(0.1)
