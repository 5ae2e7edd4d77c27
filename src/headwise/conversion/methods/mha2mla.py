"""MHA2MLA (Ji et al. 2025, arXiv:2502.14837) with its joint SVD, before any training: a baseline for MLA."""

from __future__ import annotations

from collections.abc import Mapping

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
from headwise.specs import GroupedSpec, LatentSpec, ModelSpec


class Mha2Mla(Method):
    """See `mha2mla`."""

    name = "mha2mla"
    label = "MHA2MLA"
    targets = frozenset({"mla"})

    def check(self, source: ModelSpec) -> None:
        """Refuse layers that do not rotate all of their heads' dims.

        Raises:
            ArgumentError: a layer is one.
        """
        refuse_partial_rotation(source, self.spelling)

    def solve(self, source: Layer, target: LayerTarget, evidence: Evidence) -> Layer:
        """See `mha2mla`."""
        assert isinstance(source.spec, GroupedSpec)
        assert isinstance(target.spec, LatentSpec)
        moments = None if evidence.statistics is None else evidence.statistics.inputs
        state, channels = mha2mla(source.state, source.spec, target.spec, moments=moments)
        return Layer(target.spec, state, channels)


def mha2mla(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    *,
    moments: Tensor | None = None,
) -> tuple[dict[str, Tensor], list[int]]:
    """An MLA layer by MHA2MLA.

    Each key head keeps the rotation of its pairs with the largest ``‖q‖·‖k‖`` (the best of the paper's rankings), the
    same number for every head (where P does not divide by 2·K, the last go to the heads that rank them highest). The
    rest and the values get the truncated SVD of their stacked weights.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …).
        source: what they are.
        target: what to make; from `headwise.specs.as_latent`.
        moments: ``[E, E]`` or ``[E + 1, E + 1]``, E[x xᵀ]: norms are then those of queries and keys on real text,
            as the paper takes them; those of the weights when None. The SVD looks at weights in any case.

    Returns:
        Tensors by the MLA layer's names, and the model frequency of each rotary pair.
    """
    w_q, w_k, _ = projections(state, target)
    K, F, pairs = source.num_kv_heads, source.head_dim // 2, target.qk_rope_head_dim // 2
    gram = input_gram(moments, w_k)
    queries, keys = (_pair_norms(rows, source, gram) for rows in (w_q, w_k))  # [H, F], [K, F]
    score = keys * queries.view(K, -1, F).sum(1)
    identity = torch.eye(K * F, dtype=torch.float64).view(K * F, K, F)
    channels = OrthogonalChannels(identity, share_out(score, pairs).flatten(), torch.arange(F).repeat(K))
    return latent_layer(state, source, target, channels, torch.eye(w_k.shape[1], dtype=torch.float64), balance=False)


def _pair_norms(weight: Tensor, source: GroupedSpec, gram: Tensor) -> Tensor:
    """The root mean square of each rotated pair, ``[heads, F]``."""
    pairs = rotated_pairs(weight, source)
    return ((pairs @ gram.to(pairs.dtype)) * pairs.conj()).sum(-1).real.clamp_min(0).sqrt()


METHOD = Mha2Mla()
