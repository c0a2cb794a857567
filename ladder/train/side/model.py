"""Ladder side-tuning: a frozen model, and a small network beside it that restores what its rewiring has cost.

The model runs without gradients. The side network reads its residual stream between the layers; its output is added
to the last stream, from which the model's own final norm and head compute the logits. So nothing is kept of the
model's layers for the backward pass, which ends at the side network's gates (Ladder Side-Tuning, Sung, Cho, Bansal
2022, arXiv 2206.06522). The side network has a wiring of its own, ladder by default.

It is attached to the model by hooks, which exist during a pass only: the model itself is never changed.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from math import isclose
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ladder.config.fields import SIDE, read_json
from ladder.config.lock import unlocked, wiring_of
from ladder.errors import LadderError
from ladder.files import replaced, write_json
from ladder.hf.families import layout_of
from ladder.hf.rewire import IN_MEMORY
from ladder.hf.wire import layers_of
from ladder.train.side.network import SideNetwork, SidePass, SideShape
from ladder.wiring import Wiring

WEIGHTS, FACTS = "side.safetensors", SIDE
LARGEST_HEAD = 64
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm")  # what the families call it
# keys of a config.json that do not change the function: where it came from, how it was loaded, how it is used
_IRRELEVANT = {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"}
_IRRELEVANT |= {"pad_token_id", "bos_token_id", "eos_token_id", "output_hidden_states", "output_attentions"}


@dataclass(frozen=True)
class SideConfig:
    """Of a side network, for any model."""

    reduction: int = 8  # its width is the model's divided by this, as whole heads
    every: int = 1  # it reads every so many layers of the model, the last one always, and has a layer for each
    wiring: str = "ladder"  # its own

    def __post_init__(self) -> None:
        for name in ("reduction", "every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LadderError(f"{name} of a side network must be a whole number from 1, not {value!r}")
        if not isinstance(self.wiring, str):
            raise LadderError(f"wiring of a side network must be a text such as 'ladder', not {self.wiring!r}")

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "SideConfig":
        """From a file's content."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(raw) - set(known)):
            raise LadderError(f"unknown key {unknown[0]!r} of a side network: known are {', '.join(known)}")
        return cls(**raw)

    def reads(self, layers: int) -> list[int]:
        """Which of a model's layers are read, in order."""
        return list(range(layers - 1, -1, -self.every))[::-1]

    def shape(self, config: Any) -> SideShape:
        """Beside a model of this config."""
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
        head = min(getattr(config, "head_dim", None) or hidden // heads, LARGEST_HEAD) // 2 * 2  # rotary needs pairs
        if head < 2:
            raise LadderError(f"a model of width {hidden} with {heads} heads is too small for a side network")
        if self.reduction > hidden:
            raise LadderError(f"a reduction of {self.reduction} leaves nothing of a width of {hidden}")
        width = max(1, round(hidden / self.reduction / head)) * head
        return SideShape(hidden, width, head, len(self.reads(config.num_hidden_layers)))


class SideModel(nn.Module):
    """A model and the network beside it, to be used like the model: trained, evaluated, generated with.

    Only the side network's parameters are this module's own: an optimizer, a checkpoint, DDP have nothing else. The
    backbone is frozen, without dropout, and moves to other devices and dtypes with this module.
    """

    def __init__(self, backbone: Any, config: SideConfig | None = None, dtype: torch.dtype | None = None) -> None:
        """`dtype` of the side network's parameters: None for float32, which compute in the backbone's by autocast; or
        the backbone's own.
        """
        super().__init__()
        if not isinstance(backbone, PreTrainedModel) or backbone.get_output_embeddings() is None:
            raise LadderError(f"a side network needs a causal model of transformers, not {type(backbone).__name__}")
        config, host = config or SideConfig(), backbone.config
        layout_of(host.model_type)
        _final_norm(backbone)
        shape = config.shape(host)
        wide = torch.promote_types(backbone.dtype, torch.float32)
        if dtype not in (None, wide, backbone.dtype):
            raise LadderError(f"a side network beside {backbone.dtype} must be that or {wide}, not {dtype}")
        self.side_config = config
        self.network = SideNetwork(shape, Wiring.parse(config.wiring, shape.layers))
        self.network.to(device=backbone.device, dtype=dtype or wide)
        self._held = (backbone.eval().requires_grad_(False),)  # in a tuple, where a module finds no modules

    @property
    def backbone(self) -> Any:
        return self._held[0]

    @property
    def config(self) -> Any:
        """The backbone's."""
        return self.backbone.config

    @property
    def device(self) -> torch.device:
        return self.network.gates.device

    @property
    def dtype(self) -> torch.dtype:
        """The backbone's: that of the logits."""
        return self.backbone.dtype  # type: ignore[no-any-return]

    @property
    def name_or_path(self) -> str:
        return str(self.backbone.name_or_path)

    def trainable(self) -> int:
        """Number of the side network's parameters."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def get_base_model(self) -> Any:
        """`rewire` and `set_staleness` call it, as they do with PEFT."""
        return self.backbone

    def tie_weights(self) -> None:
        """lm-eval calls it; the backbone's are tied since it was loaded."""

    def train(self, mode: bool = True) -> "SideModel":
        super().train(mode)
        self.backbone.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SideModel":
        """`to`, `cuda` and `half` call it."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.backbone._apply(fn)
        return self

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **more: Any,
    ) -> Any:
        """As the backbone's, without a cache: `loss` where there are `labels`, and `logits`."""
        more["use_cache"] = False
        with self._attached(torch.is_grad_enabled()), torch.no_grad():
            return self.backbone(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **more)

    def generate(self, *arguments: Any, **named: Any) -> Any:
        """As the backbone's, without a cache: every token computes all those before it."""
        with self._attached(False), torch.no_grad():
            return self.backbone.generate(*arguments, **{**named, "use_cache": False})

    @contextmanager
    def _attached(self, grad: bool) -> Iterator[None]:
        """Inside, a pass of the backbone is a pass of both."""
        step, backbone = SidePass(self.network, backbone_dtype=self.dtype, grad=grad), self.backbone
        layers = layers_of(backbone)
        handles = [
            backbone.register_forward_pre_hook(step.begin, with_kwargs=True),
            layers[0].register_forward_pre_hook(step.embedded),
            _final_norm(backbone).register_forward_pre_hook(step.end),
        ]
        handles += [layers[index].register_forward_hook(step.layer) for index in self.side_config.reads(len(layers))]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def save(self, folder: str | Path) -> None:
        """Write the side network, not the backbone. Each file appears under its name only when it is whole; one that
        does not belong to the other is found when they are loaded.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with replaced(folder / WEIGHTS) as partial:
            save_file({name: each.contiguous() for name, each in self.network.state_dict().items()}, partial)
            partial.chmod(0o644)  # safetensors creates it for its owner alone
        weights = _sha256(folder / WEIGHTS)
        facts = {"side": asdict(self.side_config), "backbone": _facts(self.backbone), "weights": weights}
        write_json(folder / FACTS, facts)

    @classmethod
    def load(cls, folder: str | Path, backbone: Any, dtype: torch.dtype | None = None) -> "SideModel":
        """What `save` has written, beside the backbone that it was trained with."""
        file, facts = Path(folder) / WEIGHTS, _read(Path(folder))
        config = SideConfig.of(facts["side"])
        if not isinstance(backbone, PreTrainedModel):
            raise LadderError(f"a side network needs a causal model of transformers, not {type(backbone).__name__}")
        theirs, ours = facts["backbone"], _facts(backbone)
        if theirs.get("config_sha256") != ours["config_sha256"]:
            both = [f"{each.get('model_type')} wired {each.get('wiring')!r}" for each in (theirs, ours)]
            raise LadderError(
                f"the side network in {folder} was trained beside {theirs.get('name')!r} ({both[0]}); the config of "
                f"{ours['name']!r} ({both[1]}) is another: load it with its own backbone"
            )
        if not _alike(theirs.get("sample"), ours["sample"]):
            raise LadderError(
                f"the side network in {folder} was trained beside {theirs.get('name')!r}, {ours['name']!r} has other "
                "weights: load it with its own backbone"
            )
        model = cls(backbone, config, dtype)
        try:
            model.network.load_state_dict(load_file(file))
        except (SafetensorError, RuntimeError) as error:
            raise LadderError(f"{file} is of another side network: {' '.join(str(error).split())[:300]}") from None
        return model


def backbone_of(folder: Path) -> tuple[str, str, bool] | None:
    """(model, wiring, whether it is the hub's) that the side network of a folder was trained beside; None for a folder
    without one.
    """
    if not (folder / FACTS).is_file():
        return None
    theirs = _read(folder)["backbone"]
    for key in ("name", "wiring"):
        if not isinstance(theirs.get(key), str):
            raise LadderError(f"{folder / FACTS} is damaged: its backbone has no {key!r}")
    return theirs["name"], theirs["wiring"], theirs.get("hub") is True


def _read(folder: Path) -> dict[str, Any]:
    """The facts that `save` has written; the weights must be those."""
    facts = read_json(folder / FACTS)
    parts = {"side": dict, "backbone": dict, "weights": str}
    for key, kind in parts.items():
        if not isinstance(facts.get(key), kind):
            raise LadderError(f"{folder / FACTS} is damaged: it has no {key!r}")
    if unknown := sorted(set(facts) - set(parts)):
        raise LadderError(f"{folder / FACTS} has the unknown key {unknown[0]!r}")
    if not (folder / WEIGHTS).is_file():
        raise LadderError(f"no such file: {folder / WEIGHTS}")
    if _sha256(folder / WEIGHTS) != facts["weights"]:
        raise LadderError(f"{folder / WEIGHTS} is damaged: it is not what {FACTS} was written with; save it anew")
    return facts


def _final_norm(backbone: Any) -> nn.Module:
    for name in _FINAL_NORMS:
        if hasattr(backbone.base_model, name):
            return getattr(backbone.base_model, name)  # type: ignore[no-any-return]
    raise LadderError(f"{type(backbone).__name__} has no final norm by the names {', '.join(_FINAL_NORMS)}")


def _facts(backbone: Any) -> dict[str, Any]:
    """What identifies a backbone: its config, and a sample of its weights."""
    raw = unlocked(json.loads(backbone.config.to_json_string()))
    wiring = wiring_of(raw, backbone.config.num_hidden_layers)
    kept = {key: value for key, value in raw.items() if key not in _IRRELEVANT}
    text = json.dumps({**kept, "wiring": str(wiring), "ladder_layers": None}, sort_keys=True)
    name = str(backbone.name_or_path).removesuffix(IN_MEMORY)
    found = {
        "name": name,
        "model_type": str(raw.get("model_type")),
        "wiring": str(wiring),
        "hub": not Path(name).is_dir(),
    }
    return {**found, "config_sha256": hashlib.sha256(text.encode()).hexdigest(), "sample": _sample(backbone)}


def _sample(backbone: Any) -> list[float]:
    """The first number of every matrix in its layers."""
    weights = (weight for layer in layers_of(backbone) for weight in layer.parameters() if weight.dim() > 1)
    return [float(weight.detach().flatten()[0]) for weight in weights]


def _alike(one: Any, other: list[float]) -> bool:
    """Up to the rounding of half precision; older folders have no sample."""
    if not isinstance(one, list):
        return True
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(isclose(*pair, rel_tol=0.01, abs_tol=1e-6) for pair in pairs)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
