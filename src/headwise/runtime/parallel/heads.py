"""Tensor parallelism: ranks share a layer's heads, or those of a transformers model.

Every rank is given the same states and returns the same output: ranks add up what their heads put out. Each holds its
own heads' rows of the projections, and the cache of these heads; where there are fewer key–value heads than ranks,
neighbouring ranks hold the same one. What no head has to itself, such as MLA's latent, is the same on all ranks. Of a
mechanism nothing is read here but its `HeadSplit`.

Sums over ranks have derivatives of their own, which a layer shared out by heads needs. Of a transformers model,
headwise's layers are shared by heads, and the rest by transformers' own plan.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import CONFIG_MAPPING
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from headwise.costs.formulas.layer import shard
from headwise.errors import ArgumentError
from headwise.models.specs import HOSTED_PREFIX, AttentionSpec, LatentSpaceSpec
from headwise.runtime.attention.base import AttentionLayer, Cut, RMSNorm

Group = dist.ProcessGroup | None
"""The ranks that share a layer; all of the default group when None."""


def entering(x: Tensor, group: Group) -> Tensor:
    """The same tensor; each rank computes a part of its derivative, and the sum of the parts is returned."""
    return _Entering.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, of which every rank goes on with the whole: its derivative is that of the sum."""
    return _Summed.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def shared(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, of which every rank uses a part: the parts of its derivative are summed too."""
    return entering(summed(x, group), group)


def all_reduced(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum over ranks, or another reduction, as a new tensor without a derivative."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=op, group=group)
    return total


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


Layer = TypeVar("Layer", bound=AttentionLayer)


def rank_spec(spec: AttentionSpec, ranks: int) -> AttentionSpec:
    """The part of a layer that one of several ranks holds, whose cache is the rank's.

    For example ``rank_spec(headwise.GroupedSpec(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8), 4).label``
    is ``"MQA 2/1 × 8"``.

    Raises:
        ArgumentError: the heads cannot be shared by so many ranks.
    """
    if isinstance(spec, LatentSpaceSpec) and ranks > 1:
        # `shard` has none: a rank projects up to all heads, so that no such spec has its parameters, but its cache.
        if spec.num_heads % ranks:
            raise ArgumentError("ranks", ranks, f"must divide num_heads = {spec.num_heads}")
        return replace(spec, num_heads=spec.num_heads // ranks, latent_dim=spec.latent_dim // ranks)
    return shard(spec, ranks)


def share_heads(layer: Layer, group: Group = None) -> Layer:
    """Make a layer this rank's part of itself, in place; every rank of the group has to call it.

    Afterwards the layer is called as before, and returns what it would have returned. Its cache holds the rank's
    heads. Derivatives of weights that several ranks hold are summed over them, so that they stay equal; masks with
    heads and returned weights are those of all heads. For example ``share_heads(GroupedQueryAttention(512, 8, 2))``,
    in each of the processes that ``torchrun`` starts.

    Args:
        layer: the whole layer, with the same weights on all ranks.
        group: the ranks; all processes when None.

    Raises:
        ArgumentError: the heads cannot be shared by so many ranks, or the layer has no output projection or caches
            codes.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    spec = rank_spec(layer.spec, ranks)
    if ranks == 1:
        return layer
    split = layer.head_split()
    sums = getattr(layer, split.sums, None)
    if sums is None:
        raise ArgumentError("output_projection", None, "must be there: ranks add up what it puts out")
    if getattr(layer, "code", None) is not None:
        raise ArgumentError("code", "given", "must be None: codes are of all heads together")
    heads: int = layer.spec.num_heads  # type: ignore[attr-defined]
    holders = _Holders(group)
    for name, parameter in list(layer.named_parameters()):
        owner, _, kind = name.rpartition(".")
        module = layer.get_submodule(owner)
        cut = split.cuts.get(name) or split.cuts.get(owner)
        is_bias = kind == "bias"
        if owner in (split.sums, *split.shared_sums) and is_bias:
            if rank > 0:
                module.register_parameter(kind, None)
        elif cut is not None and not (is_bias and cut.dim > 0):
            part = nn.Parameter(cut_tensor(parameter.detach(), cut, ranks, rank), parameter.requires_grad)
            module.register_parameter(kind, part)
            if cut.heads < ranks:
                _sum_gradient(part, holders.of(cut.heads))
        elif owner not in split.after:
            _sum_gradient(parameter, group)
    for name, module in list(layer.named_modules()):
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        if isinstance(module, RMSNorm) and name in split.norms:
            copies = max(ranks // split.cuts[name].heads, 1)
            setattr(layer, name, SharedRMSNorm(module.weight, module.eps, ranks // copies, copies, group))
    sums.register_forward_hook(lambda _, __, out: summed(out, group))
    for name in split.shared_sums:
        layer.get_submodule(name).register_forward_hook(lambda _, __, out: shared(out, group))
    layer.spec = spec
    layer.register_forward_pre_hook(partial(_enter, group, heads, rank), with_kwargs=True)
    layer.register_forward_hook(partial(_leave, group))
    return layer


def cut_tensor(tensor: Tensor, cut: Cut, ranks: int, rank: int) -> Tensor:
    """One rank's part of a tensor, a copy.

    For example ``cut_tensor(torch.arange(8), Cut(0, 4), ranks=2, rank=1)`` is the last four numbers.

    Args:
        tensor: the tensor of all ranks' heads; a vector is cut along its only dim.
        cut: how it is cut.
        ranks: the number of ranks.
        rank: the rank whose part is cut out.
    """
    dim = min(cut.dim, tensor.dim() - 1)
    blocks = torch.unflatten(tensor, dim, (cut.sections, cut.heads, -1))
    each = max(cut.heads // ranks, 1)
    first = rank * cut.heads // ranks
    part: Tensor = blocks.narrow(dim + 1, first, each).flatten(dim, dim + 2).clone()
    return part


class SharedRMSNorm(nn.Module):
    """RMSNorm over the heads of all ranks, of which each has its own.

    Args:
        weight: the weights of this rank's heads.
        eps: see `headwise.runtime.attention.base.RMSNorm`.
        parts: the number of different parts that ranks hold.
        copies: the number of ranks that hold the same part.
        group: the ranks.
    """

    def __init__(self, weight: nn.Parameter, eps: float, parts: int, copies: int, group: Group) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps
        self._count, self._group = weight.numel() * parts * copies, group

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim, of which this is a part; the dtype stays."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = shared(wide.square().sum(-1, keepdim=True), self._group) / self._count
        return (self.weight * (wide * torch.rsqrt(mean + self.eps)).to(x.dtype)).to(x.dtype)


class _Holders:
    """The group of the ranks that hold the same head as this one, by the number of heads."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._groups: dict[int, Group] = {1: group}  # one head is held by all

    def of(self, heads: int) -> Group:
        if heads not in self._groups:
            ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
            copies = len(ranks) // heads
            first = dist.get_rank(self._group) // copies * copies
            # By its members alone: ranks of other groups need not call this at the same time.
            mine = ranks[first : first + copies]
            self._groups[heads] = dist.new_group(mine, use_local_synchronization=True)
        return self._groups[heads]


def _sum_gradient(parameter: Tensor, group: Group) -> None:
    """Let the derivative of a weight that several ranks hold be the sum of their parts of it."""
    if parameter.requires_grad:
        parameter.register_hook(lambda grad: all_reduced(grad, group))  # type: ignore[no-untyped-call]


def _enter(
    group: Group, heads: int, rank: int, layer: AttentionLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer's call, of which each rank computes a part of the derivatives."""
    args = (entering(args[0], group), *args[1:]) if args else args
    for name in ("hidden_states", "key_value_states"):
        if kwargs.get(name) is not None:
            kwargs = kwargs | {name: entering(kwargs[name], group)}
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 4 and mask.shape[1] == heads > 1:
        own: int = layer.spec.num_heads  # type: ignore[attr-defined]
        kwargs = kwargs | {"attention_mask": mask.narrow(1, rank * own, own)}
    return args, kwargs


def _leave(group: Group, _: nn.Module, __: object, out: Any) -> Any:
    """The output of a layer's call; returned attention weights ``[B, H, S, T]`` are those of all heads."""
    if not isinstance(out, tuple) or out[1] is None:
        return out
    states, weights = out
    parts = [
        torch.empty_like(weights, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(parts, weights.detach().contiguous(), group=group)
    return states, torch.cat(parts, dim=1)


_NUMBER = re.compile(r"\.\d+\.")
_KEYS = ("k_proj", "qkv_proj", "query_key_value")


def share_model(model: Any, group: Group = None) -> Any:
    """Make a loaded model this rank's part of itself, in place; every rank of the group has to call it.

    headwise's attention is shared by `share_heads`. Feed-forward networks, and attention of transformers' own
    classes, follow the ``tp_plan`` that transformers has for the family. Embeddings, norms and the head stay whole on
    every rank. The model is then called, trained and generated with as before, with the same tokens on all ranks. For
    example ``share_model(headwise.load("./half"))``, in each of the processes that ``torchrun`` starts.

    Args:
        model: a model from `headwise.load`, the same on all ranks.
        group: the ranks; all processes when None.

    Raises:
        ArgumentError: heads cannot be shared by so many ranks, or transformers has no plan for the family.
    """
    ranks = dist.get_world_size(group)
    own = {name: module for name, module in model.named_modules() if isinstance(module, AttentionLayer)}
    plan = _plan(model, tuple(f"{name}." for name in own))
    for layer in own.values():
        rank_spec(layer.spec, ranks)
    field = "num_key_value_heads"
    if getattr(model.config, field, None) is None:  # a family without groups of heads
        field = "num_attention_heads"
    heads = getattr(model.config, field, None)
    if any(name.rpartition(".")[2] in _KEYS for name in plan) and heads is not None and heads % ranks:
        rule = f"must divide {field} = {heads}, as transformers shares its own attention"
        raise ArgumentError("ranks", ranks, rule)
    if ranks == 1:
        return model
    ranked = group or dist.group.WORLD
    assert ranked is not None
    mesh = DeviceMesh.from_group(ranked, model.device.type)
    for layer in own.values():
        share_heads(layer, group)
    apply_tensor_parallelism(model, mesh, plan)
    return model


def _plan(model: Any, own: tuple[str, ...]) -> dict[str, str]:
    """transformers' style for each module of the layers by its name, apart from what is in headwise's attention."""
    # A converted model's own class states none, because loading by it would cut projections that are not there.
    family = CONFIG_MAPPING[model.config.model_type.removeprefix(HOSTED_PREFIX)]
    rules = {f"{model.base_model_prefix}.{name}": style for name, style in (family.base_model_tp_plan or {}).items()}
    plan = {}
    for name, _ in [*model.named_parameters(), *model.named_modules()]:
        rule = _NUMBER.sub(".*.", name)
        style = rules.get(rule) or rules.get(rule.removesuffix(".weight").removesuffix(".bias"))
        if style is not None and _NUMBER.search(name) and not name.startswith(own):
            plan[name] = style
    if not plan:
        raise ArgumentError("model_type", model.config.model_type, "has no tensor-parallel plan in transformers")
    return plan
