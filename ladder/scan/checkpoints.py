"""Checkpoints that are fitted or adapted: what does not fit together is refused before a weight is read."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ladder.checkpoint import beside
from ladder.config.fields import ADAPTER
from ladder.config.lock import ranks_of, wiring_of
from ladder.data.shards import Shards
from ladder.data.texts import fingerprint, load_tokenizer
from ladder.errors import LadderError
from ladder.files import writing
from ladder.hf.families import layout_of, refuse_other_than_decoders
from ladder.hf.load import pretrained, quantizer_of
from ladder.hf.wire import refuse_settings
from ladder.scan.early import check_original
from ladder.wiring import Wiring

_SAME = ["model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
_SAME += ["head_dim", "intermediate_size", "rope_parameters", "rms_norm_eps", "tie_word_embeddings"]


def read_original(model: str, pattern: str | None, seq_len: int | None) -> tuple[Any, Wiring, int]:
    """The config of a model that is not rewired yet, the wiring that it is to have, and the length of its sequences.
    Without a pattern the model may be wired, and keeps its wiring.
    """
    config = pretrained(AutoConfig, model)
    refuse_other_than_decoders(model, config.model_type)
    layout_of(config.model_type)
    refuse_settings(config)
    own = wiring_of(vars(config), config.num_hidden_layers)
    return config, *check_original(model, own, pattern, seq_len, context_of(config))


def context_of(config: Any) -> int | None:
    """The longest sequence that a model has positions for, by its config; None: there is no longest."""
    found: int | None = getattr(config, "max_position_embeddings", None)
    return found


def refuse_quantized(model: str, config: Any, instead: str) -> None:
    """Refuse to change weights that are quantized."""
    if (method := quantizer_of(config)) is not None:
        raise LadderError(f"the weights of {model} are quantized ({method}): {instead}")


def refuse_not_finite(model: Any, name: str) -> None:
    """Refuse weights that nothing can be learned or solved with."""
    for parameter, weight in model.named_parameters():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            raise LadderError(f"{name}: the tensor {parameter!r} holds values that are not finite (NaN or infinity)")


def check_init_from(checkpoint: Path, config: Any, wiring: Wiring, ranks: int) -> None:
    """Refuse initial weights that are of another model or wiring."""
    if not checkpoint.is_dir():
        raise LadderError(f"no such folder: {checkpoint}; ladder fit makes one")
    if not (checkpoint / "config.json").exists():
        raise LadderError(f"{checkpoint} has no config.json: name a finished model, of ladder fit or ladder adapt")
    if (checkpoint / ADAPTER).exists():
        raise LadderError(f"{checkpoint} has an adapter, which a run cannot start from: name weights without one")
    own = pretrained(AutoConfig, str(checkpoint))
    for name in _SAME:
        if (found := getattr(own, name, None)) != (wanted := getattr(config, name, None)):
            raise LadderError(f"{checkpoint} is of another model: its {name} is {found}, not {wanted}")
    held = wiring_of(vars(own), own.num_hidden_layers)
    if (found := ranks_of(vars(own))) != ranks:
        raise LadderError(f"{checkpoint} is for {found} ranks, not {ranks}: name weights for the same number")
    if held != wiring:
        raise LadderError(f"{checkpoint} is wired {str(held)!r}, not {str(wiring)!r}: name weights of the same wiring")


def read_tokenizer(model: str, config: Any, *folders: Path | None) -> Any:
    """The model's tokenizer; the tokens in the folders must be of the same."""
    tokenizer = load_tokenizer(model)
    for folder in folders:
        if folder is not None:
            shards = Shards.open(folder)
            shards.check_vocab(config.vocab_size, model)
            shards.check_tokenizer(fingerprint(tokenizer), model)
    return tokenizer


def write_model(model: Any, folder: Path) -> None:
    """A model's files, readable by all users."""
    with writing(folder):
        if model.can_generate():
            own, model.generation_config = model.generation_config, type(model.generation_config)()
            model.save_pretrained(folder)
            own.to_json_file(folder / "generation_config.json")  # as it was, though transformers may not accept it
        else:
            model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors creates it for its owner alone


def write_beside(source: str, folder: Path) -> None:
    """What belongs to a local checkpoint besides its weights and is not there yet: its processor, say."""
    for file in beside(Path(source), []) if Path(source).is_dir() else ():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
