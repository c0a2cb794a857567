"""How a checkpoint stores each of its matrices, by the quantization_config of its config.json."""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ladder.config.fields import whole_number
from ladder.errors import LadderError, check_known, install

GROUPS = (32, 64, 128)  # inputs of int4 that share a scale
FP8_GROUP = 128  # inputs of fp8 activations that share one, where weights have groups
# what the transformers host can read
ELSEWHERE = frozenset({"bitsandbytes", "torchao", "hqq", "quanto", "eetq", "aqlm", "vptq", "higgs", "spqr", "bitnet"})
ELSEWHERE |= {"mxfp4", "auto-round", "fbgemm_fp8", "fp_quant", "quark", "sinq"}
BY_NAME = {"gguf": "GGUF", "exl2": "EXL2", "exl3": "EXL3", "modelopt": "NVFP4 and others of ModelOpt", "nvfp4": "NVFP4"}
# tensors of quantized activations and caches, which are not read
_ACTIVATIONS, _CACHES = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"), ("q", "k", "v")
ACTIVATION_TENSORS = _ACTIVATIONS + tuple(f".{each}_{end}" for each in _CACHES for end in ("scale", "zero_point"))
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Storage:
    """How a matrix [outputs, inputs] is stored: w = (code - zero) * scale."""

    kind: str = "dense"  # dense, fp8 (e4m3), int8, int4
    # whose names of tensors and packing: compressed, packed (the same, with codes of 8 bits in words), fp8 (DeepSeek,
    # Qwen), awq, gptq
    layout: str = ""
    group: int = 0  # inputs that share a scale; 0: all
    rows: int = 1  # outputs that share one; 0: all
    zero: bool = False  # zeros are stored, too
    # made for fp8 activations with scales as coarse as ours, or coarser; it says nothing of how weights are stored
    activations: bool = field(default=False, compare=False)

    @property
    def word(self) -> int:
        """Codes in an int32; 1: they are not packed."""
        return 8 if self.kind == "int4" else 4 if self.layout == "packed" else 1

    @property
    def unit(self) -> int:
        """A rank's slice of the inputs is a multiple of this."""
        return self.group or self.word

    def __str__(self) -> str:
        shared = f" in groups of {self.group} inputs" if self.group else ""
        blocks = f" and {self.rows} outputs" if self.rows > 1 else " with one scale" if not self.rows else ""
        return self.kind + shared + blocks + (" with zero points" if self.zero else "")


DENSE = Storage()
# the formats by name: of `--weights` and of what is written here; bf16: not quantized, in the model's own dtype
NAMED: dict[str, Storage] = {
    "bf16": DENSE,
    "fp8": Storage("fp8", "compressed"),
    "fp8-block": Storage("fp8", "compressed", 128, 128),
    "int8": Storage("int8", "compressed"),
    "int4": Storage("int4", "compressed", 128),
    "int4-64": Storage("int4", "compressed", 64),
    "int4-32": Storage("int4", "compressed", 32),
}
HEADS = ("lm_head", "embed_out")  # the names of heads, which stay as they are in nearly all checkpoints


@dataclass(frozen=True)
class Quantization:
    """Which matrices of a checkpoint are stored how. True where any is quantized.

    Targets and ignored names are a class ("Linear"), a module's name, or "re:" and the start of one as a regular
    expression, as in compressed-tensors.
    """

    groups: tuple[tuple[tuple[str, ...], Storage], ...] = ()
    ignore: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.groups)

    def of(self, name: str, module: str = "Linear") -> Storage:
        """How the matrix of the module `name`, of the class `module`, is stored."""
        ignored, patterns = self._ignored
        known = HEADS if name in HEADS else (name,)  # transformers calls every head lm_head, files also embed_out
        if not ignored.isdisjoint((*known, module)) or any(each.match(one) for each in patterns for one in known):
            return DENSE
        by_name, by_pattern = self._targets
        named = (by_name[one] for one in known if one in by_name)
        found = (storage for pattern, storage in by_pattern if any(pattern.match(one) for one in known))
        return next(named, None) or next(found, None) or by_name.get(module, DENSE)

    @cached_property
    def _ignored(self) -> tuple[frozenset[str], list[re.Pattern[str]]]:
        return frozenset(self.ignore), [_compiled(each) for each in self.ignore if each.startswith("re:")]

    @cached_property
    def _targets(self) -> tuple[dict[str, Storage], list[tuple[re.Pattern[str], Storage]]]:
        found = {target: storage for targets, storage in self.groups for target in targets}
        patterns = [(_compiled(each), found[each]) for each in sorted(found) if each.startswith("re:")]
        return found, patterns


