"""headwise's layers as vLLM's engine sees them: what they cache, how a batch is described, and the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

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
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from headwise_vllm.config import LatentLayer
from headwise_vllm.paged import WORKSPACE, Batch, Decoders, attend, rotated, store

if TYPE_CHECKING:  # what is coded needs headwise, and nothing else does
    from headwise_vllm.coded import CodedHeads, CodedLatents, CodedPages

OP = "headwise_attention"


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """Turns vLLM's description of a batch into a `Batch`, which layers of differing rows share."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        """See vLLM's base class."""
        about, count = common_attn_metadata, common_attn_metadata.num_reqs
        made: Batch | None = vars(about).get(OP)
        if made is None or made.block_table is not about.block_table_tensor:
            starts = about.query_start_loc_cpu[: count + 1]
            slots = about.slot_mapping[: int(starts[-1])]
            made = Batch(starts, about.seq_lens[:count], about.block_table_tensor, slots)
            vars(about)[OP] = made
        return made

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """See vLLM's base class; a step of one token reads nothing on the host where caches are coded."""
        is_coded = kv_cache_spec.dtype == torch.uint8
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if is_coded else AttentionCGSupport.NEVER


class Backend(AttentionBackend):
    """One tensor a token, of any width and dtype; the layers compute by themselves."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        """See vLLM's base class."""
        return "HEADWISE"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """See vLLM's base class; nothing is called of it, because the layer computes by itself."""
        return AttentionImpl

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        """See vLLM's base class."""
        return BatchBuilder

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


