"""config.json of a wired model: software without wirings must refuse it, not run it as the standard model.

An unknown `model_type` stops those who look it up: transformers' Auto classes, and vLLM, which asks `AutoConfig` for
types that it has no class for. llama.cpp's converter reads config.json even where `AutoConfig` has refused it; it looks
up the first of `architectures`, and has no `LadderForCausalLM`. But transformers only warns where a class is named
(`LlamaForCausalLM.from_pretrained`). So one number that every class needs is also stored under another name: the size
of the vocabulary, or what else a model without one, or a class without its embedding, cannot be made without. The
config of each tower of a model is locked by itself.

The paper's authors have published configs of their own, which are read as they are: `"model_type": "llamaLadder"` with
`ladder_layers`. Nothing locks those.
"""

from collections.abc import Mapping
from typing import Any

from ladder.errors import LadderError
from ladder.wiring import Wiring

WIRED_MODEL_TYPE = "ladder"
WIRED_ARCHITECTURE = "LadderForCausalLM"
PAPER_MODEL_TYPE = "llamaLadder"  # of the authors' checkpoints, whose tensors are Llama's
_LOCKED = ("vocab_size", "hidden_size", "d_model", "projection_dim")
_KEPT = "ladder_{}"
TOWERS = ("text_config", "vision_config")
_CLASSES, _KEPT_CLASSES = "architectures", "base_architectures"
# model_type -> settings of config.json, with their defaults, any of which makes the layers parallel
_PARALLEL = {
    "gpt_neox": {"use_parallel_residual": True},
    "falcon": {"new_decoder_architecture": False, "parallel_attn": True},
}


def locked(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A plain config.json with the key `wiring`, made one that only software with wirings reads."""
    wired = {
        _CLASSES: [WIRED_ARCHITECTURE],
        "model_type": WIRED_MODEL_TYPE,
        "base_model_type": raw["model_type"],
    }
    return {**_without_sizes(raw), **wired, _KEPT_CLASSES: raw.get(_CLASSES)}


def locked_keys(raw: Mapping[str, Any]) -> list[str]:
    """The numbers of a config.json that are stored under another name."""
    if "vocab_size" in raw and "d_model" not in raw:
        return ["vocab_size"]
    return [key for key in _LOCKED if key in raw]


def _without_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    towers = {key: _without_sizes(raw[key]) for key in TOWERS if isinstance(raw.get(key), dict)}
    found = {**raw, **towers}
    if towers:
        found["hidden_size"] = None  # a tower's own class may look here
    for key in locked_keys(raw):
        found |= {key: None, _KEPT.format(key): raw[key]}
    return found


def _with_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    towers = {key: _with_sizes(raw[key]) for key in TOWERS if isinstance(raw.get(key), dict)}
    found = {**raw, **towers}
    if towers and found.get("hidden_size", 0) is None:
        del found["hidden_size"]
    for key in _LOCKED:
        if _KEPT.format(key) in found:
            found[key] = found.pop(_KEPT.format(key))
    return found


def unlocked(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The plain config.json behind one of ours or the authors', the key that names the wiring kept; a plain one stays
    as it is.
    """
    if raw.get("model_type") == PAPER_MODEL_TYPE:
        raw = dict(raw)
        classes = raw.get(_CLASSES)
        if isinstance(classes, list):
            raw[_CLASSES] = [str(name).replace("LlamaLadder", "Llama") for name in classes]
        layers = [] if raw.get("ladder_layers") is None and raw.get("wiring") is None else raw.get("ladder_layers")
        return {**raw, "model_type": "llama", "ladder_layers": layers}
    if raw.get("model_type") != WIRED_MODEL_TYPE:
        return dict(raw)
    raw = _with_sizes(raw)
    raw["model_type"] = raw.pop("base_model_type", None)
    raw[_CLASSES] = raw.pop(_KEPT_CLASSES, None)
    if raw.get("wiring") is None and raw.get("ladder_layers") is None:
        raise LadderError(f"model_type {WIRED_MODEL_TYPE!r} needs the key 'wiring'")
    return raw


def own_model_type(raw: Mapping[str, Any]) -> str | None:
    """The family that a config.json is of, wired or not."""
    if raw.get("model_type") == PAPER_MODEL_TYPE:
        return "llama"
    return raw.get("base_model_type" if raw.get("model_type") == WIRED_MODEL_TYPE else "model_type")


def names_wiring(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its model is not what others make of it, in our way or the authors'; not whether
    that is understood.
    """
    return (
        wired_by_type(raw)
        or any(raw.get(key) is not None for key in ("wiring", "ladder_layers"))
        or shared_norm_of(raw)
    )


def wired_by_type(raw: Mapping[str, Any]) -> bool:
    """Whether its model_type says so, which software without wirings does not know."""
    return raw.get("model_type") in (WIRED_MODEL_TYPE, PAPER_MODEL_TYPE)


def born_parallel(raw: Mapping[str, Any]) -> bool:
    """Whether a plain config.json is of a model whose layers were parallel before any wiring: what the wiring
    `standard` means for it.
    """
    settings = _PARALLEL.get(str(raw.get("model_type")), {})
    return any(raw.get(name, default) for name, default in settings.items())


def ranks_of(raw: Mapping[str, Any]) -> int:
    """The ranks that a config.json says its model was made for (`wiring_ranks`); silence is 1: for any number."""
    return checked_ranks(raw.get("wiring_ranks", 1))


def checked_ranks(ranks: object) -> int:
    """A number of ranks, or a refusal."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise LadderError(f"the number of ranks must be a whole number from 1, not {ranks!r}")
    return ranks


def wiring_of(raw: Mapping[str, Any], layers: int) -> Wiring:
    """The wiring that a config.json names: ours, or the paper's `ladder_layers`; silence is the standard one."""
    text, paper = raw.get("wiring"), raw.get("ladder_layers")
    if text is not None and paper is not None:
        raise LadderError("both 'wiring' and 'ladder_layers' are given: keep one")
    return Wiring.from_ladder_layers(paper, layers) if text is None else Wiring.parse(str(text), layers)


def shared_norm_of(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says that a layer has one norm, which attention and MLP both read through."""
    shared = raw.get("shared_norm")
    if not isinstance(shared, bool | None):
        raise LadderError(f"shared_norm must be true or false, not {str(shared)[:80]!r}")
    return shared is True
