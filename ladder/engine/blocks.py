"""Blocks of the KV cache: which are free, how many sequences use each, and which hold the beginning of a prompt."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ladder.layers.cache import BLOCK, RESERVED


def names_of(tokens: Sequence[int]) -> Iterator[bytes]:
    """A name for each whole block of `tokens`: of what it holds and of everything before it."""
    name = b""
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        name = hashlib.blake2b(name + array("q", tokens[begin : begin + BLOCK]).tobytes(), digest_size=16).digest()
        yield name


class BlockPool:
    """`blocks` blocks, without those that are reserved. Those that nobody uses but that have a name stay as they are
    until there are no others, and then the one that was given back first is taken.
    """

    def __init__(self, blocks: int) -> None:
        self.count = blocks - RESERVED
        self._free = list(range(blocks - 1, RESERVED - 1, -1))
        self._users = dict.fromkeys(range(RESERVED, blocks), 0)
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # unused blocks with a name, in the order of their last use

    @property
    def free(self) -> int:
        """How many blocks can be taken."""
        return len(self._free) + len(self._kept)

    def take(self) -> int:
        """A block for one user; its name is forgotten."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            self._forget(block)
        self._users[block] = 1
        return block

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the first names that are known. They have not been taken yet, see `share`."""
        found = []
        for name in names:
            if name not in self._named:
                break
            found.append(self._named[name])
        return found

    def kept_of(self, blocks: Sequence[int]) -> int:
        """How many of these count as free."""
        return sum(block in self._kept for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """One more user for each."""
        for block in blocks:
            self._kept.pop(block, None)
            self._users[block] += 1

    def name(self, block: int, name: bytes) -> None:
        """The block holds what the name says; another block that does so already keeps the name."""
        if name not in self._named and block not in self._names:
            self._named[name], self._names[block] = block, name

    def give_back(self, blocks: Sequence[int]) -> None:
        """One user less for each; the last of a sequence's blocks are the first to be taken again."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                if block in self._names:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def spoil(self, blocks: Sequence[int]) -> list[int]:
        """Nobody may share what these hold any more. Which of them one user alone has: the caller may erase them."""
        for block in blocks:
            self._forget(block)
        return [block for block in blocks if self._users[block] == 1]

    def _forget(self, block: int) -> None:
        if (name := self._names.pop(block, None)) is not None:
            del self._named[name]
