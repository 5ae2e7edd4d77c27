"""Small model folders with quantised weights, and what their tensors mean, written down apart from the package.

compressed-tensors writes its own. The layouts of AWQ, GPTQ and FP8 are written as their quantisers do:
AutoAWQ 0.2.9 ``awq/modules/linear/gemm.py``, GPTQModel 7.7.0 ``nn_modules/qlinear/__init__.py``, transformers 5.23
``integrations/finegrained_fp8.py``; `test_quantised.py` has each read by a library where one can be installed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_families import save_family

SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
HEAD_DIM = 64
KEYS = ("k_proj", "k_norm", "qkv_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Quantiser = Callable[[Path, Path], Path]


def make(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Path:
    """A random model of the family, some of whose keys' channels are 16 times as large as others."""
    own = {"head_dim": HEAD_DIM} if family in ("qwen3", "gemma3_text") else {}
    save_family(folder, family, **{**SIZES, **own, **more})
    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(7)
    for name, stored in tensors.items():
        if any(part in name for part in KEYS):
            uneven = 4.0 ** torch.randint(-1, 2, (len(stored),), generator=generator)
            tensors[name] = stored * uneven.reshape(-1, *[1] * (stored.ndim - 1))
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, file, {"format": "pt"})
    edit(folder, dtype=str(dtype).removeprefix("torch."))
    return folder


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def is_matrix(name: str) -> bool:
    """Whether quantisers quantise it: the matrices of layers."""
    return ".layers." in name and name.endswith("proj.weight")


def by_compressed_tensors(**weights: Any) -> Quantiser:
    """Let compressed-tensors itself quantise, compress and save; keywords are those of its ``QuantizationArgs``."""

    def quantise(source: Path, folder: Path) -> Path:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
            QuantizationStatus,
            apply_quantization_config,
        )
        from compressed_tensors.quantization.utils import calculate_qparams

        args = QuantizationArgs(**weights)
        # A format of whole bytes is taken for inputs that are quantised too.
        inputs = None
        if args.num_bits == 8 and args.type == "float":
            inputs = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
        if args.num_bits == 8 and args.type == "int" and args.strategy == "channel":
            inputs = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
        model = AutoModelForCausalLM.from_pretrained(source)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
        config = QuantizationConfig(
            config_groups={"group_0": scheme},
            ignore=["lm_head"],
            quantization_status=QuantizationStatus.FROZEN,
        )
        apply_quantization_config(model, config)
        for module in model.modules():
            if (own := getattr(module, "quantization_scheme", None)) is None or not hasattr(module, "weight_scale"):
                continue
            weight, scale = module.weight.data, module.weight_scale
            down, across = scale.shape if scale.ndim == 2 else (1, 1)
            parts = weight.reshape(down, len(weight) // down, across, -1)  # those that share a scale
            scales, zeros = calculate_qparams(parts.amin((1, 3)), parts.amax((1, 3)), own.weights)
            scale.data.copy_(scales.reshape(scale.shape))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zeros.reshape(scale.shape))
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(str(folder))
        return with_tokenizer(source, folder)

    return quantise


def with_tokenizer(source: Path, folder: Path) -> Path:
    for file in source.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def by_hand(config: dict[str, Any], module: Callable[[Tensor], dict[str, Tensor]]) -> Quantiser:
    """Replace each matrix by tensors that a function makes of it."""

    def quantise(source: Path, folder: Path) -> Path:
        folder.mkdir()
        tensors = {}
        for name, tensor in load_file(source / "model.safetensors").items():
            if is_matrix(name):
                made = module(tensor.float())
                tensors |= {name.removesuffix("weight") + part: made[part].contiguous() for part in made}
            else:
                tensors[name] = tensor
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        edit(folder, quantization_config=config)
        return with_tokenizer(source, folder)

    return quantise


