"""Messages between ranks: a fixed format, sealed. What is not exactly that is refused with one sentence."""

import random
import struct
from collections import deque
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from ladder.engine.executors import control, seal
from ladder.engine.executors.control import BroadcastControl
from ladder.engine.executors.messages import KINDS, VERSION, decode, encode
from ladder.engine.executors.seal import HEADER, Seal, greet, read_token
from ladder.engine.frontend.open_requests import OpenRequest
from ladder.engine.model_runner import AbortSequence, AddSequence, Command, ReadLong, Shutdown
from ladder.engine.options import SamplingParams
from ladder.engine.requests import Request
from ladder.engine.scheduler import SequenceSpec
from ladder.errors import LadderError
from tests.processes import run_processes

# no field has its default
PARAMS = SamplingParams(
    max_new_tokens=7,
    temperature=0.1,
    top_k=3,
    top_p=0.3,
    min_p=0.2,
    repetition_penalty=1.1,
    presence_penalty=-0.7,
    frequency_penalty=2,
    logit_bias={3: 0.1, 5: -100},  # type: ignore[arg-type]
    seed=2**63 - 1,
    n=2,
    stop=("so \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "\n"),
    stop_token_ids=(1, 2),
    ignore_eos=True,
    min_tokens=2,
    logprobs=5,
)
COMMANDS: list[Command] = [
    AddSequence(SequenceSpec(2**40, (0, 1, 2**24), 5, PARAMS)),
    AbortSequence(0),
    AddSequence(SequenceSpec(1, tuple(range(2000)), 1, SamplingParams())),
    Shutdown(),
    ReadLong(),
]
LIMIT = 120.0


def test_what_is_sent_is_received() -> None:
    assert decode(encode(COMMANDS)) == COMMANDS and decode(encode([])) == []
    for entry in fields(SamplingParams):
        assert getattr(PARAMS, entry.name) != entry.default, f"{entry.name}: give it a value of its own here"


@pytest.mark.parametrize("message, why", [
    (b"\1", "ends within a frame"),
    (struct.pack("<III", 3, 2, 1) + b"{}", "shorter than its lengths say"),
    (struct.pack("<III", 3, 2**32 - 1, 2**32 - 1) + b"{}", "shorter than its lengths say"),
    (struct.pack("<III", 3, 2, 1) + b"{}\0\0\0\0", "tokens that belong to no sequence"),
    (struct.pack("<III", 5, 2, 0) + b"{}", "no command of kind 5"),
    (struct.pack("<III", 3, 2, 0) + b"[]", "not a JSON object"),
    (struct.pack("<III", 3, 2, 0) + b"\xff{", "not JSON"),
    (struct.pack("<III", 3, 9, 0) + b'{"id": 1}', "'id' is missing or is no field of Shutdown"),
    (struct.pack("<III", 2, 2, 0) + b"{}", "'id' is missing or is no field of AbortSequence"),
    (struct.pack("<III", 2, 12, 0) + b'{"id": true}', "id must be int, not True"),
    (struct.pack("<III", 2, 11, 0) + b'{"id": NaN}', "not JSON"),
    (struct.pack("<III", 2, 11, 0) + b'{"id": 1.5}', "id must be int"),
    (struct.pack("<III", 1, 2, 0) + b"{}", "no sampling parameters"),
    (struct.pack("<III", 1, 12, 0) + b'{"params":1}', "no sampling parameters"),
    (struct.pack("<III", 3, 200_000, 0) + b"[" * 200_000, "not JSON"),
])  # fmt: skip
def test_what_is_refused(message: bytes, why: str) -> None:
    with pytest.raises(LadderError, match=f"^a message between ranks is refused: .*{why}"):
        decode(message)


def test_values_are_checked_like_a_users() -> None:
    message = encode([AddSequence(SequenceSpec(1, (2,), 3, SamplingParams(top_p=0.5)))])
    with pytest.raises(LadderError, match=r"top_p must be above 0"):
        decode(message.replace(b'"top_p": 0.5', b'"top_p": 5.0'))
    with pytest.raises(LadderError, match=r"is no field of SamplingParams"):
        decode(message.replace(b'"top_p"', b'"top_q"'))


def test_any_bytes_are_commands_or_one_sentence() -> None:
    draw, whole = random.Random(0), encode(COMMANDS)[:1500]
    for _ in range(2000):
        message = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(message))
            message[at : at + draw.choice((0, 1, 1, 4))] = draw.randbytes(draw.choice((0, 1, 1, 4)))
        try:
            for command in decode(bytes(message)):
                assert type(command) in KINDS.values()
        except LadderError as error:
            assert "\n" not in str(error)


