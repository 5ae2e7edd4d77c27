"""Export a converted MLA model as transformers' stock ``deepseek_v3``: a folder that loads without headwise.

``deepseek_v3`` passes every latent through an RMSNorm, which headwise's layers do not have, and its decoders have no
bias. One more channel of the latent, a constant b far above the others, solves both: the root mean square is then
``b / sqrt(R')`` whatever the other channels are, the norm's weight undoes it, and decoder biases are the constant's
column.

The output of an RMSNorm is at most ``gain · sqrt(E)`` long, so that b follows from weights alone: the latent c is at
most ``|c|`` long, and the norm changes it by a share of less than ``|c|² / 2b²``.

Shapes: E hidden, R a layer's latent rank, R' the folder's, P rotary dims, H heads, N content dims, V value dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention import RotaryEmbedding
from headwise.checkpoints import Checkpoint, FolderWriter, TensorInfo, check_output, dtype_name, open_checkpoint
from headwise.checkpoints.disk import refuse_input_within
from headwise.errors import ArgumentError, SpecError
from headwise.hf import as_dtype, check_complete, expected_tensors, stock_config
from headwise.progress import Progress, silent
from headwise.specs import HOSTED_PREFIX, AttentionSpec, GroupedSpec, LatentSpec, read_config

BLOCKS = ("llama", "mistral", "qwen2")
"""Families whose layers equal deepseek_v3's dense layers, tensor names included, except for the attention."""

_MODEL = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "tie_word_embeddings",
    "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
_ATTENTION = "model.layers.{layer}.self_attn."
_INPUT_NORM = "model.layers.{layer}.input_layernorm.weight"
_NORM_EPS = 1e-6
"""The epsilon of the latents' norms, which does not follow ``rms_norm_eps``."""

_WIDE_HEADROOM = 1024.0
"""The ratio of the constant to the longest latent: the norm changes latents by at most 5e-7."""

_HEADROOM = {torch.float16: 8.0}
"""The ratio in dtypes of a smaller range, in which other channels would underflow beside a larger constant."""


