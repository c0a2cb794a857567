"""Ranks prove to each other that they hold the same token, and seal their messages with a key made from it.

The token never leaves a process. Each pair of ranks exchanges random numbers and answers with a keyed digest (BLAKE2b)
of both, so an answer serves once. A message then has a header with its number, its length, the digest of its bytes and
a keyed digest of all this: it is checked before anything else is read, let alone decoded.

An empty token proves nothing. What is left are plain digests, which find ranks of another run and damaged messages.
"""

import hmac
import logging
import secrets
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.engine.executors.messages import MOST_BYTES, VERSION
from ladder.errors import LadderError

logger = logging.getLogger(__name__)

TIMEOUT = 120.0  # seconds for a rank's proof; ranks start together, but may import for a while
FEWEST = 16  # characters of a token
MOST = 4096
NUMBER = 16  # bytes of a random number
DIGEST = 32
_FIELDS = struct.Struct(f"<4sIQQ{DIGEST}s")  # mark, version, number of the message, length, digest of its bytes
HEADER = _FIELDS.size + DIGEST
_MARK = b"lddr"


def new_token() -> bytes:
    """For ranks that one process starts."""
    return secrets.token_bytes(DIGEST)


def read_token(file: Path | None) -> bytes:
    """The token of ranks that several processes start, from a file that each of them can read."""
    if file is None:
        return b""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise LadderError(f"token file {file} is not a file")
        with file.open("rb") as opened:
            token = opened.read(MOST + 1).strip()
    except OSError as error:
        raise LadderError(f"token file {file} cannot be read: {error.strerror}") from None
    if not FEWEST <= len(token) <= MOST:
        raise LadderError(
            f"token file {file} has {len(token)} characters: {FEWEST} to {MOST}, as of `openssl rand -hex 32`"
        )
    if file.stat().st_mode & 0o077:
        logger.warning("token file %s can be read by others: chmod 600 it", file)
    return token


def _digest(key: bytes, *parts: bytes) -> bytes:
    """Keyed, and of the parts rather than of what they are joined to."""
    digest = blake2b(key=blake2b(key).digest() if key else b"", digest_size=DIGEST)
    for part in parts:
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()


def greet(group: dist.ProcessGroup | None, token: bytes, name: str, timeout: float = TIMEOUT) -> bytes:
    """Every two ranks of a group (None: all) prove to each other that they hold the token; returns this session's key.

    gloo takes whoever connects first for the rank it waits for: only this shows who is there.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = secrets.token_bytes(NUMBER)
    numbers = _exchanged(group, dict.fromkeys(range(size), own), NUMBER, 0, timeout)
    numbers[rank] = own

    def proof(sender: int, receiver: int) -> bytes:
        pair = struct.pack("<III", size, sender, receiver)
        return _digest(token, b"proof", name.encode(), pair, numbers[sender], numbers[receiver])

    proofs = _exchanged(group, {peer: proof(rank, peer) for peer in range(size)}, DIGEST, 1, timeout)
    for peer, found in proofs.items():
        if not hmac.compare_digest(found, proof(peer, rank)):
            raise LadderError(f"rank {peer} has another token, or is a stranger: give all ranks the same --token-file")
    return _digest(token, b"session", name.encode(), *(numbers[each] for each in range(size)))


def _exchanged(
    group: dist.ProcessGroup | None, mine: dict[int, bytes], size: int, tag: int, timeout: float
) -> dict[int, bytes]:
    """What each other rank has for this one, of a known size."""
    peers = [peer for peer in mine if peer != dist.get_rank(group)]
    limit = timedelta(seconds=timeout)
    found: dict[int, Tensor] = {peer: torch.empty(size, dtype=torch.uint8) for peer in peers}
    given = {peer: torch.frombuffer(bytearray(mine[peer]), dtype=torch.uint8) for peer in peers}
    with _silent_peers(timeout):
        pending = [dist.irecv(found[peer], group=group, group_src=peer, tag=tag) for peer in peers]
        pending += [dist.isend(given[peer], group=group, group_dst=peer, tag=tag) for peer in peers]
        for work in pending:
            assert work is not None
            work.wait(limit)
    return {peer: value.numpy().tobytes() for peer, value in found.items()}


@contextmanager
def _silent_peers(timeout: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "imed out" in str(error):
            raise LadderError(f"a rank has not shown its token for {timeout:g} s: all ranks were stopped") from None
        raise


class Seal:
    """The headers of one direction's messages, which are numbered: none can be left out, repeated or exchanged."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def header(self, message: bytes) -> bytes:
        """Of the next message to send."""
        known = _FIELDS.pack(_MARK, VERSION, self._number, len(message), _digest(self._key, message))
        self._number += 1
        return known + _digest(self._key, known)

    def length(self, header: bytes) -> int:
        """Of the next message to receive, by its header."""
        known, given = header[: _FIELDS.size], header[_FIELDS.size :]
        if len(header) != HEADER or not hmac.compare_digest(given, _digest(self._key, known)):
            raise LadderError("a message between ranks is refused: it was not sealed with this run's token")
        mark, version, number, length, _ = _FIELDS.unpack(known)
        if (mark, version, number) != (_MARK, VERSION, self._number) or length > MOST_BYTES:
            raise LadderError(
                f"a message between ranks is refused: number {number} of version {version}, not {self._number} of "
                f"{VERSION}; all ranks must run the same version of ladder"
            )
        self._number += 1
        return int(length)

    def check(self, header: bytes, message: bytes) -> bytes:
        """The message, if it is the one that its header announced."""
        digest = _FIELDS.unpack(header[: _FIELDS.size])[-1]
        if not hmac.compare_digest(digest, _digest(self._key, message)):
            raise LadderError("a message between ranks is refused: it is not the one that its header announced")
        return message
