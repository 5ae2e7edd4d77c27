"""Random valid specs, and random calls of layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from headwise.costs.formulas import formulas
from headwise.costs.formulas.stages import Kernel
from headwise.models.specs import (
    AttentionSpec,
    BodySpec,
    ExpertLatentSpec,
    FeedForwardSpec,
    GroupedSpec,
    LatentSpaceSpec,
    LatentSpec,
    ModelSpec,
    RecurrentSpec,
    RopeSpec,
    expert_latent,
    grouped,
    latent_space,
)

AnySpec = GroupedSpec | LatentSpec | LatentSpaceSpec | ExpertLatentSpec
GROUPED_PROJECTIONS = grouped.PROJECTIONS
MECHANISMS = ("single_head", "mha", "mqa", "gqa", "mla", "latent_space", "expert_latent")
maybe_scale = st.none() | st.floats(1e-3, 10.0)


def maybe_windows(largest: int = 40) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(1, largest)


def biases(projections: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.sets(st.sampled_from(projections)).map(tuple)


@st.composite
def rope_specs(draw: st.DrawFn, dims: st.SearchStrategy[int] | None = None) -> RopeSpec:
    numbers = st.floats(0.125, 64.0) | st.integers(1, 9999)
    lists = st.lists(st.floats(1, 2)).map(tuple)
    names = st.sampled_from(["beta_fast", "beta_slow", "mscale_all_dim", "truncate"])
    divisors = st.fixed_dictionaries({}, optional={"factor": numbers, "long_factor": lists})
    return RopeSpec(
        dim=draw(dims if dims is not None else st.integers(1, 32).map(lambda half: 2 * half)),
        theta=draw(st.floats(1.0, 1e7)),
        rope_type=draw(st.sampled_from(["default", "linear", "llama3", "yarn"])),
        parameters=(*draw(st.dictionaries(names, numbers | st.booleans() | lists)).items(), *draw(divisors).items()),
        interleaved=draw(st.booleans()),
        max_position_embeddings=draw(st.none() | st.integers(1, 1 << 20)),
    )


@st.composite
def maybe_rope(draw: st.DrawFn, width: int, *, tiny: bool) -> RopeSpec | None:
    """None, or a rotation of some or all of ``width`` dims."""
    if width < 2 or not draw(st.booleans()):
        return None
    dims = st.integers(1, width // 2).map(lambda half: 2 * half)
    if tiny:
        return RopeSpec(dim=draw(dims), interleaved=draw(st.booleans()))
    return draw(rope_specs(dims))


@st.composite
def grouped_specs(draw: st.DrawFn, *, mechanism: str | None = None, tiny: bool = False) -> GroupedSpec:
    """Specs of grouped attention; with ``tiny`` small ones, of layers that headwise can run."""
    kv_heads, group = draw(st.integers(1, 4 if tiny else 6)), draw(st.integers(1, 4 if tiny else 6))
    if mechanism in ("mqa", "single_head"):
        kv_heads = 1
    if mechanism in ("mha", "single_head"):
        group = 1
    if mechanism in ("mha", "gqa"):
        kv_heads += 1
    if mechanism in ("mqa", "gqa"):
        group += 1
    head_dim, output = draw(st.integers(1, 9 if tiny else 32)), draw(st.sampled_from([True, True, True, False]))
    return GroupedSpec(
        hidden_size=draw(st.integers(1, 24 if tiny else 300)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=draw(st.none() | st.integers(1, 9 if tiny else 32)),
        bias=draw(biases(GROUPED_PROJECTIONS if output else GROUPED_PROJECTIONS[:3])),
        qk_norm=draw(st.sampled_from([None, "head", "full"])),
        sinks=False if tiny else draw(st.booleans()),
        softcap=None if tiny else draw(maybe_scale),
        output_projection=output,
        is_causal=draw(st.booleans()),
        sliding_window=draw(maybe_windows(12 if tiny else 40)),
        rope=draw(maybe_rope(head_dim, tiny=tiny)),
        softmax_scale=draw(maybe_scale),
    )


@st.composite
def latent_specs(draw: st.DrawFn, *, tiny: bool = False) -> LatentSpec:
    rope_dim = 2 * draw(st.integers(0, 3 if tiny else 16))
    q_lora_rank = draw(st.none() | st.integers(1, 9 if tiny else 64))
    query = ("q_proj",) if q_lora_rank is None else ("q_a_proj", "q_b_proj")
    rope: st.SearchStrategy[RopeSpec | None] = st.none()
    if rope_dim:
        rope = st.builds(RopeSpec, dim=st.just(rope_dim), interleaved=st.booleans())
        rope = rope if tiny else st.none() | rope_specs(st.just(rope_dim))
    return LatentSpec(
        hidden_size=draw(st.integers(1, 24 if tiny else 300)),
        num_heads=draw(st.integers(1, 5 if tiny else 16)),
        kv_lora_rank=draw(st.integers(1, 12 if tiny else 64)),
        qk_nope_head_dim=draw(st.integers(0 if rope_dim else 1, 6 if tiny else 32)),
        qk_rope_head_dim=rope_dim,
        v_head_dim=draw(st.integers(1, 9 if tiny else 32)),
        q_lora_rank=q_lora_rank,
        latent_norm=draw(st.booleans()),
        bias=draw(biases((*query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))),
        is_causal=draw(st.booleans()),
        sliding_window=draw(maybe_windows(12 if tiny else 40)),
        rope=draw(rope),
        softmax_scale=draw(maybe_scale),
    )


@st.composite
def latent_space_specs(draw: st.DrawFn, *, tiny: bool = False) -> LatentSpaceSpec:
    heads, width = draw(st.integers(1, 5 if tiny else 16)), draw(st.integers(1, 6 if tiny else 24))
    return LatentSpaceSpec(
        hidden_size=draw(st.integers(1, 24 if tiny else 300)),
        num_heads=heads,
        latent_dim=heads * width,
        head_dim=width + draw(st.integers(0, 4 if tiny else 16)),
        bias=draw(biases(latent_space.PROJECTIONS)),
        is_causal=draw(st.booleans()),
        sliding_window=draw(maybe_windows(12 if tiny else 40)),
        rope=draw(maybe_rope(width, tiny=tiny)),
        softmax_scale=draw(maybe_scale),
    )


@st.composite
def expert_latent_specs(draw: st.DrawFn, *, tiny: bool = False) -> ExpertLatentSpec:
    latent_heads, group = draw(st.integers(1, 3 if tiny else 6)), draw(st.integers(1, 3 if tiny else 6))
    experts, head_dim = draw(st.integers(1, 4 if tiny else 8)), draw(st.integers(1, 9 if tiny else 32))
    conditioning = draw(st.sampled_from(["token", "token", "sequence"]))
    return ExpertLatentSpec(
        hidden_size=draw(st.integers(1, 24 if tiny else 300)),
        num_heads=latent_heads * group,
        head_dim=head_dim,
        latent_kv_heads=latent_heads,
        kv_dim=draw(st.integers(1, 7 if tiny else 32)),
        num_experts=experts,
        top_k=draw(st.integers(1, experts)),
        conditioning=conditioning,
        bias=draw(biases(expert_latent.PROJECTIONS)),
        is_causal=conditioning == "token" and draw(st.booleans()),
        sliding_window=draw(maybe_windows(12 if tiny else 40)) if conditioning == "token" else None,
        rope=draw(maybe_rope(head_dim, tiny=tiny)),
        softmax_scale=draw(maybe_scale),
    )


def specs(*, tiny: bool = False) -> st.SearchStrategy[AnySpec]:
    return (
        grouped_specs(tiny=tiny)
        | latent_specs(tiny=tiny)
        | latent_space_specs(tiny=tiny)
        | expert_latent_specs(tiny=tiny)
    )


def runnable_specs() -> st.SearchStrategy[AnySpec]:
    """Specs of layers that headwise has, and so knows the activations of."""
    return specs().map(_runnable)


def _runnable(spec: AnySpec) -> AnySpec:
    if isinstance(spec, GroupedSpec):
        return replace(spec, sinks=False, softcap=None, output_gate=False, shares_kv=False)
    return spec


def specs_of(mechanism: str, *, tiny: bool = False) -> st.SearchStrategy[AnySpec]:
    """Specs of one of `MECHANISMS`."""
    if mechanism == "mla":
        return latent_specs(tiny=tiny)
    if mechanism == "latent_space":
        return latent_space_specs(tiny=tiny)
    if mechanism == "expert_latent":
        return expert_latent_specs(tiny=tiny)
    return grouped_specs(mechanism=mechanism, tiny=tiny)


def causal(spec: AttentionSpec, **changes: Any) -> Any:
    """The spec of a decoder: causal, with gates by token if it has gates."""
    if isinstance(spec, ExpertLatentSpec):
        changes = {"conditioning": "token", **changes}
    return replace(spec, is_causal=True, **changes)


@dataclass(frozen=True)
class Case:
    """A tiny layer and how it is trained; ``source`` are the tokens of cross-attention, None in self-attention."""

    spec: AnySpec
    impl: str
    batch: int
    tokens: int
    source: int | None
    is_causal: bool
    dtype: str
    kernel: Kernel
    input_gradient: bool


@st.composite
def cases(draw: st.DrawFn, mechanism: str) -> Case:
    spec = draw(specs_of(mechanism, tiny=True))
    looks_ahead = isinstance(spec, ExpertLatentSpec) and spec.conditioning == "sequence"
    source = draw(st.none() | st.integers(1, 20)) if spec.sliding_window is None else None
    return Case(
        spec=spec,
        impl=draw(st.sampled_from(impls(spec))),
        batch=draw(st.integers(1, 3)),
        tokens=draw(st.integers(1, 16)),
        source=source,
        is_causal=spec.sliding_window is not None or (source is None and not looks_ahead and draw(st.booleans())),
        dtype=draw(st.sampled_from(["float32", "float32", "float64", "bfloat16"])),
        kernel=draw(st.sampled_from(["unfused", "padded"])),
        input_gradient=draw(st.booleans()),
    )


def impls(spec: AttentionSpec) -> tuple[str, ...]:
    """The implementations that the spec's layer has."""
    return tuple(impl for impl in formulas(spec).IMPLS if impl != "cached_kv")


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
