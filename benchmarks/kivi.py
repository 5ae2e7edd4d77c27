"""Check the premise of KIVI (arXiv:2402.02750) on SmolLM2: keys are coded best by channel, and values by token.

    python -m benchmarks.kivi                        # kept in benchmarks/results/kivi.json

Keys or values are coded with a scale and a zero point for each 32 channels of a token, or for each 32 tokens of a
channel. Errors of them and of what attention makes of them, relative in the Frobenius norm, are averaged over all
layers and heads.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import Kept, say
from benchmarks.rivals.simulation import Rotary, grouped_attention, simulated, split_heads
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

import headwise
from benchmarks import data
from headwise.measure.texts import read_text, token_windows
from headwise.models.checkpoints import load_tokenizer, open_checkpoint
from headwise.runtime.quantization.groups import affine_codes

GROUP, BITS = 32, (4, 2)
WAYS = {"token": -1, "channel": -2}
"""The dim of ``[…, tokens, channels]`` that a group lies along."""


def coded(states: Tensor, dim: int, bits: int) -> Tensor:
    """What remains of ``[…, S, D]`` in groups of `GROUP` along a dim; tokens behind the last whole group stay."""
    whole = states.shape[-2] // GROUP * GROUP
    groups = states[..., :whole, :].movedim(dim, -1).unflatten(-1, (-1, GROUP))
    codes, scale, zero = affine_codes(groups, bits)
    back = (codes.float() * scale.float()[..., None] + zero.float()[..., None]).flatten(-2).movedim(-1, dim)
    return torch.cat((back, states[..., whole:, :]), -2)


@dataclass
class MeasuredLayer:
    """A layer's attention, which measures what coded keys and values would do to it.

    Attributes:
        errors: relative errors of each head, by ``what/bits/way``: of keys and of the weights that they give, of
            values and of the output.
    """

    errors: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, attention: Any, hidden: Tensor, rotary: Rotary) -> Tensor:
        """See `benchmarks.rivals.simulation.Rival`."""
        keys, values = attention.k_proj(hidden), attention.v_proj(hidden)
        cos, sin = (table[:, None] for table in rotary)
        query, key, value = (split_heads(x, attention.head_dim) for x in (attention.q_proj(hidden), keys, values))
        query, key = (x * cos + rotate_half(x) * sin for x in (query, key))
        group = query.shape[1] // key.shape[1]
        weights = weights_of(query, key.repeat_interleave(group, 1), attention.scaling)
        mixed = weights @ value.repeat_interleave(group, 1)
        for bits, (way, dim) in itertools.product(BITS, WAYS.items()):
            other_key, other_value = coded(key, dim, bits), coded(value, dim, bits)
            other = weights_of(query, other_key.repeat_interleave(group, 1), attention.scaling)
            self.add(f"keys/{bits}/{way}", key, other_key)
            self.add(f"weights/{bits}/{way}", weights, other)
            self.add(f"values/{bits}/{way}", value, other_value)
            self.add(f"output/{bits}/{way}", mixed, weights @ other_value.repeat_interleave(group, 1))
        return grouped_attention(attention, hidden, keys, values, rotary)

    def add(self, name: str, right: Tensor, other: Tensor) -> None:
        """Keep the relative error of each head."""
        error = torch.linalg.matrix_norm(other - right) / torch.linalg.matrix_norm(right)
        self.errors.setdefault(name, []).extend(error.flatten().tolist())


def weights_of(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Causal attention weights ``[1, H, S, S]``."""
    scores = query @ key.transpose(-1, -2) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=3, help="of WikiText-2 test")
    parser.add_argument("--window", type=int, default=1024, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/kivi.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {name: getattr(options, name) for name in ("source", "windows", "window")})
    if "errors" in kept.rows:
        return
    model = headwise.load(options.source, dtype="float32")
    tokenizer = load_tokenizer(open_checkpoint(options.source).path)
    text = read_text(data.wikitext("test", options.cache))
    layers = [MeasuredLayer() for _ in model.model.layers]
    with simulated(model, layers):
        for ids in token_windows(tokenizer, text, window=options.window, windows=options.windows):
            model(ids[None], use_cache=False)
    errors = {name: statistics.mean(x for layer in layers for x in layer.errors[name]) for name in layers[0].errors}
    kept.add("errors", {"relative_errors": errors})
    for name, error in errors.items():
        say(f"{name:28} {100 * error:6.2f} %")


if __name__ == "__main__":
    main()
