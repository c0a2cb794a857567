"""Models and tokenizers from a directory or the hub: an error is one sentence, without the libraries' own output."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from ladder.config.fields import check_no_side
from ladder.config.inside import check_model, check_no_code, check_tokenizer
from ladder.errors import LadderError


def pretrained(auto: Any, name: str, **options: Any) -> Any:
    """`auto.from_pretrained` of a directory or a hub id."""
    local = Path(name).is_dir()
    if not local and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise LadderError(f"{name} is neither a directory nor the name of a model on the hub, as in org/name")
    if auto.__name__ != "AutoTokenizer":
        check_no_side(Path(name))
    if local:
        check_tokenizer(Path(name)) if auto.__name__ == "AutoTokenizer" else check_model(Path(name))
    try:
        if not local and auto.__name__ != "AutoTokenizer":
            check_no_code(PreTrainedConfig.get_config_dict(name)[0], name)
        return auto.from_pretrained(name, trust_remote_code=False, local_files_only=local, **options)
    except (LadderError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # transformers raises errors of every kind, tokenizers even no Exception
        raise LadderError(f"{name} cannot be loaded: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """The first line of what an error says, and the next where that only begins a list."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 1 + lines[0].rstrip().endswith(":")])


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
