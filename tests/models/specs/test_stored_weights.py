"""What quantised weights take, beside tensors in the layout that each quantiser writes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import FineGrainedFP8Config
from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.quantizers.base import get_keys_to_not_convert

from headwise.costs.formulas.model import weight_bytes
from headwise.errors import SpecError
from headwise.models.specs import catalog, read_config, read_gguf_header, read_spec
from headwise.models.specs.gguf_header import TYPES, tensor_bytes
from headwise.models.specs.sources import bundled_gguf
from tests.meta_models import meta_model
from tests.models.checkpoints.test_gguf_architectures import MODELS, random_model, write_gguf
from tests.toy_configs import TOYS

OUT, IN = 320, 512
INT32, INT64, U8, I8 = torch.int32, torch.int64, torch.uint8, torch.int8
F8, F16, BF16, F32 = torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": IN,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 100,
}

Tensors = list[tuple[tuple[int, ...], torch.dtype]]


def nbytes(tensors: Tensors) -> int:
    return sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for shape, dtype in tensors)


def compressed(layout: str, activations: Any = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    method = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"]}
    return {**method, "config_groups": {"group_0": group}}


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
HQQ = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}}
INT8_AO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}
GROUPED = {"type": "int", "strategy": "group", "group_size": 128}
STATIC = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}

SCHEMES: dict[str, tuple[dict[str, Any], Tensors]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        [((IN // 8, OUT), INT32), ((IN // 128, OUT // 8), INT32), ((IN // 128, OUT), F16), ((IN,), INT32)],
    ),
    "gptq 3 bits, one group": (
        {"quant_method": "gptq", "bits": 3, "group_size": -1},
        [((IN * 3 // 32, OUT), INT32), ((1, OUT * 3 // 32), INT32), ((1, OUT), F16), ((IN,), INT32)],
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
        [((IN, OUT // 8), INT32), ((IN // 64, OUT // 8), INT32), ((IN // 64, OUT), F16)],
    ),
    "bitsandbytes nf4": (NF4, [((OUT * IN // 2, 1), U8), ((OUT * IN // 64,), F32), ((16,), F32)]),
    "bitsandbytes nf4, scales quantised": (
        {**NF4, "bnb_4bit_use_double_quant": True},
        [
            ((OUT * IN // 2, 1), U8),
            ((OUT * IN // 64,), U8),
            ((OUT * IN // 64 // 256,), F32),
            ((16,), F32),
            ((256,), F32),
        ],
    ),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, [((OUT, IN), I8), ((OUT,), F32)]),
    "quanto int8": (
        {"quant_method": "quanto", "weights": "int8"},
        [((OUT, IN), I8), ((OUT, 1), BF16), ((), BF16), ((), BF16)],
    ),
    "quanto float8": (
        {"quant_method": "quanto", "weights": "float8"},
        [((OUT, IN), F8), ((OUT, 1), BF16), ((), BF16), ((), BF16)],
    ),
    "quanto int4": (
        {"quant_method": "quanto", "weights": "int4"},
        [((OUT * IN // 256, 128), U8), *[((OUT * IN // 128, 1), BF16)] * 2, ((), BF16), ((), BF16)],
    ),
    "quanto int2": (
        {"quant_method": "quanto", "weights": "int2"},
        [((OUT * IN // 512, 128), U8), *[((OUT * IN // 128, 1), BF16)] * 2, ((), BF16), ((), BF16)],
    ),
    "hqq": (HQQ, [((OUT * IN // 128, 64), U8), *[((OUT * IN // 64, 1), BF16)] * 2]),
    "torchao int8": (INT8_AO, [((OUT, IN), I8), ((OUT, 1), F32), ((OUT, 1), I8)]),
    "modelopt fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        [((OUT, IN), F8), ((), F32), ((), F32)],
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head*"]},
        [((OUT, IN // 2), U8), ((OUT, IN // 16), F8), ((), F32), ((), F32)],
    ),
    "compressed-tensors w4a16": (
        compressed("pack-quantized", num_bits=4, symmetric=True, **GROUPED),
        [((OUT, IN // 8), INT32), ((OUT, IN // 128), BF16), ((2,), INT64)],
    ),
    "compressed-tensors w4a16 with zero points": (
        compressed("pack-quantized", num_bits=4, symmetric=False, **GROUPED),
        [((OUT, IN // 8), INT32), ((OUT, IN // 128), BF16), ((OUT // 8, IN // 128), INT32), ((2,), INT64)],
    ),
    "compressed-tensors w4a16 in the order of activations": (
        compressed("pack-quantized", num_bits=4, symmetric=True, actorder="group", **GROUPED),
        [((OUT, IN // 8), INT32), ((OUT, IN // 128), BF16), ((IN,), INT32), ((2,), INT64)],
    ),
    "compressed-tensors w8a8": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        [((OUT, IN), I8), ((OUT, 1), BF16)],
    ),
    "compressed-tensors fp8": (
        compressed("float-quantized", STATIC, num_bits=8, type="float", strategy="tensor"),
        [((OUT, IN), F8), ((1,), BF16), ((1,), BF16)],
    ),
    "compressed-tensors fp8 by channel": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        [((OUT, IN), F8), ((OUT, 1), BF16)],
    ),
    "compressed-tensors fp8 in blocks": (
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        [((OUT, IN), F8), ((math.ceil(OUT / 128), IN // 128), BF16)],
    ),
    "compressed-tensors nvfp4": (
        compressed("nvfp4-pack-quantized", {"num_bits": 4}, num_bits=4, type="float", strategy="tensor_group"),
        [((OUT, IN // 2), U8), ((OUT, IN // 16), F8), ((1,), F32), ((1,), F32)],
    ),
    "compressed-tensors mxfp4": (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        [((OUT, IN // 2), U8), ((OUT, IN // 32), U8)],
    ),
}
"""A ``quantization_config``, and the tensors that its quantiser (seen to do so) stores a 320 × 512 matrix in."""


@pytest.mark.parametrize("name", SCHEMES)
def test_a_matrix_takes_what_its_tensors_do(name: str) -> None:
    config, tensors = SCHEMES[name]
    stored = read_config({**LLAMA, "quantization_config": config}).stored
    assert stored is not None
    assert not stored.is_bound
    assert dict(stored.kinds[0])["q_proj"].nbytes(OUT, IN) == nbytes(tensors)
    assert stored.layers == (0, 0)
    assert stored.outside == ()  # the head


def test_a_matrix_takes_what_the_class_of_fbgemm_does() -> None:
    stored = read_config({**LLAMA, "quantization_config": {"quant_method": "fbgemm_fp8"}}).stored
    assert stored is not None
    with torch.device("meta"):
        module = FbgemmFp8Linear(IN, OUT, bias=False)
    assert dict(stored.kinds[0])["q_proj"].nbytes(OUT, IN) == sum(each.nbytes for each in module.parameters())


# --- Whole models, whose matrices transformers' own classes hold

NOT_BUILT = {
    "gpt_oss": "experts with biases",
    "lfm2_moe": "a config without an activation",
    "nemotron_h": "a config without an activation",
    "gpt2": "Conv1D is left alone",
    "falcon": "FalconLinear is left alone",
    "gemma3n_text": "a body that is not known",
}
"""Families that transformers' FP8 has no classes for."""


