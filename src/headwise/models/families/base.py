"""Model families: where an architecture keeps its attention's tensors, in what layout, and what else it alone has.

A layout is a pair of functions, from and to headwise's names of the four projections, so that a family whose
projections are fused or transposed differs from the others in one line. Torch is imported where tensors are made, so
that advice, which makes none, reads the rest without it.

Shapes: H query heads, K key–value heads, D head dim, V value dim, E hidden.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from headwise.errors import CheckpointError, SpecError
from headwise.models.specs import HOSTED_PREFIX
from headwise.models.specs.grouped import PROJECTIONS, GroupedSpec

if TYPE_CHECKING:
    from torch import Tensor

State: TypeAlias = "dict[str, Tensor]"
Change: TypeAlias = "Callable[[Mapping[str, Tensor], GroupedSpec], State]"


class Layout(NamedTuple):
    """The names and shapes of a family's projections within its attention module.

    Attributes:
        pack: converts ``q_proj.weight`` ``[H·D, E]``, ``k_proj.weight`` … and biases to the tensors of the family.
        unpack: the inverse of ``pack``.
    """

    pack: Change
    unpack: Change


def canonical_shapes(spec: GroupedSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of an attention's tensors under headwise's names: ``q_proj.weight`` and so on.

    Args:
        spec: the attention.
    """
    E, H, K, D, V = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim
    weights = {"q_proj": (H * D, E), "k_proj": (K * D, E), "v_proj": (K * V, E), "o_proj": (E, H * V)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in PROJECTIONS:
        shapes[f"{name}.weight"] = weights[name]
        if name in spec.bias:
            shapes[f"{name}.bias"] = weights[name][:1]
    if spec.qk_norm is not None:
        whole = spec.qk_norm == "full"
        shapes["q_norm.weight"] = (H * D if whole else D,)
        shapes["k_norm.weight"] = (K * D if whole else D,)
    return shapes


def packed_shapes(layout: Layout, spec: GroupedSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of an attention's tensors under a family's names; nothing is allocated.

    Args:
        layout: the family's.
        spec: the attention.
    """
    import torch

    empty = {name: torch.empty(shape, device="meta") for name, shape in canonical_shapes(spec).items()}
    return {name: tuple(tensor.shape) for name, tensor in layout.pack(empty, spec).items()}


def renamed(**names: str) -> Layout:
    """A layout with headwise's projections under other names, such as ``renamed(o_proj="out_proj")``.

    Args:
        names: the family's name of each projection that it names otherwise.
    """
    inverse = {stored: canonical for canonical, stored in names.items()}
    return Layout(lambda state, _: _rename(state, names), lambda state, _: _rename(state, inverse))


def _rename(state: Mapping[str, Tensor], names: Mapping[str, str]) -> State:
    out = {}
    for name, tensor in state.items():
        stem, _, kind = name.rpartition(".")
        out[f"{names.get(stem, stem)}.{kind}"] = tensor
    return out


PLAIN = renamed()
"""Llama's layout, which is headwise's own."""


def offset_norms(offset: float) -> Layout:
    """Llama's layout with norms of queries and keys that are stored as differences from a constant (Gemma).

    Unpacked norms are float64: with the constant added, a narrower dtype would lose their last digits.

    Args:
        offset: the constant.
    """

    def shifted(state: Mapping[str, Tensor], by: float) -> State:
        norms = ("q_norm.weight", "k_norm.weight")
        return {name: tensor.double() + by if name in norms else tensor for name, tensor in state.items()}

    return Layout(lambda state, _: shifted(state, -offset), lambda state, _: shifted(state, offset))


def fused(name: str, output: str, *, by_head: bool = False, transposed: bool = False) -> Layout:
    """A layout with the rows of queries, keys and values in one projection.

    Args:
        name: the name of that projection.
        output: the name of the output projection.
        by_head: the rows of each head's query, key and value lie together (GPT-NeoX, which has one key–value head for
            each query head); otherwise all queries come first, then all keys, then all values.
        transposed: weights are stored as ``[in, out]`` (GPT-2).
    """

    def turn(tensor: Tensor) -> Tensor:
        return tensor.T.contiguous() if transposed and tensor.dim() == 2 else tensor

    def pack(state: Mapping[str, Tensor], spec: GroupedSpec) -> State:
        import torch

        out = {f"{output}.{kind}": turn(state[f"o_proj.{kind}"]) for kind in _kinds(state, "o_proj")}
        for kind in _kinds(state, "q_proj"):
            parts = [state[f"{projection}.{kind}"] for projection in PROJECTIONS[:3]]
            if by_head:
                heads = [torch.unflatten(part, 0, (spec.num_heads, -1)) for part in parts]  # each [H, D or V, E]
                whole = torch.cat(heads, dim=1).flatten(0, 1)  # [H·(2D + V), E]
            else:
                whole = torch.cat(parts)  # [H·D + K·D + K·V, E]
            out[f"{name}.{kind}"] = turn(whole)
        return out

    def unpack(state: Mapping[str, Tensor], spec: GroupedSpec) -> State:
        import torch

        D, V = spec.head_dim, spec.value_dim
        H, K = spec.num_heads, spec.num_kv_heads
        out = {f"o_proj.{kind}": turn(state[f"{output}.{kind}"]) for kind in _kinds(state, output)}
        for kind in _kinds(state, name):
            whole = turn(state[f"{name}.{kind}"])
            if by_head:
                by_part = torch.unflatten(whole, 0, (H, D + D + V))  # [H, 2D + V, E]
                heads = torch.split(by_part, [D, D, V], dim=1)  # each [H, D or V, E]
                parts = [part.flatten(0, 1) for part in heads]  # each [H·D or H·V, E]
            else:
                parts = list(torch.split(whole, [H * D, K * D, K * V]))
            for projection, part in zip(PROJECTIONS, parts, strict=False):
                out[f"{projection}.{kind}"] = part.contiguous()
        return out

    return Layout(pack, unpack)


def _kinds(state: Mapping[str, Tensor], projection: str) -> list[str]:
    return [kind for kind in ("weight", "bias") if f"{projection}.{kind}" in state]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where a transformers architecture keeps its attention, in safetensors and in GGUF files.

    Attributes:
        model_type: transformers' name of the architecture.
        layer: path of a decoder (or encoder) layer's module, such as ``model.layers.{layer}``.
        attention: path of the module that holds a layer's attention, such as ``model.layers.{layer}.self_attn``.
        cross_attention: path of the attention to an encoder's output; None where there is none.
        layout: names and shapes of the projections within that module.
        stock_kv_heads: the config has ``num_key_value_heads``, so that the family's own class can be GQA and MQA.
        deepseek_blocks: whether its layers equal deepseek_v3's dense layers, tensor names included, except for the
            attention: its MLA is written as stock MLA, and served by headwise's plugin in vLLM.
        former_rope: ``rope_theta`` and ``rope_scaling``, as transformers 4 wrote them, say all of its RoPE.
        output: path within ``attention`` of the output projection, where the module returns its output after the
            residual connection or the norm.
        adds: the attention's output is added to the residual stream directly; False where a norm comes first.
        hosted: path within ``attention`` that headwise's layer replaces; empty for the whole module.
        emptied: paths within ``attention`` that become identities, because headwise's layer computes them too.
        dropout: the config's field for dropout of attention weights.
        output_dropout: the config's field for dropout of the attention's output, where the module has that.
        autos: names of the transformers Auto classes that load the family's folders; the first is the default.
        buffers: endings of stored names that are buffers and not weights; they are not read.
        renamed: parts of stored names, and the current transformers names that replace them.
        written: parts of transformers' names, and what stock folders have in their place, as engines ask for it.
        joined: transformers' name of a tensor that holds a matrix of every expert → the names of the matrices that it
            is made of, where files store each expert's by itself; both with ``{layer}``, the latter with
            ``{expert}`` too. Several matrices of an expert are stacked by rows.
        gguf_tensors: GGUF name → transformers name, both with ``{layer}`` for the number of a layer and without
            ``.weight`` or ``.bias`` at the end.
        gguf_interleaved: GGUF stores rows of queries and keys as neighbouring pairs, transformers as halves.
        gguf_norm_offset: GGUF stores the weights of norms with this added.
    """

    model_type: str
    layer: str
    attention: str
    cross_attention: str | None = None
    layout: Layout = PLAIN
    stock_kv_heads: bool = True
    deepseek_blocks: bool = False
    former_rope: bool = False
    output: str = ""
    adds: bool = True
    hosted: str = ""
    emptied: tuple[str, ...] = ()
    dropout: str = "attention_dropout"
    output_dropout: str | None = None
    autos: tuple[str, ...] = ("AutoModelForCausalLM",)
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    renamed: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf_tensors: Mapping[str, str] = field(default_factory=dict)
    gguf_interleaved: bool = False
    gguf_norm_offset: float = 0.0

    @property
    def base(self) -> str:
        """The first part of every path, such as ``model.``: the base model within the language model."""
        return self.layer.partition(".")[0] + "."

    def bare(self) -> Family:
        """The family with paths that start at the base model, for folders whose tensor names lack `base`."""
        cut = len(self.base)
        cross = None if self.cross_attention is None else self.cross_attention[cut:]
        return replace(self, layer=self.layer[cut:], attention=self.attention[cut:], cross_attention=cross)

    def names_today(self, stored: Collection[str]) -> dict[str, str]:
        """Map transformers' current name of each tensor to its name in the file.

        Some language models are stored as their base model, without its prefix (GPT-2). Encoders' names are not
        changed, because an encoder may itself be the base model.

        Args:
            stored: the names in the files.
        """
        is_bare = "AutoModel" not in self.autos and not any(name.startswith(self.base) for name in stored)
        names = {}
        for name in stored:
            today = self.base + name if is_bare else name
            for old, new in self.renamed.items():
                today = today.replace(old, new)
            names[today] = name
        return names

    def experts(self, names: Collection[str]) -> dict[str, list[list[str]]]:
        """The tensors that hold a matrix of every expert, and the names that they are made of, by expert.

        Args:
            names: the names of the tensors in the files, as transformers has them today.

        Raises:
            CheckpointError: matrices of an expert are missing.
        """
        found: dict[str, dict[tuple[int, int], str]] = {}
        for whole, parts in self.joined.items():
            for part, pattern in enumerate(parts):
                place = re.escape(pattern).replace(r"\{layer\}", r"(\d+)").replace(r"\{expert\}", r"(\d+)")
                for name, match in ((name, re.fullmatch(place, name)) for name in names):
                    if match is not None:
                        found.setdefault(whole.format(layer=match[1]), {})[int(match[2]), part] = name
        joined = {}
        for name, stored in found.items():
            count = max(part for _, part in stored) + 1
            experts = len(stored) // count
            joined[name] = [[stored.get((expert, part), "") for part in range(count)] for expert in range(experts)]
            if len(stored) % count or not all(map(all, joined[name])):
                raise CheckpointError("tensor", name, f"lacks matrices of its experts: {len(stored)} are stored")
        return joined

    def place(self, layer: int, *, cross: bool = False, hosted: bool = False) -> str:
        """The path of a layer's attention module.

        Args:
            layer: the index of the layer, from 0.
            cross: the attention to an encoder's output.
            hosted: the path of headwise's layer in a converted model.
        """
        path = self.cross_attention if cross else self.attention
        assert path is not None
        return path.format(layer=layer) + (f".{self.hosted}" if hosted and self.hosted else "")

    def stored_shapes(self, layer: int, spec: GroupedSpec, *, cross: bool = False) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that the family stores for a layer's attention, by its full name.

        Args:
            layer: the index of the layer, from 0.
            spec: the layer's attention.
            cross: the attention to an encoder's output.
        """
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
        """Read a layer's attention under headwise's names: ``q_proj.weight`` ``[H·D, E]`` and so on.

        Norms of queries and keys are returned as factors (Gemma stores them as offsets from 1).

        Args:
            read: returns a tensor of the checkpoint by name.
            layer: the index of the layer, from 0.
            spec: the layer's attention; every shape is checked against it.
            cross: the attention to an encoder's output.
            hosted: the folder is a converted one, in which the layers are stored under headwise's names.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        layout = PLAIN if hosted else self.layout
        prefix = self.place(layer, cross=cross, hosted=hosted)
        stored = {}
        for suffix, shape in packed_shapes(layout, spec).items():
            name = f"{prefix}.{suffix}"
            tensor = read(name)
            if tuple(tensor.shape) != shape:
                raise CheckpointError(f"{name} shape", tuple(tensor.shape), f"must be {shape} by the config")
            stored[suffix] = tensor
        return layout.unpack(stored, spec)

    def write_attention(
        self, state: Mapping[str, Tensor], layer: int, spec: GroupedSpec, *, cross: bool = False
    ) -> State:
        """Convert a layer's attention to the tensors that the family stores: the inverse of `read_attention`.

        Args:
            state: the attention under headwise's names.
            layer: the index of the layer, from 0.
            spec: the spec of the layer's attention.
            cross: the attention to an encoder's output.

        Returns:
            The tensors by their full names.
        """
        prefix = self.place(layer, cross=cross)
        return {f"{prefix}.{name}": tensor for name, tensor in self.layout.pack(state, spec).items()}


@cache
def family_names() -> tuple[str, ...]:
    """The model types that have a file in this folder, sorted.

    For example ``"llama" in family_names()`` is True.
    """
    names = (file.name for file in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return tuple(sorted(name for name in names if name != "base"))


def has_family(model_type: object) -> bool:
    """Whether a model type, or the type that it was converted from, has a file in this folder.

    For example ``has_family("llama")`` is True.
    """
    return isinstance(model_type, str) and model_type.removeprefix(HOSTED_PREFIX) in family_names()


def family_of(model_type: str) -> Family:
    """The family of a model type.

    For example ``family_of("headwise_llama").model_type`` is ``"llama"``.

    Args:
        model_type: the model's type, such as ``llama``, or ``headwise_llama`` for the family of a converted folder.

    Raises:
        SpecError: this folder has no file for the model type.
    """
    name = model_type.removeprefix(HOSTED_PREFIX)
    if name not in family_names():
        rule = f"cannot be converted, or read from GGUF, yet; can: {', '.join(family_names())}"
        raise SpecError("model_type", name, rule)
    return cast(Family, importlib.import_module(f"headwise.models.families.{name}").FAMILY)
