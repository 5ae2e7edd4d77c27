"""Rotary position embedding (RoPE), interleaved or half-split, with transformers' scalings.

transformers' kinds ``dynamic`` and ``longrope`` depend on how long a text is. A module of these kinds keeps the
frequencies of its latest call, whose largest position decides them, and other layers read cos and sin of that call
alone. So whoever rotates keys at another time has to know when frequencies change.

Shapes: B batch, S new tokens, P rotated dims. Source: Su et al. 2021 (arXiv:2104.09864).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import SpecError
from headwise.models.specs.base import RopeSpec

Rotation = tuple[Tensor, Tensor]
"""Cos and sin of the positions of tokens, each ``[B or 1, S, P/2]``."""


class RotaryEmbedding(nn.Module):
    """Computes cos and sin for positions; it has no parameters and nothing in the state dict.

    For example
    ``cos, sin = RotaryEmbedding(RopeSpec(dim=64))(torch.arange(100)[None], torch.float32, length=100)``.

    The frequencies are Python numbers, not a buffer, so ``module.to(torch.bfloat16)`` cannot round them.

    Args:
        spec: frequencies and scaling; its ``dim`` is P.
        frequencies: angle in radians by which a token advances each of the P/2 pairs, instead of the spec's; may
            repeat.

    Raises:
        SpecError: the kind of scaling is not known, its numbers do not fit, or there are not P/2 frequencies.
    """

    def __init__(self, spec: RopeSpec, frequencies: Sequence[float] | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.attention_scaling = 1.0
        self._long: tuple[float, ...] | None = None
        self._switch = 0
        if frequencies is not None:
            if len(frequencies) != spec.dim // 2:
                raise SpecError("rope frequencies", len(frequencies), f"must be {spec.dim // 2}, one a pair")
            self.frequencies = tuple(float(f) for f in frequencies)
            return
        self.frequencies, self.attention_scaling = _frequencies(spec, None)
        if spec.rope_type == "longrope":
            self._switch = int(dict(spec.parameters)["original_max_position_embeddings"])
            self._long = _frequencies(spec, self._switch + 1)[0]

    def forward(self, position_ids: Tensor, dtype: torch.dtype, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[B or 1, S, P/2]``.

        Args:
            position_ids: ``[B or 1, S]``.
            dtype: the dtype of the result; angles are computed at least in float32.
            length: T, all tokens so far, on which ``dynamic`` and ``longrope`` depend.
        """
        wide = torch.promote_types(dtype, torch.float32)
        frequencies = torch.tensor(self._at(length), dtype=wide, device=position_ids.device)
        angles = position_ids[..., None].to(wide) * frequencies  # [B or 1, S, P/2]
        return (angles.cos() * self.attention_scaling).to(dtype), (angles.sin() * self.attention_scaling).to(dtype)

    def warn_of_change(self, cached: int, length: int) -> None:
        """Warn where a text has outgrown the frequencies that its cache was computed with.

        Args:
            cached: the number of tokens that were rotated before.
            length: T, all tokens so far.
        """
        if cached and self.spec.changes_at is not None and self._at(cached) != self._at(length):
            warn_of_change(self.spec.changes_at)

    def _at(self, length: int) -> tuple[float, ...]:
        """The frequencies that hold at a length of ``length`` tokens."""
        if self._long is not None and length > self._switch:
            return self._long
        if self.spec.rope_type == "dynamic" and length > (self.spec.max_position_embeddings or length):
            return _dynamic(self.spec, length)
        return self.frequencies

    def extra_repr(self) -> str:
        """Sizes and kind, for ``print(model)``."""
        layout = "interleaved" if self.spec.interleaved else "half-split"
        return f"{self.spec.dim}, theta={self.spec.theta:g}, {self.spec.rope_type}, {layout}"


def change_note(length: int) -> str:
    """What a user has to know of frequencies that change with the length of a text, in one line.

    For example ``change_note(4096)``.

    Args:
        length: the most tokens with the usual frequencies.
    """
    cached = "what is cached was computed with those of shorter texts"
    return f"beyond {length:,} tokens rotary frequencies change, and {cached}"


