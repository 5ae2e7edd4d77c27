"""TransMLA (Meng et al. 2025, arXiv:2502.07864): RoRoPE, FreqFold and balanced PCA, a baseline for MLA."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headwise.conversion.methods.base import Evidence, LatentMethod
from headwise.conversion.solvers.latent import projections
from headwise.conversion.solvers.layer import LayerTarget, grouped_layers, latent_spec
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
from headwise.models.specs import GroupedSpec, LatentSpec, ModelSpec


@dataclass(frozen=True)
class TransMla(LatentMethod):
    """See `transmla`.

    Attributes:
        freqfold: the number of neighbouring frequencies that are treated as one.
        spelled: the spelling that the user gave, with the fold or without.
    """

    freqfold: int = 1
    spelled: str = "transmla"

    name = "transmla"
    label = "TransMLA"
    usage = "transmla or transmla:F, F frequencies to a fold"
    # Its authors report the best of several folds.
    variants = ("transmla:1", "transmla:2", "transmla:4", "transmla:8")
    needs_text = True

    @property
    def spelling(self) -> str:
        """The name, with the fold if the user gave one."""
        return self.spelled

    @property
    def title(self) -> str:
        """The label with the fold."""
        return f"{self.label} (fold {self.freqfold})"

    def parsed(self, spelling: str) -> Self | None:
        """The method that ``transmla`` or ``transmla:F`` names; None for another spelling."""
        match = re.fullmatch(r"transmla(?::([0-9]{1,4}))?", spelling)
        return None if match is None else type(self)(freqfold=int(match[1] or 1), spelled=spelling)

    def check(self, source: ModelSpec) -> None:
        """Refuse layers that do not rotate all of their heads' dims, or whose frequencies the fold does not divide.

        Raises:
            ArgumentError: the model has such a layer.
        """
        refuse_partial_rotation(source, self.spelling)
        for layer in grouped_layers(source):
            _refuse_fold(self.freqfold, layer.head_dim // 2)

    def solve_latent(
        self, state: Mapping[str, Tensor], source: GroupedSpec, target: LayerTarget, evidence: Evidence
    ) -> tuple[dict[str, Tensor], list[int]]:
        """See `transmla`; without a text, all inputs count equally."""
        statistics = evidence.statistics or Statistics.nothing(source.hidden_size, source.num_heads, 1)
        return transmla(state, source, latent_spec(target.spec), moments=statistics.inputs, freqfold=self.freqfold)


def transmla(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    *,
    moments: Tensor,
    recalibrated: Tensor | None = None,
    freqfold: int = 1,
) -> tuple[dict[str, Tensor], list[int]]:
    """Convert one layer to MLA by TransMLA.

    For example ``transmla(state, source, as_latent(source, 96, 32), moments=moments, freqfold=4)``.

    Args:
        state: the layer's tensors by its own names.
        source: the layer's spec.
        target: the MLA layer's spec, from `headwise.models.specs.as_latent`.
        moments: the second moments E[x xᵀ] of the inputs on a text, ``[E, E]`` or ``[E + 1, E + 1]``: keys and values
            are linear in x, so that their PCA follows from it.
        recalibrated: the second moments E[x xᵀ], in the same shape, in the model whose layers have all lost the
            rotations that the targets drop, and no rank: the authors run the text through it a second time before the
            PCA of the latent. When None, that PCA uses ``moments`` too.
        freqfold: the number of neighbouring frequencies that are treated as one. The authors report the best of
            several by perplexity.

    Returns:
        The MLA layer's tensors by its own names, float64, and the model frequency of each rotary pair.

    Raises:
        ArgumentError: ``freqfold`` does not divide a head's frequencies.
    """
    _, w_k, _ = projections(state, target)
    gram = input_gram(moments, w_k)
    channels = rotate_rope(rotated_pairs(w_k, source), gram, target.qk_rope_head_dim // 2, freqfold=freqfold)
    latent_gram = gram if recalibrated is None else input_gram(recalibrated, w_k)
    return latent_layer(state, source, target, channels, latent_gram, balance=True)


def rotate_rope(keys: Tensor, gram: Tensor, pairs: int, *, freqfold: int = 1) -> OrthogonalChannels:
    """RoRoPE with FreqFold: in each fold of frequencies, a PCA across heads of real and imaginary parts together.

    One real orthogonal matrix for both parts commutes with a rotation of all of them by one angle. With ``freqfold``
    1 there is one angle, and scores do not change; a larger fold treats its frequencies as equal, and concentrates
    better. Every fold keeps equally many of its principal components (a remainder goes where the next component is
    largest); the n components of a fold rotate at n of its frequencies, evenly spaced from the highest.

    Args:
        keys: the rotated pairs of the key heads' rows, ``[K, F, E']`` complex.
        gram: the second moments of the inputs, ``[E', E']``.
        pairs: the number P/2 of channels that stay rotated.
        freqfold: the number of frequencies in a fold.

    Raises:
        ArgumentError: ``freqfold`` does not divide F.
    """
    K, F, _ = keys.shape
    _refuse_fold(freqfold, F)
    folds, width = F // freqfold, K * freqfold
    z = keys.view(K, folds, freqfold, -1).transpose(0, 1).flatten(1, 2)  # [folds, width, E']
    # E[Re z Re zᵀ + Im z Im zᵀ]: both parts are samples of one distribution.
    covariance = (z @ gram.to(z.dtype) @ z.mH).real  # [folds, width, width]
    energy, vectors = torch.linalg.eigh(covariance)
    energy, components = energy.flip(-1), vectors.mT.flip(1)
    mask = share_out(energy, pairs)  # [folds, width]

    fold = torch.arange(folds)
    matrix = torch.zeros(folds, width, K, folds, freqfold, dtype=torch.float64)
    matrix[fold, :, :, fold] = components.reshape(folds, width, K, freqfold)
    offset = torch.arange(width) * freqfold // mask.sum(1, keepdim=True).clamp_min(1)
    frequency = fold[:, None] * freqfold + offset.clamp_max(freqfold - 1)
    return OrthogonalChannels(matrix.view(K * F, K, F), mask.flatten(), frequency.flatten())


def _refuse_fold(freqfold: int, frequencies: int) -> None:
    if freqfold < 1 or frequencies % freqfold:
        raise ArgumentError("freqfold", freqfold, f"must divide the {frequencies} frequencies of a head")


METHOD = TransMla()
