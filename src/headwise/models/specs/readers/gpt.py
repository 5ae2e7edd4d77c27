"""GPT-2, other older decoders, encoders like BERT, and Whisper's decoder, each with its own field names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.grouped import GroupedSpec, grouped_bias
from headwise.models.specs.model import BodySpec
from headwise.models.specs.readers.body import dense_rule, read_body
from headwise.models.specs.readers.fields import (
    Config,
    MissingFieldError,
    Reader,
    check_number,
    divided_head_dim,
    read_flag,
    read_integer,
    read_num_layers,
    read_optional_integer,
    refuse_value,
)
from headwise.models.specs.readers.positions import read_rope


def _read_heads(
    config: Config, hidden: tuple[str, ...] = ("hidden_size",), heads: tuple[str, ...] = ("num_attention_heads",)
) -> GroupedSpec:
    """Read MHA without rotation and biases, whose heads divide the hidden size among them.

    Args:
        config: the config.
        hidden: the names that the hidden size may have.
        heads: the names that the number of heads may have.
    """
    E, H = read_integer(config, *hidden), read_integer(config, *heads)
    return GroupedSpec(hidden_size=E, num_heads=H, num_kv_heads=H, head_dim=divided_head_dim(E, H))


def _gpt2_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """GPT-2, and GPT-BigCode with its ``multi_query``."""
    if read_flag(config, "add_cross_attention", False):
        rule = "is not understood: its attention to another sequence is not read"
        raise SpecError("add_cross_attention", True, rule)
    plain = _read_heads(config, ("n_embd", "hidden_size"), ("n_head", "num_attention_heads"))
    multi_query = config["model_type"] == "gpt_bigcode" and read_flag(config, "multi_query", True)
    plain = replace(plain, num_kv_heads=1 if multi_query else plain.num_heads, bias=grouped_bias(True))
    scaled = read_flag(config, "scale_attn_weights", True)
    by_layer = config["model_type"] == "gpt2" and read_flag(config, "scale_attn_by_inverse_layer_idx", False)
    layers = read_num_layers(config, "n_layer", "num_hidden_layers")
    scale = plain.head_dim**-0.5 if scaled else 1.0
    if by_layer:
        return tuple(replace(plain, softmax_scale=scale / (index + 1)) for index in range(layers))
    return (plain if scaled else replace(plain, softmax_scale=scale),) * layers


def _gpt2_body(config: Config, layers: int) -> BodySpec:
    hidden_size = read_integer(config, "n_embd", "hidden_size")
    sizes = {"n_inner": read_optional_integer(config, "n_inner") or 4 * hidden_size, "hidden_size": hidden_size}
    positions = read_integer(config, "n_positions", "max_position_embeddings")
    rule = dense_rule("n_inner", gated=False, bias=True)
    return read_body(rule, {**config, **sizes}, layers, norm_vectors=2, positions=positions, tied=True)


def _falcon_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Falcon; without the "new decoder architecture", ``multi_query`` means one key–value head."""
    plain = _read_heads(config, ("hidden_size", "n_embed"), ("num_attention_heads", "n_head"))
    if _falcon_is_new(config):
        num_kv_heads = read_optional_integer(config, "num_kv_heads", "n_head_kv") or plain.num_heads
    else:
        num_kv_heads = 1 if read_flag(config, "multi_query", True) else plain.num_heads
    bias = grouped_bias(read_flag(config, "bias", False))
    rope = None if read_flag(config, "alibi", False) else read_rope(config, plain.head_dim)
    return (replace(plain, num_kv_heads=num_kv_heads, bias=bias, rope=rope),) * read_num_layers(config)


def _falcon_is_new(config: Config) -> bool:
    # The first 40B file is older than the flag, and recognised by its model type.
    return read_flag(config, "new_decoder_architecture", config["model_type"] == "RefinedWeb")


def _falcon_body(config: Config, layers: int) -> BodySpec:
    hidden_size = read_integer(config, "hidden_size", "n_embed")
    width = read_optional_integer(config, "ffn_hidden_size") or 4 * hidden_size
    sizes = {**config, "hidden_size": hidden_size, "ffn_hidden_size": width}
    norms = 2
    if read_flag(config, "parallel_attn", True):
        norms = read_optional_integer(config, "num_ln_in_parallel_attn") or (2 if _falcon_is_new(config) else 1)
    rule = dense_rule("ffn_hidden_size", gated=False, bias="bias")
    return read_body(rule, sizes, layers, norms=norms, norm_vectors=2, tied=True)


