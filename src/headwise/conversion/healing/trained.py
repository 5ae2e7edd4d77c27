"""The parameters of a model that are trained, and the rounding of an engine's own cache while they are.

A model's folder or file has no codes of such a cache: the engine rounds what it is given. So a model that is to be
served with one is trained on what is read back of it, while derivatives pass as if nothing was rounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from headwise.base.options import HealOptions
from headwise.conversion.healing.optimizer import gathered_tensor
from headwise.costs.prediction import SERVING_ENGINES
from headwise.errors import ArgumentError, CheckpointError, SpecError, naming
from headwise.models.checkpoints import Checkpoint
from headwise.models.specs import HOSTED_PREFIX, GroupedSpec
from headwise.runtime.caches.cache import NAME
from headwise.runtime.hf.codes import caching_modules
from headwise.runtime.hf.interface import TRAINED_FORMAT
from headwise.runtime.hf.layerwise import stored_names
from headwise.runtime.quantization.formats import EngineFormat, parse_engine_format
from headwise.runtime.quantization.transform_code import FILE as CODES

_ATTENTION = re.compile(r"(^|\.)(self_attn|self_attention|attention|attn)\.")
"""The path of an attention module, as transformers' families call it."""


NOTHING_TO_TRAIN = "leaves nothing to train: the teacher has every tensor in its shape"
"""The error of a model that is the teacher's, where only what is new is trained."""


class LowRank(nn.Module):
    """A change of a matrix by a product of two narrow ones (Hu et al., 2021), as a parametrization of its weight.

    A parametrization, and not another layer in the linear layer's place: MLA also reads weights without calling their
    layers, where it is absorbed.

    Args:
        weight: the matrix, ``[out, in]``.
        rank: the rank of the change, which is 0 at first.
    """

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, weight.shape[1], device=weight.device))
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        """The changed matrix ``[out, in]``."""
        return weight + self.up @ self.down


def select(model: Any, checkpoint: Checkpoint, trained: str, teacher: Checkpoint, *, rank: int = 32) -> None:
    """Choose the parameters to train, and freeze all others.

    Where a cache is in codes, the projections and norms that compute its values stay as they are: offsets, scales and
    bits of each channel were fitted to them. So do a GGUF file's tensors that are in blocks of codes.

    For example ``select(model, open_checkpoint("./half"), "attention", open_checkpoint("./source"))``.

    Args:
        model: the transformers model.
        checkpoint: the checkpoint that the model was loaded from.
        trained: the choice of parameters: ``all``, ``attention``, ``new`` or ``lora``; see
            `headwise.base.options.HealOptions`.
        teacher: the checkpoint of the teacher, whose tensors ``new`` ones are told from.
        rank: the rank of the changes of ``lora``.

    Raises:
        ArgumentError: nothing is left to train, as where the teacher has every tensor in its shape.
    """
    fixed = caching_modules(model)
    if trained == "lora":
        _add_low_rank(model, rank, fixed)
    stays = {id(parameter) for module in fixed for parameter in module.parameters()}
    in_blocks = checkpoint.tensors.keys() - set(checkpoint.writable)
    own = {stored: name for name, stored in stored_names(model, checkpoint).items()} if in_blocks else {}
    named = dict(model.named_parameters(remove_duplicate=False))
    stays |= {id(named[own[stored]]) for stored in in_blocks if own[stored] in named}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(id(parameter) not in stays and _is_chosen(name, parameter.shape, trained, teacher))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        why = "only what computes the values of a cache in codes, which stays as it is, is not the teacher's"
        raise ArgumentError("train", trained, f"leaves nothing to train: {why}" if fixed else NOTHING_TO_TRAIN)


def _is_chosen(name: str, shape: Sequence[int], trained: str, teacher: Checkpoint) -> bool:
    if trained == "all":
        return True
    if trained == "lora":
        return ".parametrizations.weight.0." in name
    if trained == "attention":
        return _ATTENTION.search(name) is not None
    info = teacher.tensors.get(name)
    return info is None or info.shape != tuple(shape)


