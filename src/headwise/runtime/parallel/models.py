"""Tensor parallelism of a transformers model: headwise's layers by heads, the rest by transformers' own plan."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import CONFIG_MAPPING
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from headwise.errors import ArgumentError
from headwise.models.specs import HOSTED_PREFIX
from headwise.runtime.attention.base import AttentionLayer
from headwise.runtime.parallel.collectives import Group
from headwise.runtime.parallel.heads import rank_spec, share_heads

_NUMBER = re.compile(r"\.\d+\.")
_KEYS = ("k_proj", "qkv_proj", "query_key_value")


def share_model(model: Any, group: Group = None) -> Any:
    """Make a loaded model this rank's part of itself, in place; every rank of the group has to call it.

    headwise's attention is shared by `share_heads`. Feed-forward networks, and attention of transformers' own
    classes, follow the ``tp_plan`` that transformers has for the family. Embeddings, norms and the head stay whole on
    every rank. The model is then called, trained and generated with as before, with the same tokens on all ranks. For
    example ``share_model(headwise.load("./half"))``, in each of the processes that ``torchrun`` starts.

    Args:
        model: of `headwise.load`, the same on all ranks.
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
