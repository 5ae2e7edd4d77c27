"""What a model family is to a checkpoint: where its attention's tensors live, and in what layout."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from torch import Tensor

from headwise.checkpoints import families
from headwise.checkpoints.layout import PLAIN, Layout, State, packed_shapes
from headwise.errors import CheckpointError, SpecError
from headwise.specs import HOSTED_PREFIX
from headwise.specs.grouped import GroupedSpec


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where a transformers architecture keeps its attention, in its own files and in GGUF.

    Attributes:
        model_type: transformers' name.
        layer: the module of a decoder (or encoder) layer, such as ``model.layers.{layer}``.
        attention: the module that a layer's attention tensors are in, such as ``model.layers.{layer}.self_attn``.
        cross_attention: likewise, of the attention to an encoder's output; None where there is none.
        layout: the names and shapes of the projections below it.
        stock_kv_heads: the config has ``num_key_value_heads``, so that the family's own class is GQA and MQA too.
        output: where below ``attention`` its output projection is, when what the module gives has been added to the
            stream or normalised already.
        adds: the attention's output joins the residual stream as it is; False where a norm comes between.
        hosted: where below ``attention`` headwise's layer goes, when that is not the module itself.
        emptied: what below ``attention`` then has nothing left to do: headwise's layer does it.
        dropout: the config's field for dropped attention weights.
        output_dropout: the config's field for what the attention module drops of its output, if it does.
        autos: transformers' Auto classes its folders load by; the first where a folder does not say.
        buffers: endings of stored names that are no weights, and are not read.
        renamed: parts of stored names → what transformers calls them today.
        gguf_tensors: GGUF name → transformers name, both with ``{layer}`` where there is one a layer; without the
            ``.weight`` or ``.bias`` at the end.
        gguf_interleaved: GGUF stores query and key rows in interleaved pairs where transformers has halves.
    """

    model_type: str
    layer: str
    attention: str
    cross_attention: str | None = None
    layout: Layout = PLAIN
    stock_kv_heads: bool = True
    output: str = ""
    adds: bool = True
    hosted: str = ""
    emptied: tuple[str, ...] = ()
    dropout: str = "attention_dropout"
    output_dropout: str | None = None
    autos: tuple[str, ...] = ("AutoModelForCausalLM",)
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    renamed: Mapping[str, str] = field(default_factory=dict)
    gguf_tensors: Mapping[str, str] = field(default_factory=dict)
    gguf_interleaved: bool = False

    @property
    def base(self) -> str:
        """The first name of every path: the bare model within the language model, such as ``model.``."""
        return self.layer.partition(".")[0] + "."

    def bare(self) -> Family:
        """The family of a folder that holds the bare model alone, whose names leave `base` out."""
        cut = len(self.base)
        cross = self.cross_attention
        return replace(
            self,
            layer=self.layer[cut:],
            attention=self.attention[cut:],
            cross_attention=None if cross is None else cross[cut:],
        )

    def names_today(self, stored: Collection[str]) -> dict[str, str]:
        """transformers' name of each stored tensor → the stored one.

        Some language models are stored as the bare model, without its prefix (GPT-2); encoders are left as they are,
        for theirs may be the bare model itself.
        """
        is_bare = "AutoModel" not in self.autos and not any(name.startswith(self.base) for name in stored)
        names = {}
        for name in stored:
            today = self.base + name if is_bare else name
            for old, new in self.renamed.items():
                today = today.replace(old, new)
            names[today] = name
        return names

    def place(self, layer: int, *, cross: bool = False, hosted: bool = False) -> str:
        """The module of a layer's attention; with ``hosted``, where headwise's own is put."""
        path = self.cross_attention if cross else self.attention
        assert path is not None
        return path.format(layer=layer) + (f".{self.hosted}" if hosted and self.hosted else "")

    def stored_shapes(self, layer: int, spec: GroupedSpec, *, cross: bool = False) -> dict[str, tuple[int, ...]]:
        """Every tensor that the family stores of a layer's attention, by its whole name."""
        prefix = self.place(layer, cross=cross)
        return {f"{prefix}.{name}": shape for name, shape in packed_shapes(self.layout, spec).items()}

    def read_attention(
        self,
        read: Callable[[str], Tensor],
        layer: int,
        spec: GroupedSpec,
        *,
        cross: bool = False,
        hosted: bool = False,
    ) -> State:
        """One layer's attention in the layer's own names: ``q_proj.weight`` ``[H·D, E]`` and so on.

        Norms of queries and keys come as they multiply (Gemma stores them as offsets from 1).

        Args:
            read: gives a tensor of the checkpoint by name.
            layer: which.
            spec: what it should be; every shape is held to it.
            cross: the attention to an encoder's output.
            hosted: the folder is a converted one, whose layers are headwise's own, in their own names.

        Raises:
            CheckpointError: a tensor is missing or of another shape.
        """
        layout = PLAIN if hosted else self.layout
        prefix = self.place(layer, cross=cross, hosted=hosted)
        stored = {}
        for own, want in packed_shapes(layout, spec).items():
            name = f"{prefix}.{own}"
            tensor = read(name)
            if tuple(tensor.shape) != want:
                raise CheckpointError(f"{name} shape", tuple(tensor.shape), f"must be {want} by the config")
            stored[own] = tensor
        return layout.unpack(stored, spec)

    def write_attention(
        self, state: Mapping[str, Tensor], layer: int, spec: GroupedSpec, *, cross: bool = False
    ) -> State:
        """The inverse of `read_attention`: the tensors the family stores, by their whole names.

        Args:
            state: the attention in the layer's own names.
            layer: which.
            spec: what it is.
            cross: the attention to an encoder's output.
        """
        prefix = self.place(layer, cross=cross)
        return {f"{prefix}.{name}": tensor for name, tensor in self.layout.pack(state, spec).items()}


def family_names() -> list[str]:
    """The families there is a file for."""
    return sorted(module.name for module in pkgutil.iter_modules(families.__path__))


def has_family(model_type: object) -> bool:
    """Whether there is a file for a model type, a converted one's included."""
    return isinstance(model_type, str) and model_type.removeprefix(HOSTED_PREFIX) in family_names()


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
