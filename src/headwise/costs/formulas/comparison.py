"""`compare`: the costs of several mechanisms in the place of a model's attention, and which ones are tried.

Candidates are other mechanisms, at several sizes or at the one nearest to the layer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headwise.costs.formulas import layer, model
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import ExpertLatentSpec, GroupedSpec, LatentSpaceSpec, LatentSpec, ModelSpec, RecurrentSpec
from headwise.models.specs.base import MAX_SIZE, AttentionSpec, RopeSpec
from headwise.models.specs.sources import read_spec
from headwise.models.specs.target_sizes import as_grouped, as_latent, refuse_as_latent, split_budget

Match = Literal["cache", "parameters"]
MATCHES: tuple[Match, ...] = ("cache", "parameters")
"""The costs by which `matched` chooses a size."""

_WIDEST = 2**16
"""The largest size that `matched` tries."""


def ladder(source: AttentionSpec) -> list[AttentionSpec]:
    """Every mechanism at several sizes in the place of a layer, with the layer itself.

    For example ``[spec.label for spec in ladder(layer_spec("llama-3-8b"))]``.

    The list begins with the mechanisms that a layer can be converted to, from the largest cache down: MHA, ever fewer
    key–value heads (each time about half) down to MQA, and MLA at the source's whole cache, a half and a quarter of
    it, of which the rotary key takes about a quarter. Mechanisms for new designs follow: latent-space and
    expert-latent attention at the same three budgets, and one head of the same width as all heads.
    """
    if isinstance(source, GroupedSpec):
        rotary = source.rope is not None
        designs = _designs(source, layer.cache_values(source), rotary=rotary)
        return list(dict.fromkeys([*_grouped_ladder(source), *_latent_ladder(source), *designs]))
    if isinstance(source, LatentSpec):
        dense = _as_multi_head(source)
        return [*_grouped_ladder(dense), source, *_designs(dense, layer.cache_values(source), rotary=True)]
    return [source]


def matched(source: AttentionSpec, match: Match) -> list[AttentionSpec]:
    """The layer itself, then every mechanism at the one size whose cache (or parameters) is nearest the layer's.

    For example ``matched(layer_spec("llama-3-8b"), "cache")[1].label`` is ``"MHA 32/32 × 32"``.

    The number of heads stays, and a head's width (MHA, GQA, MQA, one head) or the latent's changes. A mechanism whose
    smallest size already costs more is left out.
    """
    if not isinstance(source, GroupedSpec | LatentSpec):
        return [source]
    cost: Callable[[AttentionSpec], int] = layer.cache_values if match == "cache" else layer.parameters
    goal = cost(source)
    candidates = [_nearest_size(make, cost, goal) for make in _makers_by_size(source)]
    others = (spec for spec in candidates if spec is not None and spec.mechanism != source.mechanism)
    return [source, *others]


def _makers_by_size(source: GroupedSpec | LatentSpec) -> list[Callable[[int], AttentionSpec | None]]:
    """For each mechanism, a function that makes a layer of a given size, or None where the size is impossible."""
    dense = source if isinstance(source, GroupedSpec) else _as_multi_head(source)
    E, H, D = dense.hidden_size, dense.num_heads, dense.head_dim
    rotary = dense.rope is not None or isinstance(source, LatentSpec)
    step = 2 if rotary else 1  # rotation works on pairs
    between = _kv_heads(dense)

    def grouped(num_kv_heads: int) -> Callable[[int], AttentionSpec | None]:
        return lambda size: _with_head_width(dense, num_kv_heads, size * step)

    def latent(size: int) -> LatentSpec:
        bias = ("o_proj",) if "o_proj" in dense.bias else ()
        return LatentSpec(
            hidden_size=E,
            num_heads=H,
            kv_lora_rank=size,
            qk_nope_head_dim=D,
            qk_rope_head_dim=max(2, D // 4 * 2),
            v_head_dim=dense.value_dim,
            latent_norm=False,
            bias=bias,
        )

    def latent_space(size: int) -> LatentSpaceSpec | None:
        width = size * step
        return None if width > D else LatentSpaceSpec(hidden_size=E, num_heads=H, latent_dim=H * width, head_dim=D)

    def expert_latent(size: int) -> ExpertLatentSpec:
        return _experts(dense, between or 1, size, rotary=rotary)

    def single(size: int) -> AttentionSpec | None:
        return GroupedSpec(hidden_size=E, num_heads=1, num_kv_heads=1, head_dim=size * step)

    middle = [grouped(between)] if between else []
    return [grouped(H), *middle, grouped(1), latent, latent_space, expert_latent, single]


def _nearest_size(
    make: Callable[[int], AttentionSpec | None], cost: Callable[[AttentionSpec], int], goal: int
) -> AttentionSpec | None:
    """The layer whose cost is nearest the goal, found by bisection: a larger size never costs less."""

    def costs(size: int) -> int | None:
        spec = make(size)
        return None if spec is None else cost(spec)

    smallest = costs(1)
    if smallest is None or smallest > goal:
        return None
    low, high = 1, _WIDEST
    while low < high:  # the first size that costs at least the goal, or is impossible
        middle = (low + high) // 2
        value = costs(middle)
        low, high = (low, middle) if value is None or value >= goal else (middle + 1, high)
    around = {size: value for size in (low - 1, low) if size >= 1 and (value := costs(size)) is not None}
    return make(min(around, key=lambda size: abs(around[size] - goal)))


def _with_head_width(dense: GroupedSpec, num_kv_heads: int, width: int) -> GroupedSpec:
    """The layer with heads of another width, of which the same share is rotated."""
    rope = dense.rope
    if rope is not None:
        rope = replace(rope, dim=max(2, rope.dim * width // dense.head_dim // 2 * 2))
    return replace(dense, num_kv_heads=num_kv_heads, head_dim=width, v_head_dim=None, rope=rope)


def _kv_heads(dense: GroupedSpec) -> int | None:
    """The number of key–value heads of a GQA layer: the source's, or about a quarter of the heads."""
    if 1 < dense.num_kv_heads < dense.num_heads:
        return dense.num_kv_heads
    between = [d for d in range(2, dense.num_heads) if dense.num_heads % d == 0]
    return min(between, key=lambda d: abs(d - dense.num_heads / 4), default=None)


