"""The model card of a converted checkpoint."""

import re
from pathlib import Path

from ladder.wiring import Wiring

_NATIVE = """
On several ranks{hidden}:

    ladder generate --model {folder} --tp 2 --prompt "..."
"""

_NO_NATIVE = """
The tensor-parallel engine of `ladder` does not know the family {family} yet.
"""

_HEAD = """---
{base}library_name: transformers
tags:
- ladder-residual
- {family}
---

# {folder}

"""

_LOADING = """In transformers:

{needs}    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("{folder}")
{native}
"""

_CARD = (
    _HEAD
    + """The weights of `{source}`, unchanged, under another wiring:

    {wiring}

{layers}

**It needs adaptation before use.** The weights were trained under another wiring. Rewired layers read the residual
stream without its newest sums, and a model that is merely rewired writes worse text, or nonsense (Ladder Residual,
arXiv 2501.06589). Retrain or distill it, then measure it against `{source}`.

"""
    + _LOADING
    + """Made by `ladder convert`. Licence and terms are those of `{source}`.
"""
)


def card(source: str, folder: str, family: str, wiring: Wiring, native: bool) -> str:
    """README.md for a folder that was made from `source`."""
    if wiring.is_standard:
        return f"# {folder}\n\nThe weights of `{source}`, unchanged, in the standard wiring.\n"
    return _filled(_CARD, source, folder, family, wiring, native)


_ADAPTED = (
    _HEAD
    + """`{source}` under another wiring, and adapted to it {how}:

    {wiring}

{layers} How far it is from the original was measured while it was trained (`log.jsonl`); measure what matters to you:

    ladder eval {source} {folder} --text book.txt --source {source}

"""
    + _LOADING
    + """Made by `ladder adapt`. Licence and terms are those of `{source}`.
"""
)

_FITTED = (
    _HEAD
    + """`{source}` under another wiring, its weights fitted to it by least squares, layer by layer, not trained:

    {wiring}

{layers} {told}. Training goes on from here; measure it before use:

    ladder adapt {source} OUT --data TEXT --wiring "{wiring}" --init-from {folder}
    ladder eval {source} {folder} --text book.txt --source {source}

"""
    + _LOADING
    + """Made by `ladder fit`. Licence and terms are those of `{source}`.
"""
)

_SIDE = """---
{base}tags:
- ladder-residual
- {family}
---

# {folder}

A side network for `{source}` under another wiring: the model's weights are not here, and not changed.

    {wiring}

    from ladder.train.side import SideModel
    from ladder.hf import rewire
    from transformers import AutoModelForCausalLM

    backbone = rewire(AutoModelForCausalLM.from_pretrained("{backbone}"), "{wiring}")
    model = SideModel.load("{out}", backbone)

`ladder eval "{backbone}" "{out}" --text FILE --source "{source}"` measures it;
paths are as they were named in training.

Made by `ladder adapt --method side`. Licence and terms are those of `{source}`.
"""

_TRAINED = (
    _HEAD
    + """Trained from scratch on {tokens:,} tokens under the wiring

    {wiring}

"""
    + _LOADING
    + """Made by `ladder train`.
"""
)


def adapted_card(
    source: str,
    folder: str,
    family: str,
    wiring: Wiring,
    native: bool,
    distilled: bool,
    text: bool,
    begun: bool,
) -> str:
    """README.md for what was adapted from `source`: what it learned from, the original, the text's own loss or both;
    `begun`: from weights of that wiring, not from the original's.
    """
    how = "by distillation from the original" if distilled else "by fine-tuning on text alone"
    how += " and by fine-tuning on text" * (distilled and text)
    how += ", from weights that were fitted or trained for it before" * begun
    return _filled(_ADAPTED.replace("{how}", how), source, folder, family, wiring, native)


def fitted_card(source: str, folder: str, family: str, wiring: Wiring, native: bool, told: str) -> str:
    """README.md for what was fitted from `source`; `told`: what it is worth."""
    return _filled(_FITTED.replace("{told}", told), source, folder, family, wiring, native)


def side_card(source: str, out: Path, family: str, wiring: Wiring, start: Path | None = None) -> str:
    """README.md for a network beside `source`, or beside `start`, which was made from it."""
    place = {"source": source, "out": out, "family": family, "wiring": wiring, "backbone": start or source}
    return _SIDE.format(**place, folder=out.name, base=_base(source))


def trained_card(folder: str, family: str, wiring: Wiring, tokens: int) -> str:
    """README.md for what was trained from scratch."""
    place = {"folder": folder, "family": family}
    return _TRAINED.format(**place, **_loading(wiring, True, **place), wiring=wiring, tokens=tokens, base="")


def _filled(text: str, source: str, folder: str, family: str, wiring: Wiring, native: bool) -> str:
    kept = sum(name == "standard" for name in wiring.layers)
    layers = f"{len(wiring.layers) - kept} of {len(wiring.layers)} layers are rewired."
    place = {"source": source, "folder": folder, "family": family}
    more = _loading(wiring, native, folder=folder, family=family)
    return text.format(**place, **more, base=_base(source), wiring=wiring, layers=layers)


def _loading(wiring: Wiring, native: bool, **place: str) -> dict[str, str]:
    """What `_LOADING` says of models that are wired, and of those that hide their sums."""
    hides = any(name.startswith("ladder") for name in wiring.layers)
    hidden = ", the all-reduce hidden behind the next sub-block" if hides else ""
    needs = "" if wiring.is_standard else "    import ladder.hf  # without it, loading fails\n"
    return {"needs": needs, "native": (_NATIVE if native else _NO_NATIVE).format(**place, hidden=hidden)}


def _base(source: str) -> str:
    """The line that names a model of the hub; a directory is nobody's business."""
    return f"base_model: {source}\n" if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else ""
