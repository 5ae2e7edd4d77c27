"""Converted MLA models as stock ``deepseek_v3``, filled up to the sizes that an engine has kernels for.

``deepseek_v3`` passes every latent through an RMSNorm, which headwise's layers do not have, and its decoders have no
bias: a constant channel solves both (`headwise.serving.exports.latent_norm`).

It has one list of frequencies for all layers. Where that is a comb, every s-th frequency of the source's from the
first on, it is plain RoPE of another base, θ' = θ^(s · P / D), which every engine computes. Other lists are a
``longrope`` of transformers, whose factors no engine reads.

An engine's kernels are reached by zeros, which change nothing that is computed: a norm over more channels is made up
for by its weight, a softmax scale over more dims by the queries, and rotary pairs that are zero take frequencies of
the same plain RoPE beyond those in use.

Shapes: E hidden, R a layer's latent rank, R' the folder's, P rotary dims, H heads, N content dims, V value dim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.base.disk import refuse_input_within
from headwise.base.progress import Progress, silent
from headwise.errors import ArgumentError, SpecError
from headwise.models.checkpoints import Checkpoint, FolderWriter, check_output, dtype_name, open_checkpoint
from headwise.models.families import family_names, family_of
from headwise.models.specs import HOSTED_PREFIX, AttentionSpec, GroupedSpec, LatentSpec, RopeSpec, read_config
from headwise.runtime.attention import RotaryEmbedding
from headwise.runtime.hf import as_dtype, check_complete, stock_config, tensors_of
from headwise.serving.exports.latent_norm import LatentMap, with_norm

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
        ArgumentError: the text is not two numbers, or P is odd.
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
        config: a config of deepseek_v3 with plain RoPE.
        pad_to: R and P, each at least the config's.

    Raises:
        ArgumentError: a width is smaller than the config's.
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
        tensors: the layer's tensors by deepseek_v3's names within its attention, rotary pairs side by side.
        heads: H.
        own: the sizes of the tensors; the rank is read off them.
        config: the config that `padded_config` made.
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


_MODEL = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "tie_word_embeddings",
    "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
_FOR_ENGINES = {
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}
"""Fields that engines read and transformers does not need."""

_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
_ATTENTION = "model.layers.{layer}.self_attn."


def deepseek_config(
    config: Mapping[str, Any], *, for_engines: bool = False, pad_to: tuple[int, int] | None = None
) -> dict[str, Any]:
    """The ``config.json`` of a converted model as ``deepseek_v3``.

    For example ``deepseek_config(json.loads(Path("smollm2-half/config.json").read_text()))``.

    Args:
        config: the config of a folder in headwise's own format: ``model_type`` ``headwise_llama`` …, ``headwise`` and
            ``dtype``.
        for_engines: whether rotary pairs lie side by side, the head is a tensor of its own, and fields that other
            readers than transformers look for are there.
        pad_to: R and P to fill the cache up to with zeros, for engines; see `padded_config`.

    Raises:
        ArgumentError: ``pad_to`` is smaller than what is there, or the layers differ in a setting that deepseek_v3
            has once for all of them.
        SpecError: the folder is in another format, or its family has something that deepseek_v3 does not have.
    """
    family = str(config["model_type"]).removeprefix(HOSTED_PREFIX)
    if family == config["model_type"]:
        raise SpecError("model_type", family, "must be an MLA model in headwise's own format to become deepseek_v3")
    if family not in (can := [name for name in family_names() if family_of(name).deepseek_blocks]):
        raise SpecError("model_type", family, f"has other blocks than deepseek_v3's; can: {', '.join(can)}")
    full = stock_config(dict(config)).to_dict()
    if full.get("mlp_bias"):
        raise SpecError("mlp_bias", True, "deepseek_v3's feed-forward networks have no biases")
    layers, channels = read_config(config).layers, config["headwise"]["rope_channels"]
    first = common_spec(layers, channels)
    (source, *_) = read_config({**full, "model_type": family}).layers
    assert isinstance(source, GroupedSpec)
    latents = [layer for layer in layers if isinstance(layer, LatentSpec)]
    longest = full["max_position_embeddings"]
    rope = plain_rope(source.rope, channels[0]) or _longrope(source, channels[0], longest)
    own = {name: full[name] for name in _MODEL if name in full}
    stock = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **own,
        "num_key_value_heads": first.num_heads,
        "kv_lora_rank": max(layer.kv_lora_rank for layer in latents) + (0 if first.latent_norm else 1),
        # A plain query projection has no bias; a query latent of the input's width gives it a place, at E² weights
        # a layer.
        "q_lora_rank": first.hidden_size + 1 if any("q_proj" in layer.bias for layer in latents) else None,
        "qk_nope_head_dim": first.qk_nope_head_dim,
        "qk_rope_head_dim": first.qk_rope_head_dim,
        "v_head_dim": first.v_head_dim,
        "attention_bias": not first.latent_norm,
        "rope_interleave": for_engines,
        "rope_parameters": rope,
        "first_k_dense_replace": len(layers),
        "num_nextn_predict_layers": 0,
        **(_FOR_ENGINES | {"rope_theta": rope["rope_theta"]} if for_engines else {}),
        # There are no experts, but readers of the format expect these numbers.
        "moe_intermediate_size": full["intermediate_size"],
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "dtype": dtype_name(as_dtype(config["dtype"])),
    }
    return stock if pad_to is None else padded_config(stock, pad_to)


def plain_rope(rope: RopeSpec | None, channels: Sequence[int]) -> dict[str, Any] | None:
    """The RoPE parameters of a comb of frequencies, of another base; None where plain RoPE has no such frequencies.

    For example ``plain_rope(layer.rope, [0, 2, 4, 6])`` for a head of 16 dims.

    Args:
        rope: the source layer's RoPE.
        channels: the model frequency of each rotary pair.
    """
    count, step = len(channels), channels[1] - channels[0] if len(channels) > 1 else 1
    is_comb = step > 0 and list(channels) == list(range(0, count * step, step))
    if rope is None or rope.rope_type != "default" or not is_comb:
        return None
    return {"rope_type": "default", "rope_theta": rope.theta ** (step * 2 * count / rope.dim)}


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
        if not isinstance(layer, LatentSpec) or layer.q_lora_rank is not None or (layer.latent_norm and layer.bias):
            raise SpecError("attention", layer.label, "must be MLA as convert makes it to become deepseek_v3's")
        if layer.qk_norm is not None:
            raise SpecError("qk_norm", layer.qk_norm, "deepseek_v3 has no such norms")
        if layer.sliding_window is not None:
            raise SpecError("sliding_window", layer.sliding_window, "deepseek_v3 has none")
        fixed = ("kv_lora_rank",) if layer.latent_norm else ()  # without a norm a latent can be padded
        for name in ("latent_norm", "num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", *fixed):
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
        config: the config that `deepseek_config` made.
        input_norm: ``[E]``, the weight of the RMSNorm before the layer, which bounds the layer's inputs.

    Returns:
        The layer's tensors by deepseek_v3's names within a layer's attention.
    """
    dtype = as_dtype(config["dtype"])
    wide = {name: tensor.double() for name, tensor in state.items()}
    gain = input_norm.double().abs()
    R, E = spec.kv_lora_rank, spec.hidden_size
    down = wide["kv_a_proj_with_mqa.weight"]  # [R + P, E]
    if spec.latent_norm:
        names = ("kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight", "o_proj.weight")
        out = {name: wide[name] for name in names}
    else:
        bias = wide.get("kv_a_proj_with_mqa.bias", down.new_zeros(len(down)))
        own = LatentMap(down[:R], bias[:R], wide["kv_b_proj.weight"], wide.get("kv_b_proj.bias"))
        latent = with_norm(own, config["kv_lora_rank"], gain, dtype)  # of the folder's width already
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
        pair = LatentMap(inputs, inputs.new_zeros(E), query, None if query_bias is None else query_bias * scale)
        query_latent = with_norm(pair, config["q_lora_rank"], gain, dtype)
        out["q_a_proj.weight"], out["q_a_proj.bias"] = query_latent.down, query_latent.down_bias
        out["q_a_layernorm.weight"], out["q_b_proj.weight"] = query_latent.norm, query_latent.up
    if config.get("rope_interleave"):
        for name in out:
            kind = name.partition(".")[0]
            if kind in ("q_proj", "q_b_proj"):
                by_head = torch.unflatten(out[name], 0, (spec.num_heads, -1))  # [H, N + P, …]
                out[name] = _interleaved(by_head, spec.qk_rope_head_dim).flatten(0, 1)
            elif kind == "kv_a_proj_with_mqa":
                out[name] = _interleaved(out[name][None], spec.qk_rope_head_dim)[0]
    sizes = LatentSizes(R, spec.qk_rope_head_dim, spec.qk_nope_head_dim, spec.v_head_dim)
    out = padded_layer(out, spec.num_heads, sizes, config)
    return {name: tensor.to(dtype) for name, tensor in out.items()}


