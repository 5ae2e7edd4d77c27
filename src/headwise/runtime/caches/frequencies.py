"""Rotary embeddings whose frequencies depend on how long a text is: transformers' kinds ``dynamic`` and ``longrope``.

Such a module keeps the frequencies of its latest call, whose largest position decides them, and other layers read cos
and sin of that call alone. So whoever rotates keys at another time has to know when frequencies change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_LONGROPE, _DYNAMIC = "longrope", "dynamic"


def depends_on_length(rotary: nn.Module) -> bool:
    """Whether a rotary embedding chooses its frequencies by the largest position of a call, in any kind of layer."""
    return any(one in (_LONGROPE, _DYNAMIC) for one in _prefixes(rotary).values())


def rotaries_by_length(model: Any) -> list[nn.Module]:
    """The rotary embeddings of a model whose frequencies depend on how long a text is."""
    return [module for module in model.modules() if depends_on_length(module)]


def changes_at(model: Any) -> int | None:
    """The most tokens of a text with a model's usual frequencies; None where all texts have the same.

    Args:
        model: a transformers model.
    """
    lengths = [
        _change(rotary, name, kind)
        for rotary in rotaries_by_length(model)
        for name, kind in _prefixes(rotary).items()
    ]
    return min((length for length in lengths if length is not None), default=None)


def follow(rotary: nn.Module, changed: Callable[[int], None]) -> None:
    """Say when a rotary embedding has other frequencies than in the call before, if they depend on the length.

    The kind ``dynamic`` keeps what the longest text so far needed; from now on it is what the present one needs, as
    in a model that has just been loaded.

    Args:
        rotary: the module.
        changed: called with the first position of the call, after each change.
    """
    if depends_on_length(rotary):
        follower = _Follower(rotary, changed)
        rotary.register_forward_pre_hook(follower.forget)
        rotary.register_forward_hook(follower.compare, with_kwargs=True)


class _Follower:
    """Compares the frequencies of a rotary embedding with those of its call before. Its methods are hooks."""

    def __init__(self, rotary: nn.Module, changed: Callable[[int], None]) -> None:
        self._changed, self._kept = changed, frequencies(rotary)

    def forget(self, rotary: nn.Module, args: object) -> None:
        """Undo what the longest text so far has changed: transformers does so only for texts far shorter."""
        own: Any = rotary
        for prefix, kind in _prefixes(rotary).items():
            name = f"{prefix}max_seq_len_cached"
            if kind == _DYNAMIC and getattr(own, name, own.original_max_seq_len) > own.original_max_seq_len:
                setattr(own, name, own.original_max_seq_len)
                original = getattr(own, f"{prefix}original_inv_freq")
                own.register_buffer(f"{prefix}inv_freq", original.clone(), persistent=False)

    def compare(self, rotary: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: object) -> None:
        """Report new frequencies."""
        now = frequencies(rotary)
        if not all(map(_equal, now, self._kept)):
            self._kept = now
            positions = keywords["position_ids"] if "position_ids" in keywords else args[1]
            self._changed(int(positions.min()))


def frequencies(rotary: nn.Module) -> list[Tensor]:
    """Copies of the frequencies that a rotary embedding has now, those of each kind of layer apart."""
    own: Any = rotary
    with torch.inference_mode(False), torch.no_grad():
        return [getattr(own, f"{prefix}inv_freq").detach().clone() for prefix in _prefixes(rotary)]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and torch.equal(one, other)


def _prefixes(rotary: nn.Module) -> dict[str, str]:
    """The kind of RoPE of each kind of layer, by what stands before the names of its attributes."""
    kind = getattr(rotary, "rope_type", None)
    if isinstance(kind, dict):
        return {f"{layer_type}_": one for layer_type, one in kind.items()}
    return {"": kind} if isinstance(kind, str) else {}


def _change(rotary: nn.Module, prefix: str, kind: str) -> int | None:
    """The most tokens with the usual frequencies, in one kind of layer."""
    own: Any = rotary
    if kind == _DYNAMIC:
        return int(own.original_max_seq_len)
    parameters = own.config.rope_parameters
    parameters = parameters[prefix.removesuffix("_")] if prefix else parameters
    if kind != _LONGROPE or list(parameters["short_factor"]) == list(parameters["long_factor"]):
        return None
    return int(parameters["original_max_position_embeddings"])
