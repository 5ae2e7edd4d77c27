"""Read the body around the attention: feed-forward networks, norms, embedding, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from headwise.errors import SpecError
from headwise.models.specs.model import BodySpec, FeedForwardSpec
from headwise.models.specs.readers.fields import Config, MissingFieldError

FeedForward = tuple[FeedForwardSpec | None, ...]
"""The feed-forward network of each layer."""
Rule = Callable[[Config, int], FeedForward]
"""A rule, which reads the networks of all layers from a config and the number of layers."""


def read_body(
    feed_forward: Rule,
    config: Config,
    layers: int,
    *,
    tied: bool = False,
    norms: int = 2,
    norm_vectors: int = 1,
    positions: int = 0,
    head_bias: bool = False,
) -> BodySpec:
    """The body of a model whose feed-forward networks follow a rule.

    Args:
        feed_forward: the rule.
        config: the config.
        layers: the number of layers.
        tied: the family's default of ``tie_word_embeddings``.
        norms: the number of norms over E in each layer.
        norm_vectors: the number of learned vectors of E in a norm.
        positions: rows of a learned position embedding.
        head_bias: whether the head has a bias.
    """
    return BodySpec(
        feed_forward=feed_forward(config, layers),
        vocab_size=config.integer("vocab_size"),
        tied=config.flag("tie_word_embeddings", tied),
        norms=norms,
        norm_vectors=norm_vectors,
        positions=positions,
        head_bias=head_bias,
    )


def read_experts(
    config: Config,
    *,
    width: str = "moe_intermediate_size",
    count: tuple[str, ...] = ("num_experts",),
    used: tuple[str, ...] = ("num_experts_per_tok",),
    shared: int | None = None,
    gated: bool = True,
    score_correction: bool = False,
) -> FeedForwardSpec:
    """Read one layer's experts.

    Args:
        config: the config.
        width: the name of the field that has the width of an expert.
        count: the names that the number of experts may have.
        used: the names that the number of experts that a token uses may have.
        shared: the total width of shared experts; None without them.
        gated: whether an expert has three matrices rather than two.
        score_correction: whether each expert has a balancing number, see `FeedForwardSpec`.
    """
    return FeedForwardSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer(width),
        gated=gated,
        num_experts=config.integer(*count),
        experts_per_token=config.integer(*used),
        shared_intermediate_size=shared,
        score_correction=score_correction,
    )


def dense_rule(
    width: str = "intermediate_size", *, gated: bool = True, bias: str | bool = False, bias_absent: bool = False
) -> Rule:
    """A rule for one dense network in every layer.

    Args:
        width: the name of the field that has the network's width.
        gated: whether the network has three matrices (gate, up, down) rather than two.
        bias: whether the network has biases, or the name of the field that says so.
        bias_absent: the default of the field ``bias``.
    """

    def rule(config: Config, num_layers: int) -> FeedForward:
        network = FeedForwardSpec(
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer(width),
            gated=gated,
            bias=bias if isinstance(bias, bool) else config.flag(bias, bias_absent),
        )
        return (network,) * num_layers

    return rule


def experts_rule(count: str = "num_local_experts", *, bias: bool = False, score_correction: bool = False) -> Rule:
    """A rule for experts in every layer, each ``intermediate_size`` wide.

    Args:
        count: the name of the field that has the number of experts.
        bias: whether experts and router have a bias.
        score_correction: whether each expert has a balancing number, see `FeedForwardSpec`.
    """

    def rule(config: Config, num_layers: int) -> FeedForward:
        experts = read_experts(config, width="intermediate_size", count=(count,), score_correction=score_correction)
        return (replace(experts, bias=bias, router_bias=bias),) * num_layers

    return rule


def qwen_experts_rule(*, shared: bool, dense_layers: bool = True) -> Rule:
    """Qwen's rule: experts in every ``decoder_sparse_step``-th layer except ``mlp_only_layers``.

    Args:
        shared: whether there is a gated shared expert.
        dense_layers: whether some layers can be dense.
    """

    def rule(config: Config, num_layers: int) -> FeedForward:
        width = config.integer("shared_expert_intermediate_size") if shared else None
        experts = read_experts(config, count=("num_experts", "num_local_experts"), shared=width)
        sparse = replace(experts, shared_gate=shared)
        if not dense_layers:
            return (sparse,) * num_layers
        step = config.optional_integer("decoder_sparse_step") or 1
        without = config.get("mlp_only_layers") or []
        if not isinstance(without, list) or any(type(index) is not int for index in without):
            raise SpecError("mlp_only_layers", without, "must list layer numbers")
        is_sparse = [i not in without and (i + 1) % step == 0 for i in range(num_layers)]
        return experts_or_dense(config, sparse, is_sparse)

    return rule


def deepseek_experts_rule(
    *, first_dense: int | None = None, score_correction: bool = True, by_type: bool = False
) -> Rule:
    """DeepSeek's rule: the first layers dense, then routed experts beside shared ones of the same width.

    Args:
        first_dense: the default of ``first_k_dense_replace``; None where the file must have it.
        score_correction: whether each expert has a balancing number, see `FeedForwardSpec`.
        by_type: whether ``mlp_layer_types`` may name each layer's kind instead.
    """

    def rule(config: Config, num_layers: int) -> FeedForward:
        shared = config.count("n_shared_experts", config.count("num_shared_experts", 0))
        sparse = read_experts(
            config,
            count=("n_routed_experts", "num_experts", "num_local_experts"),
            used=("num_experts_per_tok", "num_experts_per_token"),
            shared=shared * config.integer("moe_intermediate_size") or None,
            score_correction=score_correction,
        )
        types = config.layer_types("mlp_layer_types", num_layers, {"dense": "dense", "sparse": "sparse"})
        if by_type and types is not None:
            return experts_or_dense(config, sparse, [name == "sparse" for name in types])
        if config.get("moe_layer_freq", 1) != 1:
            raise MissingFieldError("moe_layer_freq", config["moe_layer_freq"], "is understood only as 1")
        if first_dense is None and config.get("first_k_dense_replace") is None:
            raise MissingFieldError("first_k_dense_replace", None, "is required in config.json")
        first = config.count("first_k_dense_replace", first_dense or 0)
        return experts_or_dense(config, sparse, [i >= first for i in range(num_layers)])

    return rule


def llama4_experts(config: Config, num_layers: int) -> FeedForward:
    """Llama 4's rule: experts in ``moe_layers``, or every ``interleave_moe_layer_step``-th layer."""
    width = config.integer("intermediate_size")
    sparse = read_experts(config, width="intermediate_size", count=("num_local_experts",), shared=width)
    listed_layers = config.get("moe_layers")
    if listed_layers is None:
        step = config.optional_integer("interleave_moe_layer_step") or 1
        listed_layers = [*range(step - 1, num_layers, step)]
    is_sparse = are_in_list("moe_layers", listed_layers, num_layers)
    return experts_or_dense(config, sparse, is_sparse, width="intermediate_size_mlp")


def are_in_list(name: str, found: object, num_layers: int) -> list[bool]:
    """Whether each layer is in a list of layer numbers, a field of a config."""
    if not isinstance(found, list) or any(type(index) is not int or not 0 <= index < num_layers for index in found):
        raise SpecError(name, found, f"must list layer numbers below {num_layers}")
    return [index in found for index in range(num_layers)]


def experts_or_dense(
    config: Config, sparse: FeedForwardSpec, is_sparse: Sequence[bool], *, width: str = "intermediate_size"
) -> FeedForward:
    """Experts in the layers where ``is_sparse``, and in the others a dense network, whose width a field has."""
    if all(is_sparse):
        return (sparse,) * len(is_sparse)
    plain = FeedForwardSpec(
        hidden_size=sparse.hidden_size, intermediate_size=config.integer(width), gated=sparse.gated
    )
    return tuple(sparse if layer else plain for layer in is_sparse)
