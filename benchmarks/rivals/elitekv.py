"""EliteKV (Zhou et al. 2025, arXiv:2503.01586): few rotated frequencies in each head, and one latent for the rest.

RoPElite chooses each head's frequencies one by one: the one that brings the scores nearest, in mean absolute
difference before the softmax, to those of a model that rotates all. The other dims of the key lose their rotation,
and share a latent with the values by the SVD of the stacked weights (J-LRD). How many frequencies a head keeps is
chosen by perplexity, as the paper does. The paper's heads all have their own keys; with groups of query heads the
differences are summed over the heads that share a key. The authors then train on 0.6 % of the original data; here
nothing is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.rivals.simulation import BF16, Design, Rotary, Study, grouped_attention
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

ROUNDS = 16
"""The most frequencies that are chosen for a head."""
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2)
"""The part of the cache for rotated keys that is tried."""
QUERIES = 32
"""Queries of a window that the difference of scores is measured at."""


@dataclass(frozen=True)
class EliteLayer:
    """A layer whose cache holds the rotated dims of its keys and one latent.

    Attributes:
        rotated: bool ``[K, F]``, the frequencies that each key head keeps.
        latent: ``[c, E]``, the projection to the latent.
        rest: ``[K·D, c]``, the keys from the latent; 0 in rotated dims.
        values: ``[K·D, c]``, the values from the latent.
    """

    rotated: Tensor
    latent: Tensor
    rest: Tensor
    values: Tensor

    def __call__(self, attention: Any, hidden: Tensor, rotary: Rotary) -> Tensor:
        """See `simulation.Rival`."""
        kept = torch.cat((self.rotated, self.rotated), -1).flatten()  # [K·D]
        latent = F.linear(hidden, self.latent)
        keys = attention.k_proj(hidden) * kept + F.linear(latent, self.rest)
        return grouped_attention(attention, hidden, keys, F.linear(latent, self.values), rotary, self.rotated)


def designs(study: Study, fraction: float) -> list[Design]:
    """Caches of a fraction of the bytes, with several numbers of frequencies."""
    layers = study.model.model.layers
    K = study.model.config.num_key_value_heads
    cached = round(fraction * study.full / BF16 / len(layers))
    counts = sorted({min(max(round(share * cached / (2 * K)), 1), ROUNDS) for share in SHARES})
    designs = []
    for count in counts:
        latent = cached - 2 * K * count
        if latent < 1:
            continue
        parts = [
            joint(layer.self_attn, study.statistics[f"{index}.elite"][:, :count], latent)
            for index, layer in enumerate(layers)
        ]
        settings = {"frequencies": count, "latent": latent}
        designs.append(Design(parts, BF16 * cached * len(layers), settings))
    return designs


def joint(attention: Any, elite: Tensor, rank: int) -> EliteLayer:
    """A layer with given frequencies, and a latent of a given width for the rest.

    Args:
        attention: the model's attention.
        elite: ``[K, r]``, the frequencies that each key head keeps.
        rank: the width of the latent.
    """
    w_k, w_v = (linear.weight.detach().double() for linear in (attention.k_proj, attention.v_proj))
    rotated = torch.zeros(len(elite), attention.head_dim // 2, dtype=torch.bool).scatter(1, elite, value=True)
    rest = w_k * ~torch.cat((rotated, rotated), -1).flatten()[:, None]
    stacked = torch.cat((rest, w_v))
    left, values, right = torch.linalg.svd(stacked, full_matrices=False)
    up = (left * values)[:, :rank].float()
    return EliteLayer(rotated, right[:rank].float(), up[: len(w_k)], up[len(w_k) :])


def elite_order(queries: Tensor, keys: Tensor, rotary: Rotary, rounds: int = ROUNDS) -> Tensor:
    """RoPElite: the frequencies of each key head, the most important first, ``[K, rounds]``.

    Args:
        queries: ``[N, H, S, D]`` of N windows, before rotation.
        keys: ``[N, K, S, D]``, before rotation.
        rotary: the rotary tables of a window.
        rounds: the number of frequencies to choose.
    """
    K, S = keys.shape[1], keys.shape[2]
    rows = torch.arange(S - 1, 0, -max(S // QUERIES, 1))
    orders = []
    for head in range(K):
        group = queries.chunk(K, 1)[head][:, :, rows]  # [N, G, rows, D]
        orders.append(_head_order(group, keys[:, head, None], rotary, rows, rounds))
    return torch.stack(orders)


def _head_order(query: Tensor, key: Tensor, rotary: Rotary, rows: Tensor, rounds: int) -> Tensor:
    cos, sin = (table[0] for table in rotary)  # [S, D]
    turned_query = query * cos[rows] + rotate_half(query) * sin[rows]
    turned_key = key * cos + rotate_half(key) * sin
    causal = rows[:, None] >= torch.arange(key.shape[2])
    half = query.shape[-1] // 2
    # What the score loses when a frequency does not rotate.
    lost = torch.empty(half, *query.shape[:2], *causal.shape)
    for at in range(half):
        pair = [at, at + half]
        rotated = turned_query[..., pair] @ turned_key[..., pair].mT
        lost[at] = (rotated - query[..., pair] @ key[..., pair].mT) * causal
    residual, order = lost.sum(0), []
    for _ in range(min(rounds, half)):
        left = [at for at in range(half) if at not in order]
        best = min(left, key=lambda at: float((residual - lost[at]).abs().sum()))
        residual -= lost[best]
        order.append(best)
    return torch.tensor(order)
