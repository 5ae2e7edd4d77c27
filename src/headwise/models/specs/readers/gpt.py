"""GPT-2, other older decoders, and encoders like BERT, each with its own field names."""

from __future__ import annotations

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


def _gpt2_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """GPT-2, and GPT-BigCode with its ``multi_query``."""
    if read_flag(config, "add_cross_attention", False):
        raise SpecError(
            "add_cross_attention", True, "is not understood: its attention to another sequence is not read"
        )
    hidden_size = read_integer(config, "n_embd", "hidden_size")
    num_heads = read_integer(config, "n_head", "num_attention_heads")
    multi_query = config["model_type"] == "gpt_bigcode" and read_flag(config, "multi_query", True)
    head_dim = divided_head_dim(hidden_size, num_heads)
    scaled = read_flag(config, "scale_attn_weights", True)
    by_layer = config["model_type"] == "gpt2" and read_flag(config, "scale_attn_by_inverse_layer_idx", False)

    def layer(index: int) -> GroupedSpec:
        scale = (head_dim**-0.5 if scaled else 1.0) / (index + 1 if by_layer else 1)
        return GroupedSpec(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=1 if multi_query else num_heads,
            head_dim=head_dim,
            bias=grouped_bias(True),
            softmax_scale=None if scaled and not by_layer else scale,
        )

    layers = read_num_layers(config, "n_layer", "num_hidden_layers")
    return tuple(map(layer, range(layers))) if by_layer else (layer(0),) * layers


def _gpt2_body(config: Config, layers: int) -> BodySpec:
    hidden_size = read_integer(config, "n_embd", "hidden_size")
    width = read_optional_integer(config, "n_inner") or 4 * hidden_size
    sizes = {**config, "hidden_size": hidden_size, "n_inner": width, "bias": True}
    positions = read_integer(config, "n_positions", "max_position_embeddings")
    networks = dense_rule("n_inner", gated=False, bias="bias")(sizes, layers)
    return read_body(config, networks, norm_vectors=2, positions=positions, tied=True)


def _falcon_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Falcon; without the "new decoder architecture", ``multi_query`` means one key–value head."""
    hidden_size = read_integer(config, "hidden_size", "n_embed")
    num_heads = read_integer(config, "num_attention_heads", "n_head")
    if _falcon_is_new(config):
        num_kv_heads = read_optional_integer(config, "num_kv_heads", "n_head_kv") or num_heads
    else:
        num_kv_heads = 1 if read_flag(config, "multi_query", True) else num_heads
    head_dim = divided_head_dim(hidden_size, num_heads)
    spec = GroupedSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=grouped_bias(read_flag(config, "bias", False)),
        rope=None if read_flag(config, "alibi", False) else read_rope(config, head_dim),
    )
    return (spec,) * read_num_layers(config)


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
    networks = dense_rule("ffn_hidden_size", gated=False, bias="bias")(sizes, layers)
    return read_body(config, networks, norms=norms, norm_vectors=2, tied=True)


def _opt_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """OPT: learned positions, and a bias in every projection."""
    spec = _plain(config, bias=read_flag(config, "enable_bias", True))
    return (spec,) * read_num_layers(config)


def _opt_body(config: Config, layers: int) -> BodySpec:
    for name, usual in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False)):
        if read_flag(config, name, usual) is not usual:
            raise MissingFieldError(name, not usual, "is not supported in a body")
    if read_optional_integer(config, "word_embed_proj_dim", absent=None) not in (
        None,
        read_integer(config, "hidden_size"),
    ):
        raise MissingFieldError("word_embed_proj_dim", config["word_embed_proj_dim"], "is not supported in a body")
    networks = dense_rule("ffn_dim", gated=False, bias="enable_bias", bias_absent=True)(config, layers)
    vectors = 2 if read_flag(config, "layer_norm_elementwise_affine", True) else 0
    # Two rows more than positions: the first token is at position 2.
    positions = read_integer(config, "max_position_embeddings") + 2
    return read_body(config, networks, norm_vectors=vectors, positions=positions, tied=True)


def _gpt_neox_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """GPT-NeoX and Pythia: by default a quarter of each head is rotated."""
    hidden_size, num_heads = read_integer(config, "hidden_size"), read_integer(config, "num_attention_heads")
    head_dim = divided_head_dim(hidden_size, num_heads)
    # Names of its own take the place of the usual ones, which its class does not read.
    named = {
        "rope_theta": check_number("rotary_emb_base", config.get("rotary_emb_base", 10000.0)),
        "partial_rotary_factor": check_number("rotary_pct", config.get("rotary_pct", 0.25)),
    }
    rope = read_rope({**config, **named}, head_dim, fraction=0.25)
    spec = GroupedSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        bias=grouped_bias(read_flag(config, "attention_bias", True)),
        rope=rope,
    )
    return (spec,) * read_num_layers(config)


def _gpt_neox_body(config: Config, layers: int) -> BodySpec:
    networks = dense_rule(gated=False, bias="bias")({**config, "bias": True}, layers)
    return read_body(config, networks, norm_vectors=2)


def _phi_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Phi-1 to Phi-2: half of each head is rotated, and every projection has a bias."""
    if read_flag(config, "qk_layernorm", False):
        raise SpecError("qk_layernorm", True, "is not understood in a phi model")
    hidden_size, num_heads = read_integer(config, "hidden_size"), read_integer(config, "num_attention_heads")
    head_dim = divided_head_dim(hidden_size, num_heads)
    spec = GroupedSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=read_optional_integer(config, "num_key_value_heads") or num_heads,
        head_dim=head_dim,
        bias=grouped_bias(True),
        rope=read_rope(config, head_dim, fraction=0.5),
    )
    return (spec,) * read_num_layers(config)


def _phi_body(config: Config, layers: int) -> BodySpec:
    networks = dense_rule(gated=False, bias="bias")({**config, "bias": True}, layers)
    return read_body(config, networks, norms=1, norm_vectors=2, head_bias=True)


def _bert_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Bidirectional encoders, in which every token sees every other and nothing is cached."""
    if read_flag(config, "is_decoder", False):
        raise SpecError("is_decoder", True, f"{config['model_type']} as a decoder is not understood")
    rule = "is not understood: relative positions add weights and scores of their own"
    refuse_value(config, "position_embedding_type", unless=("absolute",), rule=rule)
    return (_plain(config, bias=True, is_causal=False),) * read_num_layers(config)


def _plain(config: Config, *, bias: bool, is_causal: bool = True) -> GroupedSpec:
    """MHA without rotation, whose heads divide the hidden size among them."""
    hidden_size = read_integer(config, "hidden_size", "dim")
    num_heads = read_integer(config, "num_attention_heads", "n_heads")
    return GroupedSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=divided_head_dim(hidden_size, num_heads),
        bias=grouped_bias(bias),
        is_causal=is_causal,
    )


_GPT2, _FALCON, _BERT = Reader(_gpt2_layers, _gpt2_body), Reader(_falcon_layers, _falcon_body), Reader(_bert_layers)
READERS = {
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "falcon": _FALCON,
    "RefinedWeb": _FALCON,
    "RefinedWebModel": _FALCON,
    "opt": Reader(_opt_layers, _opt_body),
    "gpt_neox": Reader(_gpt_neox_layers, _gpt_neox_body),
    "phi": Reader(_phi_layers, _phi_body),
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": _BERT,
}
