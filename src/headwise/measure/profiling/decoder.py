"""What is timed: small decoders with random weights, their caches filled with noise, and the grids of sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headwise.costs.formulas.layer import cache_values
from headwise.costs.prediction import MANY
from headwise.measure.profiling.pace import HERE
from headwise.measure.timing.timing import Timeable
from headwise.models.specs import LatentSpec, ModelSpec, read_config
from headwise.runtime.caches.layers import GrowingLayer
from headwise.runtime.hf import HeadwiseCache, optimize
from headwise.runtime.hf.codes import set_codes
from headwise.runtime.kernels.native.abi import MOST_ROWS
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.transform_code import blocks, code_shape
from headwise.runtime.quantization.trellis_format import TrellisFormat

_PIECE = 65_536
"""The number of tokens of noise that are drawn, and repeated in longer caches."""

_CODED = 256
"""The number of tokens of noise that are coded, and repeated in longer caches."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The sizes of a decoder.

    For example ``Decoder(num_kv_heads=1).spec().label`` is ``"MQA 8/1 × 64"``.

    Attributes:
        hidden_size: E, width of the residual stream.
        num_layers: the number of layers.
        num_heads: H, query heads.
        num_kv_heads: K, key–value heads; None for as many as query heads, and for MLA.
        latent: the widths R and P of MLA's latent and rotary key; None for a cache of heads.
        code_bits: the bits of each value that MLA caches in headwise's code; None for a cache in the dtype.
        head_dim: D, width of a head; in MLA the width of a head's content dims and of its values.
        intermediate_size: the inner width of the feed-forward networks.
        vocab_size: the number of tokens in the vocabulary.
    """

    hidden_size: int = 512
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int | None = None
    latent: tuple[int, int] | None = None
    code_bits: int | None = None
    head_dim: int = 64
    intermediate_size: int = 1536
    vocab_size: int = 1024

    def config(self) -> dict[str, Any]:
        """The decoder's ``config.json``: a llama, a deepseek_v3 without experts, or, in codes, a llama converted to
        MLA."""
        common = {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 1 << 20,  # more than any length that is timed
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        if self.latent is None:
            kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
            return {"model_type": "llama", **common, "head_dim": self.head_dim, "num_key_value_heads": kv_heads}
        rank, rope = self.latent
        # Only a converted model can have its cache in headwise's codes; a stock deepseek_v3 stands for all other MLA.
        if self.code_bits is not None:
            layer = LatentSpec(
                hidden_size=self.hidden_size,
                num_heads=self.num_heads,
                kv_lora_rank=rank,
                qk_rope_head_dim=rope,
                qk_nope_head_dim=self.head_dim,
                v_head_dim=self.head_dim,
            )
            hosted = {"layers": list(range(self.num_layers)), **layer.to_dict()}
            channels = [list(range(rope // 2))] * self.num_layers
            block = {"format": 1, "attention": [hosted], "rope_channels": channels}
            return {"model_type": "headwise_llama", **common, "head_dim": self.head_dim, "headwise": block}
        return {
            "model_type": "deepseek_v3",
            **common,
            "num_key_value_heads": self.num_heads,
            "kv_lora_rank": rank,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": self.head_dim,
            "v_head_dim": self.head_dim,
            "q_lora_rank": None,
            # All layers are dense, but the class asks for sizes of experts all the same.
            "first_k_dense_replace": self.num_layers,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 8,
        }

    def spec(self) -> ModelSpec:
        """The decoder's spec, from which its costs are computed."""
        return read_config(self.config())

    def build(self, dtype: torch.dtype, device: torch.device = HERE) -> Any:
        """The model, run by headwise's attention, cache and linear layers."""
        if device.type == "cuda":
            gc.collect()  # optimised models refer to themselves, and their memory is needed for this one
        fields = {name: value for name, value in self.config().items() if name != "model_type"}
        config = AutoConfig.for_model(str(self.config()["model_type"]), **fields)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        optimize(model.eval())
        if self.code_bits is not None:
            set_codes(model, dict(enumerate(self._codes())))
        return model

    def _codes(self) -> list[TransformCode]:
        """The code of each layer that caches a latent, with the same number of bits for each of its values."""
        found = []
        for layer in self.spec().layers:
            assert isinstance(layer, LatentSpec)
            sections, parts = code_shape(layer)
            width, bits = sum(sections), (self.code_bits or 0,) * len(list(blocks(sections)))
            code = TransformCode(
                offset=torch.zeros(width), scale=torch.ones(width), bits=bits, sections=sections, parts=parts
            )
            found.append(code)
        return found


def filled_cache(
    model: Any, spec: ModelSpec, *, batch: int, tokens: int, quantize: str | None = None
) -> HeadwiseCache:
    """A cache with noise in the place of ``tokens`` tokens of each sequence, and room for one more.

    Args:
        model: a model of ``spec``.
        spec: the spec of the model, with grouped or MLA layers.
        batch: the number of sequences.
        tokens: the number of tokens in each sequence.
        quantize: the format of the cache, see `headwise.hf.HeadwiseCache`.
    """
    cache = HeadwiseCache(model, max_length=tokens + 1, quantize=quantize)
    for index, layer in enumerate(spec.layers):
        own = cache.layers[index]
        if isinstance(own, GrowingLayer) and isinstance(own.codec, TrellisFormat):
            _fill_with_codes(own, own.codec.code.width, batch, tokens)
            continue
        heads = 1 if isinstance(layer, LatentSpec) else int(getattr(layer, "num_kv_heads", 1))
        width = cache_values(layer) // heads // (1 if isinstance(layer, LatentSpec) else 2)
        # One piece of noise is repeated: its content does not matter, and drawing more would take long.
        piece = torch.randn(min(tokens, _PIECE), width, device=model.device).to(model.dtype)
        piece = piece.expand(batch, heads, -1, -1)
        for begin in range(0, tokens, _PIECE):
            keys = piece[:, :, : tokens - begin]
            cache.update(keys, keys[..., :0] if isinstance(layer, LatentSpec) else keys, index)
    return cache


