"""An MLA layer of headwise's as vLLM's engine sees it: what it caches, how a batch is described, and the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from headwise_vllm.config import LatentLayer
from headwise_vllm.paged import WORKSPACE, Decoders, Request, attend, store

OP = "headwise_latent_attention"


@dataclass
class LatentMetadata:
    """One batch.

    Attributes:
        requests: of the batch.
        block_table: ``[requests, most blocks]``.
        slots: ``[tokens]``, where new tokens are stored.
    """

    requests: list[Request]
    block_table: Tensor
    slots: Tensor


class LatentMetadataBuilder(AttentionMetadataBuilder[LatentMetadata]):
    """Turns vLLM's description of a batch into a `LatentMetadata`."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LatentMetadata:
        """See vLLM's base class."""
        batch = common_attn_metadata
        starts, lengths = batch.query_start_loc_cpu.tolist(), batch.seq_lens.tolist()
        requests = [Request(starts[at], starts[at + 1], lengths[at]) for at in range(batch.num_reqs)]
        return LatentMetadata(requests, batch.block_table_tensor, batch.slot_mapping[: starts[batch.num_reqs]])


class LatentBackend(AttentionBackend):
    """One tensor a token, of any width; computed in torch."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        """See vLLM's base class."""
        return "HEADWISE_LATENT"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """See vLLM's base class; nothing is called of it, because the layer computes by itself."""
        return AttentionImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        """See vLLM's base class."""
        return LatentMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """See vLLM's base class."""
        return [MultipleOf(1)]

    @classmethod
    def is_mla(cls) -> bool:
        """See vLLM's base class."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """See vLLM's base class; the bounds of requests are read on the host."""
        return False


class DecoderRows(nn.Module):
    """The rows of a decoder that belong to this tensor-parallel rank, as they are stored.

    Args:
        rows: of the rank.
        rank: R.
        bias: whether there is one.
    """

    def __init__(self, rows: int, rank: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, rank), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None
        for parameter in self.parameters():
            parameter.weight_loader = _load_rows  # type: ignore[attr-defined]


def _load_rows(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copy this rank's share of the rows of all heads."""
    rows = len(parameter)
    if len(whole) != rows * get_tensor_model_parallel_world_size():
        raise ValueError(f"kv_b_proj: {len(whole)} rows: must be {rows * get_tensor_model_parallel_world_size()}")
    parameter.data.copy_(whole.narrow(0, get_tensor_model_parallel_rank() * rows, rows))


class LatentAttention(nn.Module, AttentionLayerBase):
    """An MLA layer in the place of a vLLM model's attention.

    Args:
        layer: its sizes.
        hidden_size: E.
        inv_freq: the model's rotary frequencies.
        rope_factor: multiplies cos and sin.
        prefix: the layer's name in the model.
        quant_config: vLLM's, of the weights.

    Raises:
        ValueError: the heads cannot be shared out among the tensor-parallel ranks.
    """

    def __init__(
        self,
        layer: LatentLayer,
        *,
        hidden_size: int,
        inv_freq: Tensor,
        rope_factor: float,
        prefix: str,
        quant_config: Any = None,
    ) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        if layer.num_heads % ranks:
            raise ValueError(f"num_heads = {layer.num_heads}: must be a multiple of tensor_parallel_size = {ranks}")
        self.layer, self.num_heads, self.rope_factor = layer, layer.num_heads // ranks, rope_factor
        self.layer_name = f"{prefix}.attn"
        H, N, P, V = layer.num_heads, layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim
        R, E = layer.kv_lora_rank, hidden_size

        def options(name: str) -> dict[str, Any]:
            return {"bias": name in layer.biases, "quant_config": quant_config, "prefix": f"{prefix}.{name}"}

        self.q_proj = ColumnParallelLinear(E, H * (N + P), **options("q_proj"))
        self.kv_a_proj_with_mqa = ReplicatedLinear(E, R + P, **options("kv_a_proj_with_mqa"))
        # A vLLM projection may pack its weights once they are loaded, and these are read by rows.
        self.kv_b_proj = DecoderRows(self.num_heads * (N + V), R, bias="kv_b_proj" in layer.biases)
        self.o_proj = RowParallelLinear(H * V, E, **options("o_proj"))
        self.register_buffer("frequencies", inv_freq[list(layer.channels)].clone(), persistent=False)
        self.kv_cache = torch.tensor([])
        context = get_current_vllm_config().compilation_config.static_forward_context
        if self.layer_name in context:
            raise ValueError(f"Duplicate layer name: {self.layer_name}")
        context[self.layer_name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        """See vLLM's base class."""
        return LatentBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """The latent and the rotary key of a token, once; ranks share it whole."""
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.layer.width,
            dtype=vllm_config.model_config.dtype,
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """As vLLM calls a model's attention.

        Args:
            positions: ``[Q]``.
            hidden_states: ``[Q, E]``.

        Returns:
            ``[Q, E]``.
        """
        R = self.layer.kv_lora_rank
        query = self.q_proj(hidden_states)[0].unflatten(-1, (self.num_heads, -1))
        latent = self.kv_a_proj_with_mqa(hidden_states)[0]
        if self.layer.qk_rope_head_dim:
            angles = positions[:, None].float() * self.frequencies
            cos, sin = angles.cos() * self.rope_factor, angles.sin() * self.rope_factor
            N = self.layer.qk_nope_head_dim
            query = torch.cat((query[..., :N], _rotated(query[..., N:], cos[:, None], sin[:, None])), dim=-1)
            latent = torch.cat((latent[..., :R], _rotated(latent[..., R:], cos, sin)), dim=-1)
        out = query.new_empty(len(query), self.num_heads * self.layer.v_head_dim)
        getattr(torch.ops.vllm, OP)(query, latent, out, self.layer_name)
        return self.o_proj(out)[0]  # type: ignore[no-any-return]

    def decoders(self) -> Decoders:
        """The rows of kv_b_proj of this rank's heads."""
        N, weight, bias = self.layer.qk_nope_head_dim, self.kv_b_proj.weight, self.kv_b_proj.bias
        rows = weight.unflatten(0, (self.num_heads, -1))
        if bias is None:
            return Decoders(rows[:, :N], rows[:, N:])
        biases = bias.unflatten(0, (self.num_heads, -1))
        return Decoders(rows[:, :N], rows[:, N:], biases[:, :N], biases[:, N:])


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + P/2)`` of the last dim."""
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(states.dtype)


def _latent_attention(query: Tensor, latent: Tensor, out: Tensor, layer_name: str) -> None:
    context = get_forward_context()
    metadata = context.attn_metadata
    if metadata is None:  # vLLM measures memory, and has no cache yet
        query.new_empty(2 * WORKSPACE)
        out.zero_()
        return
    batch: LatentMetadata = (metadata[0] if isinstance(metadata, list) else metadata)[layer_name]
    layer = context.no_compile_layers[layer_name]
    store(layer.kv_cache, latent[: len(batch.slots)], batch.slots)
    mixed = attend(
        query,
        layer.kv_cache,
        batch.block_table,
        batch.requests,
        layer.decoders(),
        scale=layer.layer.scale,
        window=layer.layer.window,
    )
    out.copy_(mixed.flatten(1))


def _latent_attention_fake(query: Tensor, latent: Tensor, out: Tensor, layer_name: str) -> None:
    return


direct_register_custom_op(
    op_name=OP, op_func=_latent_attention, mutates_args=["out"], fake_impl=_latent_attention_fake
)