def deepseek_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of a converted model as ``deepseek_v3``.

    For example ``deepseek_config(json.loads(Path("smollm2-half/config.json").read_text()))``.

    Args:
        config: the config of a folder in headwise's own format: ``model_type`` ``headwise_llama`` …, ``headwise`` and
            ``dtype``.

    Raises:
        ArgumentError: the layers differ in a setting that deepseek_v3 has once for all of them.
        SpecError: the folder is in another format, or its family has something that deepseek_v3 does not have.
    """
    family = str(config["model_type"]).removeprefix(HOSTED_PREFIX)
    if family == config["model_type"]:
        raise SpecError("model_type", family, "must be an MLA model in headwise's own format to become deepseek_v3")
    if family not in BLOCKS:
        raise SpecError("model_type", family, f"has other blocks than deepseek_v3's; can: {', '.join(BLOCKS)}")
    full = stock_config(dict(config)).to_dict()
    if full.get("mlp_bias"):
        raise SpecError("mlp_bias", True, "deepseek_v3's feed-forward networks have no biases")
    layers, channels = read_config(config).layers, config["headwise"]["rope_channels"]
    first = common_spec(layers, channels)
    (source, *_) = read_config({**full, "model_type": family}).layers
    assert isinstance(source, GroupedSpec)
    latents = [layer for layer in layers if isinstance(layer, LatentSpec)]
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{name: full[name] for name in _MODEL if name in full},
        "num_key_value_heads": first.num_heads,
        "kv_lora_rank": max(layer.kv_lora_rank for layer in latents) + 1,
        # A plain query projection has no bias; a query latent as wide as the input makes room for one.
        "q_lora_rank": first.hidden_size + 1 if any("q_proj" in layer.bias for layer in latents) else None,
        "qk_nope_head_dim": first.qk_nope_head_dim,
        "qk_rope_head_dim": first.qk_rope_head_dim,
        "v_head_dim": first.v_head_dim,
        "attention_bias": True,
        "rope_interleave": False,
        "rope_parameters": _rope_parameters(source, channels[0], full["max_position_embeddings"]),
        "first_k_dense_replace": len(layers),
        "num_nextn_predict_layers": 0,
        # There are no experts, but readers of the format expect these numbers.
        "moe_intermediate_size": full["intermediate_size"],
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "dtype": dtype_name(as_dtype(config["dtype"])),
    }


def common_spec(layers: Sequence[AttentionSpec], channels: Sequence[Sequence[int]]) -> LatentSpec:
    """Check that layers have one list of channels, and equal sizes but for the latent's, as deepseek_v3 needs.

    For example ``common_spec(model.layers, config["headwise"]["rope_channels"])``.

    Args:
        layers: the spec of each layer.
        channels: the model frequency of each rotary pair of each layer.

    Returns:
        The first layer's spec.

    Raises:
        ArgumentError: a layer's sizes or channels differ from the first's.
        SpecError: a layer is not MLA, or of a kind that deepseek_v3 does not have.
    """
    first, *_ = layers
    for index, (layer, layer_channels) in enumerate(zip(layers, channels, strict=True)):
        if not isinstance(layer, LatentSpec) or layer.latent_norm or layer.q_lora_rank is not None:
            raise SpecError("attention", layer.label, "must be MLA as convert makes it to become deepseek_v3's")
        if layer.qk_norm is not None:
            raise SpecError("qk_norm", layer.qk_norm, "deepseek_v3 has no such norms")
        if layer.sliding_window is not None:
            raise SpecError("sliding_window", layer.sliding_window, "deepseek_v3 has none")
        for name in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if (value := getattr(layer, name)) != (common := getattr(first, name)):
                rule = f"must be {common}, layer 0's, for deepseek_v3"
                raise ArgumentError(f"{name} of layer {index}", value, rule)
        if list(layer_channels) != list(channels[0]):
            rule = "must be layer 0's, in its order: deepseek_v3 has one list of frequencies for all layers"
            raise ArgumentError(f"rope_channels of layer {index}", list(layer_channels), rule)
    assert isinstance(first, LatentSpec)
    return first


def deepseek_layer(
    state: Mapping[str, Tensor], spec: LatentSpec, config: Mapping[str, Any], input_norm: Tensor
) -> dict[str, Tensor]:
    """One layer's attention with deepseek_v3's names, in the config's dtype.

    For example ``deepseek_layer(state, spec, deepseek_config(config), input_norm)``.

    Args:
        state: the layer's tensors by the names of headwise's format; any dtype.
        spec: the layer's spec.
        config: from `deepseek_config`.
        input_norm: ``[E]``, the weight of the RMSNorm before the layer, which bounds the layer's inputs.

    Returns:
        The layer's tensors by deepseek_v3's names within a layer's attention.
    """
    dtype = as_dtype(config["dtype"])
    wide = {name: tensor.double() for name, tensor in state.items()}
    gain = input_norm.double().abs()
    R, E = spec.kv_lora_rank, spec.hidden_size
    down = wide["kv_a_proj_with_mqa.weight"]  # [R + P, E]
    bias = wide.get("kv_a_proj_with_mqa.bias", down.new_zeros(len(down)))
    latent = _add_norm(
        _Pair(down[:R], bias[:R], wide["kv_b_proj.weight"], wide.get("kv_b_proj.bias")),
        config["kv_lora_rank"],
        gain,
        dtype,
    )
    out = {
        "kv_a_proj_with_mqa.weight": torch.cat((latent.down, down[R:])),
        "kv_a_proj_with_mqa.bias": torch.cat((latent.down_bias, bias[R:])),
        "kv_a_layernorm.weight": latent.norm,
        "kv_b_proj.weight": latent.up,
        "o_proj.weight": wide["o_proj.weight"],
        "o_proj.bias": wide.get("o_proj.bias", down.new_zeros(E)),
    }
    # deepseek_v3 has the plain softmax scale: another one goes into the queries.
    scale = 1.0 if spec.softmax_scale is None else spec.softmax_scale * spec.qk_head_dim**0.5
    query, query_bias = wide["q_proj.weight"] * scale, wide.get("q_proj.bias")
    if config["q_lora_rank"] is None:
        assert query_bias is None
        out["q_proj.weight"] = query
    else:
        inputs = torch.eye(E, dtype=torch.float64)
        pair = _Pair(inputs, inputs.new_zeros(E), query, None if query_bias is None else query_bias * scale)
        query_latent = _add_norm(pair, config["q_lora_rank"], gain, dtype)
        out["q_a_proj.weight"], out["q_a_proj.bias"] = query_latent.down, query_latent.down_bias
        out["q_a_layernorm.weight"], out["q_b_proj.weight"] = query_latent.norm, query_latent.up
    return {name: tensor.to(dtype) for name, tensor in out.items()}


def export_deepseek(
    source: str | Path, output: str | Path, *, overwrite: bool = False, progress: Progress = silent
) -> None:
    """Write a folder in headwise's own MLA format as a stock ``deepseek_v3`` folder, one layer in memory at a time.

    For example ``export_deepseek("./smollm2-mla", "./smollm2-stock")``.

    Args:
        source: a folder that `headwise.convert` wrote.
        output: the folder to write; must not exist, or be empty, unless ``overwrite``.
        overwrite: replace a model folder at ``output``.
        progress: told of each layer.

    Raises:
        ArgumentError: the output exists, or the layers differ in a setting that deepseek_v3 has once for all.
        SpecError: deepseek_v3 cannot hold the source's family or layers.
        CheckpointError: the source cannot be read, or the output cannot be written.
    """
    check_output(Path(output), overwrite=overwrite)
    checkpoint = open_checkpoint(source)
    refuse_input_within(Path(output), checkpoint.path, "the source")
    config = deepseek_config({**checkpoint.config, "dtype": dtype_name(checkpoint.dtype)})
    check_complete(checkpoint)
    tensors = {name: TensorInfo(shape, checkpoint.dtype) for name, shape in expected_tensors(config).items()}
    with FolderWriter(Path(output), tensors, overwrite=overwrite) as writer:
        add_deepseek(writer, checkpoint, config, progress)


def add_deepseek(
    writer: FolderWriter,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    progress: Progress = silent,
) -> None:
    """Add everything that a stock folder lacks, from a folder in headwise's own format.

    Args:
        writer: the writer of the stock folder, with the tensors of ``config``.
        checkpoint: the folder in headwise's own format.
        config: from `deepseek_config`.
        progress: told of each layer.
    """
    writer.add_companions(checkpoint)
    for name, tensor in _exported(checkpoint, config, writer.missing, progress):
        writer.add(name, tensor)
    writer.write_json("config.json", config)


def _exported(
    checkpoint: Checkpoint, config: Mapping[str, Any], names: Sequence[str], progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of the stock folder, in order."""
    layers = checkpoint.spec.layers
    owner = {name: index for index in range(len(layers)) for name in names if name.startswith(_prefix(index))}
    current, tensors = -1, dict[str, Tensor]()
    for name in names:
        if name not in owner:
            yield name, checkpoint.read(name).to(checkpoint.dtype)
            continue
        if owner[name] != current:
            current = owner[name]
            progress("exporting", current, len(layers))
            prefix, spec = _prefix(current), layers[current]
            assert isinstance(spec, LatentSpec)
            keys = [key for key in checkpoint.tensors if key.startswith(prefix)]
            state = {key.removeprefix(prefix): checkpoint.read(key) for key in keys}
            tensors = deepseek_layer(state, spec, config, checkpoint.read(_INPUT_NORM.format(layer=current)))
        yield name, tensors[name.removeprefix(_prefix(current))]
    progress("exporting", len(layers), len(layers))


