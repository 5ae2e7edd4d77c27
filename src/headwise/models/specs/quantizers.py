"""Read ``quantization_config``: the format of every matrix of a model whose weights are quantised.

Each scheme is a list of rules, which say which matrices have which format. The bytes are those of the tensors that
its quantiser writes. Weights that a quantiser skips (embeddings, norms, routers) have no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.matrix_names import (
    ROUTER,
    SHARED_GATE,
    Module,
    Patterns,
    by_boundary,
    by_name,
    by_wildcard,
    modules,
)
from headwise.models.specs.model import FeedForwardSpec, MatrixFormat, StoredWeights

Config = Mapping[str, Any]
Matcher = Callable[[Module], bool]
Rule = tuple[Matcher, MatrixFormat | None]
"""Which matrices a rule is for, and their format; None for matrices that stay in the dtype. Of several rules that
match a matrix, the first holds."""

_OUTSIDE = re.compile(
    r"vis|audio|speech|project(or|ion)|mtp|nextn|norm|emb|wte|wpe|rotary|conv|bias|A_log|sinks|drop"
)
"""Parts of names of weights that are not counted, such as other towers; a list of matrices to skip may name them."""


class _UnknownError(Exception):
    """A field of a ``quantization_config`` has a value whose bytes are not known."""

    def __init__(self, name: str, value: object) -> None:
        super().__init__(f"quantization_config: {name} = {value!r} is not known")


@dataclass
class _Scheme:
    """The content of a ``quantization_config``: its rules in order, and the matrices that it says to skip."""

    name: str
    rules: list[Rule]
    skipped: Patterns | None = None
    unknown: list[str] = field(default_factory=list)

    def of(self, module: Module) -> MatrixFormat | None:
        """The format of a matrix."""
        return next((form for matches, form in self.rules if matches(module)), None)


def read_stored(
    config: Config, model_type: str, layers: Sequence[AttentionSpec], networks: Sequence[FeedForwardSpec | None]
) -> StoredWeights | None:
    """The formats of a model's matrices; None where the config has no ``quantization_config``.

    For example ``read_stored({"quantization_config": {"quant_method": "mxfp4"}}, "gpt_oss", (), ()).scheme`` is
    ``"mxfp4"``.

    An unknown format is not an error: its matrices count in the dtype, and a note says so.

    Args:
        config: the model's parsed ``config.json``.
        model_type: transformers' name of the architecture, that of the text part in a multimodal model.
        layers: the attention of each layer.
        networks: the feed-forward network of each layer; None where a layer has none.
    """
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    try:
        scheme = _read_scheme(given, config)
    except _UnknownError as error:
        scheme = _Scheme("not known", [], unknown=[str(error)])
    except (AttributeError, TypeError):
        scheme = _Scheme("not known", [], unknown=["quantization_config: a field has a value of another type"])
    every = list(modules(model_type, layers, networks))
    inside: list[dict[str, MatrixFormat]] = [{} for _ in layers]
    outside: dict[str, MatrixFormat] = {}
    for module in every:
        if (form := scheme.of(module)) is not None:
            (outside if module.layer is None else inside[module.layer])[module.stage] = form
    notes = (*scheme.unknown, *_skip_notes(scheme, every, len(layers)))
    stored = StoredWeights.of_layers(scheme.name, inside, outside)
    return replace(stored, is_bound=bool(scheme.unknown), notes=notes)


def _skip_notes(scheme: _Scheme, every: Sequence[Module], num_layers: int) -> Iterator[str]:
    """A note for each pattern of matrices to skip that matches none of those that are counted."""
    for pattern in scheme.skipped.unmatched(every) if scheme.skipped else ():
        layer = re.search(r"\.(\d+)(\.|$)", pattern)
        is_outside = _OUTSIDE.search(pattern) or (layer is not None and int(layer[1]) >= num_layers)
        if not is_outside:
            yield f"quantization_config: {pattern!r} is to be left alone, and names no matrix that is counted"


def _read_scheme(given: object, config: Config) -> _Scheme:
    if not isinstance(given, Mapping):
        raise _UnknownError("type", type(given).__name__)
    method = given.get("quant_method")
    if method is None and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _METHODS:
        raise _UnknownError("quant_method", method)
    return _METHODS[method](given, config)


# --- Rules that several schemes share


def _is_counted(module: Module) -> bool:
    return module.stage != ROUTER


def _is_head(module: Module) -> bool:
    return module.layer is None


def _is_narrow(module: Module) -> bool:
    """Whether a matrix has a single output, which packed formats cannot hold."""
    return module.stage == SHARED_GATE


def _first_list(given: Config, *names: str) -> list[str] | None:
    """The first of several fields that is present, a list of names; None where all are absent."""
    for name in names:
        if (value := given.get(name)) is not None:
            if not isinstance(value, list) or any(not isinstance(one, str) for one in value):
                raise _UnknownError(name, value)
            return value
    return None


def _by_transformers(
    name: str, given: Config, form: MatrixFormat, *lists: str, first: Sequence[Rule] = ()
) -> _Scheme:
    """A scheme of all matrices but those that a list names; where there is no list, all but the head."""
    listed = _first_list(given, *(lists or ("modules_to_not_convert",)))
    skipped = None if listed is None else by_boundary(listed)
    return _Scheme(name, [(skipped or _is_head, None), *first, (_is_counted, form)], skipped)


def _known_number(given: Config, name: str, known: Sequence[int], absent: int | None = None) -> int:
    value = given.get(name, absent)
    if type(value) is not int or value not in known:
        raise _UnknownError(name, value)
    return value


def _group_size(given: Config, name: str, absent: int) -> int | None:
    """The inputs that share a scale; None for all, which is spelled -1."""
    value = given.get(name, absent)
    if type(value) is not int or not (value == -1 or 0 < value < 2**20):
        raise _UnknownError(name, value)
    return None if value == -1 else value


def _block_sizes(name: str, value: object) -> tuple[int, int]:
    """Outputs and inputs of a block."""
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
    if not is_pair:
        raise _UnknownError(name, value)
    assert isinstance(value, list)
    return value[0], value[1]


def _in_groups(group: int | None) -> str:
    return "" if group is None else f" in groups of {group}"


# --- The schemes


def _fp8(given: Config, config: Config) -> _Scheme:
    block = given.get("weight_block_size")
    sizes = (None, None) if block is None else _block_sizes("weight_block_size", block)
    scale = 8 if given.get("scale_fmt") == "ue8m0" else 32
    static = 4 if given.get("activation_scheme") == "static" else 0
    name = "FP8" if block is None else f"FP8 {sizes[0]} × {sizes[1]}"
    form = MatrixFormat(name=name, bits=8, block=sizes, scale_bits=scale, matrix_bytes=static)
    experts: list[Rule] = []
    if "fp4" in (given.get("expert_dtype"), config.get("expert_dtype")):
        fp4 = MatrixFormat(name="FP4", bits=4, block=(1, 32), scale_bits=scale, matrix_bytes=static)
        experts, name = [(lambda module: module.is_expert, fp4)], f"{name}, experts FP4"
    return _by_transformers(name, given, form, "modules_to_not_convert", "ignored_layers", first=experts)


def _mxfp4(given: Config, config: Config) -> _Scheme:
    form = MatrixFormat(name="mxfp4", bits=4, block=(1, 32), scale_bits=8)
    skipped = by_boundary(_first_list(given, "modules_to_not_convert") or [])
    rules: list[Rule] = [(skipped, None), (lambda module: module.is_expert, form)]
    return _Scheme("mxfp4", rules, skipped)


def _fbgemm(given: Config, config: Config) -> _Scheme:
    form = MatrixFormat(name="FP8", bits=8, block=(1, None), scale_bits=32)
    return _by_transformers("FP8, a scale for each output", given, form)


def _bitsandbytes(given: Config, config: Config) -> _Scheme:
    if given.get("load_in_8bit"):
        form = MatrixFormat(name="int8", bits=8, block=(1, None), scale_bits=32)
        return _by_transformers("bitsandbytes int8", given, form, "llm_int8_skip_modules")
    if not given.get("load_in_4bit"):
        raise _UnknownError("load_in_4bit", given.get("load_in_4bit"))
    kind = given.get("bnb_4bit_quant_type", "fp4")
    # Scales of 64 values are float32, or 8 bits and a float32 for 256 of them, with a table of their values.
    twice = bool(given.get("bnb_4bit_use_double_quant"))
    scale, tables = (8 + 32 / 256, 64 + 1024) if twice else (32, 64)
    form = MatrixFormat(name=str(kind), bits=4, block=(1, 64), scale_bits=scale, matrix_bytes=tables)
    return _by_transformers(f"bitsandbytes {kind}", given, form, "llm_int8_skip_modules")


def _gptq(given: Config, config: Config) -> _Scheme:
    def form_of(settings: Config) -> MatrixFormat:
        bits, group = _known_number(settings, "bits", (2, 3, 4, 8)), _group_size(settings, "group_size", 128)
        layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
        if layout not in ("gptq", "gptq_v2", "marlin"):
            raise _UnknownError("checkpoint_format", layout)
        name = f"GPTQ {bits} bits{_in_groups(group)}"
        if layout == "marlin":
            return MatrixFormat(name=name, bits=bits, block=(1, group), scale_bits=16)
        return MatrixFormat(name=name, bits=bits, block=(1, group), scale_bits=16 + bits, input_bits=32)

    form = form_of(given)
    rules: list[Rule] = [(_is_narrow, None)]
    if given.get("lm_head") is not True:
        rules.append((_is_head, None))
    for pattern, settings in (given.get("dynamic") or {}).items():
        sign, expression = pattern[:2], pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
        own = None if sign == "-:" else form_of({**given, **settings})
        rules.append((by_name([f"re:{expression}"]), own))
    if (inside := given.get("modules_in_block_to_quantize")) is not None:
        listed = [name for part in inside for name in (part if isinstance(part, list) else [part])]
        rules += [(by_boundary(listed), form), (_is_counted, None)]
    return _Scheme(form.name, [*rules, (_is_counted, form)])


def _awq(given: Config, config: Config) -> _Scheme:
    bits = _known_number(given, "bits" if "bits" in given else "w_bit", (4, 8), 4)
    group = _group_size(given, "group_size" if "group_size" in given else "q_group_size", 128)
    form = MatrixFormat(name=f"AWQ {bits} bits{_in_groups(group)}", bits=bits, block=(1, group), scale_bits=16 + bits)
    skipped = by_boundary(_first_list(given, "modules_to_not_convert") or [])
    rules: list[Rule] = [(_is_narrow, None), (_is_head, None), (skipped, None), (_is_counted, form)]
    return _Scheme(form.name, rules, skipped)


def _quanto(given: Config, config: Config) -> _Scheme:
    weights = given.get("weights", "int8")
    if weights not in ("int8", "float8", "int4", "int2"):
        raise _UnknownError("weights", weights)
    if weights in ("int8", "float8"):
        form = MatrixFormat(name=weights, bits=8, block=(1, None), scale_bits=16, matrix_bytes=4)
    else:
        bits = int(weights[-1])
        form = MatrixFormat(name=weights, bits=bits, block=(1, 128), scale_bits=32, matrix_bytes=4)
    return _by_transformers(f"quanto {weights}", given, form)


def _hqq(given: Config, config: Config) -> _Scheme:
    own = given.get("quant_config")
    settings = own.get("weight_quant_params") if isinstance(own, Mapping) else None
    if not isinstance(settings, Mapping):  # settings for each layer by its name
        raise _UnknownError("quant_config", own)
    bits, group = _known_number(settings, "nbits", (1, 2, 3, 4, 8)), _group_size(settings, "group_size", 64)
    packed = 3.2 if bits == 3 else bits  # ten values of 3 bits in an int32
    name = f"HQQ {bits} bits{_in_groups(group)}"
    form = MatrixFormat(name=name, bits=packed, block=(1, group), scale_bits=32)
    skipped = _first_list(given, "skip_modules")
    listed = ["lm_head"] if skipped is None else skipped
    return _by_transformers(name, {"skip_modules": listed}, form, "skip_modules")


def _torchao(given: Config, config: Config) -> _Scheme:
    kind = given.get("quant_type")
    kind = kind.get("default", kind) if isinstance(kind, Mapping) else kind
    kind = kind.get("_type") if isinstance(kind, Mapping) else kind
    if kind in ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"):
        form = MatrixFormat(name="int8", bits=8, block=(1, None), scale_bits=32 + 8)
    elif kind == "Float8WeightOnlyConfig":
        form = MatrixFormat(name="FP8", bits=8, block=(1, None), scale_bits=32)
    else:
        raise _UnknownError("quant_type", kind)
    if given.get("include_input_output_embeddings"):
        raise _UnknownError("include_input_output_embeddings", True)
    return _by_transformers(f"torchao {form.name}", given, form)


def _modelopt(given: Config, config: Config) -> _Scheme:
    kind = given.get("quant_algo")
    if kind == "FP8":
        form = MatrixFormat(name="FP8", bits=8, matrix_bytes=8)
    elif kind == "NVFP4":
        form = MatrixFormat(name="nvfp4", bits=4, block=(1, 16), scale_bits=8, matrix_bytes=8)
    else:
        raise _UnknownError("quant_algo", kind)
    skipped = by_wildcard(_first_list(given, "ignore", "exclude_modules") or [])
    return _Scheme(f"ModelOpt {form.name}", [(skipped, None), (_is_counted, form)], skipped)


# --- compressed-tensors, whose groups of matrices each have a format

_PACKED, _WHOLE = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")
_MICROSCALED = {"nvfp4-pack-quantized": (4, 16), "mxfp4-pack-quantized": (4, 32), "mxfp8-quantized": (8, 32)}
"""Bits of a value, and the inputs that share a scale of 8 bits."""


def _compressed(given: Config, config: Config) -> _Scheme:
    groups, ignored = given.get("config_groups"), by_name(_first_list(given, "ignore") or [])
    if not isinstance(groups, Mapping) or not groups:
        raise _UnknownError("config_groups", groups)
    sparsity = given.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise _UnknownError("sparsity_config.format", sparsity.get("format"))
    scheme = _Scheme("", [(ignored, None)], ignored)
    names = []
    for group in groups.values():
        try:
            form = _group_format(group, group.get("format") or given.get("format"))
            scheme.rules.append((_targets(group), form))
            names += [] if form is None else [form.name]
        except _UnknownError as error:
            scheme.unknown.append(str(error))
    scheme.name = ", ".join(dict.fromkeys(names)) or "compressed-tensors"
    return scheme


def _targets(group: Config) -> Matcher:
    """The matrices of a group; class names other than that of all linear layers are not known."""
    targets = _first_list(group, "targets") or []
    if "Linear" in targets:
        return _is_counted
    if not targets or any(target.isidentifier() and target != "lm_head" for target in targets):
        raise _UnknownError("targets", targets)
    named = by_name(targets)
    return lambda module: _is_counted(module) and named(module)


def _group_format(group: object, layout: object) -> MatrixFormat | None:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if weights is None or layout == "dense":
        return None
    assert isinstance(group, Mapping)
    activations = group.get("input_activations")
    bits, kind = _known_number(weights, "num_bits", range(1, 9)), weights.get("type", "int")
    if layout in _MICROSCALED:
        bits, inputs = _MICROSCALED[str(layout)]
        # nvfp4 has a float32 besides, and another of its inputs where they are quantised.
        besides = (4 if activations is None else 8) if str(layout).startswith("nvfp4") else 0
        name = str(layout).partition("-")[0]
        return MatrixFormat(name=name, bits=bits, block=(1, inputs), scale_bits=8, matrix_bytes=besides)
    if layout not in (_PACKED, *_WHOLE):
        raise _UnknownError("format", layout)
    is_packed = layout == _PACKED
    block = _scale_block(weights)
    zero = 0 if weights.get("symmetric", True) else bits if is_packed else 8
    is_static = isinstance(activations, Mapping) and activations.get("dynamic") is False
    label = f"{'FP' if kind == 'float' else 'int'}{bits}"
    size = block[1]
    where = "" if block[0] is None else f" {block[0]} × {size}" if block[0] > 1 else _in_groups(size)
    return MatrixFormat(
        name=f"{label}{where}",
        bits=bits if is_packed else 8,
        block=block,
        scale_bits=16 + zero,
        input_bits=32 if weights.get("actorder") == "group" else 0,
        matrix_bytes=(16 if is_packed else 0) + (2 if is_static else 0),
    )


def _scale_block(weights: Config) -> tuple[int | None, int | None]:
    """The outputs and inputs that share a scale."""
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy in ("group", "tensor_group"):
        return 1, _group_size(weights, "group_size", -1)
    if strategy != "block":
        raise _UnknownError("strategy", strategy)
    return _block_sizes("block_structure", weights.get("block_structure"))


_METHODS: dict[str, Callable[[Config, Config], _Scheme]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "fbgemm_fp8": _fbgemm,
    "bitsandbytes": _bitsandbytes,
    "gptq": _gptq,
    "awq": _awq,
    "quanto": _quanto,
    "hqq": _hqq,
    "torchao": _torchao,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
}
