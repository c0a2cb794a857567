"""Engines: which share of a chip's peak an implementation reaches. Each row is fitted to measurements and holds for all
sizes.

A sub-block's time is its overhead + what it reads / (reach x the chip's rate), or its operations / (efficiency x the
chip's rate), whichever is longer. An all-reduce that runs behind a computation still slows it: by `contention` x its
time.
"""

from dataclasses import dataclass, field

from ladder.comm.link import LINKS, Link

US = 1e-6


@dataclass(frozen=True)
class Stage:
    """Overheads in seconds and reaches for one way of computing: decoding one sequence, decoding several, prefill."""

    attention: float  # seconds that an attention takes beside its reading and computing
    mlp: float
    reach: float  # share of the chip's reading rate
    efficiency: float  # share of the chip's operations
    # the reach of kernels that read quantized weights, by format, where it is measured; others: `reach`, as of bf16
    reaches: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """A row. Times in seconds."""

    name: str
    what: str
    single: Stage  # decoding, one sequence
    few: Stage  # decoding, more of them
    prompt: Stage
    cache: float  # how often keys and values are moved beyond being read once, by heads that share them
    step: float  # a step's own overhead
    all_reduce_overhead: float  # seconds of an all-reduce beyond its link's time
    launch: float  # what starting one costs the computation
    contention: (
        float  # of a hidden all-reduce's time, for one token; more by `contention_growth` for each doubling of tokens
    )
    contention_growth: float
    most_contention: float
    lane: float | None = None  # seconds that a sub-block takes more beside another one; None: none runs beside another
    smaller: float = 0.0  # share of the reach that is lost with each halving of a shard, counted from `WHOLE`
    sharded_head: bool = True
    head_of_all: bool = False  # a prompt's logits are computed for all of its tokens
    whole_cache: bool = False  # a step reads the cache's whole room, not just the tokens in it
    first_too: bool = False  # fitted to decoding times over all new tokens: they count the first, which prefill made
    scale: float = 1.0  # of a link's alpha between 2 ranks of the 8 that it was measured with; 1: as it is
    large: dict[str, Link] = field(default_factory=dict)  # how the library sends what is too large for its fast way

    def all_reduce_seconds(self, link: Link, name: str | None, size: int, ranks: int) -> float:
        """Of one of `size` bytes between `ranks`. A link of the table may come with another alpha than its own: its
        way for large messages is as much later or earlier.
        """
        share = 1.0
        if name is not None and name.startswith("nvlink") and ranks < LINKED and self.scale != 1.0:
            share = self.scale + (1 - self.scale) * (ranks - 2) / (LINKED - 2)
        time = share * link.alpha + size / link.beta
        if name in self.large:
            time = min(time, self.large[name].seconds(size) + link.alpha - LINKS[name].alpha)
        return time + self.all_reduce_overhead


LINKED = 8  # ranks that the links of a machine were measured with
WHOLE = 512e6  # bytes of a sub-block's weights from which on nothing is lost to its smallness
MOST_LOST = 0.9  # share of the reach, of the smallest shards

# paper: fitted to one half of the published 70B runs on H100s (`ladder.perf.calibrate`); `large` was read off all those
# without peer-to-peer. ladder: fitted to one half of our one-rank measurements on an H200; `prompt` was read off its
# prefill lines.
ENGINES: dict[str, Engine] = {
    "paper": Engine(
        "paper",
        "the paper's code: torch.compile, CUDA graphs, NCCL; fp16, head and embedding on every rank",
        single=Stage(8.53 * US, 9.27 * US, 0.895, 0.5),
        few=Stage(24.8 * US, 14.6 * US, 0.883, 0.5),
        prompt=Stage(115 * US, 30 * US, 0.8, 0.387),
        cache=0.731,
        step=153 * US,
        all_reduce_overhead=0.0,
        launch=0.0,
        contention=0.14,
        contention_growth=0.0555,
        most_contention=0.487,
        smaller=0.0591,
        sharded_head=False,
        head_of_all=True,
        whole_cache=True,
        first_too=True,
        scale=0.373,
        large={
            "pcie_shm_tp8": Link(84 * US, 175e9),
            "pcie_shm_tp4": Link(42 * US, 210e9),
            "pcie_shm_tp2": Link(30 * US, 15.7e9),
            "ib_2node_nccl": Link(120 * US, 150e9),  # not fitted: eight NICs of 400 Gb/s share what is large
        },
    ),
    "ladder": Engine(
        "ladder",
        "this repository's: Triton kernels that start early, CUDA graphs, all-reduces that set flags; bfloat16",
        single=Stage(8.39 * US, 3.28 * US, 0.94, 0.3),
        few=Stage(13.1 * US, 5.17 * US, 0.926, 0.234),
        prompt=Stage(35 * US, 5 * US, 0.8, 0.6),
        cache=0.154,
        step=12.2 * US,
        all_reduce_overhead=2.78 * US,
        launch=0.31 * US,
        contention=0.0348,
        contention_growth=0.018,
        most_contention=0.106,
        lane=4 * US,
    ),
}
