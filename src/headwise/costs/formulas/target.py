"""Targets of conversions: as a user writes them, as specs of converted layers, and those that are tried by default.

Where the user names no target, plain formats of fewer bits and conversions to several sizes are tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headwise.base.options import BITS, KV_BUDGET, TARGET
from headwise.costs.formulas.layer import formulas
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import AttentionSpec, GroupedSpec, ModelSpec, RecurrentSpec
from headwise.models.specs.target_sizes import as_grouped, as_latent, refuse_as_latent, rotary_width, split_budget


@dataclass(frozen=True)
class Target:
    """A mechanism and its size, such as ``Target("mla", kv_budget=0.5)``.

    Attributes:
        mechanism: ``mha``, ``gqa``, ``mqa``, ``mla``, or ``same`` for the source's own.
        num_kv_heads: the number of key–value heads of ``gqa``; None for other mechanisms.
        kv_budget: the fraction of the source's cache that ``mla`` keeps.
        kv_lora_rank: the width of the latent of ``mla``, in place of a budget.
        qk_rope_head_dim: the width of the rotary key of ``mla``, together with ``kv_lora_rank``.
        kv_bytes: the fraction of the bytes of the source's cache in bfloat16 to keep, as quantised codes.
        bits: the bits of a cached value on average; None for a cache without codes.
        spreads: whether layers of ``mla`` get caches of different sizes at any budget; where few values are kept, and
            for ``kv_bytes``, they always do.
        has_constant: whether one channel of the latent of ``mla`` is a constant.
        block: the number of channels that the widths of the latent and of the rotary key of ``mla`` are multiples of,
            where a budget allows that.
    """

    mechanism: str
    num_kv_heads: int | None = None
    kv_budget: float | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    kv_bytes: float | None = None
    bits: float | None = None
    spreads: bool = False
    has_constant: bool = False
    block: int = 1

    @property
    def is_coded(self) -> bool:
        """Whether cached values are stored in codes."""
        return self.kv_bytes is not None or self.bits is not None

    @property
    def spelling(self) -> str | None:
        """The target as frontiers spell it, such as ``mla:0.5``; None with ``bits``, which have no spelling.

        For example ``parse_target("mla", kv_budget=0.5).spelling``.
        """
        if self.bits is not None:
            return None
        size = "" if self.num_kv_heads is None else f":{self.num_kv_heads}"
        if self.kv_lora_rank is not None:
            size = f":{self.kv_lora_rank}+{self.qk_rope_head_dim}"
        elif self.kv_budget is not None:
            size = f":{self.kv_budget:.12g}"
        return f"{self.mechanism}{size}" + ("" if self.kv_bytes is None else f"@{self.kv_bytes:.12g}")


def parse_target(
    to: str,
    *,
    kv_budget: float | None = None,
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    kv_bytes: float | None = None,
    bits: float | None = None,
) -> Target:
    """Read a target, such as ``parse_target("gqa:2")`` or ``parse_target("mla", kv_budget=0.5)``.

    Args:
        to: ``mha``, ``gqa:K``, ``mqa``, ``mla`` or ``same``.
        kv_budget: the fraction of the source's cache to keep, see `Target`.
        kv_lora_rank: the width of the latent, see `Target`.
        qk_rope_head_dim: the width of the rotary key, see `Target`.
        kv_bytes: the fraction of the bytes of the source's cache to keep, see `Target`.
        bits: the mean bits of a cached value, see `Target`.

    Raises:
        ArgumentError: ``to`` is no target, or the sizes do not go with it.
    """
    TARGET.check("to", to)
    mechanism, _, heads = to.strip().lower().partition(":")
    values = {"kv_budget": kv_budget, "kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    sizes: dict[str, Any] = {**values, "kv_bytes": kv_bytes, "bits": bits}
    KV_BUDGET.check("kv_bytes", kv_bytes)
    BITS.check("bits", bits)
    if mechanism != "mla":
        for name, value in values.items():
            if value is not None:
                raise ArgumentError(name, value, f"goes with mla; the cache of {to} follows from its heads")
        if kv_bytes is not None and bits is not None:
            raise ArgumentError("kv_bytes", kv_bytes, "cannot be used with bits")
        if mechanism == "same" and kv_bytes is None and bits is None:
            rule = "needs kv_bytes or bits: it stores the cache in codes and changes nothing else"
            raise ArgumentError("to", to, rule)
        return Target(mechanism, num_kv_heads=int(heads) if heads else None, kv_bytes=kv_bytes, bits=bits)
    if kv_bytes is not None:
        for name, value in sizes.items():
            if value is not None and name != "kv_bytes":
                raise ArgumentError("kv_bytes", kv_bytes, f"cannot be used with {name}: it chooses sizes and bits")
    elif all(value is None for value in values.values()):
        raise ArgumentError("kv_budget", None, "mla needs kv_budget, kv_bytes, or kv_lora_rank and qk_rope_head_dim")
    elif kv_budget is not None:
        if kv_lora_rank is not None or qk_rope_head_dim is not None:
            raise ArgumentError("kv_budget", kv_budget, "cannot be used with kv_lora_rank and qk_rope_head_dim")
        KV_BUDGET.check("kv_budget", kv_budget)
    elif kv_lora_rank is None or qk_rope_head_dim is None:
        raise ArgumentError("kv_lora_rank", kv_lora_rank, "and qk_rope_head_dim are given together")
    return Target("mla", **sizes)


def target_options(target: str) -> dict[str, Any]:
    """A conversion's target, as frontiers spell it, as keywords of `parse_target` and `headwise.convert`.

    For example ``target_options("mla:0.5")`` is ``{"to": "mla", "kv_budget": 0.5}``.

    Raises:
        ValueError: a size is no number.
    """
    mechanism, _, fraction = target.partition("@")
    kind, _, size = mechanism.partition(":")
    codes = {"kv_bytes": float(fraction)} if fraction else {}
    if kind != "mla":
        return {"to": mechanism, **codes}
    if "+" in size:
        rank, rope = map(int, size.split("+"))
        return {"to": "mla", "kv_lora_rank": rank, "qk_rope_head_dim": rope, **codes}
    return {"to": "mla", **({"kv_budget": float(size)} if size else {}), **codes}


def refuse_latent(source: ModelSpec) -> None:
    """Refuse a source that is MLA already.

    Raises:
        SpecError: a layer is MLA, or another kind without key–value heads.
    """
    for layer in source.layers:
        if not isinstance(layer, GroupedSpec):
            raise SpecError("source attention", layer.label, "converting from MLA is not supported")


def convert_spec(source: ModelSpec, target: Target) -> ModelSpec:
    """The spec of the converted model, such as ``convert_spec(source, parse_target("mqa"))``.

    The spec's weights are in one dtype: a conversion dequantises those of a GGUF file, and writes none quantised.

    Raises:
        ArgumentError: a layer cannot have the size.
        SpecError: a layer is of a kind that is not converted.
    """
    refuse_latent(source)
    layers = tuple(_convert_layer_spec(layer, target) for layer in source.layers)
    cross_layers = tuple(_convert_layer_spec(layer, target) for layer in source.cross_layers)
    return replace(source, layers=layers, cross_layers=cross_layers, stored=None)


def _convert_layer_spec(source: AttentionSpec, target: Target) -> AttentionSpec:
    """The spec of one converted layer."""
    assert isinstance(source, GroupedSpec)
    if target.mechanism != "mla":
        own = source.num_kv_heads
        counts = {"mha": source.num_heads, "mqa": 1, "gqa": target.num_kv_heads, "same": own}
        count = counts[target.mechanism]
        assert count is not None
        return as_grouped(source, count)
    refuse_as_latent(source)
    total = int(formulas(source).cache_values(source))  # a plain number, which specs and codes are made of
    if target.kv_bytes is not None:
        # A size to begin with: how the bytes divide into values and bits is decided later, on the calibration text.
        values = min(total, int(8 * code_bytes(source, target.kv_bytes) / _BITS_AT_FIRST))
        least = 3 if rotary_width(source) else 1
        if values < least:
            rule = f"leaves less than a byte for each of {least} values, the fewest that a layer caches"
            raise ArgumentError("kv_bytes", target.kv_bytes, rule)
        return as_latent(source, *split_budget(source, values))
    if target.kv_budget is not None:
        values = int(target.kv_budget * total + 1e-9)
        if values < (3 if rotary_width(source) else 1):
            rule = f"leaves {values} of the {total} values a layer caches; at least 3: a latent and a rotary pair"
            raise ArgumentError("kv_budget", target.kv_budget, rule)
        return as_latent(source, *split_budget(source, values))
    assert target.kv_lora_rank is not None
    assert target.qk_rope_head_dim is not None
    return as_latent(source, target.kv_lora_rank, target.qk_rope_head_dim)


def code_bytes(source: AttentionSpec, fraction: float) -> float:
    """Bytes a token that a fraction of one layer's cache in bfloat16 has.

    For example ``code_bytes(layer_spec("smollm2-135m"), 0.25)`` is 192.0.
    """
    return fraction * 2 * formulas(source).cache_values(source)


def refuse_codes(converted: ModelSpec) -> None:
    """Refuse a model whose cache cannot be coded.

    Raises:
        SpecError: the model is no decoder, or a layer has sinks, capped scores, or rotary pairs whose two dims lie
            side by side.
    """
    if not converted.is_causal or converted.cross_layers:
        rule = "is no decoder of text alone; only their caches are coded"
        raise SpecError("model_type", converted.model_type, rule)
    for layer in converted.layers:
        if isinstance(layer, GroupedSpec):
            for field, value in (
                ("sinks", layer.sinks or None),
                ("softcap", layer.softcap),
                ("rope.interleaved", (layer.rope is not None and layer.rope.interleaved) or None),
            ):
                if value is not None:
                    raise SpecError(field, value, "a layer with it cannot have a coded cache yet")


_BITS_AT_FIRST = 3.3
"""The bits of a cached value with which a search for sizes and bits begins; 3 to 4 are best at most budgets."""


GROUPS = (16, 32, 64, 128, 256)
"""The numbers of channels that may share a scale and a zero point; a group larger than a head is the whole head."""

GROUP = 64
"""The number of channels in a group where a format's spelling names no other number."""

