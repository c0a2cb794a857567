"""How many ranks a link can join: what was measured, what contradicts that, what extrapolates it. No torch here."""

import re
from collections.abc import Sequence

from ladder.comm.link import LINKS
from ladder.errors import LadderError
from ladder.perf.engines import LINKED

ACROSS = ("ib_", "ethernet_")  # between two machines, measured end to end; the others are within one
RANKS = dict.fromkeys(LINKS, LINKED)  # that a link was measured with
RANKS |= {"pcie_p2p_nccl": 4, "pcie_shm_tp2": 2, "pcie_shm_tp4": 4}
RANKS |= {"ib_2node_nccl": 16, "ib_2node_tuned": 16, "ethernet_10g": 2, "ethernet_1g": 2}


def usual_link(links: Sequence[str], ranks: int) -> str:
    """Of a chip's links, the first that was measured with so many ranks, else the one that joins most."""
    return next((name for name in links if RANKS[name] >= ranks), links[-1])


def across(name: str | None) -> bool:
    """Whether this link of the table goes from machine to machine."""
    return name is not None and name.startswith(ACROSS)


def named_for(name: str | None) -> int | None:
    """The number of ranks that stands in a link's name."""
    found = re.search(r"_tp([0-9]+)$", name or "")
    return int(found[1]) if found else None


def check_reach(name: str | None, tp: int, nodes: int, node_link: str | None, pp: int) -> None:
    """Refuse a link of the table that the other choices contradict."""
    most, here = named_for(name), _joined(name, tp, nodes)
    if name is None or tp == 1:
        return
    if most is not None and here > most:
        other = _same(name, here)
        valid = f"--tp {most * nodes}" if other is None else f"--link {other}"
        raise LadderError(f"link {name} joins {most} ranks, not {here}: give {valid}")
    inner = "give the link within a machine, as in --link nvlink_nccl"
    if across(name) and nodes > 2:
        raise LadderError(f"link {name} joins 2 machines, not {nodes}: give --nodes 2, or {inner}")
    if across(name) and node_link is not None and pp == 1:
        raise LadderError(f"link {name} goes from machine to machine: leave out --node-link {node_link}, or {inner}")


def remark(name: str | None, tp: int, nodes: int, node_link: str | None, pp: int) -> str | None:
    """What a reader should know of a prediction that goes beyond what its link was measured with."""
    remarks = []
    if node_link is not None and nodes == pp == 1:
        remarks.append("--node-link is not used: there is one machine")
    here = _joined(name, tp, nodes)
    known = RANKS.get(name or "", here)
    measured = f"link {name} was measured with {known} ranks, not {here}"
    if tp > 1 and here > known:
        remarks.append(measured if across(name) else f"{measured}: give --nodes if they are several machines")
    elif tp > 1 and name is not None and here < (named_for(name) or 0):
        other = _same(name, here)
        remarks.append(measured if other is None else f"{measured}: theirs is --link {other}")
    return "; ".join(remarks) or None


def _joined(name: str | None, tp: int, nodes: int) -> int:
    """The ranks that the link itself joins: all of them, or one machine's."""
    return tp if across(name) else tp // nodes


def _same(name: str, tp: int) -> str | None:
    """The link of the same kind that is named for `tp` ranks."""
    other = re.sub(r"_tp[0-9]+$", f"_tp{tp}", name)
    return other if other in LINKS else None
