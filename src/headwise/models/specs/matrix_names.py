"""Names of a layer's matrices, and which of them the lists of a ``quantization_config`` skip.

A matrix has several names: families have their own, and files of a mixture of experts were published before
transformers joined its experts. Quantisers skip some matrices by name, and each matches its lists and patterns in its
own way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cache

from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.model import FeedForwardSpec
from headwise.models.specs.recurrent import RecurrentSpec

_ATTENTION = ("self_attn", "attn", "attention", "self_attention", "mixer")
_MIXERS = ("linear_attn", "mamba", "mixer", "conv")
_NETWORKS = ("mlp", "feed_forward", "block_sparse_moe", "mixer")
_MATRICES = {
    "gate_proj": ("gate_proj", "w1"),
    "up_proj": ("up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h"),
    "down_proj": ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h"),
}
_QUERIES_KEYS_VALUES = ("query_key_value", "c_attn")

_GROUPED: dict[str, tuple[str, ...]] = {
    "q_proj": ("q_proj", *_QUERIES_KEYS_VALUES),
    "k_proj": ("k_proj", *_QUERIES_KEYS_VALUES),
    "v_proj": ("v_proj", *_QUERIES_KEYS_VALUES),
    "o_proj": ("o_proj", "out_proj", "dense", "c_proj"),
    "q_a_proj": ("q_a_proj",),
    "q_b_proj": ("q_b_proj",),
}
_SCANNED: dict[str, tuple[str, ...]] = {
    "in_proj": tuple(f"in_proj{suffix}" for suffix in ("", "_qkvz", "_ba", "_qkv", "_z", "_a", "_b")),
    "out_proj": ("out_proj",),
    "x_proj": ("x_proj",),
    "dt_proj": ("dt_proj",),
}
_LATENT_NAMES = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_LATENT = {name: (name,) for name in _LATENT_NAMES}
_OWN: dict[str, Mapping[str, tuple[str, ...]]] = {
    "grouped": _GROUPED,
    "latent": _LATENT,
    "indexed_latent": _LATENT | {f"index {name}": (f"indexer.{name}",) for name in ("wq_b", "wk", "weights_proj")},
    "compressed": {
        **{name: (name,) for name in ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj")},
        **{f"entry {name}": (f"compressor.{name}",) for name in ("kv_proj", "gate_proj")},
        **{f"index entry {name}": (f"compressor.indexer.{name}",) for name in ("kv_proj", "gate_proj")},
        "index q_b_proj": ("compressor.indexer.q_b_proj",),
        "index weights_proj": ("compressor.indexer.scorer.weights_proj",),
    },
    "kimi_delta": {
        "in_proj": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "forget_gate.f_a_proj", "g_a_proj"),
        "out_proj": ("o_proj",),
        "f_b_proj": ("f_b_proj", "forget_gate.f_b_proj"),
        "g_b_proj": ("g_b_proj",),
    },
    "mamba": _SCANNED,
    "mamba2": _SCANNED,
    "gated_delta_net": _SCANNED,
    "short_conv": _SCANNED,
}
"""The matrices of each kind of attention, and of each form of a recurrent layer, by the names of their stages."""
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("self_attn.qkv_proj",)),
    **{f"feed_forward {name}": ("mlp.gate_up_proj",) for name in ("gate_proj", "up_proj")},
}
"""Names where one matrix holds several."""
_FUSED_GATES = ("feed_forward gate_proj", "feed_forward up_proj")
_FUSED_IN = {"phi3": tuple(_FUSED), "glm": _FUSED_GATES, "glm4": _FUSED_GATES}

HEAD = ("lm_head", "model.lm_head", "embed_out")
"""Names of the head."""
ROUTER, SHARED_GATE = "router router", "shared_experts shared gate"


@dataclass(frozen=True)
class Module:
    """A matrix: the name of its stage, and its names in files and classes. ``layer`` is None for the head."""

    stage: str
    names: tuple[str, ...]
    layer: int | None = None

    @property
    def is_expert(self) -> bool:
        """Whether it is one of a mixture's experts."""
        return self.stage.startswith("experts ")


def modules(
    model_type: str, layers: Sequence[AttentionSpec], networks: Sequence[FeedForwardSpec | None]
) -> Iterator[Module]:
    """Every matrix that a model may have: the head, then those of each layer.

    For example ``next(modules("llama", (), ())).stage`` is ``"head"``.

    Args:
        model_type: transformers' name of the architecture, that of the text part in a multimodal model.
        layers: the attention of each layer.
        networks: the feed-forward network of each layer; None where a layer has none.
    """
    yield Module("head", HEAD)
    for layer, (spec, network) in enumerate(zip(layers, networks, strict=True)):
        kind = spec.form if isinstance(spec, RecurrentSpec) else spec.kind
        for stage, names in (*_of_attention(model_type, kind), *_of_network(model_type, network)):
            yield Module(stage, tuple(f"model.layers.{layer}.{name}" for name in names), layer)


_Names = tuple[tuple[str, tuple[str, ...]], ...]


@cache
def _of_attention(model_type: str, kind: str) -> _Names:
    places = _MIXERS if _OWN.get(kind) is _SCANNED else _ATTENTION
    return _own_names(model_type, {stage: _join_names(places, names) for stage, names in _OWN.get(kind, {}).items()})