def _prefix(layer: int) -> str:
    return _ATTENTION.format(layer=layer)


class _Pair(NamedTuple):
    """A map through a latent: ``up (down x + down_bias) + up_bias`` with down ``[R, E]`` and up ``[O, R]``."""

    down: Tensor
    down_bias: Tensor
    up: Tensor
    up_bias: Tensor | None


class _NormedPair(NamedTuple):
    """A map through a normed latent c: ``up (norm · c / rms(c))``, ``c = down x + down_bias``, the constant last."""

    down: Tensor
    down_bias: Tensor
    norm: Tensor
    up: Tensor


def _add_norm(pair: _Pair, rank: int, gain: Tensor, dtype: torch.dtype) -> _NormedPair:
    """Add an RMSNorm to a map's latent without changing the map, for inputs that come from an RMSNorm.

    Args:
        pair: the map; float64.
        rank: R', the number of the new latent's channels, at least R + 1.
        gain: ``[E]``, the weight of the norm that the inputs come from, not negative.
        dtype: the dtype that the weights will be rounded to.
    """
    R, E = pair.down.shape
    zeros = pair.down.new_zeros
    longest = _spectral_norm(pair.down * gain) * E**0.5 + float(pair.down_bias.norm())
    ideal = _HEADROOM.get(dtype, _WIDE_HEADROOM) * (longest or 1.0)
    largest = min(torch.finfo(dtype).max / 4, 1e15)  # its square is finite in float32
    # A power of two multiplies without rounding; the decoder corrects the rounding of the constant itself.
    scale = 2.0 ** torch.tensor(min(ideal, largest) / rank**0.5).log2().ceil()
    constant = _rounded(scale * rank**0.5, dtype)
    rms = (constant**2 / rank + _NORM_EPS) ** 0.5
    norm = torch.full((rank,), float(scale), dtype=torch.float64)
    norm[-1] = 1.0  # the constant is cached as sqrt(R'), which is nearer to the other channels than b
    up = torch.cat((pair.up * (rms / scale), zeros(len(pair.up), rank - R)), dim=1)
    if pair.up_bias is not None:
        up[:, -1] = pair.up_bias / _rounded(constant / rms, dtype)
    return _NormedPair(
        down=torch.cat((pair.down, zeros(rank - R, E))),
        down_bias=torch.cat((pair.down_bias, zeros(rank - R - 1), constant[None])),
        norm=norm,
        up=up,
    )


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).double()


