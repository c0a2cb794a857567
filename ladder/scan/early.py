"""What is refused of an original, and of the wiring it is to have. No torch here: `ladder fit`, `adapt` and `quantize`
ask before they import it, where the original's config is known without transformers, and once more when they have it.
"""

from ladder.config.early import early_config, sequence_length
from ladder.errors import LadderError
from ladder.wiring import Wiring, check_names


def check_early(model: str, pattern: str | None, seq_len: int | None) -> tuple[Wiring, int] | None:
    """What `check_original` returns; None where the model's config is not known yet."""
    check_names(pattern or "")
    if (config := early_config(model)) is None:
        return None
    return check_original(model, config.wiring, pattern, seq_len, config.context)


def check_original(
    model: str, own: Wiring, pattern: str | None, seq_len: int | None, context: int | None
) -> tuple[Wiring, int]:
    """The wiring that a model is to have, and the length of its sequences. Without a pattern the model may be wired,
    and keeps its wiring.
    """
    wiring = own
    if pattern is not None:
        if not own.is_standard:
            raise LadderError(f"{model} is wired already: name its original")
        wiring = Wiring.parse(pattern, len(own.layers))
    return wiring, sequence_length(seq_len, context)


def refuse_standard(wiring: Wiring) -> None:
    """Refuse to fit what stays as it is."""
    if wiring.is_standard:
        raise LadderError("the wiring is standard, as the model is: there is nothing to fit")


def refuse_local(wiring: Wiring) -> None:
    """Refuse to fit what is another model on every rank."""
    if wiring.local:
        raise LadderError(
            f"{str(wiring)!r} leaves partial sums on their ranks, each of which would need weights of its own"
        )