def _add_low_rank(model: Any, rank: int, fixed: Sequence[nn.Module]) -> None:
    """Give the weight of every linear layer but the head, and those that stay as they are, a change of low rank."""
    left_out = {id(module) for module in (model.get_output_embeddings(), *fixed)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # so that a run that goes on begins with the same matrices
        for module in list(model.modules()):
            if isinstance(module, nn.Linear | Conv1D) and id(module) not in left_out:
                parametrize.register_parametrization(module, "weight", LowRank(module.weight, rank))


def refuse_unwritten(model: Any, checkpoint: Checkpoint) -> None:
    """Refuse a model of which a trained parameter has no tensor of its own in the folder, as fused experts have not.

    Args:
        model: the transformers model, with what is trained chosen.
        checkpoint: the checkpoint of its folder.

    Raises:
        CheckpointError: the model has such a parameter.
    """
    names = set(stored_names(model, checkpoint))
    for name, parameter in model.named_parameters():
        changed = name.partition(".parametrizations.")[0] + ".weight" if ".parametrizations." in name else name
        if parameter.requires_grad and changed not in names:
            rule = "is trained, and the folder has no tensor of its own for it: choose another train"
            raise CheckpointError("parameter", changed, rule)


def trained_numbers(checkpoint: Checkpoint, teacher: Checkpoint, options: HealOptions) -> int:
    """About how many numbers are trained: for an estimate of disk, before the model is loaded."""
    total, writable = 0, checkpoint.writable
    for name, info in checkpoint.tensors.items():
        if name not in writable:
            continue
        if options.train == "lora":
            total += options.lora_rank * sum(info.shape) if len(info.shape) == 2 else 0
        elif _is_chosen(name, info.shape, options.train, teacher):
            total += info.numel
    return total


def trained_tensors(model: Any, checkpoint: Checkpoint) -> dict[str, Callable[[], Tensor]]:
    """The function that computes each tensor of a folder that training changed, by the tensor's name there.

    Args:
        model: the transformers model.
        checkpoint: the checkpoint of its folder.
    """
    stored_by_own = stored_names(model, checkpoint)
    changed: dict[str, Callable[[], Tensor]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and parametrize.is_parametrized(module):
            changed[f"{path}.weight"] = partial(_merged, module)
    for name, parameter in model.named_parameters(remove_duplicate=False):  # a tied one may be stored twice
        if parameter.requires_grad and ".parametrizations." not in name:
            changed[name] = parameter.detach
    return {stored: changed[own] for own, stored in stored_by_own.items() if own in changed}


def _merged(module: Any) -> Tensor:
    """The weight of a parametrized linear layer with its change of low rank."""
    parts = module.parametrizations.weight
    return (gathered_tensor(parts.original) + gathered_tensor(parts[0].up) @ gathered_tensor(parts[0].down)).detach()


def trained_format(checkpoint: Checkpoint, cache: str) -> EngineFormat:
    """Read the format that a model is trained for.

    For example ``trained_format(open_checkpoint("./model"), "llama.cpp:q4_0")``.

    Args:
        checkpoint: the model that is trained.
        cache: the format as the user spells it, such as ``llama.cpp:q4_0``.

    Raises:
        ArgumentError: the name is no format of an engine, the format rounds nothing, or its blocks do not divide the
            model's heads; or the model's cache is in codes of its own.
        SpecError: a layer's cache is not one of keys and values of heads.
    """
    code = parse_engine_format(cache, name="cache")
    if not code.keys.rounds and not code.values.rounds:
        raise ArgumentError("cache", cache, "keeps keys and values as they are: leave it out")
    if (checkpoint.path / CODES).is_file():
        raise ArgumentError("cache", cache, "must be left out: the model's cache has codes of its own")
    for index, layer in enumerate(checkpoint.spec.layers):
        is_hosted = str(checkpoint.config.get("model_type")).startswith(HOSTED_PREFIX)
        if is_hosted or not isinstance(layer, GroupedSpec) or layer.shares_kv:
            rule = f"has no keys and values of its own that an engine would store as {cache}"
            raise SpecError(f"layer {index}", layer.label, rule)
        with naming(quantize="cache"):
            code.keys.token_bytes(layer.head_dim)
            code.values.token_bytes(layer.value_dim)
    return code.interleaved() if checkpoint.family.gguf_interleaved else code


def check_file_cache(cache: str | None) -> None:
    """Refuse to train a ``.gguf`` for no cache, or for that of an engine that loads none.

    For example ``check_file_cache("llama.cpp:q4_0")``.

    Args:
        cache: the format as the user spells it, such as ``llama.cpp:q4_0``.

    Raises:
        ArgumentError: the format is None, no format of an engine, or of an engine that loads no ``.gguf``.
    """
    if cache is None:
        rule = "is required for a .gguf, whose few plain numbers can make up for no more: such as llama.cpp:q4_0"
        raise ArgumentError("cache", None, rule)
    if not SERVING_ENGINES[engine := parse_engine_format(cache, name="cache").engine].reads_gguf:
        rule = f"is a cache of {engine}, which loads no .gguf: train the folder that it was made of"
        raise ArgumentError("cache", cache, rule)


def round_in_training(model: Any, checkpoint: Checkpoint, code: EngineFormat) -> None:
    """Let a model attend to keys and values as an engine's cache would give them back, in calls without a cache.

    For example ``round_in_training(load("./model"), checkpoint, trained_format(checkpoint, "llama.cpp:q4_0"))``.

    Args:
        model: the transformers model.
        checkpoint: the checkpoint that the model was loaded from.
        code: the format that `trained_format` returned.
    """
    model.set_attn_implementation(NAME)
    place, count = checkpoint.family.bare().place, checkpoint.spec.num_layers
    for index in range(count):
        if not code.is_unquantised(index, count):
            setattr(model.base_model.get_submodule(place(index)), TRAINED_FORMAT, code)
