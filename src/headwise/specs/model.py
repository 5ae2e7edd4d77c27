"""What a model is: its attention, layer by layer, and what stands around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwise.errors import SpecError
from headwise.specs.base import AttentionSpec, positive
from headwise.specs.feed_forward import FeedForwardSpec
from headwise.specs.latent import LatentSpec


@dataclass(frozen=True, kw_only=True)
class BodySpec:
    """What a decoder has around its attention: with the layers, every weight it stores.

    Attributes:
        vocab_size: rows of the embedding and of the head.
        feed_forward: one a layer, in order; None where a layer has none.
        norms: norms over E in each layer; one more of their kind stands before the head.
        norm_vectors: vectors of E a norm learns: 1 a weight, 2 a weight and a bias, 0 neither.
        positions: rows of a learned position embedding.
        tied: the head is the embedding.
        head_bias: the head carries a bias.
    """

    vocab_size: int
    feed_forward: tuple[FeedForwardSpec | None, ...]
    norms: int = 2
    norm_vectors: int = 1
    positions: int = 0
    tied: bool = False
    head_bias: bool = False

    def __post_init__(self) -> None:
        positive("vocab_size", self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A stack of layers, each with its attention (or what it has in its place), and what is around them.

    Attributes:
        model_type: transformers' name of the architecture.
        hidden_size: E.
        layers: one spec a layer, in order.
        vocab_size: rows of the embedding, when the config says.
        max_position_embeddings: longest sequence the model was made for, when the config says.
        dtype: the dtype of the stored weights, when the config says.
        body: what is around the attention, when the config says all of it and the family's is written down.
        cross_layers: one spec a layer of its attention to an encoder's output (Whisper's decoder), or none.
    """

    model_type: str
    hidden_size: int
    layers: tuple[AttentionSpec, ...]
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    dtype: str | None = None
    body: BodySpec | None = None
    cross_layers: tuple[AttentionSpec, ...] = ()

    def __post_init__(self) -> None:
        positive("hidden_size", self.hidden_size)
        if not self.layers:
            raise SpecError("num_hidden_layers", 0, "must be at least 1")
        if self.body is not None and len(self.body.feed_forward) != len(self.layers):
            rule = f"must be one for each of {len(self.layers)} layers"
            raise SpecError("feed_forward", len(self.body.feed_forward), rule)

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return len(self.layers)

    @property
    def mechanism(self) -> str:
        """The layers' common mechanism, or ``mixed``."""
        names = {layer.mechanism for layer in self.layers}
        return names.pop() if len(names) == 1 else "mixed"

    @property
    def label(self) -> str:
        """A layer's, such as ``MLA 512 + 64``; of MLA layers of several sizes, what they have on average."""
        sizes = [(x.kv_lora_rank, x.qk_rope_head_dim) for x in self.layers if isinstance(x, LatentSpec)]
        if len(sizes) < self.num_layers or len(set(sizes)) == 1:
            return self.layers[0].label
        rank, rotary = (round(sum(widths) / len(sizes)) for widths in zip(*sizes, strict=True))
        return f"MLA {rank} + {rotary} on average"

    @property
    def is_causal(self) -> bool:
        """Whether the layers are causal (and so have a cache to speak of)."""
        return all(layer.is_causal for layer in self.layers)

    def distinct_layers(self) -> list[tuple[AttentionSpec, tuple[int, ...]]]:
        """Each distinct spec with the indices of its layers, in order of first appearance."""
        return distinct(self.layers)


def distinct(layers: Sequence[AttentionSpec]) -> list[tuple[AttentionSpec, tuple[int, ...]]]:
    """Each distinct spec among some layers with their indices, in order of first appearance."""
    found: dict[AttentionSpec, list[int]] = {}
    for index, layer in enumerate(layers):
        found.setdefault(layer, []).append(index)
    return [(spec, tuple(indices)) for spec, indices in found.items()]
