"""Rotary position embedding, interleaved and half-split, with transformers' scalings.

Shapes: B batch, S new tokens, P rotated dims. Source: Su et al. 2021 (arXiv:2104.09864).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headwise.errors import SpecError
from headwise.specs.base import RopeSpec


class RotaryEmbedding(nn.Module):
    """cos and sin for given positions; it has no parameters and nothing in the state dict.

    The frequencies are Python numbers, not a buffer, so ``module.to(torch.bfloat16)`` cannot round them.

    Args:
        spec: which frequencies and scaling; its ``dim`` is P.
        frequencies: the P/2 angles a token advances each pair by, in place of the spec's own; repeats allowed.
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
            dtype: of the result; angles are computed at least in float32.
            length: T, all tokens so far; what ``dynamic`` and ``longrope`` look at.
        """
        wide = torch.promote_types(dtype, torch.float32)
        inverse = torch.tensor(self._at(length), dtype=wide, device=position_ids.device)
        angles = position_ids[..., None].to(wide) * inverse
        return (angles.cos() * self.attention_scaling).to(dtype), (angles.sin() * self.attention_scaling).to(dtype)

    def _at(self, length: int) -> tuple[float, ...]:
        if self._long is not None and length > self._switch:
            return self._long
        if self.spec.rope_type == "dynamic" and length > (self.spec.max_position_embeddings or length):
            return _dynamic(self.spec, length)
        return self.frequencies

    def extra_repr(self) -> str:
        """Sizes and kind, for ``print(model)``."""
        layout = "interleaved" if self.spec.interleaved else "half-split"
        return f"{self.spec.dim}, theta={self.spec.theta:g}, {self.spec.rope_type}, {layout}"


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first 2·len(cos) dims of each head; the rest pass.

    Args:
        x: ``[B, heads, S, D]``.
        cos: ``[B or 1, S, P/2]``, as is ``sin``.
        interleaved: pairs are (0, 1), (2, 3), … rather than (0, P/2), (1, P/2 + 1), …
    """
    # Views by name rather than by index: with one token, what Python takes for them is most of the work.
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    P, rest = 2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]
    rotary = x.narrow(-1, 0, P) if rest else x
    if interleaved:
        turned = torch.stack(_turned(rotary[..., 0::2], rotary[..., 1::2], cos, sin), dim=-1).flatten(-2)
    else:
        first, second = rotary.chunk(2, dim=-1)
        turned = torch.cat(_turned(first, second, cos, sin), dim=-1)
        # A single pair has parts of width 1, which torch takes for an image's layout: its columns would lie apart.
        turned = turned.contiguous()
    return torch.cat((turned, x.narrow(-1, P, rest)), dim=-1) if rest else turned


def _turned(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)


def _frequencies(spec: RopeSpec, length: int | None) -> tuple[tuple[float, ...], float]:
    """The angle a token advances each pair by, and what multiplies cos and sin."""
    if spec.rope_type == "default":
        return _geometric(spec.dim, spec.theta), 1.0
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if spec.rope_type not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
        raise SpecError("rope_type", spec.rope_type, f"must be one of {known}")
    config = PreTrainedConfig(max_position_embeddings=spec.max_position_embeddings)
    # Some of the functions want the sizes head_dim would default from, whether or not there is a head_dim.
    config.head_dim, config.hidden_size, config.num_attention_heads = spec.dim, spec.dim, 1
    config.rope_parameters = {
        "rope_type": spec.rope_type,
        "rope_theta": spec.theta,
        **{key: list(value) if isinstance(value, tuple) else value for key, value in spec.parameters},
    }
    try:
        inverse, scaling = ROPE_INIT_FUNCTIONS[spec.rope_type](config, torch.device("cpu"), seq_len=length)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise SpecError(
            "rope parameters", dict(spec.parameters), f"do not make a {spec.rope_type}: {error!r}"
        ) from None
    return tuple(inverse.tolist()), float(scaling)


def _geometric(dim: int, theta: float) -> tuple[float, ...]:
    # In float32, step for step as the models' own code: an ulp of frequency is 1e-4 rad at position 2000.
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return tuple((1.0 / theta**exponent).tolist())


def _dynamic(spec: RopeSpec, length: int) -> tuple[float, ...]:
    factor = dict(spec.parameters)["factor"]
    assert spec.max_position_embeddings is not None
    stretch = factor * length / spec.max_position_embeddings - (factor - 1)
    return _geometric(spec.dim, spec.theta * stretch ** (spec.dim / (spec.dim - 2)))