class PagedAttention(nn.Module, AttentionLayerBase):
    """A layer that vLLM gives pages to.

    Args:
        layer_name: its name in the model; vLLM's own layer of that name, if there is one, is forgotten.
    """

    coded: CodedPages | None = None

    def __init__(self, layer_name: str) -> None:
        super().__init__()
        self.layer_name, self.kv_cache = layer_name, torch.tensor([])
        get_current_vllm_config().compilation_config.static_forward_context[layer_name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        """See vLLM's base class."""
        return Backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """One row a token: its values, or bytes of codes; ranks hold it whole."""
        cache = vllm_config.cache_config
        width, dtype = self.width, vllm_config.model_config.dtype
        if self.coded is not None:
            width, dtype = self.coded.row_bytes, torch.uint8
        return MLAAttentionSpec(cache.block_size, num_kv_heads=1, head_size=width, dtype=dtype, max_tp_shards=1)

    @property
    def width(self) -> int:
        """Values that a token caches."""
        raise NotImplementedError

    def store_and_attend(self, query: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """Store new tokens, and attend.

        Args:
            query: ``[Q, H, …]``, rotated.
            states: what the layer caches of the same tokens, ``[Q, W]``.
            batch: that the tokens are of.

        Returns:
            ``[Q, H, V]``.
        """
        raise NotImplementedError

    def _mixed(self, query: Tensor, states: Tensor, value_dim: int) -> Tensor:
        """Call `store_and_attend` for the batch that vLLM computes now; ``[Q, H · V]``."""
        out = query.new_empty(len(query), query.shape[1] * value_dim)
        getattr(torch.ops.vllm, OP)(query, states, out, self.layer_name)
        return out


class Rotation(nn.Module):
    """The rotation of a layer's queries and keys.

    Args:
        inv_freq: ``[P/2]``, the frequency of each pair.
        factor: multiplies cos and sin.
    """

    def __init__(self, inv_freq: Tensor, factor: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", inv_freq.clone(), persistent=False)
        self.factor = factor

    def forward(self, positions: Tensor, states: Tensor) -> Tensor:
        """Rotate ``[Q, heads, P]`` by positions ``[Q]``."""
        angles = positions[:, None, None].float() * self.frequencies
        return rotated(states, angles.cos() * self.factor, angles.sin() * self.factor)


class QueryRotation(Rotation):
    """In the place of a model's rotary embedding: keys, which are coded before rotation, are left as they are."""

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Rotate queries ``[Q, H · D]`` by positions ``[Q]``; keys pass."""
        heads = query.unflatten(-1, (-1, 2 * len(self.frequencies)))
        return super().forward(positions, heads).flatten(-2), key


class LatentAttention(PagedAttention):
    """An MLA layer in the place of a vLLM model's attention.

    Args:
        layer: its sizes.
        hidden_size: E.
        rotation: of queries and keys; None where P is 0.
        prefix: the layer's name in the model.
        coded: the pages of a layer whose latents are coded; None where they are cached as they are.
        quant_config: vLLM's, of the weights.

    Raises:
        ValueError: the heads cannot be shared out among the tensor-parallel ranks.
    """

    def __init__(
        self,
        layer: LatentLayer,
        *,
        hidden_size: int,
        rotation: Rotation | None,
        prefix: str,
        coded: CodedLatents | None = None,
        quant_config: Any = None,
    ) -> None:
        super().__init__(f"{prefix}.attn")
        ranks = get_tensor_model_parallel_world_size()
        if layer.num_heads % ranks:
            raise ValueError(f"num_heads = {layer.num_heads}: must be a multiple of tensor_parallel_size = {ranks}")
        self.layer, self.num_heads, self.rotation, self.coded = layer, layer.num_heads // ranks, rotation, coded
        if coded is not None:
            coded.decoders = self.decoders
        H, N, P, V = layer.num_heads, layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim
        R, E = layer.kv_lora_rank, hidden_size

        def options(name: str) -> dict[str, Any]:
            return {"bias": name in layer.biases, "quant_config": quant_config, "prefix": f"{prefix}.{name}"}

        self.q_proj = ColumnParallelLinear(E, H * (N + P), **options("q_proj"))
        self.kv_a_proj_with_mqa = ReplicatedLinear(E, R + P, **options("kv_a_proj_with_mqa"))
        # A vLLM projection may pack its weights once they are loaded, and these are read by rows.
        self.kv_b_proj = DecoderRows(self.num_heads * (N + V), R, bias="kv_b_proj" in layer.biases)
        self.o_proj = RowParallelLinear(H * V, E, **options("o_proj"))

    @property
    def width(self) -> int:
        """Values that a token caches."""
        return self.layer.width

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """As vLLM calls a model's attention.

        Args:
            positions: ``[Q]``.
            hidden_states: ``[Q, E]``.

        Returns:
            ``[Q, E]``.
        """
        N, R = self.layer.qk_nope_head_dim, self.layer.kv_lora_rank
        query = self.q_proj(hidden_states)[0].unflatten(-1, (self.num_heads, -1))
        latent = self.kv_a_proj_with_mqa(hidden_states)[0]
        if self.rotation is not None:
            query = torch.cat((query[..., :N], self.rotation(positions, query[..., N:])), dim=-1)
            if self.coded is None:  # codes are of keys before rotation
                key = self.rotation(positions, latent[:, None, R:])[:, 0]
                latent = torch.cat((latent[..., :R], key), dim=-1)
        return self.o_proj(self._mixed(query, latent, self.layer.v_head_dim))[0]  # type: ignore[no-any-return]

    def store_and_attend(self, query: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """See the base class."""
        options: dict[str, Any] = {"scale": self.layer.scale, "window": self.layer.window}
        if self.coded is not None:
            self.coded.store(self.kv_cache, states, batch)
            return self.coded.attend(query, self.kv_cache, batch, **options)
        store(self.kv_cache, states, batch.slots)
        return attend(query, self.kv_cache, batch.block_table, batch.requests, self.decoders(), **options)

    def decoders(self) -> Decoders:
        """The rows of kv_b_proj of this rank's heads."""
        N, weight, bias = self.layer.qk_nope_head_dim, self.kv_b_proj.weight, self.kv_b_proj.bias
        rows = weight.unflatten(0, (self.num_heads, -1))
        if bias is None:
            return Decoders(rows[:, :N], rows[:, N:])
        biases = bias.unflatten(0, (self.num_heads, -1))
        return Decoders(rows[:, :N], rows[:, N:], biases[:, :N], biases[:, N:])


class CodedAttention(PagedAttention):
    """Attention to heads in codes, in the place of vLLM's own in a model's attention.

    Args:
        layer_name: its name in the model.
        coded: the pages of the layer.
        scale: multiplies the scores.
        window: the latest tokens that are attended to; None for all.
    """

    coded: CodedHeads

    def __init__(self, layer_name: str, coded: CodedHeads, scale: float, window: int | None) -> None:
        super().__init__(layer_name)
        self.coded, self.scale, self.window = coded, scale, window

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As a vLLM model calls its attention.

        Args:
            query: ``[Q, H · D]``, rotated.
            key: ``[Q, K · D]``, not rotated.
            value: ``[Q, K · V]``.

        Returns:
            ``[Q, H · V]``.
        """
        heads = query.unflatten(-1, (-1, self.coded.head_dim))
        return self._mixed(heads, torch.cat((key, value), dim=-1), self.coded.value_dim)

    def store_and_attend(self, query: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """See the base class."""
        self.coded.store(self.kv_cache, states, batch)
        return self.coded.attend(query, self.kv_cache, batch, scale=self.scale, window=self.window)


def _attention(query: Tensor, states: Tensor, out: Tensor, layer_name: str) -> None:
    context = get_forward_context()
    metadata = context.attn_metadata
    if metadata is None:  # vLLM measures memory, and has no cache yet
        query.new_empty(2 * WORKSPACE)
        out.zero_()
        return
    batch: Batch = (metadata[0] if isinstance(metadata, list) else metadata)[layer_name]
    layer: PagedAttention = context.no_compile_layers[layer_name]
    used = len(batch.slots)  # behind them is what pads the batch
    out[:used] = layer.store_and_attend(query[:used], states[:used], batch).flatten(1)
    out[used:] = 0


def _attention_fake(query: Tensor, states: Tensor, out: Tensor, layer_name: str) -> None:
    return


direct_register_custom_op(op_name=OP, op_func=_attention, mutates_args=["out"], fake_impl=_attention_fake)
