"""Which parameters of a model are trained."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from headwise.checkpoints import Checkpoint
from headwise.errors import ArgumentError
from headwise.hf.layerwise import stored_names

_ATTENTION = re.compile(r"(^|\.)(self_attn|self_attention|attention|attn)\.")
"""The path of an attention module, as transformers' families call it."""


def select(model: Any, trained: str, teacher: Checkpoint) -> dict[str, nn.Parameter]:
    """Choose the parameters to train, and freeze all others.

    For example ``select(model, "attention", open_checkpoint("./source"))``.

    Args:
        model: a transformers model.
        trained: ``all``, ``attention`` or ``new``; see `headwise.options.HealOptions`.
        teacher: what ``new`` tensors are told from.

    Returns:
        The parameters by their names in the model, in the model's order.

    Raises:
        ArgumentError: nothing is left to train.
    """
    chosen = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_chosen(name, parameter, trained, teacher))
        if parameter.requires_grad:
            chosen[name] = parameter
    if not chosen:
        raise ArgumentError("train", trained, "leaves nothing to train: the teacher has every tensor in its shape")
    return chosen


def _is_chosen(name: str, parameter: nn.Parameter, trained: str, teacher: Checkpoint) -> bool:
    if trained == "all":
        return True
    if trained == "attention":
        return _ATTENTION.search(name) is not None
    info = teacher.tensors.get(name)
    return info is None or info.shape != tuple(parameter.shape)


def trained_tensors(model: Any, checkpoint: Checkpoint) -> dict[str, nn.Parameter]:
    """The trained parameters of a model by their names in its folder.

    Args:
        model: a transformers model.
        checkpoint: of its folder.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {stored: trained[own] for own, stored in stored_names(model, checkpoint).items() if own in trained}
