"""Symmetric memory as the backend: the GPUs of one machine map each other's memory and add up the messages there.

An all-reduce is one kernel that synchronizes with its peers through flags in their memory, without a library's set-up
around it, so that small messages take less time. Ranks that cannot map each other's memory use another communicator.
"""

import json
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.base import PRIORITY, Comm, Completed, Pending
from ladder.comm.one_shot import BLOCKS, OneShot
from ladder.errors import LadderError
from ladder.jit import PRESENT

T = TypeVar("T")
logger = logging.getLogger(__name__)

# torch.ops.symm_mem's kernels, by name
ONE_SHOT = "one_shot_all_reduce_out"  # every rank reads all messages: (ranks - 1) x bytes
TWO_SHOTS = "two_shot_all_reduce_"  # every rank sums a part and hands it to all: 2 (ranks - 1) / ranks x bytes
MULTICAST = "multimem_all_reduce_"  # likewise, but the switch adds and copies

KIB = 1024
MAX_BYTES = 8 * KIB * KIB  # of one message; for larger ones bandwidth counts, where NCCL's rings are better
SLOTS = 2
GRAIN = 16  # bytes that one thread of a kernel loads at once: messages are padded to it
DTYPES = (torch.float32, torch.bfloat16)  # those that the kernels support
MAX_TEXT = 4096  # bytes of a value that ranks tell each other
MAX_REASON = 500  # characters, of up to six bytes each
RENDEZVOUS_TIMEOUT = 60.0  # seconds to wait for a rank that failed while memory was being mapped


@dataclass(frozen=True)
class Way:
    """A kernel, for up to so many ranks and bytes."""

    kernel: str
    ranks: float = float("inf")
    bytes: float = float("inf")
    multicast: bool = False  # needs a switch that copies and adds


# The first that fits is taken. For two ranks one shot moves no more than two shots do, and synchronizes once less. The
# limit for more is the one torch has for its own all-reduce within a node (c10d/symm_mem/intra_node_comm.cu).
WAYS = (
    Way(ONE_SHOT, ranks=2),
    Way(ONE_SHOT, bytes=256 * KIB),
    Way(MULTICAST, multicast=True),
    Way(TWO_SHOTS),
)


def choose(size: int, count: int, dtype: torch.dtype, multicast: bool, room: int = MAX_BYTES) -> str | None:
    """The kernel for a message of `count` bytes between `size` ranks; None: symmetric memory is not for it."""
    if dtype not in DTYPES or not 0 < count <= room:
        return None
    fits = (way for way in WAYS if size <= way.ranks and count <= way.bytes and multicast >= way.multicast)
    return next(fits).kernel


@dataclass(frozen=True)
class Room:
    """Memory that every rank has mapped: [slots, bytes]."""

    memory: Tensor
    group: str  # the name of the group that mapped it
    multicast: bool
    light: OneShot | None = None  # for all-reduces that set a flag; needs Triton


