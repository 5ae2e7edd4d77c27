"""GPT-2, other older decoders, encoders like BERT, and Whisper's decoder, each with its own field names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.grouped import GroupedSpec, grouped_bias
from headwise.models.specs.model import BodySpec
from headwise.models.specs.readers.body import dense_rule, read_body
from headwise.models.specs.readers.fields import Config, MissingFieldError, Reader, check_number, divided_head_dim
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
    E, H = config.integer(*hidden), config.integer(*heads)
    return GroupedSpec(hidden_size=E, num_heads=H, num_kv_heads=H, head_dim=divided_head_dim(E, H))


def _gpt2_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """GPT-2, and GPT-BigCode with its ``multi_query``."""
    if config.flag("add_cross_attention", False):
        rule = "is not understood: its attention to another sequence is not read"
        raise SpecError("add_cross_attention", True, rule)
    plain = _read_heads(config, ("n_embd", "hidden_size"), ("n_head", "num_attention_heads"))
    multi_query = config["model_type"] == "gpt_bigcode" and config.flag("multi_query", True)
    plain = replace(plain, num_kv_heads=1 if multi_query else plain.num_heads, bias=grouped_bias(True))
    scaled = config.flag("scale_attn_weights", True)
    by_layer = config["model_type"] == "gpt2" and config.flag("scale_attn_by_inverse_layer_idx", False)
    layers = config.num_layers("n_layer", "num_hidden_layers")
    scale = plain.head_dim**-0.5 if scaled else 1.0
    if by_layer:
        return tuple(replace(plain, softmax_scale=scale / (index + 1)) for index in range(layers))
    return (plain if scaled else replace(plain, softmax_scale=scale),) * layers


def _gpt2_body(config: Config, layers: int) -> BodySpec:
    hidden_size = config.integer("n_embd", "hidden_size")
    sizes = {"n_inner": config.optional_integer("n_inner") or 4 * hidden_size, "hidden_size": hidden_size}
    positions = config.integer("n_positions", "max_position_embeddings")
    rule = dense_rule("n_inner", gated=False, bias=True)
    return read_body(rule, Config(config, **sizes), layers, norm_vectors=2, positions=positions, tied=True)


def _falcon_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Falcon; without the "new decoder architecture", ``multi_query`` means one key–value head."""
    plain = _read_heads(config, ("hidden_size", "n_embed"), ("num_attention_heads", "n_head"))
    if _falcon_is_new(config):
        num_kv_heads = config.optional_integer("num_kv_heads", "n_head_kv") or plain.num_heads
    else:
        num_kv_heads = 1 if config.flag("multi_query", True) else plain.num_heads
    bias = grouped_bias(config.flag("bias", False))
    rope = None if config.flag("alibi", False) else read_rope(config, plain.head_dim)
    return (replace(plain, num_kv_heads=num_kv_heads, bias=bias, rope=rope),) * config.num_layers()


def _falcon_is_new(config: Config) -> bool:
    # The first 40B file is older than the flag, and recognised by its model type.
    return config.flag("new_decoder_architecture", config["model_type"] == "RefinedWeb")


def _falcon_body(config: Config, layers: int) -> BodySpec:
    hidden_size = config.integer("hidden_size", "n_embed")
    width = config.optional_integer("ffn_hidden_size") or 4 * hidden_size
    sizes = Config(config, hidden_size=hidden_size, ffn_hidden_size=width)
    norms = 2
    if config.flag("parallel_attn", True):
        norms = config.optional_integer("num_ln_in_parallel_attn") or (2 if _falcon_is_new(config) else 1)
    rule = dense_rule("ffn_hidden_size", gated=False, bias="bias")
    return read_body(rule, sizes, layers, norms=norms, norm_vectors=2, tied=True)


def _opt_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """OPT: learned positions, and a bias in every projection."""
    bias = grouped_bias(config.flag("enable_bias", True))
    return (replace(_read_heads(config), bias=bias),) * config.num_layers()


def _opt_body(config: Config, layers: int) -> BodySpec:
    for name, usual in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False)):
        if config.flag(name, usual) is not usual:
            raise MissingFieldError(name, not usual, "is not supported in a body")
    projected = config.optional_integer("word_embed_proj_dim")
    if projected not in (None, config.integer("hidden_size")):
        raise MissingFieldError("word_embed_proj_dim", projected, "is not supported in a body")
    vectors = 2 if config.flag("layer_norm_elementwise_affine", True) else 0
    # Two rows more than positions: the first token is at position 2.
    positions = config.integer("max_position_embeddings") + 2
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
    rope = read_rope(Config(config, **named), plain.head_dim, fraction=0.25)
    bias = grouped_bias(config.flag("attention_bias", True))
    return (replace(plain, bias=bias, rope=rope),) * config.num_layers()


def _phi_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Phi-1 to Phi-2: half of each head is rotated, and every projection has a bias."""
    if config.flag("qk_layernorm", False):
        raise SpecError("qk_layernorm", True, "is not understood in a phi model")
    plain = _read_heads(config)
    num_kv_heads = config.optional_integer("num_key_value_heads") or plain.num_heads
    rope = read_rope(config, plain.head_dim, fraction=0.5)
    layer = replace(plain, num_kv_heads=num_kv_heads, bias=grouped_bias(True), rope=rope)
    return (layer,) * config.num_layers()


def _bert_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Bidirectional encoders, in which every token sees every other and nothing is cached."""
    if config.flag("is_decoder", False):
        raise SpecError("is_decoder", True, f"{config['model_type']} as a decoder is not understood")
    rule = "is not understood: relative positions add weights and scores of their own"
    config.refuse("position_embedding_type", unless=("absolute",), rule=rule)
    plain = _read_heads(config, ("hidden_size", "dim"), ("num_attention_heads", "n_heads"))
    return (replace(plain, bias=grouped_bias(True), is_causal=False),) * config.num_layers()


def _whisper_layers(config: Config, *, is_causal: bool = True) -> tuple[AttentionSpec, ...]:
    """The attention of each decoder layer to past tokens, or of the same sizes to the encoder's output.

    Every projection but the keys' has a bias.
    """
    plain = _read_heads(config, ("d_model",), ("decoder_attention_heads",))
    layer = replace(plain, bias=("q_proj", "v_proj", "o_proj"), is_causal=is_causal)
    return (layer,) * config.num_layers("decoder_layers")


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
