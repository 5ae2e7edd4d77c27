"""The sizes that operators are timed at, and those of the decoders that predictions are checked on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwise.costs.prediction import MANY
from headwise.measure.profiling.decoder import Decoder
from headwise.runtime.kernels.native.abi import MOST_ROWS

BITS = {0.0: None, 8.5: "int8", 5.0: "int4:32"}
"""Bits of a cached value, its scale included, and the format that has them; 0 for the dtype's own."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Sizes to choose decoders from, on which no curve was measured.

    Attributes:
        heads: query heads; a hidden state is as wide as all of them.
        layers: of a model.
        vocabularies: tokens.
        batches: sequences of a decode step.
        contexts: tokens of each.
        prompts: tokens of a prompt.
        latent: R and P of MLA.
        code_bits: of a value of its latents in codes, where these were measured.
    """

    heads: tuple[int, ...]
    layers: tuple[int, ...]
    vocabularies: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    latent: tuple[int, int]
    code_bits: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Grids:
    """The sizes that a kind of device is measured at.

    Attributes:
        dtypes: that it is measured in.
        few_reads: bytes of weights that a pass reads, some of which the processor's caches hold; empty where no
            model's weights lie in them, as on a GPU, and ``tokens`` begin at 1 instead.
        few_tokens: of projections whose weights are read in turn.
        few_weights: values of such weights: small ones are read by one thread, large ones by several.
        tokens: of other projections.
        weights: values of their weights.
        turns: bytes of such weights that take turns, two projections at least.
        product_tokens: of products of heads with matrices.
        product_weights: values of all their matrices.
        prompts: tokens that attend to themselves.
        prompt_heads: query heads that do; where there is one number, time is taken to grow as FLOPs do.
        head_dim: D.
        heads: query heads of decoders whose attention is timed.
        kv_heads: key–value heads of these.
        coded_kv_heads: some of them, where caches are in fewer bits, which take long to fill.
        latent: R and P of decoders whose attention to latents is timed.
        latent_heads: query heads of these.
        latent_hidden: E of these.
        code_bits: of a value of latents in codes; none where those are not measured.
        code_tokens: of their contexts.
        between: bytes of weights of a network that a layer reads between caches, so that none is left where it can be
            read faster.
        caches: bytes that a pass reads of caches.
        coded_caches: the same of caches in fewer bits, which take long to fill.
        hidden: E of decoders whose other work is measured.
        states: values of a hidden state, multiples of ``hidden``.
        latent_states: those of them that decoders with latents are measured at as well.
        whole: decoders whose weights come from memory, which projections are measured once more in.
        whole_prompts: tokens of the prompt that each of them reads, 64 at least.
        places: for `headwise.measure.profiling.check`.
        layers: of decoders, a few and more: their difference is what one takes.
        short: tokens of a context that takes next to nothing.
    """

    dtypes: tuple[torch.dtype, ...]
    few_reads: tuple[int, ...]
    few_tokens: tuple[int, ...]
    few_weights: tuple[int, ...]
    tokens: tuple[int, ...]
    weights: tuple[int, ...]
    turns: int
    product_tokens: tuple[int, ...]
    product_weights: tuple[int, ...]
    prompts: tuple[int, ...]
    prompt_heads: tuple[int, ...]
    head_dim: int
    heads: int
    kv_heads: tuple[int, ...]
    coded_kv_heads: tuple[int, ...]
    latent: tuple[int, int]
    latent_heads: tuple[int, ...]
    latent_hidden: int
    code_bits: tuple[int, ...]
    code_tokens: tuple[int, ...]
    between: int
    caches: tuple[int, ...]
    coded_caches: tuple[int, ...]
    hidden: tuple[int, ...]
    states: tuple[int, ...]
    latent_states: tuple[int, ...]
    places: Places
    whole: tuple[Decoder, ...] = ()
    whole_prompts: tuple[int, ...] = ()
    layers: tuple[int, int] = (1, 4)
    short: int = 32


CPU = Grids(
    dtypes=(torch.float32, torch.bfloat16),
    few_reads=(6 << 20, 20 << 20, 48 << 20, 80 << 20, 160 << 20),
    few_tokens=(1, MOST_ROWS, MOST_ROWS + 1, MANY),  # a kernel of its own reads the weights for a few
    few_weights=(1 << 18, 1 << 20, 1 << 22, 1 << 24),
    tokens=(64, 256, 1024),
    weights=(1 << 15, 1 << 17, 1 << 19, 1 << 21),
    turns=0,
    product_tokens=(1, 2, 4, 8, 16),
    product_weights=(1 << 15, 1 << 17, 1 << 19),
    prompts=(16, 64, 256, 1024, 2048),
    prompt_heads=(8,),
    head_dim=64,
    heads=16,
    kv_heads=(16, 4, 1),
    coded_kv_heads=(16, 1),
    latent=(192, 32),
    latent_heads=(4, 8, 16),
    latent_hidden=256,
    code_bits=(4,),
    code_tokens=(256, 2048, 16_384),
    between=0,
    caches=(6 << 20, 24 << 20, 128 << 20),
    coded_caches=(8 << 20, 64 << 20),
    hidden=(128, 512, 1024),
    # Beyond 2^15 values torch works on a tensor in several threads, which have to be woken.
    states=(1 << 10, 1 << 12, 1 << 14, 1 << 15, 36 << 10, 1 << 17, 384 << 10),
    latent_states=(1 << 10, 1 << 14, 36 << 10, 384 << 10),
    places=Places(
        heads=(8, 12, 16),
        layers=(3, 4, 6, 8),
        vocabularies=(8192, 32_768),
        batches=(1, 1, 2, 4, 8),
        contexts=(300, 1000, 3000, 6000),
        prompts=(96, 200, 400, 900),
        latent=(160, 32),
        code_bits=(2, 3, 5, 6),
    ),
    whole=tuple(
        Decoder(hidden_size=hidden, num_layers=7, num_heads=hidden // 64, num_kv_heads=2, intermediate_size=inner)
        for hidden, inner in ((512, 4096), (640, 3200), (896, 3584), (1152, 2304), (1024, 4096))
    ),
    whole_prompts=(80, 160, 320, 400, 240),
)
"""Of processors."""

GPU = Grids(
    dtypes=(torch.bfloat16,),
    few_reads=(),
    few_tokens=(),
    few_weights=(),
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    weights=(1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26),
    turns=384 << 20,
    product_tokens=(1, 2, 4, 8, 16, 32),
    product_weights=(1 << 17, 1 << 19, 1 << 21, 1 << 23),
    prompts=(16, 64, 256, 1024, 2048, 4096),
    prompt_heads=(4, 32, 128),
    head_dim=128,
    heads=32,
    kv_heads=(32, 8, 1),
    coded_kv_heads=(32, 8, 1),
    latent=(512, 64),
    latent_heads=(8, 32, 128),
    latent_hidden=512,
    code_bits=(),
    code_tokens=(),
    between=128 << 20,
    caches=(16 << 20, 128 << 20, 1 << 29),
    coded_caches=(16 << 20, 256 << 20),
    hidden=(1024, 4096),
    states=(1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22),
    latent_states=(1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22),
    places=Places(
        heads=(8, 16, 32),
        layers=(2, 3, 4),
        vocabularies=(32_768, 131_072),
        batches=(1, 1, 4, 8, 16),
        contexts=(500, 2000, 4000, 8000),
        prompts=(200, 700, 1500, 3000),
        latent=(256, 64),
    ),
)
"""Of CUDA GPUs."""


def grids_of(device: torch.device) -> Grids:
    """The sizes that a device is measured at.

    For example ``grids_of(torch.device("cuda")).dtypes``.
    """
    return GPU if device.type == "cuda" else CPU