def named_format(name: str) -> Quantization:
    """The matrices of all layers in a format of the table; embedding, head, router and norms stay as they are."""
    check_known("format of weights", name, NAMED)
    storage = NAMED[name]
    return Quantization() if storage == DENSE else Quantization(((("Linear",), storage),), HEADS)


def format_names(texts: Iterable[str]) -> tuple[str, ...]:
    """`--weights bf16,fp8 --weights int4` as names of the table."""
    names = tuple(dict.fromkeys(part.strip() for text in texts for part in text.split(",")))
    for name in names:
        named_format(name)
    return names


def _compiled(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise LadderError(f"quantization_config has {target[:80]!r}, which is no regular expression: {error}") from None


def _inside(names: Iterable[str]) -> tuple[str, ...]:
    """Targets of all modules whose names have one of these as whole parts: "mlp.gate" is none of "mlp.gate_proj"."""
    return tuple(rf"re:(?:.*\.)?{re.escape(name)}(?:\.|$)" for name in names)


def read_quantization(raw: Mapping[str, Any]) -> Quantization:
    """What a config.json says; formats that the engine does not read are refused by name."""
    quantized = raw.get("quantization_config")
    if not quantized:
        return Quantization()
    if not isinstance(quantized, Mapping) or not isinstance(quantized.get("quant_method"), str):
        raise LadderError(f"quantization_config must name a quant_method, not {str(quantized)[:80]!r}")
    method = quantized["quant_method"]
    if method not in READERS:
        hint = "; the transformers host can read them" if method in ELSEWHERE else ""
        raise _refused(BY_NAME.get(method, method[:80]), f" in the native engine{hint}")
    found = READERS[method](quantized)
    if not any(storage != DENSE for _, storage in found.groups):
        return Quantization()
    _ = found._ignored, found._targets  # compiles the regular expressions
    return found


def _refused(what: str, why: str) -> LadderError:
    return LadderError(f"quantized weights ({' '.join(what.split())}) are not supported{why}")


def _mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object of config.json, empty where it is missing or null."""
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise LadderError(f"quantization_config: {key!r} must be an object, not {str(value)[:80]!r}")
    return value or {}


def _compressed(raw: Mapping[str, Any]) -> Quantization:
    sparse = _mapping(raw, "sparsity_config").get("format", "dense")
    if sparse != "dense":
        raise _refused(f"{str(sparse)[:80]}", ": sparse formats are not read")
    if raw.get("transform_config"):
        raise _refused("transform_config", ": transformed weights are not read")
    schemes = _mapping(raw, "config_groups")
    for key in (key for key, each in schemes.items() if not isinstance(each, list)):  # a list is of a preset's targets
        scheme = _mapping(schemes, key)
        weights, form = _mapping(scheme, "weights"), scheme.get("format") or raw.get("format")
        order = weights.get("actorder")
        if weights and form not in FORMATS:
            name = "NVFP4" if form == "nvfp4-pack-quantized" else str(form)[:80]
            raise _refused(name, f": the formats that are read are {', '.join(FORMATS)}")
        if order is True or str(order).lower() in ("group", "dynamic"):  # "weight" does not change how it is stored
            raise _refused("act-order", f": actorder {order!r} scatters the groups over the inputs")
    status = raw.get("quantization_status", "compressed")
    if status != "compressed":
        raise _refused(f"quantization_status {str(status)[:80]!r}", ": only compressed weights are read")
    config = _parsed(raw)
    groups = []
    for scheme in config.config_groups.values():
        storage = _storage(scheme.weights, scheme.format or config.format)
        if scheme.input_activations is not None:
            storage = _with_activations(storage, _are_fp8(scheme.input_activations, storage))
        groups.append((tuple(scheme.targets), storage))
        if scheme.output_activations is not None:
            logger.info("quantized output_activations are ignored: products give the model's own dtype")
    if config.kv_cache_scheme is not None:
        logger.info("kv_cache_scheme is ignored: the option cache_dtype says how the cache is stored")
    return Quantization(tuple(dict.fromkeys(groups)), tuple(config.ignore or ()))


def _parsed(raw: Mapping[str, Any]) -> Any:
    """compressed-tensors' own reading of a quantization_config."""
    try:
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError:
        raise LadderError(f"weights of compressed-tensors need that package: {install('quantized')}") from None
    try:
        return QuantizationConfig.model_validate(dict(raw))
    except Exception as error:
        raise LadderError(f"quantization_config cannot be read by compressed-tensors: {_first(error)}") from None


def _first(error: Exception) -> str:
    """What an error of that package says; of a list of errors the first, with the keys that lead to it."""
    listed = getattr(error, "errors", None)  # pydantic's
    text = str(error)
    if callable(listed) and (errors := listed(include_url=False, include_context=False, include_input=False)):
        # it names the functions that check a value among the keys
        keys = [str(key) for key in errors[0]["loc"] if re.fullmatch(r"[\w-]+", str(key))]
        text = ": ".join(filter(None, (".".join(keys), errors[0]["msg"].removeprefix("Value error, "))))
    return " ".join(text.split())[:300]


FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized")


def _storage(args: Any, form: Any) -> Storage:
    """compressed-tensors' arguments of a weight -> how it is stored."""
    if args is None:
        return DENSE
    form = str(getattr(form, "value", form))
    name = f"{form}, {args.num_bits}-bit {args.type}"
    kind = {(8, "float"): "fp8", (8, "int"): "int8", (4, "int"): "int4"}.get((args.num_bits, str(args.type)))
    packed = form == "pack-quantized"
    if kind is None or (kind == "int4" and not packed) or (kind == "fp8" and packed):
        raise _refused(name, ": 8-bit floats, 8-bit integers and packed 4-bit integers are")
    if form != "naive-quantized" and (kind == "fp8") != (form == "float-quantized"):
        raise _refused(name, ": the format is for another type of weights")
    if args.strategy not in ("tensor", "channel", "group", "block") or args.dynamic:
        raise _refused(f"{name}, strategy {args.strategy}", ": known are tensor, channel, group and block")
    if args.scale_dtype is not None and not args.scale_dtype.is_floating_point:
        raise _refused(f"{name}, scales of {args.scale_dtype}", ": scales must be plain floats")
    if packed and (args.strategy not in ("channel", "group") or args.group_size not in (None, -1, *GROUPS)):
        raise _refused(f"{name}, strategy {args.strategy}, group_size {args.group_size}", f": {_GROUPS}")
    if kind != "int4" and not args.symmetric:
        raise _refused(f"{name}, asymmetric", ": only int4 may have zero points")
    if args.strategy == "block":
        rows, group = args.block_structure
        return Storage(kind, "compressed", group, rows)
    group = args.group_size if args.strategy == "group" else 0
    layout = "packed" if packed and kind == "int8" else "compressed"
    return Storage(kind, layout, group, int(args.strategy != "tensor"), not args.symmetric)


def _are_fp8(args: Any, storage: Storage) -> bool:
    """Whether compressed-tensors' arguments of activations are those of fp8 whose scales are as coarse as ours or
    coarser: one for a row, or for each of the groups of the weights. Static ones are one for all rows.
    """
    fp8 = args.num_bits == 8 and str(args.type) == "float" and args.symmetric and isinstance(args.dynamic, bool)
    groups = args.strategy == "group" and args.group_size == storage.group == FP8_GROUP
    return fp8 and (groups or args.strategy in ("tensor", "token"))


def _with_activations(storage: Storage, allowed: bool) -> Storage:
    """For fp8 activations, where the checkpoint allows it and there is a product for it."""
    allowed = allowed and storage.kind == "fp8" and storage.group in (0, FP8_GROUP)
    if allowed:
        logger.info(
            "activations become fp8, too, where a GPU has such products, the model is bfloat16 and many rows are "
            "multiplied at once, as in prompts; elsewhere they stay as they are"
        )
    else:
        logger.info("quantized activations are ignored: products take the weights alone as quantized")
    return replace(storage, activations=allowed)


_GROUPS = f"groups must be of {', '.join(map(str, GROUPS))} or all inputs"


def _group(raw: Mapping[str, Any], method: str) -> int:
    size = whole_number(raw, "group_size", 128)
    if size not in (-1, *GROUPS):
        raise _refused(f"{method}, group_size {size}", f": {_GROUPS}")
    return max(size, 0)


def _four_bits(raw: Mapping[str, Any], method: str) -> None:
    if (bits := whole_number(raw, "bits", 4)) != 4:
        raise _refused(f"{method}, {bits} bits", ": only 4 bits are read")


def _names(raw: Mapping[str, Any], key: str) -> list[str]:
    """Names of modules, none where the key is missing or null."""
    value = raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise LadderError(f"{key!r} must be a list of names, not {str(value)[:80]!r}")
    return value


def _fp8(raw: Mapping[str, Any]) -> Quantization:
    block = raw.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= 1 << 16 for n in block):
        raise _refused(f"fp8, weight_block_size {str(block)[:80]}", ": two numbers are needed, as in [128, 128]")
    if raw.get("fmt", "e4m3") != "e4m3":
        raise _refused(f"fp8, fmt {str(raw['fmt'])[:80]}", ": only e4m3 is read")
    dynamic = raw.get("activation_scheme", "dynamic") == "dynamic"
    storage = _with_activations(Storage("fp8", "fp8", block[1], block[0]), dynamic)
    told = raw.get("modules_to_not_convert") is not None
    ignored = _names(raw, "modules_to_not_convert") if told else HEADS
    return Quantization(((("Linear",), storage),), _inside(ignored))


