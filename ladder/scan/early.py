"""What is refused of an original, and of the wiring it is to have. No torch here: `ladder fit`, `adapt` and `quantize`
ask before they import it, where the original's config is known without transformers, and once more when they have it.
"""

from ladder.config.early import early_config, sequence_length
from ladder.errors import LadderError
from ladder.wiring import Out, Wiring, canonical, check_names
from ladder.wiring import row as row_of


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


def checked_row(name: str) -> str:
    """A row whose damage can be measured on one rank."""
    name = canonical(name)
    if is_local(name):
        raise LadderError(
            f"the damage of {name} depends on the number of ranks, and this measures on one, where it does none: "
            "scan a row that all-reduces every output, such as ladder, ladder-2 or parallel"
        )
    return name


def is_local(name: str) -> bool:
    """Whether a row leaves some partial sums on their ranks."""
    return any(block.out is Out.LOCAL for block in row_of(name))


def layers_to_scan(wiring: Wiring, row: str) -> tuple[int, ...]:
    """The layers that are not under this row yet."""
    layers = tuple(at for at, name in enumerate(wiring.layers) if name != row)
    if not layers:
        raise LadderError(f"every layer of the model is under {row} already: scan its original, or another row")
    return layers
