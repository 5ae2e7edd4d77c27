"""Fill an MLA model in deepseek_v3's layout up with zeros, to the sizes that an engine has kernels for.

Zeros change nothing that is computed: a norm over more channels is made up for by its weight, a softmax scale over
more dims by the queries, and rotary pairs that are zero take frequencies of the same plain RoPE beyond those in use.

Shapes: R latent rank, P rotary dims, N content dims, V value dim, H heads, E hidden.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ArgumentError

_PREFILL = ((64, 64, 128), (128, 64, 128), (192, 64, 256))
"""N, P and V that engines' prompts have kernels for (vLLM 0.33, v1/attention/backends/mla/prefill)."""


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of an MLA layer: R, P, N and V."""

    rank: int
    rope: int
    nope: int
    value: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LatentSizes:
        """The sizes in a config of deepseek_v3."""
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        return cls(*(config[name] for name in names))

    @property
    def fields(self) -> dict[str, int]:
        """The fields of a config of deepseek_v3."""
        return {
            "kv_lora_rank": self.rank,
            "qk_rope_head_dim": self.rope,
            "qk_nope_head_dim": self.nope,
            "v_head_dim": self.value,
        }


def parse_padding(text: str) -> tuple[int, int]:
    """R and P of a user's ``R+P``.

    For example ``parse_padding("512+64")`` is ``(512, 64)``.

    Raises:
        ArgumentError: it is not two numbers, or P is odd.
    """
    match = re.fullmatch(r"\s*(\d{1,6})\s*\+\s*(\d{1,6})\s*", text)
    if match is None or int(match[2]) % 2:
        raise ArgumentError(
            "pad_to", text, "must be R+P, the latent's width and an even one of the rotary key: 512+64"
        )
    return int(match[1]), int(match[2])


def padded_config(config: Mapping[str, Any], pad_to: tuple[int, int]) -> dict[str, Any]:
    """A config of deepseek_v3 with the latent and the rotary key of other widths, and heads that fit a kernel.

    For example ``padded_config(deepseek_config(config, for_engines=True), (512, 64))``.

    Args:
        config: with plain RoPE.
        pad_to: R and P, each at least the config's.

    Raises:
        ArgumentError: one is smaller.
    """
    sizes = LatentSizes.of(config)
    rank, rope = pad_to
    if rank < sizes.rank or rope < sizes.rope:
        rule = f"must be at least {sizes.rank}+{sizes.rope}, what the folder has without it"
        raise ArgumentError("pad_to", f"{rank}+{rope}", rule)
    fitting = [(nope, value) for nope, own, value in _PREFILL if own == rope and nope >= sizes.nope]
    fitting = [(nope, value) for nope, value in fitting if value >= sizes.value]
    nope, value = fitting[0] if fitting else (sizes.nope, sizes.value)
    theta = config["rope_theta"] ** (rope / sizes.rope)  # the first P/2 frequencies stay
    return {
        **config,
        **LatentSizes(rank, rope, nope, value).fields,
        "rope_theta": theta,
        "rope_parameters": {**config["rope_parameters"], "rope_theta": theta},
    }


def padded_layer(
    tensors: Mapping[str, Tensor], heads: int, own: LatentSizes, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """A layer's tensors with zeros up to a config's sizes.

    Args:
        tensors: by deepseek_v3's names within a layer's attention, rotary pairs side by side.
        heads: H.
        own: the sizes of the tensors; the rank is read off them.
        config: from `padded_config`.
    """
    own, new = replace(own, rank=len(tensors["kv_a_layernorm.weight"])), LatentSizes.of(config)
    if own == new:
        return dict(tensors)
    out = dict(tensors)
    for name in ("kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias"):
        if name in out:
            latent, rotary = torch.split(out[name], [own.rank, own.rope])
            out[name] = torch.cat((_rows(latent, 0, new.rank), _rows(rotary, 0, new.rope)))
    # The mean square over more channels is smaller.
    norm = out["kv_a_layernorm.weight"] * (own.rank / new.rank) ** 0.5
    out["kv_a_layernorm.weight"] = _rows(norm, 0, new.rank)
    by_head = torch.unflatten(out["kv_b_proj.weight"], 0, (heads, -1))  # [H, N + V, R]
    keys, values = torch.split(by_head, [own.nope, own.value], 1)
    decoded = torch.cat((_rows(keys, 1, new.nope), _rows(values, 1, new.value)), 1)
    out["kv_b_proj.weight"] = _rows(decoded.flatten(0, 1), 1, new.rank)
    queries = "q_proj.weight" if "q_proj.weight" in out else "q_b_proj.weight"
    scale = ((new.nope + new.rope) / (own.nope + own.rope)) ** 0.5
    by_head = torch.unflatten(out[queries], 0, (heads, -1)) * scale
    content, rotary = torch.split(by_head, [own.nope, own.rope], 1)
    out[queries] = torch.cat((_rows(content, 1, new.nope), _rows(rotary, 1, new.rope)), 1).flatten(0, 1)
    gathered = torch.unflatten(out["o_proj.weight"], 1, (heads, own.value))  # [E, H, V]
    out["o_proj.weight"] = _rows(gathered, 2, new.value).flatten(1, 2)
    return out


def _rows(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A tensor with zeros behind it along one dim."""
    shape = list(tensor.shape)
    shape[dim] = size - shape[dim]
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)