def warn_of_change(length: int) -> None:
    """Warn that a text has outgrown the frequencies that its cache was computed with.

    For example ``warn_of_change(4096)``.

    Args:
        length: the most tokens with those frequencies.
    """
    warnings.warn(f"{change_note(length)}: the result is not that of a text read at once", UserWarning, stacklevel=3)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first P dims of each head, and leave the rest as they are.

    For example ``rotate(queries, *rope(positions, torch.float32, 100), interleaved=False)``, where ``rope`` is a
    `RotaryEmbedding`.

    Args:
        x: ``[B, heads, S, D]``.
        cos: ``[B or 1, S, P/2]``.
        sin: ``[B or 1, S, P/2]``.
        interleaved: whether pairs are (0, 1), (2, 3), … rather than (0, P/2), (1, P/2 + 1), …

    Returns:
        ``[B, heads, S, D]``.
    """
    # Views by method rather than by index: for a single token, Python's indexing would take most of the time.
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [B or 1, 1, S, P/2]
    P, rest = 2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]
    rotary = x.narrow(-1, 0, P) if rest else x  # [B, heads, S, P]
    if interleaved:
        rotated = torch.stack(_rotate_pairs(rotary[..., 0::2], rotary[..., 1::2], cos, sin), dim=-1).flatten(-2)
    else:
        first, second = rotary.chunk(2, dim=-1)
        rotated = torch.cat(_rotate_pairs(first, second, cos, sin), dim=-1)
        # The halves of a single pair are 1 wide. torch takes them for an image with channels last, and lays the
        # result out so that a token's numbers do not lie side by side.
        rotated = rotated.contiguous()
    return torch.cat((rotated, x.narrow(-1, P, rest)), dim=-1) if rest else rotated


def _rotate_pairs(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second number of each rotated pair, ``[B, heads, S, P/2]``."""
    return torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)


def _frequencies(spec: RopeSpec, length: int | None) -> tuple[tuple[float, ...], float]:
    """The angle by which a token advances each pair, and the factor of cos and sin."""
    if spec.rope_type == "default":
        return _geometric(spec.dim, spec.theta), 1.0
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if spec.rope_type not in ROPE_INIT_FUNCTIONS:
        names = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
        raise SpecError("rope_type", spec.rope_type, f"must be one of {names}")
    config = PreTrainedConfig(max_position_embeddings=spec.max_position_embeddings)
    # Some of the functions need the sizes that head_dim would default from, even where there is a head_dim.
    config.head_dim, config.hidden_size, config.num_attention_heads = spec.dim, spec.dim, 1
    config.rope_parameters = {
        "rope_type": spec.rope_type,
        "rope_theta": spec.theta,
        **{key: list(value) if isinstance(value, tuple) else value for key, value in spec.parameters},
    }
    try:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[spec.rope_type](config, torch.device("cpu"), seq_len=length)
    except (KeyError, TypeError, ArithmeticError, ValueError, RuntimeError) as error:
        raise SpecError(
            "rope parameters", dict(spec.parameters), f"do not make a {spec.rope_type}: {error!r}"
        ) from None
    return tuple(frequencies.tolist()), float(scaling)


def _geometric(dim: int, theta: float) -> tuple[float, ...]:
    # In float32 and in the same steps as transformers: one unit in the last place is 1e-4 rad at position 2000.
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return tuple((1.0 / theta**exponent).tolist())


def _dynamic(spec: RopeSpec, length: int) -> tuple[float, ...]:
    factor = dict(spec.parameters)["factor"]
    assert spec.max_position_embeddings is not None
    stretch = factor * length / spec.max_position_embeddings - (factor - 1)
    return _geometric(spec.dim, spec.theta * stretch ** (spec.dim / (spec.dim - 2)))


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
        if not all(_equal(own, self._kept[prefix]) for prefix, own in now.items()):
            self._kept = now
            positions = keywords["position_ids"] if "position_ids" in keywords else args[1]
            self._changed(int(positions.min()))


def frequencies(rotary: nn.Module) -> dict[str, Tensor]:
    """Copies of the frequencies that a rotary embedding has now, by the prefix of each kind of layer."""
    own: Any = rotary
    with torch.inference_mode(False), torch.no_grad():
        return {prefix: getattr(own, f"{prefix}inv_freq").detach().clone() for prefix in _prefixes(rotary)}


def prefix_of(rotary: nn.Module, layer_type: str | None) -> str:
    """What stands before the names of a rotary embedding's attributes for one kind of layer; "" for all kinds.

    For example ``prefix_of(model.model.rotary_emb, "sliding_attention")`` is ``"sliding_attention_"`` of Gemma 3.

    Args:
        rotary: the model's rotary embedding.
        layer_type: the layer's kind, one of the config's ``layer_types``; None where it has none.
    """
    prefix = f"{layer_type}_"
    return prefix if prefix in _prefixes(rotary) else ""


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
