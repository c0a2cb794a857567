"""Measures a model under several wirings on the same sequences of text, merely rewired or fitted first.

No logits are stored: a batch of sequences goes through the original and then through every set of layers of a round.
The original is computed once in each round: one for the layers alone, one for all grown sets (greedy: one for each
size; fitted, one for each set, beside a copy of the model). The model is rewired in place; afterwards it is what it
was, also after an error.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ladder.config.lock import wiring_of
from ladder.errors import LadderError
from ladder.hf.layer import unwrap_states
from ladder.hf.measures import Estimate, check_logits, checked_window, compare
from ladder.hf.wire import layers_of, refuse_settings, unwrapped, wire_layers
from ladder.progress import Progress
from ladder.scan.early import checked_row, is_local, layers_to_scan
from ladder.scan.solve import solve
from ladder.wiring import Wiring

OnMeasured = Callable[[str, "Damage", "Damage"], None]  # alone, grown or last; the damage; the original's


@dataclass(frozen=True)
class Damage:
    """What it costs to wire some layers; the standard errors are None where there is but one sequence."""

    layers: tuple[int, ...]  # in the model's order
    wiring: str  # of the whole model: what `--wiring` takes
    kl: float  # nats per token
    kl_stderr: float | None
    perplexity: float
    perplexity_stderr: float | None
    agreement: float  # share of positions whose likeliest token is unchanged


class Probe:
    """A model and the sequences that its wirings are measured on; nothing is measured twice."""

    def __init__(
        self,
        model: Any,
        sequences: Tensor,
        row: str,
        batch: int,
        progress: Progress | None,
        fit: Tensor | None,
        on_measured: OnMeasured | None,
    ) -> None:
        self.model = unwrapped(model)
        if not isinstance(self.model, PreTrainedModel):
            raise LadderError(f"a transformers model is needed, not {type(model).__name__}")
        config = self.model.config
        self.own, self.row = original_wiring(config), checked_row(row)
        self.layers = layers_to_scan(self.own, self.row)
        if sequences.dim() != 2 or not len(sequences) or sequences.shape[1] < 2:
            raise LadderError(f"sequences must be [n, length] with at least 2 tokens each, not {list(sequences.shape)}")
        checked_window(config, sequences.shape[1] - 1)
        vocabulary = config.get_text_config().vocab_size
        if int(sequences.max()) >= vocabulary or int(sequences.min()) < 0:
            raise LadderError(f"the text's tokens go up to {int(sequences.max())}, the model has {vocabulary}")
        if batch < 1:
            raise LadderError(f"batch is {batch} sequences: at least 1 is needed")
        if fit is not None and not self.own.is_standard:
            raise LadderError(f"only a model that was trained as standard can be fitted, and this one is {self.own}")
        check_logits([self.model, self.model], min(batch, len(sequences)), sequences.shape[1] - 1)
        self.sequences, self.batch = sequences, batch
        self.fit, self.fitted = fit, 0 if fit is None else fit.numel()
        self.tokens = len(sequences) * (sequences.shape[1] - 1)
        self.progress = progress or (lambda done, total, what: None)
        self.on_measured = on_measured or (lambda kind, damage, original: None)
        self.known: dict[tuple[int, ...], Damage] = {}

    def wiring(self, layers: tuple[int, ...]) -> Wiring:
        return with_row(self.own, layers, self.row)

    def measure(self, sets: Sequence[tuple[int, ...]], what: str, kinds: Sequence[str] = ()) -> list[Damage]:
        """The damage of each set of layers, in one round over the sequences (fitted: one each); reported by kind."""
        fresh = [layers for layers in dict.fromkeys(((), *sets)) if layers not in self.known]
        unreported = list(zip(kinds, sets, strict=True)) if kinds else []
        done, total = 0, len(fresh) * len(self.sequences)
        for group in [fresh] * bool(fresh) if self.fit is None else [[layers] for layers in fresh]:
            sums: dict[tuple[int, ...], list[Tensor]] = {layers: [] for layers in group}
            solved = None
            if self.fit is not None and group[0]:
                solved = self._solved(group[0], self.fit, partial(self.progress, done, total))
            for batch in self.sequences.split(self.batch):
                original = self._logits((), batch)
                for layers in group:
                    logits = self._logits(layers, batch, solved) if layers else original
                    sums[layers] += _compared(logits, original, batch[:, 1:])
                    done += len(batch)
                    self.progress(done, total, what)
                if sums.get(()) and bool(sums[()][-1].isnan().any()):
                    raise LadderError("the model's output is not finite: check its weights, or take a wider dtype")
            for layers in group:
                self.known[layers] = self._damage(layers, torch.stack(sums[layers]).cpu())
            self._report(unreported)
        self._report(unreported)
        return [self.known[layers] for layers in sets]

    def _report(self, unreported: list[tuple[str, tuple[int, ...]]]) -> None:
        """Report those at the head of the list that are measured by now, and remove them from it."""
        while unreported and unreported[0][1] in self.known:
            kind, layers = unreported.pop(0)
            self.on_measured(kind, self.known[layers], self.known[()])

    def _logits(self, layers: tuple[int, ...], batch: Tensor, solved: Any = None) -> Tensor:
        """[sequences, positions, vocabulary], of the model or of one that was fitted to these layers' wiring."""
        model = solved
        if model is None:
            model = self.model
            wire_layers(model, self.wiring(layers))
        return model(input_ids=batch[:, :-1].to(model.device), use_cache=False).logits  # type: ignore[no-any-return]

    def _solved(self, layers: tuple[int, ...], sequences: Tensor, report: Callable[[str], None]) -> Any:
        def progress(layer: int, count: int, what: str) -> None:
            report(f"{what} layer {layer} of {count}")

        wire_layers(self.model, self.own)
        return solve(copy.deepcopy(self.model), self.wiring(layers), sequences, batch=self.batch, progress=progress)

    def _damage(self, layers: tuple[int, ...], sums: Tensor) -> Damage:
        counts = torch.full((len(sums),), float(self.sequences.shape[1] - 1), dtype=torch.float64)
        nats, kl, same = (Estimate.ratio(column, counts) for column in sums.unbind(1))
        perplexity = nats.exp()
        figures = (kl.value, kl.stderr, perplexity.value, perplexity.stderr, same.value)
        return Damage(layers, str(self.wiring(layers)), *figures)


