"""`ladder serve --engine vllm`: checks what can be checked here, and becomes vLLM's own server. No vLLM is imported."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Any, NoReturn

from ladder.config.fields import read_config, whole_number
from ladder.config.lock import own_model_type, unlocked, wired_by_type
from ladder.engine.options import EngineOptions
from ladder.errors import LadderError, install
from ladder.server.options import ServerOptions
from ladder.vllm.families import VllmFamily, vllm_family, vllm_family_of
from ladder.vllm.settings import Wired
from ladder.wiring import Wiring

PLUGIN, GROUP = "ladder.vllm.plugin:register", "vllm.general_plugins"
# our option -> vLLM's
CARRIED = {
    "tp": "--tensor-parallel-size",
    "dtype": "--dtype",
    "max_num_seqs": "--max-num-seqs",
    "prefill_chunk": "--max-num-batched-tokens",
    "cache_dtype": "--kv-cache-dtype",
    "expert_parallel": "--enable-expert-parallel",
    "host": "--host",
    "port": "--port",
    "served_model_name": "--served-model-name",
}
_OWN = {"model", "directory", "wiring", "engine", "api_key", "api_key_file", "log_level"}


@dataclass(frozen=True)
class Handover:
    """The program that this process becomes: its arguments, and what is added to its environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def handover(options: EngineOptions, server: ServerOptions, named: frozenset[str], passed: Sequence[str]) -> Handover:
    """`named`: which options were given; `passed`: vLLM's own, as they were given. Refuses what would fail later."""
    for name in sorted(named - _OWN - CARRIED.keys()):
        flag = f"--{name.replace('_', '-')}"
        raise LadderError(f"{flag} is an option of the native engine: leave it out with --engine vllm")
    given = dict(options.__dict__, **server.__dict__)
    taken = {name: flag for name, flag in CARRIED.items() if name in named}
    for name, flag in taken.items():
        if value_of(passed, flag) is not None:
            raise LadderError(f"--{name.replace('_', '-')} and {flag} are the same option: give one of them")
    ranks = options.tp if "tp" in named else _number(passed, "--tensor-parallel-size", "-tp")
    arguments = [] if "tp" not in named else ["--tensor-parallel-size", str(ranks)]
    for name, flag in taken.items():
        if name != "tp":
            arguments += [flag] if given[name] is True else [flag, str(given[name])]
    raw = read_config(options.model)
    overridden = _overridden(passed)
    if overrides := overrides_of(raw, options.wiring, ranks):
        if overridden:
            raise LadderError("--hf-overrides cannot be given with this wiring: vLLM is told of the wiring in that way")
        arguments += ["--hf-overrides", json.dumps(overrides)]
    elif not wired_by_type(raw) and any(key in overridden for key in ("wiring", "ladder_layers")):
        raise LadderError("--hf-overrides names a wiring, which vLLM would not look at: give --wiring")
    if server.port == 0:
        raise LadderError("vLLM needs a port: 0 is not one")
    if "host" not in named and value_of(passed, "--host") is None:
        arguments += ["--host", server.host]
    if "served_model_name" not in named and value_of(passed, "--served-model-name") is None:
        arguments += ["--served-model-name", options.model.resolve().name]
    key = server.key()
    return Handover((str(options.model), *arguments, *passed), {} if key is None else {"VLLM_API_KEY": key})


def overrides_of(raw: dict[str, Any], wiring: str | None, ranks: int) -> dict[str, Any]:
    """What vLLM's hf_overrides must say: another wiring than config.json's, or one that a plain file names."""
    family, plain = vllm_family_of(raw), unlocked(raw)
    layers = whole_number(plain, "num_hidden_layers") if family is not None or wiring is not None else 0
    if wiring is None:
        if family is None:
            return {}  # vLLM's own business
        Wired.of(plain, layers, ranks)
        return {} if wired_by_type(raw) else _architecture(family)
    family = family or vllm_family(own_model_type(raw))
    keys = {"wiring": str(Wiring.parse(wiring, layers)), "wiring_ranks": 1, "ladder_layers": None}
    Wired.of({**plain, **keys}, layers, ranks)
    return keys | ({} if wired_by_type(raw) else _architecture(family))


def _architecture(family: VllmFamily) -> dict[str, Any]:
    return {"architectures": [family.wired]}


def value_of(passed: Sequence[str], *names: str) -> str | None:
    """An option's value among vLLM's own, where it is there: `--name value` or `--name=value`; "" without one."""
    found = None
    for number, each in enumerate(passed):
        name, equals, value = each.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else next(iter(passed[number + 1 : number + 2]), "")
    return found


def _overridden(passed: Sequence[str]) -> str:
    """What is given to --hf-overrides among vLLM's own, "" for nothing. vLLM's parser takes any beginning of the name,
    and --hf-overrides.KEY VALUE; of two the last one holds, whatever the first one says.
    """
    found = ""
    for number, each in enumerate(passed):
        if each.replace("_", "-").startswith("--hf-o"):
            found += " ".join([each, *passed[number + 1 : number + 2]])
    return found


def _number(passed: Sequence[str], *names: str) -> int:
    text = value_of(passed, *names)
    if text is None:
        return 1
    if not text.isdecimal() or int(text) < 1:
        raise LadderError(f"{names[0]} must be a whole number from 1, not {text!r}")
    return int(text)


def check_installed(what: str = "serving") -> None:
    """vLLM is here, and finds the plugin."""
    if find_spec("vllm") is None:
        raise LadderError(f"{what} on vLLM needs vllm: {install('vllm')}")
    ours = [each.name for each in entry_points(group=GROUP) if each.value == PLUGIN]
    if not ours:
        raise LadderError("vLLM does not find the plugin: install this package beside vllm, by pip install .")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ours[0] not in allowed.split(","):
        raise LadderError(
            f"VLLM_PLUGINS is {allowed!r}, which leaves out the plugin: add {ours[0]!r} to it, or unset it"
        )


def check_machine(arguments: Sequence[str]) -> list[str]:
    """Refuse more ranks than there are GPUs; on a CPU without bf16 products, the dtype that vLLM is to be given."""
    import torch

    from ladder.devices import cpu_multiplies_bfloat16

    ranks = _number(arguments, "--tensor-parallel-size", "-tp") * _number(arguments, "--pipeline-parallel-size", "-pp")
    if torch.cuda.is_available():
        there, elsewhere = torch.cuda.device_count(), _number(arguments, "--nnodes", "-n") > 1
        elsewhere |= value_of(arguments, "--distributed-executor-backend") == "ray"
        if ranks > there and not elsewhere:
            raise LadderError(
                f"{ranks} ranks need {ranks} GPUs, this machine has {there}: use fewer, or give vLLM's --nnodes or "
                "--distributed-executor-backend ray for several machines"
            )
        return []
    return [] if value_of(arguments, "--dtype") or cpu_multiplies_bfloat16() else ["--dtype", "float32"]


def become(found: Handover) -> NoReturn:
    """This process goes on as vLLM's server: signals reach it."""
    check_installed()
    arguments = [*found.arguments, *check_machine(found.arguments)]
    try:
        version("vllm")
        program = ["vllm.entrypoints.cli.main", "serve", *arguments]
    except PackageNotFoundError:  # builds for CPUs have other names, by which vLLM's command does not find itself
        program = ["vllm.entrypoints.openai.api_server", "--model", *arguments]
    os.execve(sys.executable, [sys.executable, "-m", *program], {**os.environ, **found.environment})
