"""What a model family is to a checkpoint: where its attention's tensors live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwise.errors import CheckpointError
from headwise.specs.base import AttentionSpec
from headwise.specs.grouped import GroupedSpec

if TYPE_CHECKING:
    from torch import Tensor

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where a transformers architecture keeps its attention, in its own files and in GGUF.

    Attributes:
        model_type: transformers' name.
        attention: the attention module of a layer, such as ``model.layers.{layer}.self_attn``.
        gguf_tensors: GGUF name → transformers name, both with ``{layer}`` where there is one a layer; without the
            ``.weight`` or ``.bias`` at the end.
        gguf_interleaved: GGUF stores query and key rows in interleaved pairs where transformers has halves.
    """

    model_type: str
    attention: str
    gguf_tensors: Mapping[str, str] = field(default_factory=dict)
    gguf_interleaved: bool = False

    def attention_names(self, layer: int, spec: AttentionSpec) -> dict[str, str]:
        """The layer's own parameter name (``q_proj.weight``) → the checkpoint's."""
        prefix = self.attention.format(layer=layer)
        names = [f"{name}.weight" for name in PROJECTIONS]
        names += [f"{name}.bias" for name in PROJECTIONS if name in spec.bias]
        if isinstance(spec, GroupedSpec) and spec.qk_norm is not None:
            names += ["q_norm.weight", "k_norm.weight"]
        return {name: f"{prefix}.{name}" for name in names}

    def read_attention(self, read: Callable[[str], Tensor], layer: int, spec: GroupedSpec) -> dict[str, Tensor]:
        """One layer's attention in the layer's own names: ``q_proj.weight`` ``[H·D, E]`` and so on.

        Args:
            read: gives a tensor of the checkpoint by name.
            layer: which.
            spec: what it should be; every shape is held to it.

        Raises:
            CheckpointError: a tensor is missing or of another shape.
        """
        E, H, K, D, V = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim
        shapes: dict[str, tuple[int, ...]] = {
            "q_proj": (H * D, E),
            "k_proj": (K * D, E),
            "v_proj": (K * V, E),
            "o_proj": (E, H * V),
        }
        state = {}
        for own, name in self.attention_names(layer, spec).items():
            projection, _, kind = own.partition(".")
            tensor = read(name)
            if projection in shapes:
                want = shapes[projection] if kind == "weight" else shapes[projection][:1]
                if tuple(tensor.shape) != want:
                    raise CheckpointError(f"{name} shape", tuple(tensor.shape), f"must be {want} by the config")
            state[own] = tensor
        return state
