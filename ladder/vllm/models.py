"""Wired models for vLLM: its own models, whose weights, layers, quantizations and adapters stay as they are. Only the
order is ours in which a pass goes through their sub-blocks, and what it does with their partial sums.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.model_executor.models.gemma2 import Gemma2ForCausalLM
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from ladder.comm.base import Comm, Solo
from ladder.comm.group import Group
from ladder.vllm.decoder import WiredDecoder
from ladder.vllm.families import VLLM_FAMILIES, Parts
from ladder.vllm.settings import Settings, Wired
from ladder.vllm.versions import (
    IntermediateTensors,
    VllmConfig,
    breaks_at_attention,
    captures_whole,
    get_pp_group,
    keep_partial,
    suits_lanes,
    tensor_parallel_group,
)
from ladder.wiring import Wiring


class WiredModel(nn.Module):
    """A mixin before a model of vLLM's, whose `model` has the layers: its forward pass is not used."""

    family: ClassVar[str]
    model: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **more: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **more)
        settings, group = Settings.read(vllm_config.additional_config), tensor_parallel_group()
        config = vllm_config.model_config.hf_text_config
        self.wired = Wired.of(vars(config), config.num_hidden_layers, group.world_size)
        parts, inner = VLLM_FAMILIES[self.family].parts, self.model
        self._parts = parts = _without_second_norm(inner, parts) if self.wired.shared_norm else parts
        self._comm: Comm = Solo() if group.world_size == 1 else Group(group, overlap=not settings.reference)
        self._lanes = settings.lanes_where(suits_lanes(vllm_config))
        self._decoder = WiredDecoder(inner, parts, self.wired.blocks, self._comm, self._lanes)
        for layer in self._decoder.layers:
            self._check_and_hook(layer.part(parts.attention), layer.part(parts.mlp))
        self._hidden = int(config.hidden_size)
        self.make_empty_intermediate_tensors = self._empty

    def rewire(self, pattern: str) -> None:
        """Another wiring, which changes no tensor. What was captured or cached before is of the old one."""
        wiring = Wiring.parse(pattern, len(self.wired.blocks))
        self.wired = replace(self.wired, wiring=wiring, blocks=wiring.sub_blocks())
        self._decoder = WiredDecoder(self.model, self._parts, self.wired.blocks, self._comm, self._lanes)

    def _check_and_hook(self, attention: nn.Module, mlp: nn.Module) -> None:
        for block in (attention, mlp):
            if (count := keep_partial(block)) != 1:
                raise RuntimeError(
                    f"{type(block).__name__} of this vLLM has {count} all-reduces, not one: its layers are not known"
                )
        attention.attn.register_forward_pre_hook(self._before_attention)  # type: ignore[union-attr]

    def _before_attention(self, *_: Any) -> None:
        if breaks_at_attention():
            self._decoder.join()

    def _empty(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        """What vLLM lays out for the tensors that this stage receives."""
        widths = self._decoder.before.widths(self._hidden, self._decoder.comm.size)
        return IntermediateTensors(
            {name: torch.zeros((batch_size, width), dtype=dtype, device=device) for name, width in widths.items()}
        )

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        stage = get_pp_group()
        if stage.is_first_rank:
            x = self.model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            lanes = self._decoder.lanes if captures_whole() else 1
            found = self._decoder.forward(x, positions, stage.is_last_rank, lanes)
        else:
            assert intermediate_tensors is not None
            found = self._decoder.go_on(intermediate_tensors.tensors, positions, stage.is_last_rank)
        return IntermediateTensors(found) if isinstance(found, dict) else found


def _without_second_norm(model: Any, parts: Parts) -> Parts:
    """A layer's MLP reads through the attention's norm: the checkpoint has no other."""
    for index in range(int(model.start_layer), int(model.end_layer)):
        delattr(model.layers[index], parts.mlp_norm)
    return replace(parts, mlp_norm=parts.attention_norm)


class LadderLlamaForCausalLM(WiredModel, LlamaForCausalLM):
    family = "llama"


class LadderMistralForCausalLM(WiredModel, MistralForCausalLM):
    family = "mistral"


class LadderQwen2ForCausalLM(WiredModel, Qwen2ForCausalLM):
    family = "qwen2"


class LadderQwen3ForCausalLM(WiredModel, Qwen3ForCausalLM):
    family = "qwen3"


class LadderMixtralForCausalLM(WiredModel, MixtralForCausalLM):
    family = "mixtral"


class LadderQwen3MoeForCausalLM(WiredModel, Qwen3MoeForCausalLM):
    family = "qwen3_moe"


class LadderGemma2ForCausalLM(WiredModel, Gemma2ForCausalLM):
    family = "gemma2"


class LadderGemma3ForCausalLM(WiredModel, Gemma3ForCausalLM):
    family = "gemma3_text"