def original_wiring(config: Any) -> Wiring:
    """The wiring of a model that can be scanned."""
    refuse_settings(config)
    if (staleness := getattr(config, "staleness", 1.0)) != 1.0:
        raise LadderError(f"the model's adaptation is not finished, its staleness is {staleness}: scan it at 1")
    wiring = wiring_of(vars(config), config.num_hidden_layers)
    if local := sorted({name for name in wiring.layers if is_local(name)}):
        raise LadderError(f"the model has layers under {local[0]}, which is another function for every number of ranks")
    return wiring


def with_row(wiring: Wiring, layers: Sequence[int], row: str) -> Wiring:
    """A wiring with these layers under another row."""
    return Wiring(tuple(row if at in layers else name for at, name in enumerate(wiring.layers)))


def _compared(logits: Tensor, original: Tensor, targets: Tensor) -> list[Tensor]:
    """Each sequence's sums, in float32 one sequence at a time."""
    device, wide = logits.device, torch.promote_types(logits.dtype, torch.float32)
    triples = zip(logits, original, targets.to(device), strict=True)
    return [compare([each.to(device, wide) for each in pair], target) for *pair, target in triples]


@contextmanager
def rewired_temporarily(model: Any) -> Iterator[None]:
    """No gradients and no dropout. The layers may be rewired: afterwards every one is what it was."""
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
            if key not in hooks and hook is unwrap_states:
                del model.base_model._forward_hooks[key]