@cache
def _of_network(model_type: str, network: FeedForwardSpec | None) -> _Names:
    found: dict[str, tuple[str, ...]] = {}
    if network is None:
        return ()
    for stage, names in _MATRICES.items():
        if network.num_experts is None:
            plain = tuple(name for name in names if name.startswith("fc"))  # OPT's stand in the layer itself
            found[f"feed_forward {stage}"] = (*_join_names(_NETWORKS, names), *plain)
            continue
        experts = tuple(f"experts.0.{name}" for name in names)
        found[f"experts {stage}"] = _join_names(_NETWORKS, (*experts, "experts"))
        shared = tuple(f"{place}.{name}" for place in ("shared_experts", "shared_expert") for name in names)
        found[f"shared_experts {stage}"] = (*_join_names(_NETWORKS, shared), "shared_mlp")
    if network.num_experts is not None:
        found[ROUTER] = _join_names(_NETWORKS, ("gate", "router"))
        found[SHARED_GATE] = _join_names(_NETWORKS, ("shared_expert_gate",))
    return _own_names(model_type, found)


def _join_names(places: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for place in places for name in names)


def _own_names(model_type: str, found: dict[str, tuple[str, ...]]) -> _Names:
    """Names of a family whose matrices are fused in place of the usual ones."""
    fused = {stage: _FUSED[stage] for stage in _FUSED_IN.get(model_type, ()) if stage in found}
    return tuple((found | fused).items())


_PLAIN = re.compile(r"[\w.]+")
_TEXT_PART = re.compile(r"(?:model\\?\.)?language_model\\?\.(?:model\\?\.)?")
_OTHER_LAYERS = re.compile(
    r"\b(?:transformer\\?\.h|gpt_neox\\?\.layers|model\\?\.decoder\\?\.layers|backbone\\?\.layers)"
)


@dataclass(frozen=True)
class Patterns:
    """The patterns of one quantiser. Files list hundreds of whole names, which are looked up and not tried one by
    one.

    For example ``by_boundary(["lm_head"])(Module("head", ("lm_head",)))`` is True.

    Attributes:
        names: whole names.
        starts: beginnings of names, up to a dot or the name's end.
        ends: ends of names.
        expressions: regular expressions that match the beginning of a name, by the pattern that each was made of.
    """

    names: frozenset[str] = frozenset()
    starts: frozenset[str] = frozenset()
    ends: tuple[str, ...] = ()
    expressions: Mapping[str, re.Pattern[str]] = field(default_factory=dict)

    def __call__(self, module: Module) -> bool:
        """Whether a pattern matches one of a matrix's names."""
        return any(map(self._matches, module.names))

    def unmatched(self, modules: Iterable[Module]) -> Iterator[str]:
        """The patterns that match none of the matrices."""
        names = {name for module in modules for name in module.names}
        starts = {start for name in names for start in _beginnings(name)}
        for pattern in sorted({*self.names, *self.starts, *self.ends, *self.expressions}):
            is_found = (
                pattern in (names if pattern in self.names else starts)
                or (pattern in self.ends and any(name.endswith(pattern) for name in names))
                or (pattern in self.expressions and any(map(self.expressions[pattern].match, names)))
            )
            if not is_found:
                yield pattern

    def _matches(self, name: str) -> bool:
        return (
            name in self.names
            or name.endswith(self.ends)
            or (bool(self.starts) and not self.starts.isdisjoint(_beginnings(name)))
            or any(pattern.match(name) for pattern in self.expressions.values())
        )


def by_boundary(patterns: Sequence[str]) -> Patterns:
    """Patterns as transformers' quantisers read them: a name's beginning up to a dot or its end, or a name's end.

    For example ``by_boundary(["model.layers.1"])`` matches ``model.layers.1.mlp.up_proj``, not ``model.layers.11``.
    """
    found = [_as_model(pattern) for pattern in patterns]
    plain = frozenset(pattern for pattern in found if _PLAIN.fullmatch(pattern))
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return Patterns(
        starts=plain,
        ends=tuple(pattern for pattern in plain if ".layers." not in pattern),
        expressions={each: _compiled(each, f"(?:{each}){boundary}") for each in found if each not in plain},
    )


def by_name(patterns: Sequence[str]) -> Patterns:
    """Patterns as compressed-tensors reads them: a whole name, or after ``re:`` an expression for its beginning."""
    found = [_as_model(pattern) for pattern in patterns]
    return Patterns(
        names=frozenset(pattern for pattern in found if not pattern.startswith("re:")),
        expressions={each: _compiled(each, each[3:]) for each in found if each.startswith("re:")},
    )


def by_wildcard(patterns: Sequence[str]) -> Patterns:
    """Patterns as ModelOpt reads them: a name with ``*`` for anything, which also covers all matrices below it."""
    found = [_as_model(pattern) for pattern in patterns]
    return Patterns(
        starts=frozenset(pattern for pattern in found if _PLAIN.fullmatch(pattern)),
        expressions={
            each: re.compile(f"{translate(each)}|{translate(f'{each}.*')}")
            for each in found
            if not _PLAIN.fullmatch(each)
        },
    )


def _as_model(pattern: str) -> str:
    """A pattern as one for a model of text alone, whose layers are ``model.layers``."""
    return _OTHER_LAYERS.sub("model.layers", _TEXT_PART.sub("model.", pattern))


def _beginnings(name: str) -> Iterator[str]:
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)
    yield name


def _compiled(pattern: str, expression: str) -> re.Pattern[str]:
    """A compiled expression; where it is invalid, one for the pattern as plain text."""
    try:
        return re.compile(expression)
    except re.error:
        return re.compile(re.escape(pattern))
