"""What stands around the attention: feed-forward networks, norms, embedding, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headwise.errors import SpecError
from headwise.specs.feed_forward import FeedForwardSpec
from headwise.specs.model import BodySpec
from headwise.specs.readers.fields import Config, NotSaidError, count, flag, integer, listed, optional_integer

FeedForward = tuple[FeedForwardSpec | None, ...]
Rule = Callable[[Config, int], FeedForward]


def read_body(config: Config, feed_forward: FeedForward, *, tied: bool = False, **rest: Any) -> BodySpec:
    """The body around some feed-forward networks; ``tied`` is the family's own where the file does not say."""
    return BodySpec(
        vocab_size=integer(config, "vocab_size"),
        feed_forward=feed_forward,
        tied=flag(config, "tie_word_embeddings", tied),
        **rest,
    )


def dense(
    width: str = "intermediate_size", *, gated: bool = True, bias: str | None = None, bias_absent: bool = False
) -> Rule:
    """The same network in every layer; ``bias`` is the field that says whether it carries one."""

    def rule(config: Config, num_layers: int) -> FeedForward:
        network = FeedForwardSpec(
            hidden_size=integer(config, "hidden_size"),
            intermediate_size=integer(config, width),
            gated=gated,
            bias=bias is not None and flag(config, bias, bias_absent),
        )
        return (network,) * num_layers

    return rule


def experts(*, count: str = "num_local_experts", bias: bool = False, score_correction: bool = False) -> Rule:
    """Experts in every layer, ``intermediate_size`` wide."""

    def rule(config: Config, num_layers: int) -> FeedForward:
        network = FeedForwardSpec(
            hidden_size=integer(config, "hidden_size"),
            intermediate_size=integer(config, "intermediate_size"),
            bias=bias,
            num_experts=integer(config, count),
            experts_per_token=integer(config, "num_experts_per_tok"),
            router_bias=bias,
            score_correction=score_correction,
        )
        return (network,) * num_layers

    return rule


def qwen_experts(*, shared: bool, dense_layers: bool = True) -> Rule:
    """Qwen's: every ``decoder_sparse_step``-th layer but ``mlp_only_layers``; perhaps a gated shared expert."""

    def rule(config: Config, num_layers: int) -> FeedForward:
        sparse = FeedForwardSpec(
            hidden_size=integer(config, "hidden_size"),
            intermediate_size=integer(config, "moe_intermediate_size"),
            num_experts=integer(config, "num_experts", "num_local_experts"),
            experts_per_token=integer(config, "num_experts_per_tok"),
            shared_intermediate_size=integer(config, "shared_expert_intermediate_size") if shared else None,
            shared_gate=shared,
        )
        if not dense_layers:
            return (sparse,) * num_layers
        step = optional_integer(config, "decoder_sparse_step") or 1
        only = config.get("mlp_only_layers") or []
        if not isinstance(only, list) or any(type(index) is not int for index in only):
            raise SpecError("mlp_only_layers", only, "must list layer numbers")
        is_sparse = [i not in only and (i + 1) % step == 0 for i in range(num_layers)]
        return mixture(config, sparse, is_sparse)

    return rule


def deepseek_experts(*, first_dense: int | None = None, score_correction: bool = True, by_type: bool = False) -> Rule:
    """DeepSeek's: the first layers dense, then routed experts beside shared ones of the same width.

    Args:
        first_dense: ``first_k_dense_replace`` where the file does not say; None where it must.
        score_correction: the router balances by numbers of its own.
        by_type: ``mlp_layer_types`` may name each layer instead.
    """

    def rule(config: Config, num_layers: int) -> FeedForward:
        width = integer(config, "moe_intermediate_size")
        shared = count(config, "n_shared_experts", count(config, "num_shared_experts", 0))
        sparse = FeedForwardSpec(
            hidden_size=integer(config, "hidden_size"),
            intermediate_size=width,
            num_experts=integer(config, "n_routed_experts", "num_experts", "num_local_experts"),
            experts_per_token=integer(config, "num_experts_per_tok", "num_experts_per_token"),
            shared_intermediate_size=shared * width or None,
            score_correction=score_correction,
        )
        types = listed(config, "mlp_layer_types", num_layers, {"dense": "dense", "sparse": "sparse"})
        if by_type and types is not None:
            return mixture(config, sparse, [name == "sparse" for name in types])
        if config.get("moe_layer_freq", 1) != 1:
            raise NotSaidError("moe_layer_freq", config["moe_layer_freq"], "is understood only as 1")
        if first_dense is None and config.get("first_k_dense_replace") is None:
            raise NotSaidError("first_k_dense_replace", None, "is required in config.json")
        first = count(config, "first_k_dense_replace", first_dense or 0)
        return mixture(config, sparse, [i >= first for i in range(num_layers)])

    return rule


def mixture(config: Config, sparse: FeedForwardSpec, is_sparse: Sequence[bool]) -> FeedForward:
    """Experts where ``is_sparse``, and a dense network of ``intermediate_size`` elsewhere."""
    if all(is_sparse):
        return (sparse,) * len(is_sparse)
    plain = FeedForwardSpec(
        hidden_size=sparse.hidden_size, intermediate_size=integer(config, "intermediate_size"), gated=sparse.gated
    )
    return tuple(sparse if layer else plain for layer in is_sparse)
