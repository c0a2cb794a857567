"""Writes a tiny random model with a byte tokenizer, as a Hugging Face directory: something to try the commands on.

python examples/tiny_checkpoint.py DIRECTORY [WIRING]
"""

import argparse
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ladder.checkpoint import Random, load, save
from ladder.config import ModelConfig
from ladder.errors import LadderError
from ladder.files import check_new
from ladder.model import Decoder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    zero = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\0")[0][0]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=zero)  # so that texts can have an end


def main(directory: Path, wiring: str = "standard") -> None:
    config = ModelConfig.named("tiny").rewired(wiring)
    check_new(directory)
    save(load(Decoder(config), Random(seed=1, deviation=0.1)), directory)
    byte_tokenizer().save_pretrained(directory)
    print(f"wrote {directory}: tiny, {config.layers} layers, wiring {config.wiring}, random weights")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="new folder for the model")
    parser.add_argument("wiring", nargs="?", default="standard", help="as in ladder or standard:2 ladder:2")
    try:
        main(**vars(parser.parse_args()))
    except LadderError as error:
        sys.exit(f"tiny_checkpoint.py: {error}")