class Symmetric:
    """All-reduces over symmetric memory; other messages go to `inner`, and so does `all_gather`.

    All of them run on one stream of their own, each after what the caller's stream had been given before. That stream
    keeps them apart: the kernels synchronize through one set of flags, and two at once would take each other's signals.
    In a CUDA graph its branch does the same. So a graph is replayed on a stream that has waited for the all-reduces
    started before, and two graphs never run at once.

    A message is copied into shared memory, summed, and copied back to where it was: the result is the caller's own
    tensor, which no later all-reduce touches. Slots are taken in turn, the same ones on all ranks.
    """

    def __init__(self, inner: Comm, room: Room) -> None:
        self._inner = inner
        self._room = room
        self._slots = [room.memory[slot] for slot in range(SLOTS)]
        self._turn = 0
        self._stream = torch.cuda.Stream(
            room.memory.device, priority=PRIORITY
        )  # high: it must not queue behind compute
        # the few messages that are not for symmetric memory go to `inner`
        self.capturable = getattr(inner, "capturable", False)
        self.signals = room.light is not None
        self.size = inner.size
        self.rank = inner.rank

    @classmethod
    def build(
        cls,
        inner: Comm,
        group: dist.ProcessGroup,
        device: torch.device,
        required: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> Comm:
        """Symmetric memory between the ranks of `group`, or `inner` where it cannot be had (`required`: an error).

        A collective call, with equal sizes, on a group that carries CPU tensors. All ranks get the same kind of
        communicator: where a step fails on one rank, all give up.
        """
        try:
            room = _map(group, device, max_bytes)
            comm = together(group, lambda: cls(inner, room))
            kernels = sorted({way.kernel for way in WAYS if room.multicast >= way.multicast})
            together(group, comm._try_light)
            for kernel, dtype in product(kernels, DTYPES):  # one by one: see `together`
                together(group, partial(comm._try, kernel, dtype))
        except Impossible as reason:
            if required:
                raise LadderError(f"symmetric memory cannot be had, {reason}: leave --comm-backend to auto") from None
            if inner.rank == 0:
                logger.warning("no symmetric memory, %s: all-reduces use the process group, which is slower", reason)
            return inner
        return comm

    def all_reduce(self, x: Tensor) -> Pending:
        x = x.contiguous()
        if x.numel() == 0:
            return Completed(x)
        memory = self._room.memory
        kernel = choose(self.size, x.numel() * x.element_size(), x.dtype, self._room.multicast, memory.shape[1])
        if kernel is None or x.device != memory.device:
            return self._inner.all_reduce(x)
        return self._send(x, kernel)

    def all_reduce_and_signal(self, x: Tensor, flag: Tensor) -> tuple[Tensor, int] | None:
        """The all-reduce, in the current stream, and what it counts `flag` up to; None: not for this message.

        These kernels have signals of their own, apart from those of `all_reduce`. They too follow each other in one
        stream, the caller's.
        """
        if self._room.light is None or not x.is_contiguous() or not OneShot.fits(x):
            return None
        self._room.light.add(x, flag)
        return x, BLOCKS

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x)

    def _send(self, x: Tensor, kernel: str) -> "_Pending":
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            add(x, self._slots[self._turn], kernel, self._room.group)
            arrival = self._stream.record_event()
        self._turn = (self._turn + 1) % len(self._slots)
        return _Pending(x, arrival)

    def _try_light(self) -> None:
        if self._room.light is not None:
            x = torch.full((1001,), self.rank + 1.0, device=self._room.memory.device)
            self._room.light.add(x, None)
            if x.unique().tolist() != [self.size * (self.size + 1) / 2]:
                raise RuntimeError("an all-reduce by our own kernel is wrong")

    def _try(self, kernel: str, dtype: torch.dtype) -> None:
        """Check a result: that memory can be mapped does not mean that a kernel works on it.

        This also makes the driver load the kernel, which it must not do while a graph is captured.
        """
        x = torch.full((1001,), self.rank + 1, dtype=dtype, device=self._room.memory.device)  # no whole grains
        found = self._send(x, kernel).wait().unique().tolist()
        if found != [self.size * (self.size + 1) / 2]:
            raise RuntimeError(f"{kernel} of 1 to {self.size} is {found}")


class _Pending:
    """An all-reduce in flight; keeps the tensor alive while the other stream works on it."""

    def __init__(self, x: Tensor, arrival: torch.cuda.Event) -> None:
        self._x = x
        self._arrival = arrival

    def wait(self) -> Tensor:
        torch.cuda.current_stream(self._x.device).wait_event(self._arrival)
        return self._x


