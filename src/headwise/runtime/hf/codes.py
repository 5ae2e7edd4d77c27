"""Give a loaded model the codes of its cache."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.base.disk import write_whole
from headwise.errors import ArgumentError, CheckpointError
from headwise.models.checkpoints import Checkpoint, family_of
from headwise.models.families.base import canonical_shapes
from headwise.models.specs import HOSTED_PREFIX, GroupedSpec, LatentSpec
from headwise.models.specs.sources import INDEX, SINGLE, stored_tensors
from headwise.runtime.attention.rope import prefix_of
from headwise.runtime.caches.cache import HeadwiseCache
from headwise.runtime.hf.attention import CodedAttention, HostedGroupedAttention, SlotRotation
from headwise.runtime.hf.models import refuse_continuous_batching, replace_attention
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.transform_code import FILE, code_shape, codes_content


def set_codes(model: Any, codes: Mapping[int, TransformCode], checkpoint: Checkpoint | None = None) -> None:
    """Code the values that a model's layers cache.

    Stock attention modules are replaced by headwise's, which compute the same. ``generate`` then stores codes unless
    it is given another cache. For example ``set_codes(model, read_codes(checkpoint.path), checkpoint)``.

    Args:
        model: the model that was loaded from the checkpoint.
        codes: the code of each layer, by the layer's number; none changes nothing.
        checkpoint: the model's checkpoint, whose stock attention modules are replaced; without one, the layers that
            are coded have to be headwise's already.

    Raises:
        CheckpointError: a layer does not have the values that its code is for.
    """
    if not codes:
        return
    if checkpoint is not None:
        _replace_stock(model, codes, checkpoint)
    layers = {module.layer_idx: module for module in model.modules() if isinstance(module, CodedAttention)}
    slots_of = _slot_rotations(model)
    for index, code in codes.items():
        layer = layers.get(index)
        spec = None if layer is None else layer.spec
        fits = isinstance(spec, GroupedSpec | LatentSpec) and (code.sections, code.parts) == code_shape(spec)
        if layer is None or not fits:
            raise CheckpointError(FILE, index, "codes a layer that the model does not have")
        layer.set_code(code, slots_of(index))
    model_class: Any = type(model)
    model.__class__ = _storing_codes(model_class)
    model.register_forward_pre_hook(_give_cache, with_kwargs=True)
    model.register_forward_pre_hook(_check_positions, with_kwargs=True)


def _slot_rotations(model: Any) -> Callable[[int], SlotRotation | None]:
    """The rotation of slots of each layer, by its number; layers of one kind share it."""
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    made: dict[str, SlotRotation] = {}

    def of_layer(index: int) -> SlotRotation | None:
        if rotary is None:
            return None
        prefix = prefix_of(rotary, kinds[index] if index < len(kinds) else None)
        if prefix not in made:
            made[prefix] = SlotRotation(rotary, prefix)
        return made[prefix]

    return of_layer


def has_codes(model: Any) -> bool:
    """Whether cached values are coded, as in ``has_codes(headwise.load("folder"))``; see `set_codes`."""
    return any(isinstance(module, CodedAttention) and module.code is not None for module in model.modules())


def caching_modules(model: Any) -> list[nn.Module]:
    """The projections and norms that compute coded values, as in ``caching_modules(headwise.load("folder"))``."""
    layers = [m for m in model.modules() if isinstance(m, CodedAttention) and m.code is not None]
    found = (getattr(layer, name, None) for layer in layers for name in layer.CACHING)
    return [module for module in found if module is not None]


def _give_cache(
    model: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A cache of codes for a call that would make a dynamic one; training goes on without."""
    wants_cache = keywords.get("use_cache")
    wants_cache = model.config.get_text_config().use_cache if wants_cache is None else wants_cache
    is_given = keywords.get("past_key_values") is not None or len(args) >= len(_ARGUMENTS)
    if wants_cache and not is_given and not torch.is_grad_enabled() and has_codes(model):
        keywords = {**keywords, "past_key_values": HeadwiseCache(model)}
    return args, keywords


