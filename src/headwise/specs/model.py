"""What a model is, as far as its attention is concerned."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.errors import SpecError
from headwise.specs.base import AttentionSpec, positive


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A stack of attention layers and the few sizes around them.

    Attributes:
        model_type: transformers' name of the architecture.
        hidden_size: E.
        layers: one spec a layer, in order.
        vocab_size: rows of the embedding, when the config says.
        max_position_embeddings: longest sequence the model was made for, when the config says.
        dtype: the dtype of the stored weights, when the config says.
    """

    model_type: str
    hidden_size: int
    layers: tuple[AttentionSpec, ...]
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        positive("hidden_size", self.hidden_size)
        if not self.layers:
            raise SpecError("num_hidden_layers", 0, "must be at least 1")

    @property
    def num_layers(self) -> int:
        """How many layers have attention."""
        return len(self.layers)

    @property
    def mechanism(self) -> str:
        """The layers' common mechanism, or ``mixed``."""
        names = {layer.mechanism for layer in self.layers}
        return names.pop() if len(names) == 1 else "mixed"

    @property
    def is_causal(self) -> bool:
        """Whether the layers are causal (and so have a cache to speak of)."""
        return all(layer.is_causal for layer in self.layers)

    def distinct_layers(self) -> list[tuple[AttentionSpec, tuple[int, ...]]]:
        """Each distinct spec with the indices of its layers, in order of first appearance."""
        found: dict[AttentionSpec, list[int]] = {}
        for index, layer in enumerate(self.layers):
            found.setdefault(layer, []).append(index)
        return [(spec, tuple(indices)) for spec, indices in found.items()]
