"""Model cards: the README.md of a checkpoint, as the hub reads it."""

import re
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ladder.config.families import FAMILIES as NATIVE
from ladder.wiring import Wiring

CAUSAL = "AutoModelForCausalLM"


def card(
    source: str,
    folder: str,
    family: str,
    before: Wiring,
    wiring: Wiring,
    native: bool,
    quantizer: str | None = None,
    auto: str = CAUSAL,
    stacks: int = 1,
) -> str:
    """For a folder with the weights of `source`, unchanged. `before`: the wiring of `source`; `native`: the engine of
    `ladder` reads it; `auto`: the class that loads it; `stacks`: of its layers, which are wired alike.
    """
    weights = "weights" if quantizer is None else f"quantized weights ({quantizer})"
    if wiring.is_standard:
        text = f"# {folder}\n\nThe {weights} of `{source}`, unchanged, in the standard wiring.\n"
        if not before.is_standard:
            text += f"`{source}` is wired `{before}`: weights trained for that need adaptation here.\n"
        return text
    under, advice = "another wiring", _AFTER_REWIRING
    if wiring == before:
        under, advice = "the wiring that it names", _AS_BEFORE
    worse = "writes worse text, or nonsense" if auto == CAUSAL else "is worse at what it does, or useless"
    text = f"""The {weights} of `{source}`, unchanged, under {under}:

    {wiring}

{_rewired(wiring, stacks)}

{advice.format(source, worse)}

{_loading(folder, family, wiring, native, quantizer, auto)}"""
    return _card(text, "convert", folder, family, source)


_AFTER_REWIRING = """\
**It needs adaptation before use.** The weights were trained under another wiring. Rewired layers read the residual
stream without its newest all-reduces, and a model that is merely rewired {1} (Ladder
Residual, arXiv 2501.06589). Retrain or distill it, then measure it against `{0}`."""
_AS_BEFORE = """\
The wiring is the one that the config of `{0}` names, and nothing was rewired: `{0}` says what the weights were
trained for, and how good they are."""


def adapted_card(
    source: str,
    folder: str,
    family: str,
    wiring: Wiring,
    native: bool,
    distilled: bool,
    text: bool,
    begun: bool,
    quantizer: str | None = None,
    auto: str = CAUSAL,
    stacks: int = 1,
) -> str:
    """For a model adapted from `source`: by distillation, on the text's own loss or both; `begun`: from weights of that
    wiring, not from the original's; `quantizer`: of the weights that an adapter was trained beside; `auto`: the class
    for it; `stacks`: of its layers. What is no decoder may have learned from labels, not from text.
    """
    taught = "text" if auto == CAUSAL else "labels"
    how = "by distillation from the original" if distilled else f"by fine-tuning on {taught} alone"
    how += f" and by fine-tuning on {taught}" * (distilled and text)
    how += ", from weights that were fitted or trained for it before" * begun
    loading = _loading(folder, family, wiring, native, auto=auto)
    measure = f":\n\n    ladder eval {source} {folder} --text book.txt --source {source}" if auto == CAUSAL else "."
    body = f"""`{source}` under another wiring, and adapted to it {how}:

    {wiring}

{_rewired(wiring, stacks)} How far it is from the original was measured while it was trained (`log.jsonl`); measure it
for your own use{measure}

{loading if quantizer is None else _with_adapter(folder, wiring, quantizer)}"""
    return _card(body, "adapt", folder, family, source)


def fitted_card(
    source: str,
    folder: str,
    family: str,
    wiring: Wiring,
    native: bool,
    result: str,
    auto: str = CAUSAL,
    stacks: int = 1,
) -> str:
    """For a model whose weights were fitted, not trained; `result`: how good they are; `auto`: the class for it;
    `stacks`: of its layers.
    """
    adapt = f'ladder adapt {source} OUT --data TEXT --wiring "{wiring}" --init-from {folder}'
    measure = f"ladder eval {source} {folder} --text book.txt --source {source}"
    how = f":\n\n    {adapt}\n    {measure}" if auto == CAUSAL else "."
    text = f"""`{source}` under another wiring, its weights fitted to it by least squares, layer by layer, not trained:

    {wiring}

{_rewired(wiring, stacks)} {result}. Training goes on from here; measure it before use{how}

{_loading(folder, family, wiring, native, auto=auto)}"""
    return _card(text, "fit", folder, family, source)