def _check_positions(model: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Refuse positions of tokens that are not as far apart as their slots in the cache, by which keys are rotated.

    Positions may begin anywhere, and anew at 0 where sequences lie in a row that a mask keeps apart.

    Raises:
        ArgumentError: a token's position does not follow from its slot.
    """
    given = dict(zip(_ARGUMENTS, args, strict=False)) | keywords
    mask, positions, cache = (given.get(name) for name in _ARGUMENTS[1:])
    if not isinstance(positions, Tensor) or positions.dim() != 2 or torch.compiler.is_compiling():
        return
    if not any(isinstance(module, CodedAttention) and module.slots is not None for module in model.modules()):
        return
    begin, S = 0 if cache is None else int(cache.get_seq_length()), positions.shape[1]
    ahead = positions - torch.arange(begin, begin + S, device=positions.device)  # of their slots
    seen = torch.ones_like(positions, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        seen = seen & (mask[:, -S:] != 0).to(seen.device)
        ahead = ahead.expand_as(seen)
    last = getattr(cache, "positions_ahead", None) if begin else None
    if last is None or last.shape != ahead.shape[:1]:
        before, may_begin = ahead[:, :1], (positions == 0) | (seen & (seen.cumsum(1) == 1))
    else:
        before, may_begin = last[:, None].to(ahead.device), positions == 0
    # How far the latest token is ahead that is seen, up to each one.
    latest = torch.where(seen, torch.arange(1, S + 1, device=seen.device), 0).cummax(1).values
    up_to = torch.cat((before, ahead), 1).gather(1, latest)
    wrong = seen & ~may_begin & (ahead != torch.cat((before, up_to[:, :-1]), 1))
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        rule = "must be as far from that of the token before as its slot is: a cache in codes rotates keys by slot"
        raise ArgumentError(
            "position_ids", f"{int(ahead[row, column]) + begin + column} in slot {begin + column}", rule
        )
    if isinstance(cache, HeadwiseCache):
        cache.positions_ahead = up_to[:, -1]


_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "past_key_values")
"""The first arguments of transformers' models, in their order."""


def _replace_stock(model: Any, codes: Mapping[int, TransformCode], checkpoint: Checkpoint) -> None:
    family, base = checkpoint.family, model.base_model
    bare, dtype = family.bare(), next(model.parameters()).dtype
    for index in codes:
        spec = checkpoint.spec.layers[index] if index < len(checkpoint.spec.layers) else None
        path = bare.place(index)
        if not isinstance(spec, GroupedSpec) or isinstance(base.get_submodule(path), CodedAttention):
            continue
        state = family.read_attention(checkpoint.read, index, spec)
        pairs = list(range(spec.rope.dim // 2)) if spec.rope else []
        layer = HostedGroupedAttention(spec, model.config.get_text_config(), index, pairs)
        layer.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()})
        if spec.qk_norm is not None:  # which round as the family's do
            layer.q_norm, layer.k_norm = (base.get_submodule(f"{path}.{name}") for name in ("q_norm", "k_norm"))
        replace_attention(base, path, layer.to(dtype).eval())


@cache
def _storing_codes(model_class: type[Any]) -> type[Any]:
    """A model class whose ``generate`` makes a `HeadwiseCache` where it would make a dynamic cache.

    It is saved with its codes, as the folder that it was loaded from. Its name is the model class's, by which
    transformers knows what a model can do.
    """

    def prepare_cache(self: Any, settings: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        may_choose = settings.use_cache is not False and settings.cache_implementation in (None, "dynamic")
        if may_choose and model_kwargs.get("past_key_values") is None and has_codes(self):
            model_kwargs["past_key_values"] = HeadwiseCache(self)
            return
        model_class._prepare_cache_for_generation(self, settings, model_kwargs, *args)

    def save(
        self: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **options: Any
    ) -> None:
        saves_model = not getattr(self, "_hf_peft_config_loaded", False)  # and not its adapters alone
        if saves_model:
            state_dict = _stock_state(self, self.state_dict() if state_dict is None else state_dict)
        model_class.save_pretrained(self, save_directory, is_main_process, state_dict, **options)
        if saves_model and self.should_save_on_this_rank(is_main_process) and Path(save_directory).is_dir():
            _write_codes(self, save_directory)

    def upload(self: Any, working_dir: Any, *args: Any, **options: Any) -> Any:
        _write_codes(self, working_dir)  # ``save_pretrained`` with ``push_to_hub`` uploads before it returns
        return model_class._upload_modified_files(self, working_dir, *args, **options)

    attributes = {
        "__module__": __name__,
        "__doc__": model_class.__doc__,
        "_prepare_cache_for_generation": prepare_cache,
        "init_continuous_batching": refuse_continuous_batching,
        "save_pretrained": save,
        "_upload_modified_files": upload,
    }
    subclass = type(model_class.__name__, (model_class,), attributes)
    globals()[subclass.__name__] = subclass  # pickle looks classes up here
    return subclass


def _write_codes(model: Any, folder: str | os.PathLike[str]) -> None:
    """Write the file of a model's codes into its folder, and an index, which says that they are no weights."""
    layers = [module for module in model.modules() if isinstance(module, CodedAttention)]
    codes = {layer.layer_idx: layer.code for layer in layers if layer.code is not None}
    if not codes:
        return
    folder = Path(folder)
    write_whole(folder / FILE, codes_content(codes))
    if (folder / SINGLE).is_file():
        stored = stored_tensors(folder / SINGLE)
        total = sum(tensor.nbytes for tensor in stored.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(stored, SINGLE)}
        write_whole(folder / INDEX, json.dumps(index, indent=2).encode())


def _stock_state(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors with those of stock attention modules, which were replaced, as its family stores them.

    Raises:
        ArgumentError: a module of the model has other parameters now, such as adapters'.
    """
    stored, model_type = dict(state), str(model.config.model_type)
    if model_type.startswith(HOSTED_PREFIX):  # its layers are headwise's in the folder too
        return stored
    layout = family_of(model_type).layout
    for path, layer in model.named_modules():
        if isinstance(layer, HostedGroupedAttention):
            prefix, spec = f"{path}.", layer.spec
            assert isinstance(spec, GroupedSpec)
            own = {name.removeprefix(prefix): stored.pop(name) for name in state if name.startswith(prefix)}
            if own.keys() != canonical_shapes(spec).keys():
                rule = "has other parameters than its family's, such as adapters': merge them before it is saved"
                raise ArgumentError("state_dict", path, rule)
            dtype = next(iter(own.values())).dtype
            norms = {name: own[name] for name in own if name.endswith("_norm.weight")}  # as the family stores them
            packed = layout.pack(own, spec) | norms
            stored |= {prefix + name: tensor.to(dtype) for name, tensor in packed.items()}
    return stored
