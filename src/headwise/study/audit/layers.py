"""The layers that the guides describe, as specs."""

from __future__ import annotations

from headwise.errors import ArgumentError
from headwise.models.specs import AttentionSpec, GroupedSpec, LatentSpaceSpec, LatentSpec
from headwise.models.specs.grouped import grouped_bias
from headwise.models.specs.latent import latent_bias


def grouped_layer(hidden_size: int, num_heads: int, num_kv_heads: int, *, bias: bool = False) -> GroupedSpec:
    """Grouped attention with heads as wide as the hidden size allows; MHA and MQA by their number of heads.

    For example ``grouped_layer(512, 8, 8).mechanism`` is ``"mha"``.
    """
    head_dim = hidden_size // num_heads
    return GroupedSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=grouped_bias(bias),
    )


def latent_space_layer(hidden_size: int, num_heads: int, latent_dim: int) -> LatentSpaceSpec:
    """Latent-space attention, which the second guide calls MLA.

    For example ``latent_space_layer(512, 8, 256).label``.
    """
    head_dim = hidden_size // num_heads
    return LatentSpaceSpec(hidden_size=hidden_size, num_heads=num_heads, latent_dim=latent_dim, head_dim=head_dim)


def latent_layer(
    hidden_size: int, num_heads: int, rank: int, up: int, rope: int, *, bias: bool = False
) -> LatentSpec:
    """The first guide's MLA: latents of keys, values and queries without norms, each head's part of ``up`` dims.

    For example ``latent_layer(256, 8, 64, 128, 26, bias=True).qk_head_dim`` is 42.
    """
    return LatentSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        kv_lora_rank=rank,
        q_lora_rank=rank,
        qk_nope_head_dim=up // num_heads,
        qk_rope_head_dim=rope,
        v_head_dim=up // num_heads,
        latent_norm=False,
        bias=latent_bias(bias, rank),
    )


def layer_by_name(name: str, hidden_size: int = 512, num_heads: int = 8) -> AttentionSpec:
    """A layer by the second guide's names: ``MHA``, ``MQA``, ``GQA-k`` (k key–value heads) or ``latent-R``.

    For example ``layer_by_name("GQA-4").label``.

    Raises:
        ArgumentError: there is no such name.
    """
    kind, _, size = name.partition("-")
    if kind == "latent":
        return latent_space_layer(hidden_size, num_heads, int(size))
    heads = {"MHA": num_heads, "MQA": 1, "GQA": int(size or 0)}.get(kind)
    if not heads:
        raise ArgumentError("name", name, "must be MHA, MQA, GQA-k or latent-R")
    return grouped_layer(hidden_size, num_heads, heads)
