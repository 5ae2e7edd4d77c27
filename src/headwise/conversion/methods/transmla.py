"""TransMLA (Meng et al. 2025, arXiv:2502.07864), a baseline for MLA: RoRoPE, FreqFold, balanced PCA."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headwise.conversion.methods.base import Evidence, LayerTarget, Method
from headwise.conversion.solvers.assemble import projections
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.orthogonal_channels import (
    OrthogonalChannels,
    input_gram,
    latent_layer,
    refuse_partial_rotation,
    share_out,
)
from headwise.conversion.solvers.rope_channels import rotated_pairs
from headwise.conversion.solvers.statistics import Statistics
from headwise.errors import ArgumentError
from headwise.specs import GroupedSpec, LatentSpec, ModelSpec


@dataclass(frozen=True)
class TransMla(Method):
    """See `transmla`.

    Attributes:
        freqfold: neighbouring frequencies that are treated as one.
        spelled: as the user wrote it, with the fold or without.
    """

    freqfold: int = 1
    spelled: str = "transmla"

    name = "transmla"
    label = "TransMLA"
    usage = "transmla or transmla:F, F frequencies to a fold"
    targets = frozenset({"mla"})
    # Its authors report the best of several folds.
    variants = ("transmla:1", "transmla:2", "transmla:4", "transmla:8")
    needs_text = True

    @property
    def spelling(self) -> str:
        """The name, and the fold where the user gave one."""
        return self.spelled

    @property
    def title(self) -> str:
        """The label and the fold."""
        return f"{self.label} (fold {self.freqfold})"

    def parsed(self, spelling: str) -> Self | None:
        """``transmla`` or ``transmla:F``."""
        match = re.fullmatch(r"transmla(?::([0-9]{1,4}))?", spelling)
        return None if match is None else type(self)(freqfold=int(match[1] or 1), spelled=spelling)

    def check(self, source: ModelSpec) -> None:
        """Refuse layers that do not rotate all of their heads' dims, or whose frequencies the fold does not divide.

        Raises:
            ArgumentError: a layer is one.
        """
        refuse_partial_rotation(source, self.spelling)
        for layer in (*source.layers, *source.cross_layers):
            assert isinstance(layer, GroupedSpec)
            _refuse_fold(self.freqfold, layer.head_dim // 2)

    def solve(self, source: Layer, target: LayerTarget, evidence: Evidence) -> Layer:
        """See `transmla`; without a text, all inputs count alike."""
        assert isinstance(source.spec, GroupedSpec)
        assert isinstance(target.spec, LatentSpec)
        statistics = evidence.statistics or Statistics.nothing(source.spec.hidden_size, source.spec.num_heads, 1)
        state, channels = transmla(
            source.state, source.spec, target.spec, moments=statistics.inputs, freqfold=self.freqfold
        )
        return Layer(target.spec, state, channels)


def transmla(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    *,
    moments: Tensor,
    freqfold: int = 1,
) -> tuple[dict[str, Tensor], list[int]]:
    """An MLA layer by TransMLA.

    Args:
        state: the layer's tensors by its own names.
        source: what they are.
        target: what to make; from `headwise.specs.as_latent`.
        moments: ``[E, E]`` or ``[E + 1, E + 1]``, E[x xᵀ]: keys and values are linear in x, so their PCA on real
            text follows from it.
        freqfold: how many neighbouring frequencies are treated as one. The authors take the best of several by
            perplexity.

    Returns:
        Tensors by the MLA layer's names, and the model frequency of each rotary pair.

    Raises:
        ArgumentError: ``freqfold`` does not divide a head's frequencies.
    """
    _, w_k, _ = projections(state, target)
    gram = input_gram(moments, w_k)
    channels = rotate_rope(rotated_pairs(w_k, source), gram, target.qk_rope_head_dim // 2, freqfold=freqfold)
    return latent_layer(state, source, target, channels, gram, balance=True)


def rotate_rope(keys: Tensor, gram: Tensor, pairs: int, *, freqfold: int = 1) -> OrthogonalChannels:
    """RoRoPE with FreqFold: per fold of frequencies, PCA across heads of real and imaginary parts alike.

    One real orthogonal matrix for both parts commutes with a rotation of all of them by one angle. With
    ``freqfold`` 1 the angle is one and scores do not change; a fold of more holds its frequencies to be one, and
    concentrates better. Every fold keeps as many of its principal components as every other (what does not
    divide goes where the next component is largest); the n of a fold turn at n of its frequencies, evenly spaced
    from the highest.

    Args:
        keys: ``[K, F, E']`` complex.
        gram: ``[E', E']``.
        pairs: P/2, channels that stay rotated.
        freqfold: frequencies to a fold.

    Raises:
        ArgumentError: ``freqfold`` does not divide F.
    """
    K, F, _ = keys.shape
    _refuse_fold(freqfold, F)
    folds, width = F // freqfold, K * freqfold
    z = keys.view(K, folds, freqfold, -1).transpose(0, 1).flatten(1, 2)
    # E[Re z Re zᵀ + Im z Im zᵀ]: both parts are samples of one distribution.
    covariance = (z @ gram.to(z.dtype) @ z.mH).real
    energy, vectors = torch.linalg.eigh(covariance)
    energy, components = energy.flip(-1), vectors.mT.flip(1)
    kept = share_out(energy, pairs)

    fold = torch.arange(folds)
    matrix = torch.zeros(folds, width, K, folds, freqfold, dtype=torch.float64)
    matrix[fold, :, :, fold] = components.reshape(folds, width, K, freqfold)
    place = torch.arange(width) * freqfold // kept.sum(1, keepdim=True).clamp_min(1)
    frequency = fold[:, None] * freqfold + place.clamp_max(freqfold - 1)
    return OrthogonalChannels(matrix.view(K * F, K, F), kept.flatten(), frequency.flatten())


def _refuse_fold(freqfold: int, frequencies: int) -> None:
    if freqfold < 1 or frequencies % freqfold:
        raise ArgumentError("freqfold", freqfold, f"must divide the {frequencies} frequencies of a head")


METHOD = TransMla()
