"""What is refused before vLLM starts anything: options that would lose numbers or overlap of a wired model."""

from ladder.errors import LadderError
from ladder.vllm.settings import Settings, Wired
from ladder.vllm.versions import (
    CompilationMode,
    VerifyAndUpdateConfig,
    VllmConfig,
    default_modes,
    foreign_parts,
    needs_compiler,
)

# proposers that read nothing of the model but its tokens and its last hidden state
SPECULATIVE = ("ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "medusa")


class VerifyWired(VerifyAndUpdateConfig):
    """vLLM calls it for our architectures, in the process that the user has started."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        settings = Settings.read(vllm_config.additional_config)
        config = model.hf_text_config
        Wired.of(vars(config), config.num_hidden_layers, parallel.tensor_parallel_size)
        if foreign := foreign_parts(vllm_config):
            raise LadderError(f"wired models are not computed with {', '.join(foreign)}: leave it out")
        if parallel.data_parallel_size > 1 and model.is_moe:
            raise LadderError(
                "wired models with experts are not computed with --data-parallel-size: start a server for each replica"
            )
        if (speculative := vllm_config.speculative_config) is not None and speculative.method not in SPECULATIVE:
            raise LadderError(
                f"speculation by {speculative.method!r} reads hidden states of layers, which wired models do not give: "
                f"known are {', '.join(SPECULATIVE)}"
            )
        compilation = vllm_config.compilation_config
        if compilation.mode not in (None, CompilationMode.NONE) and not model.enforce_eager:
            raise LadderError(
                "vLLM's compiler would move the all-reduces of a wired model: leave out -cc.mode, or give -cc.mode=0"
            )
        if needs_compiler(vllm_config) and not model.enforce_eager:
            raise LadderError(
                f"cudagraph_mode {compilation.cudagraph_mode.name} is made by vLLM's compiler, which wired models do "
                "not use: leave it out, or set VLLM_USE_BREAKABLE_CUDAGRAPH=1"
            )
        if settings.lanes == 2 and parallel.pipeline_parallel_size > 1:
            raise LadderError("ladder.lanes is for models of one pipeline stage: leave it out")
        if settings.lanes == 2 and settings.reference:
            raise LadderError("ladder.reference computes one sub-block after the other: leave out ladder.lanes")
        default_modes(vllm_config)
