"""Small decoders with random weights, their caches filled with noise, and the calls that are timed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headwise.costs.formulas.layer import cache_values
from headwise.measure.profiling.pace import HERE
from headwise.models.specs import LatentSpec, ModelSpec, read_config
from headwise.runtime.caches.layers import GrowingLayer
from headwise.runtime.hf import HeadwiseCache, optimize
from headwise.runtime.hf.codes import set_codes
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.transform_code import TrellisFormat, blocks, code_shape

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


def decode_step(model: Any, cache: HeadwiseCache, batch: int) -> Callable[[], object]:
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