def add(x: Tensor, slot: Tensor, kernel: str, group: str) -> None:
    """On the current stream, `x` (contiguous) becomes the ranks' sum, by way of `slot`, bytes in symmetric memory.

    The padding of the message has any values; they are added up like the rest, and dropped. The kernels end with a
    barrier, so the slot is free when they end. (torch has a kernel that also does the copying, but lets it signal
    before all of its threads have copied.)
    """
    flat = x.view(-1)
    grain = GRAIN // x.element_size()
    whole = slot.view(x.dtype)[: -(-flat.numel() // grain) * grain]
    message = whole[: flat.numel()]
    message.copy_(flat)
    if kernel != ONE_SHOT:
        _kernel(kernel)(whole, "sum", group)  # in place
        flat.copy_(message)
    elif whole.numel() == flat.numel() and flat.data_ptr() % GRAIN == 0:
        _kernel(kernel)(whole, "sum", group, flat)
    else:  # the kernel writes whole grains
        flat.copy_(_kernel(kernel)(whole, "sum", group, torch.empty_like(whole))[: flat.numel()])


def _kernel(name: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = getattr(torch.ops.symm_mem, name)
    return found


class Impossible(Exception):
    """Symmetric memory is not available on some rank; raised on all of them, with the same text."""


def together(group: dist.ProcessGroup, step: Callable[[], T]) -> T:
    """`step`, taken by all ranks. Where it fails on any, all raise `Impossible` with the first one's reason."""
    result, reason = None, None
    try:
        result = step()
    except Exception as error:  # of any type: the other ranks must not wait
        first = str(error).strip().partition("\n")[0]  # the lines below are a C++ stack trace
        reason = first[:MAX_REASON] or type(error).__name__
    for rank, other in enumerate(everyones(group, reason)):
        if other is not None:
            raise Impossible(f"rank {rank}: {other}")
    return result  # type: ignore[return-value]


def everyones(group: dist.ProcessGroup, mine: T) -> list[T]:
    """Each rank's value, in rank order: None, a truth value, a number, a text, or a list of these. As JSON: torch's own
    way to gather objects runs what it receives.
    """
    text = json.dumps(mine).encode()
    own = torch.zeros(MAX_TEXT, dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [json.loads(each.numpy().tobytes().rstrip(b"\0")) for each in found]


def _map(group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> Room:
    """Each rank's memory, mapped by all. What can fail on one rank alone is tried before the rendezvous."""
    symm = together(group, lambda: _library(device))
    places = everyones(group, [_machine(), device.index])
    together(group, lambda: _check_peers(places, device))
    room = max_bytes // GRAIN * GRAIN
    memory: Tensor = together(group, lambda: symm.empty((SLOTS, room), dtype=torch.uint8, device=device))
    multicast = all(everyones(group, together(group, lambda: bool(_meet(symm, memory, group).multicast_ptr))))
    light = None
    if all(everyones(group, PRESENT)):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        signs: Tensor = together(group, lambda: OneShot.room(symm, size, device))
        light = together(group, lambda: OneShot(signs, _meet(symm, signs, group).buffer_ptrs, rank, size))
    elif dist.get_rank(group) == 0:
        logger.info("no all-reduces that set a flag: they need Triton on all ranks")
    return Room(memory, group.group_name, multicast, light)


def _library(device: torch.device) -> Any:
    """torch's module, where it has one for this device."""
    if device.type != "cuda":
        raise RuntimeError(f"it connects GPUs, the device is {device}")
    try:
        import torch.distributed._symmetric_memory as symm

        backend = symm.get_backend(device)
        for way in WAYS:
            _kernel(way.kernel)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"torch {torch.__version__} does not have it ({error})") from None
    if backend != "CUDA":  # NVSHMEM's and NCCL's memory has no flags for these kernels
        raise RuntimeError(f"torch's symmetric memory is set to {backend}, not CUDA")
    return symm


def _machine() -> str:
    """The same for processes that can hand each other memory; ranks in containers of their own have other names."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _check_peers(places: list[list[Any]], device: torch.device) -> None:
    """One machine, whose GPUs reach each other. (Whether ranks may share one is torch's to say.)"""
    machines = {machine for machine, _ in places}
    if len(machines) > 1:
        raise RuntimeError(f"the ranks are on {len(machines)} machines")
    for _, index in places:
        if index != device.index and not torch.cuda.can_device_access_peer(device, index):
            raise RuntimeError(f"{device} cannot map the memory of cuda:{index}")


def _meet(symm: Any, memory: Tensor, group: dist.ProcessGroup) -> Any:
    """Map each other's memory."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    # ranks wait for each other at the group's store, which may have no time-out
    store: Any = _get_process_group_store(group)
    before = store.timeout
    store.set_timeout(timedelta(seconds=RENDEZVOUS_TIMEOUT))
    try:
        handle = symm.rendezvous(memory, group)
    finally:
        store.set_timeout(before)
    if getattr(handle, "offset", 0):  # the kernels need the beginning of an allocation
        raise RuntimeError("torch has put the memory inside another allocation")
    return handle