def _interleaved(rows: Tensor, rotary: int) -> Tensor:
    """Rows ``[heads, dims, …]`` with the last P of each head's dims as pairs side by side, not in two halves."""
    if not rotary:
        return rows
    plain, halves = rows[:, :-rotary], torch.unflatten(rows[:, -rotary:], 1, (2, -1))  # [heads, 2, P/2, …]
    return torch.cat((plain, halves.transpose(1, 2).flatten(1, 2)), 1)


def export_deepseek(
    source: str | Path, output: str | Path, *, overwrite: bool = False, progress: Progress = silent
) -> None:
    """Write a folder in headwise's own MLA format as a stock ``deepseek_v3`` folder, one layer in memory at a time.

    For example ``export_deepseek("./smollm2-mla", "./smollm2-stock")``.

    Args:
        source: a folder that `headwise.convert` wrote.
        output: the folder to write; must not exist, or be empty, unless ``overwrite``.
        overwrite: replace a model folder at ``output``.
        progress: called for each layer.

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
    tensors = tensors_of(config, checkpoint.dtype)
    with FolderWriter(Path(output), tensors, overwrite=overwrite) as writer:
        add_deepseek(writer, checkpoint, config, progress)


def add_deepseek(
    writer: FolderWriter, checkpoint: Checkpoint, config: Mapping[str, Any], progress: Progress = silent
) -> None:
    """Add everything that a stock folder lacks, from a folder in headwise's own format.

    Args:
        writer: the writer of the stock folder, with the tensors of ``config``.
        checkpoint: the folder in headwise's own format.
        config: the config that `deepseek_config` made.
        progress: called for each layer.
    """
    writer.add_companions(checkpoint)
    for name, tensor in deepseek_tensors(checkpoint, config, writer.missing, progress):
        writer.add(name, tensor)
    writer.write_json("config.json", config)


def deepseek_tensors(
    checkpoint: Checkpoint, config: Mapping[str, Any], names: Sequence[str], progress: Progress = silent
) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a stock model, in order, with one layer in memory at a time.

    Args:
        checkpoint: the folder in headwise's own format.
        config: the config that `deepseek_config` made.
        names: the names of the wanted tensors of the stock model.
        progress: called for each layer.
    """
    layers = checkpoint.spec.layers
    owner = {name: index for index in range(len(layers)) for name in names if name.startswith(_prefix(index))}
    current, tensors = -1, dict[str, Tensor]()
    for name in names:
        if name not in owner:
            # Engines look for a head of its own where the source's is the embeddings.
            stored = name if name in checkpoint.tensors or name != _HEAD else _EMBEDDINGS
            yield name, checkpoint.read(stored).to(checkpoint.dtype)
            continue
        if owner[name] != current:
            current = owner[name]
            progress("exporting", current, len(layers))
            prefix, spec = _prefix(current), layers[current]
            assert isinstance(spec, LatentSpec)
            keys = [key for key in checkpoint.tensors if key.startswith(prefix)]
            state = {key.removeprefix(prefix): checkpoint.read(key) for key in keys}
            tensors = deepseek_layer(state, spec, config, checkpoint.read(input_norm(current)))
        yield name, tensors[name.removeprefix(_prefix(current))]
    progress("exporting", len(layers), len(layers))


def input_norm(layer: int) -> str:
    """The name of the weight of the norm before a layer's attention, in the families that deepseek_v3 can hold."""
    return f"model.layers.{layer}.input_layernorm.weight"


def _prefix(layer: int) -> str:
    return _ATTENTION.format(layer=layer)


def _longrope(source: GroupedSpec, channels: Sequence[int], longest: int) -> dict[str, Any]:
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