def affine(weight: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[out, in]``, zeros and float16 scales ``[groups, out]``, of groups of inputs."""
    count = int(groups.max()) + 1
    least = torch.stack([weight[:, groups == group].amin(1).clamp_max(0) for group in range(count)])
    most = torch.stack([weight[:, groups == group].amax(1).clamp_min(0) for group in range(count)])
    scales = ((most - least) / (2**bits - 1)).clamp_min(1e-5).half()
    zeros = (-least / scales.float()).round().clamp(1, 2**bits - 1).int()
    codes = (weight / scales.float()[groups].T + zeros[groups].T).round().clamp(0, 2**bits - 1).int()
    return codes, zeros, scales


def in_words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes ``[rows, n]`` in words along them; ``order[i]`` is the code in the i-th place of a word."""
    each = 32 // bits
    words = np.zeros((len(codes), codes.shape[1] // each), np.uint32)
    numbers = codes.numpy().astype(np.uint32)
    for place in range(each):
        words |= numbers[:, (place if order is None else order[place]) :: each] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def out_of_words(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    each, numbers = 32 // bits, words.numpy().view(np.uint32)
    codes = np.zeros((len(words), words.shape[1] * each))
    for place in range(each):
        codes[:, (place if order is None else order[place]) :: each] = (numbers >> np.uint32(bits * place)) % 2**bits
    return codes


def awq(group: int = 64, version: str = "gemm") -> Quantiser:
    def module(weight: Tensor) -> dict[str, Tensor]:
        codes, zeros, scales = affine(weight, 4, torch.arange(weight.shape[1]) // group)
        return {
            "qweight": in_words(codes.T.contiguous(), 4, AWQ_ORDER),
            "qzeros": in_words(zeros, 4, AWQ_ORDER),
            "scales": scales,
        }

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": version, "zero_point": True}
    return by_hand(config, module)


def gptq(bits: int = 4, group: int = 64, version: str = "gptq", *, act_order: bool = False) -> Quantiser:
    less = 1 if version == "gptq" else 0

    def module(weight: Tensor) -> dict[str, Tensor]:
        groups = torch.arange(weight.shape[1]) // group
        if act_order:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(3))]
        codes, zeros, scales = affine(weight, bits, groups)
        return {
            "qweight": in_words(codes, bits).T,
            "qzeros": in_words(zeros - less, bits),
            "scales": scales,
            "g_idx": groups.int(),
        }

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": False,
        "checkpoint_format": version,
    }  # fmt: skip
    return by_hand(config, module)


def fp8(block: tuple[int, int] | None = None, *, by: str = "row", scale: str = "weight_scale_inv") -> Quantiser:
    def module(weight: Tensor) -> dict[str, Tensor]:
        rows, columns = block or {"row": (1, weight.shape[1]), "tensor": weight.shape}[by]
        down, across = math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns)
        padded = torch.zeros(down * rows, across * columns)
        padded[: len(weight), : weight.shape[1]] = weight
        scales = padded.reshape(down, rows, across, columns).abs().amax((1, 3)) / 448
        codes = (weight / spread(scales, (rows, columns), weight.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, scale: scales}

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and list(block)}
    return by_hand(config, module)


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Scales of blocks as a matrix of the whole shape."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def meant(folder: Path) -> dict[str, Tensor]:
    """Every weight of a quantised folder in float64, by the formats' own definitions."""
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    weights = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        own = {key.removeprefix(f"{module}."): value for key, value in stored.items() if key.startswith(f"{module}.")}
        if part == "qweight":
            scales = own["scales"].double().numpy()
            if config["quant_method"] == "awq":
                codes, zeros = (out_of_words(own[key], 4, AWQ_ORDER) for key in ("qweight", "qzeros"))
                groups = np.arange(len(codes)) // config["group_size"]
            else:
                bits = config["bits"]
                codes = out_of_words(own["qweight"].T.contiguous(), bits).T
                zeros = out_of_words(own["qzeros"], bits) + (config["checkpoint_format"] == "gptq")
                groups = own["g_idx"].numpy()
            weights[f"{module}.weight"] = torch.from_numpy(((codes - zeros[groups]) * scales[groups]).T.copy())
        elif part in ("weight", "weight_packed") and ("weight_scale" in own or "weight_scale_inv" in own):
            if config["quant_method"] == "compressed-tensors":
                weights[f"{module}.weight"] = decompressed(own, config)
            else:
                scales = own.get("weight_scale_inv", own.get("weight_scale")).double()
                block = config["weight_block_size"] or [tensor.shape[0] // len(scales), tensor.shape[1]]
                weights[name] = tensor.double() * spread(scales, tuple(block), tensor.shape)
        elif part in ("weight", "bias"):
            weights[name] = tensor.double()
    return weights


def decompressed(own: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """A module's weight, by compressed-tensors itself in float64."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme.model_validate(group)
    compressor = BaseCompressor.get_value_from_registry(group.get("format") or config["format"])
    own = {**own, "weight_scale": own["weight_scale"].double()}
    weight: Tensor = compressor.decompress(own, scheme)["weight"]
    return weight


def model_of(folder: Path) -> Any:
    """The model in float64 that a quantised folder means."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    weights = meant(folder)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model.eval()
