"""GGUF files of every architecture that is read, written as llama.cpp's converters write them."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import headwise
from headwise.errors import CheckpointError, HeadwiseError, SpecError
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import gguf_config, read_config, read_gguf_header, read_spec
from headwise.models.specs.gguf_config import ARCHITECTURES
from tests.closeness import assert_close

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 6.0, 9.0]}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phi3": ("phi3", "phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": 9}),
    "phi4": (
        "phi3",
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 8 / 12,
                "original_max_position_embeddings": 16,
                **FACTORS,
            },
            "original_max_position_embeddings": 16,
        },
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "gemma3, long": (
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "llama3": (
        "llama",
        "llama",
        {
            "num_hidden_layers": 2,
            "head_dim": 64,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "deepseek v2 lite": ("deepseek2", "deepseek_v2", {**MLA, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek v2": (
        "deepseek2",
        "deepseek_v2",
        {**MLA, "q_lora_rank": 10, "topk_method": "group_limited_greedy", "n_group": 2, "rope_parameters": YARN},
    ),
    "deepseek v3": ("deepseek2", "deepseek_v3", {**MLA, "q_lora_rank": 10, "norm_topk_prob": True, "n_group": 2}),
    "deepseek v3, long": ("deepseek2", "deepseek_v3", {**MLA, "q_lora_rank": 10, "rope_parameters": YARN}),
}
"""GGUF's architecture, transformers' and the fields of its config."""


def test_every_architecture_is_tested() -> None:
    of_qwen = {"qwen2", "qwen3"}  # in test_gguf_weights.py
    assert {architecture for architecture, _, _ in MODELS.values()} | of_qwen == {*ARCHITECTURES}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_read_from_gguf(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    path = write_gguf(tmp_path / "model.gguf", MODELS[name][0], model)
    ids = torch.randint(2, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_close(headwise.load(path)(ids).logits, model(ids).logits, 1e-5)
    model.save_pretrained(tmp_path / "folder")
    read, expected = read_spec(path), read_spec(tmp_path / "folder")
    assert read.layers == expected.layers
    assert read.body == expected.body


@pytest.mark.parametrize("name", ["phi3", "gemma3"])
def test_transformers_reads_the_same_tensors(name: str, tmp_path: Path) -> None:
    """So that the files of this test are GGUF as others understand it."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    path = write_gguf(tmp_path / "model.gguf", MODELS[name][0], random_model(name))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    ours = open_checkpoint(path)
    assert set(ours.tensors) == set(theirs) - ({"lm_head.weight"} if name == "gemma3" else set())
    for tensor in ours.tensors:
        assert torch.equal(ours.read(tensor), theirs[tensor]), tensor


def test_a_decoder_in_one_piece(tmp_path: Path) -> None:
    """Files from before llama.cpp computed MLA in its latent."""
    model = random_model("deepseek v3")
    path = write_gguf(tmp_path / "model.gguf", "deepseek2", model, in_parts=False)
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        assert_close(headwise.load(path)(ids).logits, model(ids).logits, 1e-5)


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "deepseek2", random_model("deepseek v3"), without="blk.1.attn_v_b")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.kv_b_proj\.weight.*cannot be made of attn_k_b"):
        open_checkpoint(path)
    path = write_gguf(
        tmp_path / "model.gguf", "deepseek2", random_model("deepseek v3"), without="blk.1.attn_kv_a_mqa"
    )
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.kv_a_proj_with_mqa\.weight.*is missing"):
        headwise.load(path)


def test_other_factors_of_frequencies_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", random_model("llama3"), factors=np.full(32, 2.0, np.float32))
    with pytest.raises(SpecError, match=r"rope_freqs\.weight = '32 factors': are not those of Llama 3's RoPE"):
        read_spec(path)


@pytest.mark.parametrize("name", MODELS)
def test_metadata_that_cannot_be_right_are_one_line(name: str, tmp_path: Path) -> None:
    """Whatever is wrong with one value, the file is read or refused by name."""
    header = read_gguf_header(write_gguf(tmp_path / "model.gguf", MODELS[name][0], random_model(name)))
    refused = 0
    for key, values in itertools.product(
        [key for key in header.metadata if key.startswith(f"{header.architecture}.")],
        [("absent",), *[(value,) for value in ("x", [1], 0, -1, 0.0, -2.5, math.nan, math.inf, 62, None, True)]],
    ):
        metadata = {**header.metadata, key: values[0]}
        if values == ("absent",):
            del metadata[key]
        try:
            read_config(gguf_config(replace(header, metadata=metadata)))
        except HeadwiseError:
            refused += 1
    assert refused > 20
    for factors in ((), (math.inf,) * 4, (math.nan,) * 4, (0.0,) * 4, (-1.0,) * 32):
        for tensor in ("rope_freqs.weight", "rope_factors_long.weight"):
            with pytest.raises(HeadwiseError):
                read_config(gguf_config(replace(header, factors={**header.factors, tensor: factors})))


