"""Random valid specs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from headwise.specs import (
    AttentionSpec,
    BodySpec,
    FeedForwardSpec,
    GroupedSpec,
    LatentSpec,
    ModelSpec,
    RecurrentSpec,
    RopeSpec,
)

GROUPED_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
maybe_window = st.none() | st.integers(1, 40)
maybe_scale = st.none() | st.floats(1e-3, 10.0)


@st.composite
def rope_specs(draw: st.DrawFn, dims: st.SearchStrategy[int] | None = None) -> RopeSpec:
    values = st.floats(0.125, 64.0) | st.integers(1, 9999) | st.booleans() | st.lists(st.floats(1, 2)).map(tuple)
    names = st.sampled_from(["factor", "beta_fast", "beta_slow", "mscale_all_dim", "long_factor", "truncate"])
    return RopeSpec(
        dim=draw(dims if dims is not None else st.integers(1, 32).map(lambda half: 2 * half)),
        theta=draw(st.floats(1.0, 1e7)),
        rope_type=draw(st.sampled_from(["default", "linear", "llama3", "yarn"])),
        parameters=tuple(draw(st.dictionaries(names, values)).items()),
        interleaved=draw(st.booleans()),
        max_position_embeddings=draw(st.none() | st.integers(1, 1 << 20)),
    )


@st.composite
def grouped_specs(draw: st.DrawFn) -> GroupedSpec:
    kv_heads, group, half_dim = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 16))
    rope_dims = st.integers(1, half_dim).map(lambda half: 2 * half)
    return GroupedSpec(
        hidden_size=draw(st.integers(1, 300)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=2 * half_dim,
        v_head_dim=draw(st.none() | st.integers(1, 32)),
        bias=tuple(draw(st.sets(st.sampled_from(GROUPED_PROJECTIONS)))),
        qk_norm=draw(st.sampled_from([None, "head", "full"])),
        sinks=draw(st.booleans()),
        softcap=draw(maybe_scale),
        is_causal=draw(st.booleans()),
        sliding_window=draw(maybe_window),
        rope=draw(st.none() | rope_specs(rope_dims)),
        softmax_scale=draw(maybe_scale),
    )


@st.composite
def latent_specs(draw: st.DrawFn) -> LatentSpec:
    rope_dim = 2 * draw(st.integers(1, 16))
    q_lora_rank = draw(st.none() | st.integers(1, 64))
    query = ("q_proj",) if q_lora_rank is None else ("q_a_proj", "q_b_proj")
    projections = (*query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    return LatentSpec(
        hidden_size=draw(st.integers(1, 300)),
        num_heads=draw(st.integers(1, 16)),
        kv_lora_rank=draw(st.integers(1, 64)),
        qk_nope_head_dim=draw(st.integers(0, 32)),
        qk_rope_head_dim=rope_dim,
        v_head_dim=draw(st.integers(1, 32)),
        q_lora_rank=q_lora_rank,
        latent_norm=draw(st.booleans()),
        bias=tuple(draw(st.sets(st.sampled_from(projections)))),
        is_causal=draw(st.booleans()),
        sliding_window=draw(maybe_window),
        rope=draw(st.none() | rope_specs(st.just(rope_dim))),
        softmax_scale=draw(maybe_scale),
    )


def specs() -> st.SearchStrategy[GroupedSpec | LatentSpec]:
    return grouped_specs() | latent_specs()


@st.composite
def recurrent_specs(draw: st.DrawFn, hidden_size: int | None = None) -> RecurrentSpec:
    form = draw(st.sampled_from(["mamba", "mamba2", "gated_delta_net", "kimi_delta", "short_conv", "none"]))
    size = st.integers(1, 20)
    sizes: dict[str, int] = {}
    if form != "none":
        sizes |= {name: draw(size) for name in ("num_heads", "head_dim", "conv_kernel")}
    if form not in ("none", "short_conv"):
        sizes["state_size"] = draw(size)
        sizes["dt_rank" if form == "mamba" else "num_groups"] = draw(size)
    projections = [] if form == "none" else ["in_proj", "conv1d", "out_proj"]
    return RecurrentSpec(
        form=form,
        hidden_size=hidden_size or draw(st.integers(1, 300)),
        bias=tuple(draw(st.sets(st.sampled_from(projections)))) if projections else (),
        **sizes,
    )


@st.composite
def feed_forward_specs(draw: st.DrawFn, hidden_size: int) -> FeedForwardSpec:
    size = st.integers(1, 40)
    fields: dict[str, object] = {}
    if draw(st.booleans()):
        count = draw(st.integers(1, 9))
        fields = {
            "num_experts": count,
            "experts_per_token": draw(st.integers(1, count)),
            "shared_intermediate_size": draw(st.none() | size),
            "shared_gate": draw(st.booleans()),
            "router_bias": draw(st.booleans()),
            "score_correction": draw(st.booleans()),
        }
    return FeedForwardSpec(
        hidden_size=hidden_size,
        intermediate_size=draw(size),
        gated=draw(st.booleans()),
        bias=draw(st.booleans()),
        **fields,  # type: ignore[arg-type]
    )


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """A whole model of any layers."""
    E = draw(st.integers(1, 64))
    kinds = grouped_specs() | latent_specs() | recurrent_specs()
    layers: list[AttentionSpec] = draw(st.lists(kinds, min_size=1, max_size=4))
    layers = [replace(layer, hidden_size=E, is_causal=True) for layer in layers]
    layers = [replace(s, shares_kv=draw(st.booleans())) if isinstance(s, GroupedSpec) else s for s in layers]
    networks = st.none() | feed_forward_specs(E)
    body = BodySpec(
        vocab_size=draw(st.integers(1, 500)),
        feed_forward=tuple(draw(networks) for _ in layers),
        norms=draw(st.integers(0, 4)),
        norm_vectors=draw(st.integers(0, 2)),
        positions=draw(st.integers(0, 50)),
        tied=draw(st.booleans()),
        head_bias=draw(st.booleans()),
    )
    return ModelSpec(model_type="toy", hidden_size=E, layers=tuple(layers), body=body)
