"""Which layers bear another wiring: what each costs alone, and what growing sets of them cost.

    alone   layer i under the row that is tried, all others as they are
    grown   the n layers that hurt least: by their damage alone, or (greedy) each next one by trying all that remain
    last    the last n layers, for comparison

The cost is KL(original || rewired) in nats per token: it sees what moved, whether or not the text likes it. Perplexity
and greedy agreement come with it. Sizes of sets are a sample of the curve; 1, half and all are always among them. A set
costs what it costs merely rewired or, where rows to fit on are given, what is left when `solve` has done what it can.

A window is a row of tokens: position j reads row[0..j] and predicts row[j+1], so a row of W+1 tokens counts W times.
All windows count alike, and standard errors take them as independent, as `ladder.hf.measures` has it.

Nothing is stored: a batch of windows goes through the original and then through every set of a round, and its logits
are dropped. The original is computed once in each round: one for the layers alone, one for all grown sets (greedy: one
for each size; fitted, one for each set, beside a copy of the model). The model is rewired in place and is afterwards
what it was, whatever happens.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import exp, isnan
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ladder.adapt.solve import solve
from ladder.config.lock import wiring_of
from ladder.errors import LadderError
from ladder.hf.layer import show
from ladder.hf.measures import Estimate, checked_window
from ladder.hf.wire import inside, layers_of, refuse_settings, wire_layers
from ladder.wiring import Out, Wiring, canonical
from ladder.wiring import row as row_of

POINTS = 8
Progress = Callable[[int, int, str], None]  # windows done, windows in all (counted anew in each round), of what
Heard = Callable[[str, "Damage", "Damage"], None]  # alone, grown or last; the damage; the original's


@dataclass(frozen=True)
class Damage:
    """What it costs to wire some layers; the standard errors are None where there is but one window."""

    layers: tuple[int, ...]  # in the model's order
    wiring: str  # of the whole model: what `--wiring` takes
    kl: float  # nats per token
    kl_stderr: float | None
    perplexity: float
    perplexity_stderr: float | None
    agreement: float  # share of positions whose likeliest token stayed


@dataclass(frozen=True)
class Scan:
    """All that was measured. Layers that the model has under `row` already are not tried."""

    row: str
    wiring: Wiring  # the original's
    original: Damage  # of no layer: its perplexity
    tokens: int  # that were predicted
    order: tuple[int, ...]  # of the layers, as grown sets take them
    alone: tuple[Damage, ...]  # by layer
    grown: tuple[Damage, ...]  # by size
    last: tuple[Damage, ...]
    fitted: int = 0  # tokens that each set was fitted on; 0: merely rewired

    @property
    def state(self) -> str:
        """What the layers have been through."""
        return f"fitted on {self.fitted} tokens, not trained" if self.fitted else "before any training"

    def sized(self, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The grown set of this size, and the last layers."""
        return tuple(sorted(self.order[:size])), tuple(sorted(self.order))[-size:]


def scan(
    model: Any,
    windows: Tensor,
    row: str = "ladder",
    points: int = POINTS,
    greedy: bool = False,
    batch: int = 8,
    progress: Progress | None = None,
    fit: Tensor | None = None,
    heard: Heard | None = None,
) -> Scan:
    """Try a row of the table on a loaded model, layer by layer and in growing sets.

    `windows`: [n, length] tokens. `points`: about so many sizes of sets, 0 for every size (as greedy has it). `batch`:
    windows at a time; it changes no value. `fit`: rows to fit each set on, a multiple of `batch`. `heard` is told what
    the scan will hold as soon as it is known: fitted, set by set; else round by round.
    """
    if points < 0:
        raise LadderError(f"points is {points}: it must be 0 (every size) or more")
    probe = _Probe(model, windows, row, batch, progress, fit, heard)
    layers = probe.layers
    with _borrowed(probe.model):
        alone = probe.measure([(layer,) for layer in layers], "layers alone", ["alone"] * len(layers))
        order = [found.layers[0] for found in sorted(alone, key=_cost)]
        if greedy:
            order = _greedy(probe, order)
        grown_sizes = sizes(len(layers), 0 if greedy else points)
        grown = [tuple(sorted(order[:size])) for size in grown_sizes]
        last = [layers[-size:] for size in grown_sizes]
        found = probe.measure([*grown, *last], "growing sets", ["grown"] * len(grown) + ["last"] * len(last))
    curves = (tuple(found[: len(grown)]), tuple(found[len(grown) :]))
    return Scan(probe.row, probe.own, probe.known[()], probe.tokens, tuple(order), tuple(alone), *curves, probe.fitted)


