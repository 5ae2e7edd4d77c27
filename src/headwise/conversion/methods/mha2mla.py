"""MHA2MLA (Ji et al. 2025, arXiv:2502.14837) with its joint SVD, without training: a baseline for MLA."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.conversion.methods.base import Evidence, LatentMethod
from headwise.conversion.solvers.latent import projections
from headwise.conversion.solvers.layer import LayerTarget, latent_spec
from headwise.conversion.solvers.orthogonal_channels import (
    OrthogonalChannels,
    input_gram,
    latent_layer,
    refuse_partial_rotation,
    share_out,
)
from headwise.conversion.solvers.rope_channels import rotated_pairs
from headwise.models.specs import GroupedSpec, LatentSpec, ModelSpec


class Mha2Mla(LatentMethod):
    """See `mha2mla`."""

    name = "mha2mla"
    label = "MHA2MLA"

    def check(self, source: ModelSpec) -> None:
        """Refuse layers that do not rotate all of their heads' dims.

        Raises:
            ArgumentError: a layer has dims without rotation.
        """
        refuse_partial_rotation(source, self.spelling)

    def solve_latent(
        self, state: Mapping[str, Tensor], source: GroupedSpec, target: LayerTarget, evidence: Evidence
    ) -> tuple[dict[str, Tensor], list[int]]:
        """See `mha2mla`."""
        moments = None if evidence.statistics is None else evidence.statistics.inputs
        return mha2mla(state, source, latent_spec(target.spec), moments=moments)


def mha2mla(
    state: Mapping[str, Tensor], source: GroupedSpec, target: LatentSpec, *, moments: Tensor | None = None
) -> tuple[dict[str, Tensor], list[int]]:
    """Convert one layer to MLA by MHA2MLA.

    Each key head keeps the rotation of its pairs with the largest ``‖q‖·‖k‖`` (the best of the paper's orders),
    equally many in every head; if P is no multiple of 2·K, the remaining pairs are the best of the heads' next ones.
    The other pairs and the values are decoded from the truncated SVD of their stacked weights.

    For example ``mha2mla(state, source, as_latent(source, 96, 32))`` converts a layer by its weights alone.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …).
        source: the layer's spec.
        target: the MLA layer's spec, from `headwise.models.specs.as_latent`.
        moments: the second moments E[x xᵀ] of the inputs, ``[E, E]`` or ``[E + 1, E + 1]``: norms are then those of
            queries and keys on a text, as in the paper; those of the weights when None. The SVD is of weights in any
            case.

    Returns:
        The MLA layer's tensors by its own names, float64, and the model frequency of each rotary pair.
    """
    w_q, w_k, _ = projections(state, target)
    K, F, pairs = source.num_kv_heads, source.head_dim // 2, target.qk_rope_head_dim // 2
    gram = input_gram(moments, w_k)
    queries, keys = (_pair_norms(rows, source, gram) for rows in (w_q, w_k))  # [H, F], [K, F]
    score = keys * queries.view(K, -1, F).sum(1)  # [K, F]
    identity = torch.eye(K * F, dtype=torch.float64).view(K * F, K, F)
    channels = OrthogonalChannels(identity, share_out(score, pairs).flatten(), torch.arange(F).repeat(K))
    return latent_layer(state, source, target, channels, torch.eye(w_k.shape[1], dtype=torch.float64), balance=False)


def _pair_norms(weight: Tensor, source: GroupedSpec, gram: Tensor) -> Tensor:
    """The root mean square of each rotated pair, ``[heads, F]``."""
    pairs = rotated_pairs(weight, source)  # [heads, F, E']
    return ((pairs @ gram.to(pairs.dtype)) * pairs.conj()).sum(-1).real.clamp_min(0).sqrt()


METHOD = Mha2Mla()
