"""Links: how long an all-reduce takes, time = alpha + bytes / beta. No torch here."""

import re
from dataclasses import dataclass

from ladder.errors import LadderError


@dataclass(frozen=True)
class Link:
    """alpha in seconds, beta in bytes of message per second."""

    alpha: float
    beta: float
    what: str = ""
    source: str = ""

    def seconds(self, size: int) -> float:
        """How long an all-reduce of a message of `size` bytes takes."""
        return self.alpha + size / self.beta

    @classmethod
    def parse(cls, text: str) -> "Link":
        """A name from the table, or `alpha,beta` as in `50us,10GB/s`: up to a minute, from 1 KB/s up."""
        if text in LINKS:
            return LINKS[text]
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s),([0-9]+(?:\.[0-9]+)?)([KMG])B/s", text.replace(" ", ""))
        link = None
        if match:
            link = cls(float(match[1]) * _SECONDS[match[2]], float(match[3]) * _BYTES[match[4]])
        if link is None or link.alpha > 60 or not 1e3 <= link.beta <= 1e15:
            known = ", ".join(LINKS)
            raise LadderError(f"unknown link {text!r}: write alpha,beta as in '50us,10GB/s', or one of {known}")
        return link


_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"K": 1e3, "M": 1e6, "G": 1e9}


def _link(alpha_us: float, beta_gb: float, what: str, source: str) -> Link:
    return Link(alpha_us * 1e-6, beta_gb * 1e9, what, source)


# Fitted, +-25%, to all-reduce timings that users and maintainers have posted.
_THREADS = "vLLM, SGLang, FlashInfer and NCCL issue threads, NCCL benchmark repositories"
# Two hops of TCP between applications, 20 us each, on a network card's first driver; beta is the line rate.
_TCP = "latency: Hurwitz and Feng, Hot Interconnects 11 (2003); rate: IEEE 802.3ae"

LINKS: dict[str, Link] = {
    "nvlink_fused": _link(5, 250, "8 GPUs, NVSwitch, all-reduce fused with RMSNorm (FlashInfer class)", _THREADS),
    "nvlink_oneshot": _link(8, 70, "8 GPUs, NVSwitch, one-shot custom all-reduce, messages up to 1 MB", _THREADS),
    "nvlink_multimem": _link(9, 210, "8 GPUs, NVSwitch multicast, larger messages", _THREADS),
    "nvlink_nccl_graph": _link(13, 140, "8 GPUs, NVSwitch, NCCL inside a CUDA graph", _THREADS),
    "nvlink_nccl": _link(24, 250, "8 GPUs, NVSwitch, NCCL as in the paper's baseline", _THREADS),
    "pcie_p2p_nccl": _link(20, 6, "4 GPUs behind one PCIe switch, NCCL", _THREADS),
    "pcie_shm_tp2": _link(20, 6, "2 GPUs, peer-to-peer disabled, through host memory", _THREADS),
    "pcie_shm_tp4": _link(26, 6, "4 GPUs, peer-to-peer disabled", _THREADS),
    "pcie_shm_tp8": _link(62, 6, "8 GPUs, peer-to-peer disabled, as in the paper's P2P=0", _THREADS),
    "ib_2node_nccl": _link(46, 14, "2 nodes x 8 GPUs, InfiniBand, NCCL", _THREADS),
    "ib_2node_tuned": _link(20, 25, "2 nodes x 8 GPUs, one-shot RDMA class", _THREADS),
    "ethernet_10g": _link(40, 1.25, "2 machines, 10 GbE, TCP", _TCP),
    "ethernet_1g": _link(100, 0.125, "2 machines, 1 GbE, TCP", "rate: IEEE 802.3ab; latency: assumed, not measured"),
}
