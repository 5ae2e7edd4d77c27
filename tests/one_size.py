"""Converted folders that keep the same rotary channels in every layer, as deepseek_v3 needs them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import headwise
from headwise.conversion import LayerTarget, convert_to_latent
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import GroupedSpec, LatentSpec


def convert_to_one_size(source: Path, output: Path, *, kv_lora_rank: int, qk_rope_head_dim: int) -> Path:
    """A lossy MLA folder whose layers all keep rotation on every n-th frequency, of the first channels."""
    headwise.convert(
        source, output, to="mla", kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim, evaluate=False
    )
    before, after = open_checkpoint(source), open_checkpoint(output)
    tensors = load_file(output / "model.safetensors")
    channels = []
    for index, (old, new) in enumerate(zip(before.spec.layers, after.spec.layers, strict=True)):
        assert isinstance(old, GroupedSpec)
        assert isinstance(new, LatentSpec)
        state = before.family.read_attention(before.read, index, old)
        chosen = spread(old.head_dim // 2, old.num_kv_heads, qk_rope_head_dim // 2)
        target = LayerTarget(new, longest=128, rotary_channels=chosen)
        made, channels_of_layer = convert_to_latent(state, old, target, statistics=None)
        channels.append(channels_of_layer)
        prefix = before.family.attention.format(layer=index)
        for name, tensor in made.items():
            tensors[f"{prefix}.{name}"] = tensor.to(after.dtype).contiguous()
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((output / "config.json").read_text())
    config["headwise"]["rope_channels"] = channels
    (output / "config.json").write_text(json.dumps(config))
    return output


def spread(frequencies: int, channels: int, pairs: int) -> torch.Tensor:
    """``[F, K]`` bool with ``pairs`` True, as far apart in frequency as they can be."""
    order = torch.arange(frequencies * channels).view(channels, frequencies).mT  # all of channel 0 first
    step = max(frequencies // pairs, 1)
    order = order + (torch.arange(frequencies)[:, None] % step > 0) * frequencies * channels
    kept = torch.zeros(frequencies * channels, dtype=torch.bool)
    kept[order.flatten().argsort()[:pairs]] = True
    return kept.view(frequencies, channels)