def test_tensors_of_other_shapes_are_one_line(tmp_path: Path) -> None:
    model = random_model("deepseek v3")
    model.config.qk_nope_head_dim, model.config.v_head_dim = 7, 7  # of the heads that the decoder has
    path = write_gguf(tmp_path / "model.gguf", "deepseek2", model, in_parts=False)
    with pytest.raises(CheckpointError, match="is refused by transformers"):
        headwise.load(path)


def test_a_gguf_of_a_family_converts(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "phi3", random_model("phi3"))
    headwise.convert(path, tmp_path / "out", to="mha", evaluate=False)
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        assert_close(headwise.load(tmp_path / "out")(ids).logits, headwise.load(path)(ids).logits, 1e-5)


def random_model(name: str) -> Any:
    """A random model in float32; everything learned is random, norms too."""
    _, model_type, fields = MODELS[name]
    config = CONFIG_MAPPING[model_type](**{**SIZES, **fields})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
        for own, buffer in model.named_buffers():
            if own.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) / 8)
    return model


def write_gguf(
    path: Path,
    architecture: str,
    model: Any,
    *,
    in_parts: bool = True,
    without: str = "nothing",
    factors: Any = None,
) -> Path:
    """Write a model as GGUF, as llama.cpp's converter of its architecture does.

    Args:
        path: of the file.
        architecture: GGUF's name of it.
        model: the model.
        in_parts: whether MLA's decoder is stored in two parts.
        without: the beginning of the names of tensors to leave out.
        factors: ``rope_freqs.weight`` in place of the right one.
    """
    writer, config = gguf.GGUFWriter(path, architecture), model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_pad_token_id(0)  # that of transformers' class for Phi-3 is beyond this vocabulary
    tensors = {"gemma3": _gemma3, "phi3": _phi3, "llama": _llama3, "deepseek2": _deepseek2}[architecture](
        writer, config, factors
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensors += list(_stored(name, tensor, config, architecture, in_parts=in_parts))
    for name, tensor in tensors:
        if not name.startswith(without):
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _stored(
    name: str, tensor: Tensor, config: Any, architecture: str, *, in_parts: bool
) -> Iterator[tuple[str, Any]]:
    """The tensors of GGUF that one of transformers becomes."""
    names = {**NAMES, **OF_GEMMA} if architecture == "gemma3" else NAMES
    if name in {f"{own}.weight" for own in names}:
        block, inner = "", name
    else:
        _, _, layer, inner = name.split(".", 3)
        block = f"blk.{layer}."
    value = tensor.detach().float()
    own, _, ending = inner.rpartition(".")
    if inner == "mlp.experts.gate_up_proj":
        gate, up = value.chunk(2, 1)
        yield f"{block}ffn_gate_exps.weight", gate.numpy()
        yield f"{block}ffn_up_exps.weight", up.numpy()
    elif inner == "mlp.experts.down_proj":
        yield f"{block}ffn_down_exps.weight", value.numpy()
    elif ending == "e_score_correction_bias":
        yield f"{block}exp_probs_b.bias", value.numpy()
    elif own == "self_attn.kv_b_proj" and in_parts:
        heads = value.view(config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, -1)
        key, other = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        yield f"{block}attn_k_b.weight", key.transpose(1, 2).contiguous().numpy()
        yield f"{block}attn_v_b.weight", other.numpy()
    else:
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        if architecture == "llama" and own.endswith(("q_proj", "k_proj")):
            count = config.num_attention_heads if own.endswith("q_proj") else config.num_key_value_heads
            value = value.view(count, 2, -1, value.shape[1]).transpose(1, 2).reshape(value.shape)
        yield f"{block}{names[own]}.{ending}", value.numpy()


def _phi3(writer: Any, config: Any, _: Any) -> list[tuple[str, Any]]:
    rope = config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_sliding_window(config.sliding_window or 0)
    original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
    writer.add_rope_scaling_orig_ctx_len(original)
    if "long_factor" not in rope:
        return []
    scale = config.max_position_embeddings / original
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    return [
        (f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)) for kind in ("long", "short")
    ]


def _gemma3(writer: Any, config: Any, _: Any) -> list[tuple[str, Any]]:
    full = config.rope_parameters["full_attention"]
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    return []


def _llama3(writer: Any, config: Any, factors: Any) -> list[tuple[str, Any]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2).double() / config.head_dim)
    right = (plain / scaled.double()).float().numpy()
    return [("rope_freqs.weight", right if factors is None else factors)]


def _deepseek2(writer: Any, config: Any, _: Any) -> list[tuple[str, Any]]:
    is_v3, rope = config.model_type == "deepseek_v3", config.rope_parameters
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if is_v3 else kinds.SOFTMAX)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    return []