def _spectral_norm(matrix: Tensor) -> float:
    """The largest singular value of a matrix."""
    gram = matrix @ matrix.mT if matrix.shape[0] <= matrix.shape[1] else matrix.mT @ matrix
    return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt())


def _rope_parameters(source: GroupedSpec, channels: Sequence[int], longest: int) -> dict[str, Any]:
    """The RoPE parameters of a list of frequencies, with repeats: factors of a ``longrope`` with a grid of ones.

    Args:
        source: the source layer's spec.
        channels: the model frequency of each rotary pair.
        longest: the model's positions.

    Raises:
        SpecError: the model's frequencies change with the length of the text.
    """
    rope = source.rope
    if rope is None or rope.rope_type in ("dynamic", "longrope"):
        kind = None if rope is None else rope.rope_type
        raise SpecError("rope_type", kind, "deepseek_v3 can hold frequencies that do not change with the length only")
    rotary = RotaryEmbedding(rope)
    factors = [_reciprocal(rotary.frequencies[channel]) for channel in channels]
    return {
        "rope_type": "longrope",
        "rope_theta": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": rotary.attention_scaling,
        "original_max_position_embeddings": longest,
    }


def _reciprocal(frequency: float) -> float:
    """The float32 whose reciprocal, in float32, is nearest: one ulp of frequency is 1e-4 rad at position 2000."""
    rounded = (1.0 / torch.tensor(frequency, dtype=torch.float64)).float()
    candidates = torch.stack((rounded, rounded.nextafter(rounded * 0), rounded.nextafter(rounded * 2)))
    return float(candidates[(1.0 / candidates - frequency).abs().argmin()])