_SCALES = 32
"""The bits of a group's scale and zero point, which are float16."""


@dataclass(frozen=True)
class PlainFormat:
    """A format of a cache of keys and values.

    Attributes:
        keys: the bits of one number of a key, without its share of the scales.
        values: the bits of one number of a value, without its share of the scales.
        group: the number of channels that share a scale, one of `GROUPS`; with blocks also the number of tokens of
            which a key's channel shares one.
        has_blocks: whether a key's channel shares its scale over a block of tokens (KIVI).
        is_rotated: whether keys are rotated by a Hadamard matrix; their width must then be a power of 2.
    """

    keys: int
    values: int
    group: int = GROUP
    has_blocks: bool = False
    is_rotated: bool = False

    def __str__(self) -> str:
        group = "" if self.group == GROUP else f":{self.group}"
        if self.has_blocks:
            return f"kivi{self.keys}{group}"
        keys, values = f"int{self.keys}{group}{'+hadamard' * self.is_rotated}", f"int{self.values}{group}"
        return keys if keys == values else f"{keys}/{values}"

    def suits(self, model: ModelSpec) -> bool:
        """Whether a model's cache can be stored in the format.

        Groups must divide the width of a head, or be as wide as it. Latents are not stored in plain formats. Sliding
        windows are not stored in blocks of tokens; where other layers are, they stay as they are, like the states of
        recurrent layers.

        For example ``PlainFormat(8, 8).suits(read_spec("llama-3-8b"))`` is True.

        Args:
            model: the spec of the model.
        """
        layers = [layer for layer in model.layers if not isinstance(layer, RecurrentSpec)]
        heads = [layer for layer in layers if isinstance(layer, GroupedSpec) and not layer.shares_kv]
        stored = [layer for layer in heads if self._stores(layer)]
        return len(heads) == len(layers) and bool(stored) and all(map(self._fits, stored))

    def fitted(self, model: ModelSpec) -> PlainFormat:
        """The format with groups that suit a model, of about as many bytes; itself if it suits, or if none does.

        For example ``str(PlainFormat(8, 8).fitted(read_spec("phi-2")))``, whose heads have 80 channels, is
        ``"int8:128"``, a group for a whole head.

        Args:
            model: the spec of the model.
        """
        if self.suits(model):
            return self
        others = [other for other in (replace(self, group=group) for group in GROUPS) if other.suits(model)]
        wanted = self.keys + self.values + 2 * _SCALES / self.group
        return min(others, key=lambda other: abs(2 * other.bits(model) - wanted), default=self)

    def bits(self, model: ModelSpec) -> float:
        """The mean bits of a cached value, scales included, of a model that it `suits`.

        For example ``PlainFormat(8, 8).bits(read_spec("llama-3-8b"))`` is 8.5.

        Args:
            model: the spec of the model.
        """
        taken = values = 0.0
        for layer in model.layers:
            if isinstance(layer, GroupedSpec):
                width = layer.head_dim + layer.value_dim
                values += layer.num_kv_heads * width
                taken += layer.num_kv_heads * (self._head_bits(layer) if self._stores(layer) else 16 * width)
        return taken / values

    def _stores(self, layer: GroupedSpec) -> bool:
        """Whether a layer's keys and values are stored in the format."""
        return not (self.has_blocks and layer.sliding_window is not None)

    def _fits(self, layer: GroupedSpec) -> bool:
        """Whether the format's groups divide a layer's heads, or are as wide as one."""
        D, V = layer.head_dim, layer.value_dim
        grouped = (V,) if self.has_blocks else (D, V)
        is_turned = not self.is_rotated or D & (D - 1) == 0
        return is_turned and all(width <= self.group or width % self.group == 0 for width in grouped)

    def _head_bits(self, layer: GroupedSpec) -> float:
        """Bits of a token's key and value in one head."""
        D, V = layer.head_dim, layer.value_dim
        of_keys = D * _SCALES / self.group if self.has_blocks else _SCALES * max(D // self.group, 1)
        return _packed_bits(D, self.keys) + of_keys + _packed_bits(V, self.values) + _SCALES * max(V // self.group, 1)


def _packed_bits(width: int, bits: int) -> int:
    """Bits that a row of codes takes in whole bytes."""
    return -(-width * bits // 8) * 8


PLAIN_FORMATS = (
    PlainFormat(8, 8),
    PlainFormat(8, 4),
    PlainFormat(4, 4, has_blocks=True),
    PlainFormat(4, 4, is_rotated=True),
    PlainFormat(3, 3, 32, has_blocks=True),
    PlainFormat(3, 3, has_blocks=True),
    PlainFormat(2, 2, 32, has_blocks=True),
    PlainFormat(2, 2, has_blocks=True),
)
"""The formats that conversions are compared with, from the most bytes to the least; of equal bytes the best first.

Where their groups do not divide a model's heads, other groups are taken (`plain_formats`).
"""


def plain_formats(model: ModelSpec) -> dict[str, PlainFormat]:
    """The formats that a model's conversions are compared with, by their spellings, as in `PLAIN_FORMATS`.

    For example ``list(plain_formats(read_spec("phi-2")))[:2]`` is ``["int8:128", "int8:128/int4:128"]``, as 64
    channels do not divide its heads of 80.

    Args:
        model: the model whose cache is stored.
    """
    fitted = (form.fitted(model) for form in PLAIN_FORMATS)
    return {str(form): form for form in fitted if form.suits(model)}


BUDGETS = (0.5, 0.25)
"""The fractions of the source's values that MLA keeps."""

BYTES = (0.5, 0.28, 0.25, 0.19, 0.15, 0.125, 0.094, 0.0625)
"""The fractions of the bytes of the source's cache in bfloat16 that MLA with codes keeps."""


def conversion_targets(source: ModelSpec) -> list[str]:
    """The targets of the ladder that convert a model, in the order in which they are tried.

    For example ``conversion_targets(read_spec("smollm2-135m"))[:3]`` is ``["mla:0.5", "mla:0.25", "mqa"]``.

    What takes minutes comes before what takes hours: MLA at each of `BUDGETS`, GQA at each proper divisor of the
    key–value heads, and MQA; and MLA with codes at each of `BYTES`.
    """
    heads = {layer.num_kv_heads for layer in source.layers if isinstance(layer, GroupedSpec)}
    fewest = min(heads, default=1)
    divisors = [count for count in range(fewest - 1, 1, -1) if fewest % count == 0]
    return [
        *(f"mla:{budget:g}" for budget in BUDGETS),
        *(f"gqa:{count}" for count in divisors),
        *(["mqa"] if fewest > 1 else []),
        *(f"mla@{fraction:g}" for fraction in BYTES),
    ]
