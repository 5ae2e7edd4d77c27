"""A small decoder of any mechanism's layers, over bytes, to be trained from scratch.

Shapes: B sequences, S tokens, E hidden size, V tokens in the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import cost
from headwise.models.specs import AttentionSpec, ExpertLatentSpec, LatentSpec, RopeSpec
from headwise.runtime.attention import build
from headwise.runtime.attention.base import RMSNorm
from headwise.study.audit.layers import grouped_layer, latent_space_layer

VOCABULARY = 256
"""Every byte is a token, so that no mechanism's parameters are lost among those of an embedding."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that all decoders share.

    Attributes:
        hidden_size: E, width of the residual stream.
        num_heads: the number of query heads.
        num_layers: the number of the decoder's layers.
        intermediate_size: the inner width of the feed-forward networks beside MHA; those beside other mechanisms are
            wider, as these have fewer parameters.
    """

    hidden_size: int = 256
    num_heads: int = 8
    num_layers: int = 4
    intermediate_size: int = 704


def mechanisms(sizes: Sizes) -> dict[str, AttentionSpec]:
    """The specs of the layers that are trained, by name, from the largest cache to the smallest.

    For example ``list(mechanisms(Sizes()))[0]`` is ``"MHA"``. All rotate positions; MLA by its decoupled key.
    """
    E, H = sizes.hidden_size, sizes.num_heads
    D = E // H
    rope = RopeSpec(dim=D)
    heads = {"MHA": H, f"GQA-{H // 2}": H // 2, f"GQA-{H // 4}": H // 4, "MQA": 1}
    specs: dict[str, AttentionSpec] = {
        name: replace(grouped_layer(E, H, count), rope=rope) for name, count in heads.items()
    }
    half, quarter = (
        replace(latent_space_layer(E, H, width), rope=RopeSpec(dim=width // H)) for width in (E // 2, E // 4)
    )
    specs |= {f"latent-{E // 2}": half, f"latent-{E // 4}": quarter}
    for rank, rotary in ((3 * D, D), (3 * D // 2, D // 2)):
        specs[f"MLA {rank} + {rotary}"] = LatentSpec(
            hidden_size=E,
            num_heads=H,
            kv_lora_rank=rank,
            q_lora_rank=None,
            qk_nope_head_dim=D,
            qk_rope_head_dim=rotary,
            v_head_dim=D,
            rope=RopeSpec(dim=rotary, interleaved=True),
        )
    specs["experts 2 × 32"] = ExpertLatentSpec(
        hidden_size=E, num_heads=H, head_dim=D, latent_kv_heads=2, kv_dim=D, rope=rope
    )
    return dict(sorted(specs.items(), key=lambda item: -cost.cache_values(item[1])))


def width_for(spec: AttentionSpec, sizes: Sizes) -> int:
    """The width of a feed-forward network beside which a layer has as many parameters as MHA's, to a whole unit.

    For example ``width_for(mechanisms(Sizes())["MHA"], Sizes())`` is 704.
    """
    mha = mechanisms(sizes)["MHA"]
    return sizes.intermediate_size + (cost.parameters(mha) - cost.parameters(spec)) // (3 * sizes.hidden_size)


class Decoder(nn.Module):
    """Layers of one mechanism and of SwiGLU, with norms before each and tied embeddings; called as transformers' are.

    Args:
        spec: the spec of every layer's attention.
        sizes: the decoder's sizes.
        width: the inner width of the feed-forward networks.
    """

    def __init__(self, spec: AttentionSpec, sizes: Sizes, width: int) -> None:
        super().__init__()
        E = sizes.hidden_size
        self.embedding = nn.Embedding(VOCABULARY, E)
        self.attention = nn.ModuleList(build(spec) for _ in range(sizes.num_layers))
        self.gate, self.up, self.down = (
            nn.ModuleList(nn.Linear(*shape, bias=False) for _ in range(sizes.num_layers))
            for shape in ((E, width), (E, width), (width, E))
        )
        self.norms = nn.ModuleList(RMSNorm(E) for _ in range(2 * sizes.num_layers + 1))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.embedding.weight.device

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        output_hidden_states: bool = False,
    ) -> Any:
        """Logits ``[B, S, V]``, as the attribute ``logits``.

        Args:
            input_ids: token ids, ``[B, S]``.
            position_ids: the position of each token, ``[B, S]``.
            attention_mask: all ones, because sequences have no padding.
            use_cache: always false; the decoder has no cache.
            output_hidden_states: always false; the decoder returns logits alone.
        """
        del attention_mask
        assert not use_cache
        assert not output_hidden_states
        states = self.embedding(input_ids)
        for index, attention in enumerate(self.attention):
            normed = self.norms[2 * index](states)
            states = states + attention(normed, is_causal=True, position_ids=position_ids)
            normed = self.norms[2 * index + 1](states)
            states = states + self.down[index](F.silu(self.gate[index](normed)) * self.up[index](normed))
        return SimpleNamespace(logits=F.linear(self.norms[-1](states), self.embedding.weight))
