"""`LayerTarget`: what one layer is converted to, and by which settings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwise.conversion.solvers.statistics import KEY_WEIGHT
from headwise.models.specs import GroupedSpec, LatentSpec

LONGEST = 2048
"""The longest distance between query and key that counts without a text, in tokens."""


@dataclass(frozen=True)
class LayerTarget:
    """The target of one layer.

    For example ``LayerTarget(as_latent(source, 96, 32), key_weight=1.0)``, where errors of keys and of values count
    equally.

    Attributes:
        spec: the converted layer's spec.
        key_weight: the cost of an error of the keys relative to one of the values, on a text; for MLA.
        rotary_channels: the channels that keep their rotation, bool ``[F, K]``, for MLA; when None, the layer keeps
            those that lose most without it.
        mixes_heads: whether key heads are mixed into rotary channels (the stage ``channels``), for MLA; otherwise
            each channel is one head's own.
        longest: the distance in tokens up to which a dropped rotation is averaged where there is no text.
    """

    spec: GroupedSpec | LatentSpec
    key_weight: float = KEY_WEIGHT
    rotary_channels: Tensor | None = None
    mixes_heads: bool = True
    longest: int = LONGEST
