"""A model's output head: during a pass, what is to be made of the logits takes its place.

The model's forward calls its head as ever. A hook hands the head no tokens, so that its product costs nothing; another
one returns a loss instead of logits. There the weights are as the pass has them, unsharded under FSDP, and the loss is
an output of the model, by whose gradient FSDP prepares the backward pass.

This is right only where the model returns what the head returns. One pass of two tokens tells; for other models, such
as those that scale or cap their logits, the whole logits are computed.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ladder.errors import LadderError
from ladder.hf.wire import unwrapped
from ladder.train.head.logits import Logits

logger = logging.getLogger(__name__)

Run = Callable[[Tensor], Any]  # a pass of the model over [sequences, tokens]
Use = Callable[[Tensor | Logits], Tensor]  # what becomes of [tokens, vocabulary] logits


class Head:
    """Of a causal model, whatever is around it."""

    def __init__(self, model: Any, tells: bool = True) -> None:
        """`tells`: whether it says so where the logits are whole."""
        self._model, self._tells = unwrapped(model), tells
        self._fused: bool | None = None  # None: not known yet

    def apply(self, run: Run, tokens: Tensor, use: Use) -> tuple[Any, Tensor]:
        """The model's output, and what `use` makes of its logits, which are whole only where they must be."""
        if self._fused is None:
            reason = self._reason(run, tokens[:1, :2])
            self._fused = reason is None
            if reason and self._tells:
                name = type(self._model).__name__
                logger.warning("the logits of %s are computed whole, which takes more memory: %s", name, reason)
        if not self._fused:
            outputs = run(tokens)
            return outputs, use(outputs.logits.flatten(0, 1))
        made: list[Tensor] = []

        def keep(logits: Tensor | Logits) -> Tensor:
            made.append(use(logits))
            return made[-1]

        with self._replaced(keep):
            outputs = run(tokens)
        if len(made) != 1 or outputs.logits is not made[0]:
            name = type(self._model).__name__
            raise LadderError(f"{name} does not return what its head returns in training, though in evaluation it does")
        return outputs, made[0]

    def logits(self, run: Run, tokens: Tensor) -> tuple[Any, Tensor | Logits]:
        """The model's output, and its logits, to be used after the pass."""
        kept: list[Tensor | Logits] = []

        def keep(logits: Tensor | Logits) -> Tensor:
            kept.append(logits)
            return logits.hidden if isinstance(logits, Logits) else logits

        outputs, _ = self.apply(run, tokens, keep)
        return outputs, kept[0]

    @property
    def _module(self) -> Any:
        return self._model.get_output_embeddings()

    def _reason(self, run: Run, tokens: Tensor) -> str | None:
        """Why the logits must be whole; None: they need not."""
        head, seen = self._module, list[tuple[Any, Tensor, int]]()
        if getattr(type(head), "forward", None) is not nn.Linear.forward or "forward" in vars(head):
            return f"its head is {type(head).__name__}"

        def look(head: Any, given: Any, output: Tensor) -> None:
            seen.append((given, output, output._version))

        handle, training = head.register_forward_hook(look, prepend=True), self._model.training
        self._model.eval()  # which draws no random numbers
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                logits = run(tokens).logits
        finally:
            handle.remove()
            self._model.train(training)
        if len(seen) != 1 or len(seen[0][0]) != 1 or seen[0][0][0].shape[:-1] != tokens.shape:
            return "its forward does not call the head once with all tokens"
        _, output, version = seen[0]
        return None if logits is output and output._version == version else "its forward changes what the head returns"

    @contextmanager
    def _replaced(self, use: Use) -> Iterator[None]:
        """Meanwhile the head returns what `use` makes of its logits."""
        read: list[Tensor] = []

        def before(head: Any, given: tuple[Tensor]) -> tuple[Tensor]:
            read.append(given[0])
            return (given[0][:, :0],)

        def after(head: Any, given: Any, output: Tensor) -> Tensor:
            logits = Logits(read.pop().flatten(0, 1), head.weight, head.bias, output.dtype)
            return use(logits if torch.is_grad_enabled() else logits.cast())

        # next to the head's own forward: after FSDP has gathered the weights, before it looks for gradients
        handles = [
            self._module.register_forward_pre_hook(before),
            self._module.register_forward_hook(after, prepend=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