def extended(
    model: Any,
    windows: Tensor,
    found: Scan,
    size: int,
    batch: int = 8,
    progress: Progress | None = None,
    fit: Tensor | None = None,
    heard: Heard | None = None,
) -> Scan:
    """A scan with one more size on its curves, of the same model, windows and rows."""
    if size in (len(damage.layers) for damage in found.grown):
        return found
    probe = _Probe(model, windows, found.row, batch, progress, fit, heard)
    with _borrowed(probe.model):
        grown, last = probe.measure(found.sized(size), f"{size} layers", ("grown", "last"))
    return replace(found, grown=_by_size(*found.grown, grown), last=_by_size(*found.last, last))


def _by_size(*sets: Damage) -> tuple[Damage, ...]:
    return tuple(sorted(sets, key=lambda damage: len(damage.layers)))


def sizes(layers: int, points: int) -> list[int]:
    """Sizes of sets: evenly spaced, with 1 (which is known already), half and all."""
    if not points:
        return list(range(1, layers + 1))
    return sorted({1, -(-layers // 2), *(-(-layers * step // points) for step in range(1, points + 1))})


def windows_of(tokens: Sequence[int], window: int, most: int, begin: int | None = None) -> Tensor:
    """Windows of a text, [n, window + 1]: each predicts `window` tokens, all together at most `most`.

    As `ladder eval` cuts it: every window's last token is the next one's first, unless texts of the model begin with a
    token of their own. What is left at the end is less than a window, and dropped.
    """
    if most < window:
        raise LadderError(f"{most} tokens are less than a window of {window}: take more of them, or a shorter window")
    count = min(most, len(tokens) - 1) // window
    if count < 1:
        raise LadderError(
            f"the text has {len(tokens)} tokens, a window of {window} needs {window + 1}: "
            "take a longer text, or a shorter window"
        )
    rows = torch.tensor(tokens[: count * window + 1], dtype=torch.long).unfold(0, window + 1, window).clone()
    if begin is not None:
        rows[:, 0] = begin
    return rows


def rows_of(tokens: Sequence[int], measured: Tensor, most: int, batch: int, begin: int | None = None) -> Tensor:
    """Rows to fit on, [n, window], a multiple of `batch`: at most `most` tokens of a text, behind its windows."""
    window = measured.shape[1] - 1
    at = len(measured) * window + 1
    if not (count := min(most, len(tokens) - at) // (batch * window) * batch):
        raise LadderError(
            f"a fit takes {batch * window} tokens at least, a batch of windows, behind the {at} that are measured on; "
            f"{most} are wanted, and the text has {len(tokens)}"
        )
    rows = torch.tensor(tokens[at : at + count * window], dtype=torch.long).view(count, window)
    if begin is not None:
        rows[:, 0] = begin
    return rows


class _Probe:
    """A model whose wirings are tried on the same windows; what was measured is remembered."""

    def __init__(
        self,
        model: Any,
        windows: Tensor,
        row: str,
        batch: int,
        progress: Progress | None,
        fit: Tensor | None,
        heard: Heard | None,
    ) -> None:
        self.model = inside(model)
        if not isinstance(self.model, PreTrainedModel):
            raise LadderError(f"a transformers model is needed, not {type(model).__name__}")
        config = self.model.config
        self.own, self.row = original_wiring(config), checked_row(row)
        self.layers = tried(self.own, self.row)
        if windows.dim() != 2 or not len(windows) or windows.shape[1] < 2:
            raise LadderError(f"windows must be [n, length] with at least 2 tokens each, not {list(windows.shape)}")
        checked_window(config, windows.shape[1] - 1)
        vocabulary = config.get_text_config().vocab_size
        if int(windows.max()) >= vocabulary or int(windows.min()) < 0:
            raise LadderError(f"the text's tokens go up to {int(windows.max())}, the model has {vocabulary}")
        if batch < 1:
            raise LadderError(f"batch is {batch} windows: at least 1 is needed")
        if fit is not None and not self.own.is_standard:
            raise LadderError(f"only a model that was trained as standard can be fitted, and this one is {self.own}")
        self.windows, self.batch = windows, batch
        self.fit, self.fitted = fit, 0 if fit is None else fit.numel()
        self.tokens = len(windows) * (windows.shape[1] - 1)
        self.tell = progress or (lambda done, total, what: None)
        self.hear = heard or (lambda kind, damage, original: None)
        self.known: dict[tuple[int, ...], Damage] = {}

    def wiring(self, layers: tuple[int, ...]) -> Wiring:
        return wired(self.own, layers, self.row)

    def measure(self, sets: Sequence[tuple[int, ...]], what: str, kinds: Sequence[str] = ()) -> list[Damage]:
        """The damage of each set of layers, in one round over the windows (fitted: one each); told as these kinds."""
        fresh = [layers for layers in dict.fromkeys(((), *sets)) if layers not in self.known]
        untold = list(zip(kinds, sets, strict=True)) if kinds else []
        done, total = 0, len(fresh) * len(self.windows)
        for group in [fresh] * bool(fresh) if self.fit is None else [[layers] for layers in fresh]:
            sums: dict[tuple[int, ...], list[Tensor]] = {layers: [] for layers in group}
            solved = None
            if self.fit is not None and group[0]:
                solved = self._solved(group[0], self.fit, partial(self.tell, done, total))
            for rows in self.windows.split(self.batch):
                original = self._logits((), rows)
                for layers in group:
                    logits = self._logits(layers, rows, solved) if layers else original
                    sums[layers] += [
                        _scores(*pair) for pair in zip(logits, original, rows[:, 1:].to(logits.device), strict=True)
                    ]
                    done += len(rows)
                    self.tell(done, total, what)
                if sums.get(()) and bool(sums[()][-1].isnan().any()):
                    raise LadderError("the model's output is not finite: check its weights, or take a wider dtype")
            for layers in group:
                self.known[layers] = self._damage(layers, torch.stack(sums[layers]).cpu())
            self._tell_known(untold)
        self._tell_known(untold)
        return [self.known[layers] for layers in sets]

    def _tell_known(self, untold: list[tuple[str, tuple[int, ...]]]) -> None:
        """Those at the head of the list that are known by now leave it."""
        while untold and untold[0][1] in self.known:
            kind, layers = untold.pop(0)
            self.hear(kind, self.known[layers], self.known[()])

    def _logits(self, layers: tuple[int, ...], rows: Tensor, solved: Any = None) -> Tensor:
        """[windows, positions, vocabulary], of the model or of one that was fitted to these layers' wiring."""
        model = solved
        if model is None:
            model = self.model
            wire_layers(model, self.wiring(layers))
        return model(input_ids=rows[:, :-1].to(model.device), use_cache=False).logits  # type: ignore[no-any-return]

    def _solved(self, layers: tuple[int, ...], rows: Tensor, tell: Callable[[str], None]) -> Any:
        def progress(layer: int, count: int, what: str) -> None:
            tell(f"{what} layer {layer} of {count}")

        wire_layers(self.model, self.own)
        return solve(copy.deepcopy(self.model), self.wiring(layers), rows, batch=self.batch, progress=progress)

    def _damage(self, layers: tuple[int, ...], sums: Tensor) -> Damage:
        counts = torch.full((len(sums),), float(self.windows.shape[1] - 1), dtype=torch.float64)
        surprise, kl, same = (Estimate.ratio(column, counts) for column in sums.unbind(1))
        value = exp(surprise.value) if surprise.value < 700 else surprise.value * float("inf")  # what a double holds
        perplexity = surprise.through(lambda _: value, value)
        figures = (kl.value, kl.stderr, perplexity.value, perplexity.stderr, same.value)
        return Damage(layers, str(self.wiring(layers)), *figures)


def original_wiring(config: Any) -> Wiring:
    """The wiring of a model that can be scanned."""
    refuse_settings(config)
    if (staleness := getattr(config, "staleness", 1.0)) != 1.0:
        raise LadderError(f"the model's adaptation is not finished, its staleness is {staleness}: scan it at 1")
    wiring = wiring_of(vars(config), config.num_hidden_layers)
    if local := sorted({name for name in wiring.layers if _is_local(name)}):
        raise LadderError(f"the model has layers under {local[0]}, which is another function for every number of ranks")
    return wiring


def checked_row(name: str) -> str:
    """A row that transformers can show the damage of."""
    name = canonical(name)
    if _is_local(name):
        raise LadderError(
            f"the damage of {name} depends on the number of ranks, and this measures on one, where it does none: "
            "scan a row that reduces every sum, such as ladder, ladder-2 or parallel"
        )
    return name


def _is_local(name: str) -> bool:
    return any(block.out is Out.LOCAL for block in row_of(name))


def wired(wiring: Wiring, layers: Sequence[int], row: str) -> Wiring:
    """A wiring with these layers under another row."""
    return Wiring(tuple(row if at in layers else name for at, name in enumerate(wiring.layers)))


def tried(wiring: Wiring, row: str) -> tuple[int, ...]:
    """The layers that are not under this row yet."""
    layers = tuple(at for at, name in enumerate(wiring.layers) if name != row)
    if not layers:
        raise LadderError(f"every layer of the model is under {row} already: scan its original, or another row")
    return layers


def _greedy(probe: _Probe, rest: Sequence[int]) -> list[int]:
    """Each next layer is the one that costs least beside those chosen before it."""
    chosen: list[int] = []
    left = list(rest)
    while left:
        trials = [tuple(sorted((*chosen, layer))) for layer in left]
        found = probe.measure(trials, f"greedy, {len(chosen) + 1} of {len(rest)} layers")
        costs = [_cost(damage) for damage in found]
        chosen.append(left.pop(costs.index(min(costs))))
    return chosen


def _cost(damage: Damage) -> float:
    """What is not finite costs most."""
    return float("inf") if isnan(damage.kl) else damage.kl


def _scores(logits: Tensor, original: Tensor, targets: Tensor) -> Tensor:
    """Sums over one window: its tokens' surprise, KL(original || model), positions with the same likeliest token."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    model_says, original_says = (each.to(logits.device, wide).log_softmax(-1) for each in (logits, original))
    apart = original_says.exp() * (original_says - model_says)
    apart = apart.masked_fill(original_says.isneginf(), 0)  # what the original rules out adds nothing
    surprise = -model_says.gather(-1, targets[:, None]).double().sum()
    same = model_says.argmax(-1) == original_says.argmax(-1)
    return torch.stack([surprise, apart.sum(-1).double().sum(), same.double().sum()])


@contextmanager
def _borrowed(model: Any) -> Iterator[None]:
    """No gradients, no dropout, any wiring; afterwards every layer is what it was."""
    layers = layers_of(model)
    before = [(type(layer), dict(vars(layer))) for layer in layers]  # no tensors are copied
    training = {module: module.training for module in model.modules()}
    hooks = set(model.base_model._forward_hooks)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in training.items():
            module.training = flag
        for layer, (own, attributes) in zip(layers, before, strict=True):
            layer.__class__ = own
            vars(layer).clear()
            vars(layer).update(attributes)
        for key, hook in list(model.base_model._forward_hooks.items()):
            if key not in hooks and hook is show:
                del model.base_model._forward_hooks[key]
