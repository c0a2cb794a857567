"""Models and tokenizers from a directory or the hub: an error is one sentence, without the libraries' own output."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from ladder.config.early import check_model_named
from ladder.config.fields import ADAPTER, check_no_side
from ladder.config.inside import check_model, check_no_code, check_tokenizer
from ladder.devices import computing_dtype, device
from ladder.errors import LadderError, install
from ladder.perf.memory import check_host, free_bytes

SURELY = 16  # a model surely fits where its files and the bytes for each weight multiply to this share of what is free


def pretrained(auto: Any, name: str, **options: Any) -> Any:
    """`auto.from_pretrained` of a directory or a hub id. Weights of compressed-tensors are dequantized."""
    check_model_named(name, config=auto.__name__ != "AutoTokenizer")
    local = Path(name).is_dir()
    if auto.__name__ != "AutoTokenizer":
        check_no_side(Path(name))
    if local:
        check_tokenizer(Path(name)) if auto.__name__ == "AutoTokenizer" else check_model(Path(name))
    try:
        if not local and auto.__name__ != "AutoTokenizer":
            check_no_code(PreTrainedConfig.get_config_dict(name)[0], name)
        options |= {"trust_remote_code": False, "local_files_only": local}
        if auto.__name__.startswith("AutoModel"):
            if (Path(name) / ADAPTER).exists() and find_spec("peft") is None:
                raise LadderError(f"{name} has an adapter, which needs peft: {install('train')}")
            config = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=local)
            each = _bytes_each(config, options.get("dtype"))
            check_weights(auto, name, config, each, "use a smaller model, or a narrower --dtype")
            if quantizer_of(config) is not None:
                return _quantized(auto, name, config, options)
        return auto.from_pretrained(name, **options)
    except (LadderError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # transformers raises errors of every kind, tokenizers even no Exception
        raise LadderError(f"{name} cannot be loaded: {reason(error)}") from error


def check_weights(auto: Any, name: str, config: Any, each: float, ways: str) -> None:
    """Refuse a model of which `each` bytes for every weight are more than this machine has left."""
    held = sum(file.stat().st_size for file in Path(name).glob("*.safetensors")) if Path(name).is_dir() else 0
    if 0 < held * each < free_bytes() / SURELY:
        return
    count = weight_count(auto, config)
    check_host(f"{name} ({count / 1e9:.3g} billion weights, {each:g} bytes for each)", count * each, ways)


def weight_count(auto: Any, config: Any) -> int:
    """How many weights a model of this config has."""
    plain = type(config).from_dict({**config.to_dict(), "quantization_config": None})
    with torch.device("meta"):
        return int(auto.from_config(plain).num_parameters())


def _bytes_each(config: Any, asked: Any) -> int:
    """Of a weight in a dtype as `from_pretrained` takes it; auto: the config's."""
    named = getattr(config, "dtype", None) if asked in (None, "auto") else asked
    found = getattr(torch, str(named).removeprefix("torch."), torch.float32)
    return int(found.itemsize)


def dtype_for(name: str, asked: str, where: str) -> str:
    """The dtype to load a model in: the one that was asked for; auto: the checkpoint's, where device `where` has it."""
    if asked != "auto":
        return asked
    config = pretrained(AutoConfig, name)
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if stored is None:
        return asked  # transformers looks at the weights
    return computing_dtype(asked, str(stored).removeprefix("torch."), device(where))


def quantizer_of(config: Any) -> str | None:
    """The quant_method of a config of transformers', or of config.json's content; None: its weights are whole."""
    raw = config if isinstance(config, dict) else vars(config)
    if not (found := raw.get("quantization_config")):
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    if isinstance(found, dict) and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        method = "bitsandbytes"  # whose older checkpoints do not name it
    if not isinstance(method, str):
        raise LadderError(f"quantization_config must name a quant_method, not {str(found)[:80]!r}")
    return str(getattr(method, "value", method))


def with_formats(quantized: dict[str, Any]) -> dict[str, Any]:
    """A quantization_config of compressed-tensors whose groups name their format. Where they do not, the library
    guesses one, and does not find weights of 8 bits whose activations are not quantized.
    """
    form, groups = quantized.get("format"), quantized.get("config_groups")
    if not isinstance(groups, dict) or not isinstance(form, str) or form in ("dense", "mixed-precision"):
        return quantized
    named = {
        key: {**group, "format": group.get("format") or form} if isinstance(group, dict) else group
        for key, group in groups.items()
    }
    return {**quantized, "config_groups": named}


def _quantized(auto: Any, name: str, config: Any, options: dict[str, Any]) -> Any:
    """A model whose layers are its quantizer's. compressed-tensors would dequantize at the first pass: behind an
    adapter's back, and as tensors that cannot be trained with if that pass is a measurement. It is done at once.
    """
    if quantizer_of(config) == "compressed-tensors":
        config.quantization_config = {**with_formats(config.quantization_config), "dequantize": True}
    with redirect_stderr(StringIO()):  # the library's progress bars, which nothing turns off
        model, found = auto.from_pretrained(name, config=config, output_loading_info=True, **options)
    if missing := sorted(found["missing_keys"]):
        raise LadderError(f"{name} cannot be loaded: it lacks the tensor {missing[0]!r}, and {len(missing) - 1} others")
    return model


def reason(error: BaseException) -> str:
    """The first line of what an error says, and where that only begins a list, the list."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    if not lines[0].endswith(":"):
        return lines[0]
    listed = takewhile(lambda line: re.match(r"[(\d*-]|and\b|or\b", line), lines[1:])
    return " ".join([lines[0], *(list(listed) or lines[1:2])]).rstrip(",;")


@contextmanager
def quiet(*libraries: str) -> Iterator[None]:
    """No progress bars of transformers and the hub, and only their errors in the log; of `libraries` as well.

    Afterwards everything is as it was. Of all warnings one is ignored: torch's stack trace about bfloat16 products on a
    CPU that has no instructions for them; the products are right.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "mkldnn_matmul failed, switching to BLAS gemm", UserWarning)
        for name in ("transformers", "huggingface_hub", "accelerate", *libraries):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        if transformers_logging.is_progress_bar_enabled():
            if are_progress_bars_disabled():  # the hub's own, which transformers switches together with its bars
                stack.callback(disable_progress_bars)
            stack.callback(transformers_logging.enable_progress_bar)
            transformers_logging.disable_progress_bar()
        yield