def _as_multi_head(source: LatentSpec) -> GroupedSpec:
    """The multi-head attention with the heads of an MLA layer."""
    return GroupedSpec(
        hidden_size=source.hidden_size,
        num_heads=source.num_heads,
        num_kv_heads=source.num_heads,
        head_dim=source.qk_nope_head_dim or source.qk_rope_head_dim,
        v_head_dim=source.v_head_dim,
    )


def _grouped_ladder(source: GroupedSpec) -> list[AttentionSpec]:
    counts = {1, source.num_kv_heads, source.num_heads}
    divisors = [d for d in range(1, source.num_heads) if source.num_heads % d == 0]
    count = source.num_heads
    while count > 1:
        count = max(d for d in divisors if d <= max(count // 2, 1))
        counts.add(count)
    reachable = [n for n in counts if max(n, source.num_kv_heads) % min(n, source.num_kv_heads) == 0]
    return [as_grouped(source, count) for count in sorted(reachable, reverse=True)]


def _latent_ladder(source: GroupedSpec) -> list[AttentionSpec]:
    if source.num_kv_heads * source.head_dim < 2:  # too few dims for a rotary pair
        return []
    values = source.num_kv_heads * (source.head_dim + source.value_dim)
    budgets = [values, values // 2, values // 4]
    # At least a latent channel and a rotary pair.
    return [as_latent(source, *split_budget(source, budget)) for budget in budgets if budget >= 3]


def _designs(dense: GroupedSpec, values: int, *, rotary: bool) -> list[AttentionSpec]:
    """Latent-space and expert-latent attention that cache ``values``, half or a quarter; and one wide head."""
    E, H, D = dense.hidden_size, dense.num_heads, dense.head_dim
    K = _kv_heads(dense) or 1
    widths = dict.fromkeys(min(D, max(1, values // part // (2 * H))) for part in (1, 2, 4))
    latents = dict.fromkeys(max(1, values // part // (2 * K)) for part in (1, 2, 4))
    return [
        *(LatentSpaceSpec(hidden_size=E, num_heads=H, latent_dim=H * width, head_dim=D) for width in widths),
        *(_experts(dense, K, width, rotary=rotary) for width in latents),
        GroupedSpec(hidden_size=E, num_heads=1, num_kv_heads=1, head_dim=H * D),
    ]


def _experts(dense: GroupedSpec, latent_kv_heads: int, kv_dim: int, *, rotary: bool) -> ExpertLatentSpec:
    """Expert-latent attention with RoPE on an eighth of a head: rotated keys are decoded at every step."""
    D = dense.head_dim
    theta = 10000.0 if dense.rope is None else dense.rope.theta
    rope = RopeSpec(dim=max(2, D // 16 * 2), theta=theta) if rotary and D > 1 else None
    return ExpertLatentSpec(
        hidden_size=dense.hidden_size,
        num_heads=dense.num_heads,
        head_dim=D,
        latent_kv_heads=latent_kv_heads,
        kv_dim=kv_dim,
        rope=rope,
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mechanism at one size, in the place of the model's attention.

    FLOPs are those of all layers' attention (or mixers), causal; ``decode_flops`` are those of one token at the
    stated context. ``convert_to`` is the option of ``headwise convert`` that makes it, None where there is none.
    ``decode_ms`` and ``prefill_ms`` are measured on one layer, when asked for.
    """

    mechanism: str
    label: str
    is_source: bool
    convert_to: str | None
    attention_parameters_per_layer: int
    prefill_flops: int
    decode_flops: int
    kv_bytes_per_token: int
    kv_bytes: int
    decode_intensity: float
    decode_ms: float | None = None
    prefill_ms: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-able values, with the measured keys only where there is a measurement."""
        return {key: value for key, value in asdict(self).items() if value is not None or not key.endswith("_ms")}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows for one model at one context and batch; ``specs[i]`` is the layer of ``rows[i]``."""

    context: int
    batch: int
    dtype: str
    source: str
    match: str | None
    rows: tuple[Row, ...]
    specs: tuple[AttentionSpec, ...]

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-able values."""
        return {
            "source": self.source,
            "context": self.context,
            "batch": self.batch,
            "dtype": self.dtype,
            "match": self.match,
            "rows": [row.to_dict() for row in self.rows],
        }


def compare(
    source: str | Path | ModelSpec,
    *,
    context: int = 4096,
    batch: int = 1,
    dtype: str = "bfloat16",
    match: Match | None = None,
) -> Comparison:
    """Compare the costs of mechanisms in the place of a model's attention.

    Layers without attention stay as they are, and every candidate keeps each layer's window.

    Args:
        source: a model folder, ``.gguf``, ``config.json``, catalog name, ``smollm2-135m``, ``hf://…`` or a spec.
        context: the number of tokens in the cache, and in the prompt of the prefill.
        batch: the number of sequences.
        dtype: the dtype of the cache.
        match: None for several sizes (`headwise.cost.ladder`); ``cache`` or ``parameters`` for each mechanism at the
            one size whose cache or parameters are nearest the model's.

    Raises:
        ArgumentError: context or batch is not positive, a name is not known, or there is no such source.
        CheckpointError: the files of the source are damaged.
        SpecError: the architecture is not understood, the model keeps no cache, or its attention is not of one kind
            and size, or shares keys and values, or is gated.

    >>> [row.label for row in headwise.compare("llama-3-8b", context=8192, match="cache").rows]
    """
    for name, value in (("context", context), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(name, value, "must be a whole number of at least 1")
        if value > MAX_SIZE:
            raise ArgumentError(name, value, f"must be at most {MAX_SIZE}")
    if match is not None and match not in MATCHES:
        raise ArgumentError("match", match, f"must be one of {', '.join(MATCHES)}")
    spec = source if isinstance(source, ModelSpec) else read_spec(source)
    if not spec.is_causal:
        raise SpecError("model_type", spec.model_type, "is an encoder: it keeps no cache to compare")
    original = _attention_of(spec)
    specs = tuple(ladder(original) if match is None else matched(original, match))
    rows = []
    for candidate in specs:
        stack = spec if candidate == original else _with_attention(spec, candidate)
        rows.append(
            Row(
                mechanism=candidate.mechanism,
                label=candidate.label,
                is_source=candidate == original,
                convert_to=_convert_arguments(original, candidate),
                attention_parameters_per_layer=layer.parameters(candidate),
                prefill_flops=model.attention_flops(stack, context, batch=batch, causal=True),
                decode_flops=model.attention_flops(stack, 1, context, batch=batch, causal=True),
                kv_bytes_per_token=model.cache_bytes_per_token(stack, dtype),
                kv_bytes=model.cache_bytes(stack, context, batch=batch, dtype=dtype),
                decode_intensity=layer.decode_intensity(candidate, dtype=dtype),
            )
        )
    return Comparison(
        source=spec.model_type if isinstance(source, ModelSpec) else str(source),
        context=context,
        batch=batch,
        dtype=dtype.removeprefix("torch."),
        match=match,
        rows=tuple(rows),
        specs=specs,
    )


def _attention_of(spec: ModelSpec) -> AttentionSpec:
    """The layer that candidates replace: the model's first attention layer, where all are of one kind and size."""
    attention = [one for one in spec.layers if not isinstance(one, RecurrentSpec)]
    kinds = {one.kind for one in attention}
    if len(kinds) != 1:
        rule = "must be one: candidates replace all layers, which are of several kinds"
        raise SpecError("attention kinds", sorted(kinds), rule)
    for name, what in (("shares_kv", "share keys and values"), ("output_gate", "gate their output")):
        if any(getattr(one, name, False) for one in attention):
            raise SpecError("model_type", spec.model_type, f"has layers that {what}, which candidates cannot replace")
    sizes = {replace(one, sliding_window=None, chunked=False, rope=None, softmax_scale=None) for one in attention}
    if len(sizes) > 1:
        rule = "must be of one size to be compared: each candidate takes the place of all of them"
        raise SpecError("attention", list(dict.fromkeys(one.label for one in attention)), rule)
    return attention[0]


def _with_attention(spec: ModelSpec, candidate: AttentionSpec) -> ModelSpec:
    """The model with another attention; each layer keeps its window, and recurrent layers stay as they are."""

    def replaced(one: AttentionSpec) -> AttentionSpec:
        kept = isinstance(one, RecurrentSpec)
        return one if kept else replace(candidate, sliding_window=one.sliding_window, chunked=one.chunked)

    return replace(spec, layers=tuple(map(replaced, spec.layers)), stored=None)


def _convert_arguments(original: AttentionSpec, candidate: AttentionSpec) -> str | None:
    """The arguments of ``headwise convert`` that turn the layer into the candidate, or None."""
    if candidate == original or not isinstance(original, GroupedSpec):
        return None
    if isinstance(candidate, LatentSpec):
        rank, rope_dim = candidate.kv_lora_rank, candidate.qk_rope_head_dim
        try:
            refuse_as_latent(original)
            converted = as_latent(original, rank, rope_dim)
        except (ArgumentError, SpecError):
            return None  # a source of its kind is not converted, or is narrower than the candidate
        return f"--to mla --kv-lora-rank {rank} --qk-rope-head-dim {rope_dim}" if candidate == converted else None
    if isinstance(candidate, GroupedSpec) and replace(original, num_kv_heads=candidate.num_kv_heads) == candidate:
        count = candidate.num_kv_heads
        return f"--to {candidate.mechanism}" + (f":{count}" if candidate.mechanism == "gqa" else "")
    return None