def fp8_bytes(config: dict[str, Any], **settings: Any) -> int:
    """Bytes of a model's tensors in transformers' FP8 classes."""
    given = FineGrainedFP8Config(**{"weight_block_size": None, **settings})
    model = meta_model(config).to(BF16)
    skipped = given.modules_to_not_convert or get_keys_to_not_convert(model)
    torch.set_default_dtype(BF16)
    try:
        replace_with_fp8_linear(model, modules_to_not_convert=skipped, quantization_config=given)
    finally:
        torch.set_default_dtype(F32)
    model.tie_weights()
    buffers = {
        name: each
        for name, each in model.named_buffers()
        if name.endswith(("e_score_correction_bias", "expert_bias"))
    }
    return sum(each.nbytes for each in {id(each): each for each in (*model.parameters(), *buffers.values())}.values())


@pytest.mark.parametrize("name", sorted(TOYS.keys() - NOT_BUILT.keys()))
def test_every_family_in_fp8(name: str) -> None:
    config = {**TOYS[name], "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    assert weight_bytes(read_config(config)).total == fp8_bytes(TOYS[name], weight_block_size=(8, 8))


LISTS = [
    ["lm_head", "model.layers.1"],
    ["lm_head", "mlp.gate_proj", "self_attn.q_proj"],
    ["lm_head", "o_proj", "k_proj"],
    ["lm_head", "model.layers.*.mlp", "model.layers.3.self_attn.o_proj"],
    ["lm_head", r"model\.layers\.[0-2]\.self_attn\.(q|k)_proj"],
    ["model.embed_tokens", "model.norm", "model.layers.0.input_layernorm"],
]


@pytest.mark.parametrize("names", LISTS)
@pytest.mark.parametrize("family", ["llama", "phi3", "deepseek_v3", "qwen3_next"])
def test_what_a_list_names_stays_wide(family: str, names: list[str]) -> None:
    settings = {"weight_block_size": [8, 8], "modules_to_not_convert": names}
    model = read_config({**TOYS[family], "quantization_config": {"quant_method": "fp8", **settings}})
    assert weight_bytes(model).total == fp8_bytes(TOYS[family], **settings)


@pytest.mark.parametrize(
    ("settings", "besides"), [({}, 4), ({"activation_scheme": "static"}, 8), ({"scale_fmt": "ue8m0"}, 4)]
)
def test_fp8_with_one_scale_a_matrix(settings: dict[str, Any], besides: int) -> None:
    """As published before blocks: a float32 scale, and one of the inputs where they are static."""
    config = {"quant_method": "fp8", "ignored_layers": ["lm_head"], **settings}
    stored = read_config({**LLAMA, "quantization_config": config}).stored
    assert stored is not None
    found = dict(stored.kinds[0])["q_proj"].nbytes(OUT, IN)
    assert found == OUT * IN + (besides if settings.get("scale_fmt") is None else 1)
    if settings.get("scale_fmt") is None:
        toy = {**TOYS["llama"], "quantization_config": {"quant_method": "fp8", **settings}}
        assert weight_bytes(read_config(toy)).total == fp8_bytes(TOYS["llama"], **settings)


def test_experts_in_mxfp4() -> None:
    """gpt-oss: blocks of 32 values in 16 bytes with a scale, biases and all else in bfloat16."""
    config = TOYS["gpt_oss"]
    settings = catalog()["gpt-oss-20b"]["config"]["quantization_config"]
    model = meta_model(config).to(BF16)
    experts, packed = 0, 0
    for name, tensor in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            number, inputs, outputs = tensor.shape
            experts += tensor.nbytes
            blocks = math.ceil(inputs / 32)
            packed += nbytes([((number, outputs, inputs // 2), U8), ((number, outputs, blocks), U8)])
    whole = sum(each.nbytes for each in model.parameters())
    found = weight_bytes(read_config({**config, "quantization_config": settings}))
    assert found.total == whole - experts + packed


@pytest.mark.parametrize(
    ("name", "config", "gib"),
    [
        ("gpt-oss-20b", {}, 12.8),  # as its model card says
        ("gpt-oss-120b", {}, 60.8),
        ("llama-3-70b", {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, 67.7),
    ],
)
def test_published_sizes(name: str, config: dict[str, Any], gib: float) -> None:
    model = read_config({**catalog()[name]["config"], **({"quantization_config": config} if config else {})})
    assert round(weight_bytes(model).total / 2**30, 1) == gib


def test_the_text_part_of_a_multimodal_model() -> None:
    """Its scheme stands outside the text part, and its names have a part more."""
    names = ["lm_head", "model.visual", "model.language_model.layers.0.mlp", "re:vision_tower.*"]
    outer = {"model_type": "llava", "text_config": TOYS["llama"]}
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    model = read_config({**outer, "quantization_config": {**settings, "modules_to_not_convert": names}})
    own = {**settings, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp"]}
    assert weight_bytes(model) == weight_bytes(read_config({**TOYS["llama"], "quantization_config": own}))
    assert model.stored is not None
    assert model.stored.notes == ()


# --- Which matrices


def formats(config: dict[str, Any], toy: str = "llama") -> list[dict[str, str]]:
    stored = read_config({**TOYS[toy], "quantization_config": config}).stored
    assert stored is not None
    return [{name: form.name for name, form in stored.kinds[kind]} for kind in stored.layers]


def test_groups_of_compressed_tensors_have_their_own_formats() -> None:
    float8 = {"num_bits": 8, "type": "float"}
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "type": "int"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head", "re:.*layers\\.0\\..*", "model.layers.1.self_attn.q_proj"],
        "config_groups": {
            "a": {"targets": ["re:.*self_attn.*"], "format": "float-quantized", "weights": float8},
            "b": {"targets": ["re:.*mlp.*"], "format": "pack-quantized", "weights": weights},
        },
    }  # fmt: skip
    first, second, third, *_ = formats(config)
    assert first == {}
    assert "q_proj" not in second
    assert second["o_proj"] == third["q_proj"] == "FP8"
    assert third["feed_forward up_proj"] == "int4 in groups of 32"


def test_gptq_by_expressions_and_by_lists() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    rules = {r"-:model\.layers\.0\.": {}, r"+:.*\.down_proj": {"bits": 8}}
    first, second, *_ = formats({**config, "dynamic": rules})
    assert first == {}
    assert second["feed_forward down_proj"] == "GPTQ 8 bits in groups of 32"
    assert second["feed_forward up_proj"] == "GPTQ 4 bits in groups of 32"
    listed = formats({**config, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert listed[0].keys() == {"q_proj", "feed_forward up_proj"}


def test_routers_and_gates_of_one_output_stay_wide() -> None:
    found = formats({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["visual"]}, "qwen2_moe")[0]
    assert "experts up_proj" in found
    assert not found.keys() & {"router router", "shared_experts shared gate"}
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*.mlp.experts*"]}
    found = formats(config, "mixtral")[0]
    assert "o_proj" in found
    assert not found.keys() & {"experts gate_proj", "experts up_proj", "experts down_proj", "router router"}


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"quant_method": "vptq"}, "quant_method = 'vptq'"),
        ({"quant_method": "gptq", "bits": 5}, "bits = 5"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size = 0"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size = [128]"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size = '128'"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head'"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups = {}"),
        (compressed("marlin-24", num_bits=4), "format = 'marlin-24'"),
        (
            compressed("float-quantized", num_bits=8, strategy="block", block_structure=[0, 1]),
            "block_structure = [0, 1]",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": [1]}, "a field has a value of another type"),
        ({"quant_method": ["fp8"]}, "quant_method = ['fp8']"),
        ("fp8", "type = 'str'"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_an_upper_bound(config: Any, note: str) -> None:
    model = read_config({**LLAMA, "quantization_config": config})
    assert model.stored is not None
    assert model.stored.is_bound
    assert note in model.stored.warnings()[0]
    assert "upper bound" in model.stored.warnings()[-1]
    assert weight_bytes(model) == weight_bytes(read_config(LLAMA))


def test_a_name_of_no_matrix_is_said() -> None:
    names = ["lm_head", "model.layers.0.mlp.gate_project", "model.layers.99.mlp", "model.norm"]
    stored = read_config(
        {**LLAMA, "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": names}}
    ).stored
    assert stored is not None
    (note,) = stored.notes
    assert "'model.layers.0.mlp.gate_project' is to be left alone, and names no matrix" in note
    assert not stored.is_bound


def test_formats_are_those_of_each_layer() -> None:
    model = read_spec("gpt-oss-20b")
    with pytest.raises(SpecError, match=r"^stored = 24: must be one for each"):
        replace(model, layers=model.layers[:1], body=None)


# --- GGUF


def test_every_type_of_ggml() -> None:
    sizes = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert sizes == TYPES


def gguf_bytes(path: Path) -> int:
    """Bytes of the tensors in a file, by the gguf package; factors of frequencies are no weights."""
    tensors = gguf.GGUFReader(path).tensors
    return sum(int(each.n_bytes) for each in tensors if not each.name.startswith("rope_"))


def test_a_real_file_takes_what_its_tensors_do() -> None:
    model, path = read_spec("smollm2-135m"), bundled_gguf()
    begin = min(each.offset for each in read_gguf_header(path).tensors.values())
    assert weight_bytes(model).total == path.stat().st_size - begin == 96_576_768
    assert model.stored is not None
    assert model.stored.scheme == "GGUF Q4_1, Q8_0, F32"


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_takes_what_its_tensors_do(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", MODELS[name][0], random_model(name))
    assert weight_bytes(read_spec(path)).total == gguf_bytes(path)
    assert all(tensor_bytes(each) for each in read_gguf_header(path).tensors.values())