def quantized_card(source: str, folder: str, family: str, wiring: Wiring, storage: str, error: float, how: str) -> str:
    """For a model whose matrices were quantized; `storage`: how they are stored, `error`: of all of them together."""
    text = f"""The weights of `{source}`, quantized by {how}: {storage}. The wiring:

    {wiring}

The matrices of layers are quantized, with an error of {error:.2%} of their root mean square. All other tensors are
unchanged. Measure it before use:

    ladder eval {source} {folder} --text book.txt --source {source}

The weights are stored as compressed-tensors, which must be installed to read them.

{_loading(folder, family, wiring, True)}"""
    return _card(text, "quantize", folder, family, source)


def side_card(source: str, out: Path, family: str, wiring: Wiring, start: Path | None = None) -> str:
    """For a network beside `source`, or beside `start`, which was made from it."""
    backbone = start or source
    text = f"""A side network for `{source}` under another wiring: the model's weights are not here, and not changed.

    {wiring}

    from ladder.train.side import SideModel
    from ladder.hf import rewire
    from transformers import AutoModelForCausalLM

    backbone = rewire(AutoModelForCausalLM.from_pretrained("{backbone}"), "{wiring}")
    model = SideModel.load("{out}", backbone)

`ladder eval "{backbone}" "{out}" --text FILE --source "{source}"` measures it;
paths are as they were named in training.
"""
    return _card(text, "adapt --method side", out.name, family, source, library=None)


def trained_card(folder: str, family: str, wiring: Wiring, tokens: int) -> str:
    """For a model that was trained from scratch."""
    text = f"Trained from scratch on {tokens:,} tokens under the wiring\n\n    {wiring}\n\n"
    return _card(text + _loading(folder, family, wiring, True), "train", folder, family)


def _card(
    text: str, verb: str, folder: str, family: str, source: str | None = None, library: str | None = "transformers"
) -> str:
    base = source if source and re.fullmatch(r"[\w.-]+/[\w.-]+", source) else None  # of the hub, not a directory
    data = ModelCardData(base_model=base, library_name=library, tags=["ladder-residual", family])
    terms = f" Licence and terms are those of `{source}`." if source else ""
    whole = f"---\n{data.to_yaml()}\n---\n\n# {folder}\n\n{text}\nMade by `ladder {verb}`.{terms}\n"
    return str(ModelCard(whole).content)


def _rewired(wiring: Wiring, stacks: int) -> str:
    if stacks > 1:
        return f"Each of its {stacks} stacks of layers is wired so."
    kept = sum(name == "standard" for name in wiring.layers)
    return f"{len(wiring.layers) - kept} of {len(wiring.layers)} layers are rewired."


def _with_adapter(folder: str, wiring: Wiring, quantizer: str) -> str:
    more, given = "", ""
    if quantizer == "compressed-tensors":  # whose weights no adapter finds before they are dequantized
        more, given = ", CompressedTensorsConfig", ", quantization_config=CompressedTensorsConfig(dequantize=True)"
    needs = "" if wiring.is_standard else "    import ladder.hf  # without it, loading fails\n"
    return f"""The weights are quantized ({quantizer}) and unchanged; what was trained is an adapter beside them
(`adapter_model.safetensors`), which transformers loads with them where peft is installed:

{needs}    from transformers import AutoModelForCausalLM{more}

    model = AutoModelForCausalLM.from_pretrained("{folder}"{given})

The tensor-parallel engine of `ladder` applies no adapters.
"""


def _loading(
    folder: str, family: str, wiring: Wiring, native: bool, quantizer: str | None = None, auto: str = CAUSAL
) -> str:
    hides = any(block.lag for layer in wiring.sub_blocks() for block in layer)
    hidden = ", the all-reduces hidden behind the sub-blocks that follow" if hides else ""
    needs = "" if wiring.is_standard else "    import ladder.hf  # without it, loading fails\n"
    lacks = f"have the family {family}" if family not in NATIVE else f"read weights of {quantizer}"
    engine = f'On several ranks{hidden}:\n\n    ladder generate --model {folder} --tp 2 --prompt "..."'
    return f"""In transformers:

{needs}    from transformers import {auto}

    model = {auto}.from_pretrained("{folder}")

{engine if native else f"The tensor-parallel engine of `ladder` does not {lacks} yet."}
"""