def _awq(raw: Mapping[str, Any]) -> Quantization:
    _four_bits(raw, "awq")
    if str(raw.get("version", "gemm")).lower() != "gemm":
        raise _refused(f"awq, version {str(raw['version'])[:80]}", ": only gemm is read")
    if raw.get("zero_point", True) is not True:
        raise _refused("awq without zero_point", ": how it is stored is not defined")
    ignored = [*HEADS, *_names(raw, "modules_to_not_convert")]
    storage = Storage("int4", "awq", _group(raw, "awq"), zero=True)
    return Quantization(((("Linear", "Conv1D"), storage),), _inside(ignored))


def _gptq(raw: Mapping[str, Any]) -> Quantization:
    _four_bits(raw, "gptq")
    if raw.get("desc_act"):
        raise _refused("gptq with act-order", ": desc_act scatters the groups over the inputs")
    # some writers name the format by the one key, some by the other; the zeros of gptq_v2 are not less by one
    forms = [raw.get("checkpoint_format"), raw.get("format"), "marlin" if raw.get("is_marlin_format") else None]
    for form in forms:
        if form not in (None, "gptq"):
            raise _refused(f"gptq, checkpoint_format {str(form)[:80]}", ": only gptq is read")
    if raw.get("dynamic"):
        raise _refused("gptq, dynamic", ": all matrices must be stored alike")
    key = "modules_in_block_to_quantize"
    inside = raw.get(key)
    if isinstance(inside, list):  # of names, or of lists of names
        inside = [name for each in inside for name in (each if isinstance(each, list) else [each])]
    names = _names({key: inside}, key)
    storage = Storage("int4", "gptq", _group(raw, "gptq"), zero=not raw.get("sym", True))
    targets = _inside(names) or ("Linear", "Conv1D")
    return Quantization(((targets, storage),), () if raw.get("lm_head") else _inside(HEADS))


READERS = {"compressed-tensors": _compressed, "fp8": _fp8, "awq": _awq, "gptq": _gptq}