def test_a_seal_is_of_one_key_one_number_and_one_message() -> None:
    ours, theirs, other = Seal(b"key"), Seal(b"key"), Seal(b"another")
    headers = [ours.header(message) for message in (b"first", b"", b"third")]
    assert {len(header) for header in headers} == {HEADER}
    with pytest.raises(LadderError, match="not sealed with this run's token"):
        other.length(headers[0])
    with pytest.raises(LadderError, match=f"number 1 of version {VERSION}, not 0"):
        theirs.length(headers[1])
    assert theirs.length(headers[0]) == 5
    assert theirs.check(headers[0], b"first") == b"first"
    with pytest.raises(LadderError, match="not the one that its header announced"):
        theirs.check(headers[0], b"fir5t")
    with pytest.raises(LadderError, match=f"number 0 of version {VERSION}, not 1"):  # once more
        theirs.length(headers[0])
    assert theirs.length(headers[1]) == 0
    for at in range(HEADER):
        changed = bytearray(headers[2])
        changed[at] ^= 1
        with pytest.raises(LadderError, match="not sealed"):
            theirs.length(bytes(changed))
    for header in (b"", headers[2][:-1], headers[2] + b"\0"):
        with pytest.raises(LadderError, match="not sealed"):
            theirs.length(header)
    assert theirs.length(headers[2]) == 5


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    header = Seal(b"").header(b"")
    monkeypatch.setattr(seal, "VERSION", VERSION + 1)
    with pytest.raises(
        LadderError, match=f"of version {VERSION}, not 0 of {VERSION + 1}; all ranks must run the same version"
    ):
        Seal(b"").length(header)


@pytest.mark.parametrize("most", [1, 100, len(encode(COMMANDS)), 1 << 24])
def test_a_long_message_goes_in_pieces(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The open requests of a large server are hundreds of megabytes, all sent at once when its ranks start again."""
    sent: deque[bytes] = deque()

    def broadcast(own: BroadcastControl, message: bytes) -> bytes:
        if own is first:
            sent.append(message)
            return message
        assert len(sent[0]) == len(message), "ranks must agree on a length before they meet"
        return sent.popleft()

    ranks = iter(range(2))
    monkeypatch.setattr(control.dist, "get_rank", lambda group: next(ranks))
    monkeypatch.setattr(BroadcastControl, "_broadcast", broadcast)
    monkeypatch.setattr(control, "MOST_BYTES", most)
    first, second = (BroadcastControl(None, b"key") for _ in range(2))  # type: ignore[arg-type]
    for commands in (COMMANDS, [], COMMANDS[:1]):
        assert first.share(commands) == commands
        assert max(len(message) for message in sent) <= max(most, HEADER)
        assert list(second.share(())) == commands and not sent


def meet(rank: int, size: int, directory: str) -> None:
    """Ranks that meet three times: with one token, with two, and without their last."""
    store = dist.FileStore(f"{directory}/store", size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    keys = [greet(None, b"one for all" * 2, name) for name in ("a", "a", "b")]
    said = []
    for token, limit in ((b"two" if rank == 1 else b"one", 60.0), (b"one", 1.0)):
        if rank == 2 and limit == 1.0:
            break
        try:
            greet(None, token, "a", limit)
        except LadderError as error:
            said.append(str(error))
    Path(directory, f"{rank}.txt").write_text("\n".join([*(key.hex() for key in keys), *said]))
    if rank == 2:  # its connections stay until the others have given up
        store.wait(["done 0", "done 1"])
    store.set(f"done {rank}", "")


def test_ranks_prove_that_they_hold_the_token(tmp_path: Path) -> None:
    run_processes(meet, 3, tmp_path, LIMIT)
    found = [(tmp_path / f"{rank}.txt").read_text().splitlines() for rank in range(3)]
    keys = [each[:3] for each in found]
    assert keys[0] == keys[1] == keys[2] and len(set(keys[0])) == 3  # another in each session
    assert found[0][3] == found[2][3] and found[0][3].startswith("rank 1 has another token, or is a stranger")
    assert found[1][3].startswith("rank 0 has another token")
    assert found[0][4:] == found[1][4:] == ["a rank has not shown its token for 1 s: all ranks were stopped"]


def test_token_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "token"
    assert read_token(None) == b""
    with pytest.raises(LadderError, match="cannot be read: No such file"):
        read_token(file)
    with pytest.raises(LadderError, match="is not a file"):
        read_token(tmp_path)
    for text in ("", "short", "x" * 5000):
        file.write_text(text)
        with pytest.raises(LadderError, match="characters: 16 to 4096"):
            read_token(file)
    file.write_text("  0123456789abcdef\n")
    file.chmod(0o644)
    assert read_token(file) == b"0123456789abcdef" and "can be read by others: chmod 600 it" in caplog.text
    caplog.clear()
    file.chmod(0o600)
    read_token(file)
    assert caplog.text == ""


def test_a_longer_prompt_is_no_problem() -> None:
    spec = SequenceSpec(0, tuple(range(200_000)), 1, replace(PARAMS, stop=("x" * 100_000,)))
    assert decode(encode([AddSequence(spec)])) == [AddSequence(spec)]


def test_ranks_are_not_sent_stop_texts() -> None:
    """These may be megabytes, of each of a hundred results: the process that has the texts looks for them."""
    request = Request(0, "abc", [1, 2, 3], 4, PARAMS, None)
    command = OpenRequest(request, None).command(7)
    assert command == AddSequence(SequenceSpec(7, (1, 2, 3), 4, replace(request.params, stop=())))
    assert request.params.stop == PARAMS.stop