def _fill_with_codes(layer: GrowingLayer, width: int, batch: int, tokens: int) -> None:
    """Fill a layer with the codes of a few tokens, repeated: coding all tokens would take long."""
    few = torch.randn(batch, 1, min(tokens, _CODED), width)
    layer.append(few, few[..., :0], torch.zeros(batch, dtype=torch.long))
    codes = layer.keys
    for begin in range(_CODED, tokens, _CODED):
        more = codes[:, :, : tokens - begin]
        layer.append_rows(more, more[..., :0])


def decode_step(model: Any, cache: HeadwiseCache, batch: int) -> Timeable:
    """A call that decodes one token of each sequence, and forgets it."""
    ids = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    cache.activate_past_recording()

    @torch.inference_mode()
    def step() -> None:
        model(ids, past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return step


def prompt_call(model: Any, tokens: int) -> Callable[[], Tensor]:
    """A call that reads one prompt into a new cache."""
    ids = torch.ones(1, tokens, dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def read() -> Tensor:
        cache = HeadwiseCache(model, max_length=tokens)
        out: Tensor = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return out

    return read


BITS = {0.0: None, 8.5: "int8", 5.0: "int4:32"}
"""The bits of a cached value, its share of a scale included, and the format that has them; 0 stands for the dtype."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The sizes of decoders that predictions are checked on, of which no curve was measured.

    Attributes:
        heads: numbers of query heads; a hidden state is as wide as all of them together.
        layers: numbers of layers.
        vocabularies: numbers of tokens in the vocabulary.
        batches: numbers of sequences in a decode step.
        contexts: numbers of tokens in each sequence's cache.
        prompts: numbers of tokens in a prompt.
        latent: the widths R and P of MLA's latent and rotary key.
        code_bits: the bits of a value of latents in codes; empty where such caches are not checked.
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
        dtypes: the dtypes that the device is measured in.
        few_reads: bytes of weights that a pass of few tokens reads, small enough at first to lie in the processor's
            caches; empty where no model's weights lie in them, as on a GPU, and ``tokens`` begin at 1 instead.
        few_tokens: numbers of tokens of the projections that read ``few_reads`` in turn.
        few_weights: numbers of weights of such a projection: few are read by one thread, many by several.
        tokens: numbers of tokens of all other projections.
        weights: numbers of weights of these projections.
        turns: bytes of the weights of these projections that take turns, of at least two projections.
        product_tokens: numbers of tokens of products of heads with matrices of their own.
        product_weights: numbers of weights in all matrices of such a product.
        prompts: numbers of tokens of prompts whose attention is timed.
        prompt_heads: numbers of query heads of these prompts; with only one, time is taken to grow as FLOPs do.
        head_dim: D, the width of a head.
        heads: the number of query heads of decoders whose attention to heads is timed.
        kv_heads: numbers of key–value heads of these decoders.
        coded_kv_heads: those of ``kv_heads`` that are timed with quantised caches, which take long to fill.
        latent: the widths R and P of decoders whose attention to latents is timed.
        latent_heads: numbers of query heads of these decoders.
        latent_hidden: E, the hidden size of these decoders.
        code_bits: the bits of a value of latents in codes; empty where such caches are not measured.
        code_tokens: numbers of tokens in the contexts of latents in codes.
        between: bytes of a network's weights that each layer reads between two caches, so that no cache stays where
            it could be read faster.
        caches: bytes of the caches that a pass reads.
        coded_caches: bytes of the quantised caches that a pass reads, which take long to fill.
        hidden: E, hidden sizes of decoders whose work beside these operators is measured.
        states: numbers of values in the hidden states of all tokens of a pass, multiples of ``hidden``.
        latent_states: those of ``states`` that decoders with latents are measured at as well.
        models: decoders whose weights come from memory, in which projections are measured once more.
        model_prompts: the number of tokens of the prompt that each of these decoders reads, at least 64.
        places: the sizes that `headwise.measure.profiling.check` checks predictions on.
        layers: two numbers of layers of decoders; the difference of their times is that of the layers between.
        short: the number of tokens of a context that takes hardly any time.
    """

    dtypes: tuple[torch.dtype, ...]
    few_reads: tuple[int, ...] = ()
    few_tokens: tuple[int, ...] = ()
    few_weights: tuple[int, ...] = ()
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
    code_bits: tuple[int, ...] = ()
    code_tokens: tuple[int, ...] = ()
    between: int
    caches: tuple[int, ...]
    coded_caches: tuple[int, ...]
    hidden: tuple[int, ...]
    states: tuple[int, ...]
    latent_states: tuple[int, ...]
    places: Places
    models: tuple[Decoder, ...] = ()
    model_prompts: tuple[int, ...] = ()
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
    models=tuple(
        Decoder(hidden_size=hidden, num_layers=7, num_heads=hidden // 64, num_kv_heads=2, intermediate_size=inner)
        for hidden, inner in ((512, 4096), (640, 3200), (896, 3584), (1152, 2304), (1024, 4096))
    ),
    model_prompts=(80, 160, 320, 400, 240),
)
"""The sizes that processors are measured at."""

GPU = Grids(
    dtypes=(torch.bfloat16,),
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
"""The sizes that CUDA GPUs are measured at."""


def grids_of(device: torch.device) -> Grids:
    """The sizes that a device is measured at.

    For example ``grids_of(torch.device("cuda")).dtypes``.
    """
    return GPU if device.type == "cuda" else CPU
