"""Cost of latent-space attention: keys and values as wide as the latent, and two projections behind the heads."""

from __future__ import annotations

from headwise.costs.formulas import activations as keep
from headwise.costs.formulas.activations import Heads, KeptTensor, Storages, Training
from headwise.costs.formulas.stages import Core, Linear, Size, Stage
from headwise.models.specs.latent_space import LatentSpaceSpec

IMPLS = ("direct",)


def stages(spec: LatentSpaceSpec, impl: str, new_tokens: int) -> tuple[Stage, ...]:
    """The work of one layer, in order; query dims beyond the width of a latent head are computed and dropped."""
    E, H, D = Size(spec.hidden_size, "E"), Size(spec.num_heads, "H"), Size(spec.head_dim, "D")
    R, width = Size(spec.latent_dim, "R"), Size(spec.latent_head_dim, "R/H")
    return (
        Linear("q_proj", E, H * D, "q_proj" in spec.bias),
        Linear("k_proj", E, R, "k_proj" in spec.bias, over="source"),
        Linear("v_proj", E, R, "v_proj" in spec.bias, over="source"),
        Core(H, width, width),
        Linear("v_out_proj", R, H * D, "v_out_proj" in spec.bias, reads="inner"),
        Linear("o_proj", H * D, E, "o_proj" in spec.bias, reads="inner"),
    )


def cache_values(spec: LatentSpaceSpec) -> Size:
    """Values cached for a token: a key latent and a value latent."""
    return 2 * Size(spec.latent_dim, "R")


def activations(spec: LatentSpaceSpec, impl: str, training: Training) -> tuple[KeptTensor, ...]:
    """The tensors that one layer keeps for the backward pass; without rotation, queries are views of all D dims."""
    E, H, D = Size(spec.hidden_size, "E"), Size(spec.num_heads, "H"), Size(spec.head_dim, "D")
    width = Size(spec.latent_head_dim, "R/H")
    rotation = () if spec.rope is None else keep.rotation(training, Size(spec.rope.dim, "P"))
    return (
        *keep.inputs(training, E),
        *rotation,
        *keep.core(
            training,
            Heads(H, H, width, width),
            storages=Storages(query=H * D if spec.rope is None else None),
            contiguous=spec.rope is not None,
        ),
        KeptTensor("v_out_proj output", H * D, "new"),
    )