def _opt_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """OPT: learned positions, and a bias in every projection."""
    bias = grouped_bias(read_flag(config, "enable_bias", True))
    return (replace(_read_heads(config), bias=bias),) * read_num_layers(config)


def _opt_body(config: Config, layers: int) -> BodySpec:
    for name, usual in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False)):
        if read_flag(config, name, usual) is not usual:
            raise MissingFieldError(name, not usual, "is not supported in a body")
    projected = read_optional_integer(config, "word_embed_proj_dim")
    if projected not in (None, read_integer(config, "hidden_size")):
        raise MissingFieldError("word_embed_proj_dim", projected, "is not supported in a body")
    vectors = 2 if read_flag(config, "layer_norm_elementwise_affine", True) else 0
    # Two rows more than positions: the first token is at position 2.
    positions = read_integer(config, "max_position_embeddings") + 2
    rule = dense_rule("ffn_dim", gated=False, bias="enable_bias", bias_absent=True)
    return read_body(rule, config, layers, norm_vectors=vectors, positions=positions, tied=True)


def _gpt_neox_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """GPT-NeoX and Pythia: by default a quarter of each head is rotated."""
    plain = _read_heads(config)
    # Names of its own take the place of the usual ones, which its class does not read.
    named = {
        "rope_theta": check_number("rotary_emb_base", config.get("rotary_emb_base", 10000.0)),
        "partial_rotary_factor": check_number("rotary_pct", config.get("rotary_pct", 0.25)),
    }
    rope = read_rope({**config, **named}, plain.head_dim, fraction=0.25)
    bias = grouped_bias(read_flag(config, "attention_bias", True))
    return (replace(plain, bias=bias, rope=rope),) * read_num_layers(config)


def _phi_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Phi-1 to Phi-2: half of each head is rotated, and every projection has a bias."""
    if read_flag(config, "qk_layernorm", False):
        raise SpecError("qk_layernorm", True, "is not understood in a phi model")
    plain = _read_heads(config)
    num_kv_heads = read_optional_integer(config, "num_key_value_heads") or plain.num_heads
    rope = read_rope(config, plain.head_dim, fraction=0.5)
    layer = replace(plain, num_kv_heads=num_kv_heads, bias=grouped_bias(True), rope=rope)
    return (layer,) * read_num_layers(config)


def _bert_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Bidirectional encoders, in which every token sees every other and nothing is cached."""
    if read_flag(config, "is_decoder", False):
        raise SpecError("is_decoder", True, f"{config['model_type']} as a decoder is not understood")
    rule = "is not understood: relative positions add weights and scores of their own"
    refuse_value(config, "position_embedding_type", unless=("absolute",), rule=rule)
    plain = _read_heads(config, ("hidden_size", "dim"), ("num_attention_heads", "n_heads"))
    return (replace(plain, bias=grouped_bias(True), is_causal=False),) * read_num_layers(config)


def _whisper_layers(config: Config, *, is_causal: bool = True) -> tuple[AttentionSpec, ...]:
    """The attention of each decoder layer to past tokens, or of the same sizes to the encoder's output.

    Every projection but the keys' has a bias.
    """
    plain = _read_heads(config, ("d_model",), ("decoder_attention_heads",))
    layer = replace(plain, bias=("q_proj", "v_proj", "o_proj"), is_causal=is_causal)
    return (layer,) * read_num_layers(config, "decoder_layers")


_DENSE = dense_rule(gated=False, bias=True)
_GPT2, _FALCON, _BERT = Reader(_gpt2_layers, _gpt2_body), Reader(_falcon_layers, _falcon_body), Reader(_bert_layers)
READERS = {
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "falcon": _FALCON,
    "RefinedWeb": _FALCON,
    "RefinedWebModel": _FALCON,
    "opt": Reader(_opt_layers, _opt_body),
    "gpt_neox": Reader(_gpt_neox_layers, partial(read_body, _DENSE, norm_vectors=2)),
    "phi": Reader(_phi_layers, partial(read_body, _DENSE, norms=1, norm_vectors=2, head_bias=True)),
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": _BERT,
    "whisper": Reader(_whisper_layers, cross=partial(_whisper_layers, is_causal=False)),
}
