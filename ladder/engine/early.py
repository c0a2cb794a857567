"""What is refused of the engine's options before torch is imported; `Setup` asks the same. No torch here."""

from dataclasses import replace

from ladder.comm.link import Link
from ladder.config import ModelConfig
from ladder.config.early import check_model_named
from ladder.devices import check_name
from ladder.engine.executors.torchrun import adopt_torchrun_size
from ladder.engine.options import EngineOptions
from ladder.errors import LadderError
from ladder.hub import directory_of
from ladder.kernels.table import Config, Shape, read_table
from ladder.wiring import check_names

Tables = dict[str, dict[Shape, Config]]  # by chip


def prepared(options: EngineOptions) -> EngineOptions:
    """The same with a model of the hub as the directory that it was downloaded to, and torchrun's number of ranks;
    checked.
    """
    check_names(options.wiring or "")
    check_options(options)
    check_model_named(options.model)
    options = adopt_torchrun_size(replace(options, model=directory_of(options.model)))
    checked_config(ModelConfig.from_directory(options.model), options)
    return options


def check_options(options: EngineOptions) -> tuple[Link | None, Tables]:
    """Refuse what no model could be run with; returns the link that is to be emulated, and the tables of kernels."""
    link = None if options.emulate_link is None else Link.parse(options.emulate_link)
    check_name(options.device)
    gpu = options.device.startswith("cuda")
    if options.comm_backend in ("symmetric", "nccl") and not gpu:
        raise LadderError(
            f"comm_backend {options.comm_backend!r} connects GPUs, the device is {options.device}: use --device cuda"
        )
    tables = {} if options.tuned is None else read_table(options.tuned)
    if options.tuned is not None and not gpu:
        raise LadderError(f"tuned kernels are for GPUs, the device is {options.device}: use --device cuda")
    return link, tables


def checked_config(config: ModelConfig, options: EngineOptions) -> ModelConfig:
    """A model's config under the options' wiring, for their number of ranks."""
    if options.wiring is not None:
        config = config.rewired(options.wiring)
    config.check_degree(options.tp, options.expert_parallel)
    if config.ranks not in (1, options.tp):
        raise LadderError(
            f"{options.model} was trained for {config.ranks} ranks, not {options.tp}: give --tp {config.ranks}"
        )
    return config
