"""The spec of a whole model: each layer's attention, the body around it, and the formats of stored weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec, check_positive, check_sizes
from headwise.models.specs.latent import LatentSpec

Formats = tuple[tuple[str, "MatrixFormat"], ...]
"""The format of each matrix that has one of its own, by the name of its stage in `headwise.cost`; those of a
feed-forward network stand behind the name of its part, as in ``experts up_proj``."""


@dataclass(frozen=True, kw_only=True)
class MatrixFormat:
    """The memory that a matrix takes: its values, and scales and zero points beside them.

    For example ``MatrixFormat(name="mxfp4", bits=4, block=(1, 32), scale_bits=8).nbytes(64, 64)`` is 2176.

    Attributes:
        name: the format's name in reports.
        bits: the bits of one value.
        block: the numbers of outputs and of inputs that share a scale; None for all of them.
        scale_bits: the bits of one block's scale and zero point.
        input_bits: the bits that each input takes besides, for the number of its group.
        matrix_bytes: the bytes that a whole matrix takes besides, such as a table.
    """

    name: str
    bits: float
    block: tuple[int | None, int | None] = (None, None)
    scale_bits: float = 0
    input_bits: int = 0
    matrix_bytes: int = 0

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a matrix of ``outputs`` rows and ``inputs`` columns."""
        rows, columns = self.block
        blocks = -(-outputs // (rows or outputs)) * -(-inputs // (columns or inputs))
        bits = outputs * inputs * self.bits + blocks * self.scale_bits + inputs * self.input_bits
        return int(-(-bits // 8)) + self.matrix_bytes


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """The formats of a model's matrices; what has none is in the dtype that the model runs in.

    For example ``read_spec("gpt-oss-20b").stored.scheme`` is ``"mxfp4"``.

    Attributes:
        scheme: the scheme's name in reports.
        kinds: the different sets of formats that layers have, each once.
        layers: the index in ``kinds`` of each layer's set.
        outside: the formats of ``embedding`` and ``head``.
        vector_bytes: the bytes of one value of norms and biases; None where these are in the model's dtype.
        is_bound: whether some matrices are stored in an unknown format of fewer bits, so that their count in the
            dtype is an upper bound.
        notes: remarks on what is not known of the formats, for reports.
    """

    scheme: str
    kinds: tuple[Formats, ...]
    layers: tuple[int, ...]
    outside: Formats = ()
    vector_bytes: float | None = None
    is_bound: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def of_layers(
        cls, scheme: str, layers: Sequence[Mapping[str, MatrixFormat]], outside: Mapping[str, MatrixFormat]
    ) -> Self:
        """Make the stored weights of a model from the formats of each layer."""
        each = [tuple(sorted(formats.items(), key=lambda item: item[0])) for formats in layers]
        kinds = tuple(dict.fromkeys(each))
        places = {formats: place for place, formats in enumerate(kinds)}
        which = tuple(places[formats] for formats in each)
        return cls(scheme=scheme, kinds=kinds, layers=which, outside=tuple(outside.items()))

    def counted(self, dtype: str) -> str:
        """A phrase for reports on how weights are counted, where those without a format are in a dtype."""
        dtype = dtype.removeprefix("torch.")
        if not any((*self.kinds, self.outside)):
            return dtype
        return self.scheme if self.vector_bytes is not None else f"{self.scheme}, the rest {dtype}"

    def warnings(self) -> tuple[str, ...]:
        """What is not known of the formats, in sentences."""
        bound = ("what is not known of the weights counts in the dtype, which is an upper bound",)
        return (*self.notes, *(bound if self.is_bound else ()))


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec:
    """One layer's feed-forward network.

    For example ``FeedForwardSpec(hidden_size=4096, intermediate_size=14336)``.

    Source: Shazeer 2020 (gated), Shazeer et al. 2017 (experts), DeepSeekMoE (shared experts).

    Attributes:
        hidden_size: E, width of the residual stream.
        intermediate_size: width of the dense network, or of each expert.
        gated: whether there are three matrices (gate, up, down) rather than two.
        bias: whether every matrix of the network, or of each expert, has a bias.
        num_experts: experts that the router chooses from; None for a dense network.
        experts_per_token: the number of experts that a token uses.
        shared_intermediate_size: total width of the shared experts, which every token uses; None without them.
        shared_gate: whether the shared experts have a learned gate (Qwen2-MoE).
        router_bias: whether the router's logits have a bias (gpt-oss).
        score_correction: whether each expert has a number that balances how often it is chosen but does not weigh its
            output (DeepSeek-V3).
    """

    hidden_size: int
    intermediate_size: int
    gated: bool = True
    bias: bool = False
    num_experts: int | None = None
    experts_per_token: int | None = None
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    router_bias: bool = False
    score_correction: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "hidden_size", "intermediate_size")
        for name in ("num_experts", "experts_per_token", "shared_intermediate_size"):
            if (value := getattr(self, name)) is not None:
                check_positive(name, value)
        if self.num_experts is None:
            if self.experts_per_token or self.shared_intermediate_size:
                raise SpecError("num_experts", None, "is required where there are experts")
        elif self.experts_per_token is None or self.experts_per_token > self.num_experts:
            rule = f"must be at least 1 and at most num_experts = {self.num_experts}"
            raise SpecError("experts_per_token", self.experts_per_token, rule)


@dataclass(frozen=True, kw_only=True)
class BodySpec:
    """A decoder without its attention: together with the layers, every weight that the model stores.

    Where a reader cannot tell all of it, a model has no body at all: its attention and cache are known, and costs of
    the whole model are refused.

    Attributes:
        vocab_size: rows of the embedding and of the head.
        feed_forward: the network of each layer, in order; None where a layer has none.
        norms: the number of norms over E in each layer; one more of the same kind stands before the head.
        norm_vectors: the number of learned vectors of E in a norm: 1 for a weight, 2 for a weight and a bias, 0 for
            neither.
        positions: rows of a learned position embedding; 0 without one.
        tied: whether the head shares the embedding's weights.
        head_bias: whether the head has a bias.
        streams: the number of residual streams; each block joins several and adds its output to each (DeepSeek-V4).
    """

    vocab_size: int
    feed_forward: tuple[FeedForwardSpec | None, ...]
    norms: int = 2
    norm_vectors: int = 1
    positions: int = 0
    tied: bool = False
    head_bias: bool = False
    streams: int = 1

    def __post_init__(self) -> None:
        check_positive("vocab_size", self.vocab_size)
        check_positive("streams", self.streams)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: a stack of layers, each with its attention or another mixer, and the body around them.

    For example ``ModelSpec(model_type="llama", hidden_size=4096, layers=(layer_spec("llama-3-8b"),) *
    32).num_layers`` is 32.

    Attributes:
        model_type: transformers' name of the architecture.
        hidden_size: E, width of the residual stream.
        layers: the spec of each layer, in order.
        vocab_size: rows of the embedding, where the config has it.
        max_position_embeddings: the longest sequence that the model was made for, where the config has it.
        dtype: the dtype of the stored weights, where the config has it.
        body: the rest of the model, where the config is complete and the family's body is understood.
        cross_layers: the spec of each layer's attention to an encoder's output (Whisper's decoder), or none.
        stored: the formats of weights that are stored quantised; None where all are in one dtype.
    """

    model_type: str
    hidden_size: int
    layers: tuple[AttentionSpec, ...]
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    dtype: str | None = None
    body: BodySpec | None = None
    cross_layers: tuple[AttentionSpec, ...] = ()
    stored: StoredWeights | None = None

    def __post_init__(self) -> None:
        check_positive("hidden_size", self.hidden_size)
        if not self.layers:
            raise SpecError("num_hidden_layers", 0, "must be at least 1")
        if self.body is not None and len(self.body.feed_forward) != len(self.layers):
            rule = f"must be one for each of {len(self.layers)} layers"
            raise SpecError("feed_forward", len(self.body.feed_forward), rule)
        if self.stored is not None and len(self.stored.layers) != len(self.layers):
            raise SpecError("stored", len(self.stored.layers), f"must be one for each of {len(self.layers)} layers")

    def __hash__(self) -> int:
        # Costs are kept by model. Equal models agree in these fields, and those of all layers take long.
        return hash((self.model_type, self.hidden_size, self.num_layers, self.layers[:1]))

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def changes_at(self) -> int | None:
        """The longest text, in tokens, with the usual rotary frequencies; None where texts of all lengths have the
        same."""
        lengths = [layer.rope.changes_at for layer in self.layers if layer.rope is not None]
        return min((length for length in lengths if length is not None), default=None)

    @property
    def mechanism(self) -> str:
        """The mechanism of all layers, or ``mixed`` where they differ."""
        names = {layer.mechanism for layer in self.layers}
        return names.pop() if len(names) == 1 else "mixed"

    @property
    def label(self) -> str:
        """The first layer's label, such as ``MLA 512 + 64``, or for MLA layers of several sizes their average."""
        sizes = [(x.kv_lora_rank, x.qk_rope_head_dim) for x in self.layers if isinstance(x, LatentSpec)]
        if len(sizes) < self.num_layers or len(set(sizes)) == 1:
            return self.layers[0].label
        rank, rotary = (round(sum(widths) / len(sizes)) for widths in zip(*sizes, strict=True))
        return f"MLA {rank} + {rotary} on average"

    @property
    def is_causal(self) -> bool:
        """Whether all layers are causal, and so keep a cache."""
        return all(layer.is_causal for layer in self.layers)

    def distinct_layers(self) -> list[tuple[AttentionSpec, tuple[int, ...]]]:
        """Each distinct spec and the indices of its layers, in order of first appearance."""
        return group_equal_layers(self.layers)


def group_equal_layers(layers: Sequence[AttentionSpec]) -> list[tuple[AttentionSpec, tuple[int, ...]]]:
    """Each distinct spec among ``layers`` and the indices of its layers, in order of first appearance."""
    indices_of: dict[AttentionSpec, list[int]] = {}
    for index, layer in enumerate(layers):
        indices_of.setdefault(layer, []).append(index)
    return [(spec, tuple(indices)) for spec, indices in indices_of.items()]
