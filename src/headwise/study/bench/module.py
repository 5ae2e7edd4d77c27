"""Whole attention layers, timed side by side: projections, positions and cache included.

Shapes: B batch, S new tokens, T all tokens, E hidden.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise import cost
from headwise.base.progress import Progress, silent
from headwise.errors import ArgumentError
from headwise.measure.timing.machine import Probes
from headwise.models.checkpoints import dtype_name
from headwise.models.specs import RopeSpec
from headwise.runtime.attention import GroupedQueryAttention, MultiHeadLatentAttention
from headwise.runtime.attention.base import AttentionLayer, merge_heads, split_heads
from headwise.runtime.hf import as_dtype
from headwise.runtime.hf.linears import take_over_linears
from headwise.study.bench.decode import DTYPES, check_sizes, expanded, short_name, without_repetitions
from headwise.study.bench.report import OURS, Bench, Case, UnableError, Way, run_case

PEERS_PIP = "pip install 'headwise[peers]'"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2048, 32, 8, 64
LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}


@torch.inference_mode()
def bench_module(
    *,
    hidden_size: int = HIDDEN,
    num_heads: int = HEADS,
    num_kv_heads: int = KV_HEADS,
    lengths: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    quick: bool = False,
    progress: Progress = silent,
) -> Bench:
    """Time a layer of grouped attention, and of MLA, over a prompt and for one more token.

    For example
    ``bench_module(hidden_size=512, num_heads=8, num_kv_heads=2, lengths=[256], quick=True).to_dict()``.

    Args:
        hidden_size: E, the width of the layers' input.
        num_heads: the number of query heads.
        num_kv_heads: the number of key–value heads of the grouped layers.
        lengths: the numbers of tokens in the prompt and in the cache; 512 and 4096 when None.
        dtypes: the dtypes of weights and hidden states; `DTYPES` when None.
        quick: whether to time a smaller grid.
        progress: the callback that reports each case.

    Raises:
        ArgumentError: sizes do not fit together, or a dtype is not known.
    """
    lengths = without_repetitions(lengths or ((512,) if quick else (512, 4096)))
    kinds = without_repetitions(as_dtype(text) for text in dtypes or DTYPES)
    check_sizes(length=lengths, hidden_size=(hidden_size,), num_heads=(num_heads,), num_kv_heads=(num_kv_heads,))
    if hidden_size % (2 * num_heads) or num_heads % num_kv_heads:
        rule = "must be a multiple of twice num_heads, and num_heads of num_kv_heads"
        raise ArgumentError("hidden_size", hidden_size, rule)
    grid = list(itertools.product(kinds, lengths, (1, None)))
    cases: list[Case] = []
    for index, (dtype, T, tokens) in enumerate(grid):
        progress("modules", index, len(grid))
        bench = _Layers(hidden_size, num_heads, num_kv_heads, T, dtype)
        probes = Probes(dtype)
        for kind, ways, layer in (
            ("GQA", bench.grouped(tokens), bench.gqa),
            ("MLA", bench.latent(tokens), bench.mla),
        ):
            new = tokens or T
            total = T + new if tokens else T
            cached = cost.cache_bytes(layer.spec, T, dtype=dtype_name(dtype)) if tokens else 0
            cases.append(
                run_case(
                    f"{kind}, {'one token after' if tokens else 'prompt of'} {T:,} {short_name(dtype)}",
                    {"kind": kind, "tokens": new, "length": T, "dtype": dtype_name(dtype)},
                    ways,
                    nbytes=cost.parameters(layer.spec) * dtype.itemsize + cached,
                    flops=cost.forward_flops(layer.spec, new, total),
                    probes=probes,
                    budget=1.0 if quick else 4.0,
                )
            )
    progress("modules", len(grid), len(grid))
    return Bench("module", cases)


class _Layers:
    """The layers of one size, their caches filled with noise."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, T: int, dtype: torch.dtype) -> None:
        self.hidden, self.heads, self.kv_heads, self.T, self.dtype = hidden, heads, kv_heads, T, dtype
        self.D = hidden // heads
        self.states = torch.randn(1, T, hidden).to(dtype)
        self.gqa = GroupedQueryAttention(hidden, heads, kv_heads, rope=RopeSpec(dim=self.D)).to(dtype).eval()
        self.mla = MultiHeadLatentAttention(hidden, heads, **LATENT, rope=RopeSpec(dim=64)).to(dtype).eval()
        for layer in (self.gqa, self.mla):
            take_over_linears(layer)

    def grouped(self, tokens: int | None) -> dict[str, Callable[[], Way]]:
        """The ways to compute a layer of grouped attention; ``tokens`` new ones behind the cache, or the prompt."""
        return {
            OURS: partial(self._ours, self.gqa, tokens),
            "transformers, sdpa": partial(self._llama, tokens, "sdpa"),
            "transformers, eager": partial(self._llama, tokens, "eager"),
            "x-transformers": partial(self._x_transformers, tokens),
            "nn.MultiheadAttention": partial(self._torchs, tokens),
            "guides": partial(self._guides, tokens),
        }

    def latent(self, tokens: int | None) -> dict[str, Callable[[], Way]]:
        """The ways to compute a layer of MLA; see `grouped`."""
        return {
            OURS: partial(self._ours, self.mla, tokens),
            "headwise, expanded": partial(self._ours, self.mla, tokens, "expanded"),
            "headwise, absorbed": partial(self._ours, self.mla, tokens, "absorbed"),
            "transformers, sdpa": partial(self._deepseek, tokens, "sdpa"),
            "transformers, eager": partial(self._deepseek, tokens, "eager"),
        }

    def _ours(self, layer: AttentionLayer, tokens: int | None, impl: str = "auto") -> Way:
        if tokens is None:
            if impl == "absorbed" and self.T > 2048:
                raise UnableError("is made for few tokens")
            return lambda: self._as(layer, impl)(self.states, is_causal=True)
        cache = layer.new_cache(1, self.T + tokens)
        for buffer in cache.buffers:
            buffer.normal_()

        def call() -> object:
            cache.length = self.T
            return self._as(layer, impl)(self.states[:, :tokens], is_causal=True, cache=cache)

        return call

    @staticmethod
    def _as(layer: AttentionLayer, impl: str) -> AttentionLayer:
        if isinstance(layer, MultiHeadLatentAttention):
            layer.impl = impl  # type: ignore[assignment]
        return layer

    def _llama(self, tokens: int | None, implementation: str) -> Way:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaAttention

        config = LlamaConfig(
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.D,
            num_hidden_layers=1,
        )
        config._attn_implementation = implementation
        return self._stock(LlamaAttention(config, 0), config, tokens, self.kv_heads, (self.D, self.D))

    def _deepseek(self, tokens: int | None, implementation: str) -> Way:
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

        config = DeepseekV3Config(
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            q_lora_rank=None,
            num_hidden_layers=1,
            **LATENT,
        )
        config._attn_implementation = implementation
        rank, rope = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
        return self._stock(DeepseekV3Attention(config, 0), config, tokens, 1, (rank, rope))

    def _stock(self, layer: Any, config: Any, tokens: int | None, heads: int, widths: tuple[int, int]) -> Way:
        """A transformers layer; cos and sin are made beforehand, as a model makes them once for all layers."""
        from transformers import DynamicCache

        layer = layer.to(self.dtype).eval()
        new = self.T if tokens is None else tokens
        dim = widths[1] if heads == 1 else self.D
        rotation = tuple(torch.randn(1, new, dim).to(self.dtype) for _ in range(2))
        mask = None
        if config._attn_implementation == "eager" and tokens is None:
            mask = torch.zeros(1, 1, new, new, dtype=self.dtype).masked_fill(
                torch.ones(new, new, dtype=torch.bool).triu(1), torch.finfo(self.dtype).min
            )
        if tokens is None:
            return lambda: layer(self.states, position_embeddings=rotation, attention_mask=mask)
        cache = DynamicCache(config=config)
        cache.update(*(torch.randn(1, heads, self.T, width).to(self.dtype) for width in widths), 0)

        def call() -> object:
            out = layer(
                self.states[:, :tokens], position_embeddings=rotation, attention_mask=None, past_key_values=cache
            )
            cache.crop(-tokens)
            return out

        return call

    def _x_transformers(self, tokens: int | None) -> Way:
        if importlib.util.find_spec("x_transformers") is None:
            raise UnableError(f"is not installed: {PEERS_PIP}")
        attention = importlib.import_module("x_transformers.x_transformers").Attention(
            dim=self.hidden, heads=self.heads, dim_head=self.D, kv_heads=self.kv_heads, causal=True, flash=True
        )
        layer = attention.to(self.dtype).eval()
        if tokens is None:
            return lambda: layer(self.states)
        _, filled = layer(self.states, return_intermediates=True)
        return lambda: layer(self.states[:, :tokens], cache=filled)

    def _torchs(self, tokens: int | None) -> Way:
        layer = nn.MultiheadAttention(self.hidden, self.heads, batch_first=True, bias=False).to(self.dtype).eval()
        if tokens is None:
            mask = torch.ones(self.T, self.T, dtype=torch.bool).triu(1)
            return lambda: layer(
                self.states, self.states, self.states, attn_mask=mask, is_causal=True, need_weights=False
            )
        # nn.MultiheadAttention has no cache: keys and values of all tokens are projected again.
        return lambda: layer(self.states[:, :tokens], self.states, self.states, need_weights=False)

    def _guides(self, tokens: int | None) -> Way:
        layer: Any = self.gqa
        cached = [torch.randn(1, self.kv_heads, self.T, self.D).to(self.dtype) for _ in range(2)]

        def call() -> Tensor:
            states = self.states if tokens is None else self.states[:, :tokens]
            query = split_heads(layer.q_proj(states), self.heads)
            key, value = (split_heads(project(states), self.kv_heads) for project in (layer.k_proj, layer.v_proj))
            if tokens is not None:
                key, value = torch.cat((cached[0], key), 2), torch.cat((cached[1], value), 2)
            mixed = expanded(query, key, value, tokens is None)
            out: Tensor = layer.o_proj(merge_heads(mixed))
            return out

        return call
