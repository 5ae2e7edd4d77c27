"""What a model family is to a checkpoint: where its attention's tensors live."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from headwise.checkpoints import families
from headwise.errors import CheckpointError, SpecError
from headwise.specs import HOSTED_PREFIX
from headwise.specs.base import AttentionSpec
from headwise.specs.grouped import PROJECTIONS, GroupedSpec

if TYPE_CHECKING:
    from torch import Tensor


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
            want = shapes[projection] if kind == "weight" else shapes[projection][:1]
            if tuple(tensor.shape) != want:
                raise CheckpointError(f"{name} shape", tuple(tensor.shape), f"must be {want} by the config")
            state[own] = tensor
        return state


def family_names() -> list[str]:
    """The families there is a file for."""
    return sorted(module.name for module in pkgutil.iter_modules(families.__path__))


def family_of(model_type: str) -> Family:
    """The family of a model type, a converted one's included (``headwise_llama`` is of the llama family).

    Raises:
        SpecError: there is no such family.
    """
    name = model_type.removeprefix(HOSTED_PREFIX)
    if name not in family_names():
        raise SpecError(
            "model_type",
            name,
            f"cannot be converted, or read from GGUF, yet; can: {', '.join(family_names())}",
        )
    return cast(Family, importlib.import_module(f"{families.__name__}.{name}").FAMILY)
