"""ladder train: a model of any wiring from scratch."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, set_seed

from ladder.config import ModelConfig
from ladder.config.card import trained_card
from ladder.config.lock import shared_norm_of, unlocked
from ladder.data.shards import Shards
from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.families import layout_of
from ladder.hf.load import pretrained, quiet
from ladder.hf.ranks import output_projection
from ladder.hf.wire import check_ranks, layers_of
from ladder.perf.costs import RankCosts
from ladder.progress import Progress
from ladder.scan.checkpoints import check_init_from, read_tokenizer
from ladder.train import folder
from ladder.train.early import TRAINED_BYTES, chosen
from ladder.train.loss import LossWeights
from ladder.train.options import ScratchOptions, TrainingOptions
from ladder.train.run import TrainingData, TrainingTask, check_memory, run_training, save_trained
from ladder.train.tensor_parallel import loop
from ladder.wiring import Wiring


def train(
    options: ScratchOptions, training: TrainingOptions, progress: Progress, named: Collection[str] | None = None
) -> dict[str, Any]:
    """Train a model from scratch into `options.out`; returns the last evaluation. The same call continues a run.

    `named`: options that override the recipe; None: those that differ from their defaults.
    """
    config, training = chosen(options, training, named)
    training = training.within(config.context)
    folders = {"data": training.data, "valid": training.valid, "init_from": options.init_from}
    wanted = folder.described(options, training, **folders)
    folder.check(options.out, wanted)
    shards = Shards.open(training.data)
    wiring = Wiring.parse(options.wiring, config.layers)
    config = replace(config, vocab=shards.vocab, wiring=Wiring(()), eos=(shards.eos,), shared_norm=options.shared_norm)
    if options.ranks > 1:
        config.check_degree(options.ranks)
    if options.init_from is not None:
        _check_init_from(options, config, wiring, training)
    count = RankCosts(config, 1, element_bytes=1).weight_bytes
    check_memory(options.size or str(options.recipe), count, TRAINED_BYTES, training, options.tp)
    check_ranks(wiring, max(options.tp, options.ranks))

    def complete(out: Path) -> None:
        """Tokenizer and model card beside the weights."""
        pretrained(AutoTokenizer, str(training.data / "tokenizer")).save_pretrained(out)
        tokens = training.steps * training.batch * training.length
        text = trained_card(options.out.name, "llama", wiring, tokens)
        (out / "README.md").write_text(text, encoding="utf-8")

    if options.tp > 1:
        wired = replace(config, wiring=wiring, ranks=options.tp if wiring.local else 1)
        return loop.train(wired, hf_config(config), options, training, wanted, complete, progress)

    def finish(trainer: Any, out: Path) -> None:
        save_trained(trainer, out, getattr(torch, config.dtype))
        if trainer.args.process_index == 0:
            complete(out)

    def make(data: TrainingData, args: Any) -> TrainingTask:
        set_seed(training.seed)
        if options.init_from is not None:  # which has its wiring
            model = pretrained(AutoModelForCausalLM, str(options.init_from), dtype=torch.float32)
            return TrainingTask(model, LossWeights(0.0, 1.0), None, lambda: data.train, None, finish)
        model = new_model(config)
        more = {"ranks": options.ranks} if options.ranks > 1 else {}
        rewire(model, wiring, **more)
        return TrainingTask(model, LossWeights(0.0, 1.0), None, lambda: data.train, None, finish)

    return run_training(options.out, wanted, training, make, progress)


def _check_init_from(options: ScratchOptions, config: ModelConfig, wiring: Wiring, training: TrainingOptions) -> None:
    """Refuse a run that is not of this model, its wiring and its tokenizer."""
    assert options.init_from is not None
    if options.tp > 1:
        raise LadderError("--init-from is not for --tp: leave one of them out")
    plain = hf_config(config)
    with quiet():
        check_init_from(options.init_from, plain, wiring, options.ranks)
        if shared_norm_of(pretrained(AutoConfig, str(options.init_from)).to_dict()) != options.shared_norm:
            raise LadderError(f"{options.init_from} has other norms: give --shared-norm where it was trained with it")
        read_tokenizer(str(options.init_from), plain, training.data, training.valid)


def new_model(config: ModelConfig) -> Any:
    """transformers' model with random weights. Output projections are smaller by the square root of the number of
    sub-blocks (GPT-2, Radford et al. 2019), so that a deep model's stream is not larger than a shallow one's.
    """
    model = AutoModelForCausalLM.from_config(hf_config(config), attn_implementation="sdpa")
    row = layout_of(model.config.model_type)
    with torch.no_grad():
        for layer in layers_of(model):
            for branch in (row.attention, row.mlp):
                output_projection(layer, branch).weight.mul_((2 * config.layers) ** -0.5)  # type: ignore[operator]
    return model


def hf_config(config: ModelConfig) -> LlamaConfig:
    """transformers' config of the same model, its weights drawn with a standard deviation of 0.02."""
    raw = unlocked(config.to_hf())
    return LlamaConfig(**{key: raw[key] for key in raw if key not in ("architectures", "model_type", "dtype")})
