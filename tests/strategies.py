"""Random valid specs."""

from __future__ import annotations

from hypothesis import strategies as st

from headwise.specs import GroupedSpec, LatentSpec, RopeSpec

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
