"""The model that is to be rewired, and data in its tokens: whatever does not fit is refused before a weight is read."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ladder.config.lock import ranks_of, wiring_of
from ladder.data.shards import Shards
from ladder.data.texts import fingerprint, load_tokenizer
from ladder.errors import LadderError
from ladder.hf.families import family
from ladder.hf.load import pretrained
from ladder.hf.wire import refuse_settings
from ladder.wiring import Wiring

_SAME = ["model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
_SAME += ["head_dim", "intermediate_size", "rope_parameters", "rms_norm_eps", "tie_word_embeddings"]


def read_original(model: str, pattern: str, window: int) -> tuple[Any, Wiring]:
    """The config of a model that is not wired yet, and the wiring that it is to have."""
    config = pretrained(AutoConfig, model)
    family(config.model_type)
    refuse_settings(config)
    wiring = Wiring.parse(pattern, config.num_hidden_layers)
    if not wiring_of(vars(config), config.num_hidden_layers).is_standard:
        raise LadderError(f"{model} is wired already: name its original")
    context = getattr(config, "max_position_embeddings", window)
    if window > context:
        raise LadderError(f"a window of {window} is more than the model's {context}: give a smaller --window")
    return config, wiring


def check_begin(begin: Path, config: Any, wiring: Wiring, ranks: int) -> None:
    """Refuse weights to begin with that are of another model or wiring."""
    if not begin.is_dir():
        raise LadderError(f"no such folder: {begin}; ladder fit makes one")
    if not (begin / "config.json").exists():
        raise LadderError(f"{begin} has no config.json: begin with a finished model, of ladder fit or ladder adapt")
    own = pretrained(AutoConfig, str(begin))
    for name in _SAME:
        if (found := getattr(own, name, None)) != (wanted := getattr(config, name, None)):
            raise LadderError(f"{begin} is of another model: its {name} is {found}, not {wanted}")
    held = wiring_of(vars(own), own.num_hidden_layers)
    if (found := ranks_of(vars(own))) != ranks:
        raise LadderError(f"{begin} is for {found} ranks, not {ranks}: begin with weights for the same number")
    if held != wiring:
        raise LadderError(f"{begin} is wired {str(held)!r}, not {str(wiring)!r}: begin with weights of the same wiring")


def read_tokenizer(model: str, config: Any, *folders: Path | None) -> Any:
    """The model's tokenizer, which the folders' tokens are of."""
    tokenizer = load_tokenizer(model)
    for folder in folders:
        if folder is not None:
            shards = Shards.open(folder)
            shards.check_vocab(config.vocab_size, model)
            shards.check_tokenizer(fingerprint(tokenizer), model)
    return tokenizer
