"""Run a model one layer at a time, with one layer's weights in memory.

Shapes: B windows, W tokens in each, E hidden size.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from headwise.checkpoints import Checkpoint, has_family
from headwise.errors import ArgumentError, CheckpointError, SpecError
from headwise.hf.config import refused, stock_config


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of a layer's attention module.

    Attributes:
        inputs: ``[B, W, E]``, what goes in: the hidden states after the norm, where the norm comes first.
        args: what it was given beside them, by place.
        kwargs: and by name: ``position_embeddings``, ``attention_mask`` and so on.
        output: ``[B, W, E]``, what comes out, before it is added to the residual stream.
    """

    inputs: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor

    def repeat(self, attention: nn.Module, inputs: Tensor | None = None) -> Tensor:
        """The output of an attention module called the same way, on other inputs if they are given."""
        return _states(attention(self.inputs if inputs is None else inputs, *self.args, **self.kwargs))


class LayerwiseModel:
    """A transformers model whose weights are read when they are needed.

    ``begin`` and ``finish`` are the model's own forward pass with its layers left out, so that embeddings, scalings,
    masks, rotary tables and logits are the model's, whatever its family. Windows come in batches of any number B,
    and are full: there is no padding.

    Args:
        checkpoint: a decoder, or an encoder, which is run without its pooler.
        dtype: to compute in; what most of the checkpoint is stored in when None.
        layer: where a layer is, such as ``model.layers.{layer}``; what holds the attention when None.
        attention: where its attention is; the family's when None.

    Raises:
        CheckpointError: transformers cannot build the model.
        SpecError: it has no such layers.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None = None,
        *,
        layer: str | None = None,
        attention: str | None = None,
    ) -> None:
        output = None  # where below the attention its output projection is, if that gives more than it does
        if attention is None:
            family = checkpoint.family
            attention, layer, output = family.attention, family.layer, family.output
        layer = layer or attention.rpartition(".")[0]
        if not attention.startswith(f"{layer}."):
            raise ArgumentError("attention", attention, f"must be inside a layer, {layer}")
        self.checkpoint = checkpoint
        self.adds = checkpoint.family.adds if has_family(checkpoint.config.get("model_type")) else True
        self.dtype = dtype or checkpoint.dtype
        self.model = _without_weights(checkpoint, self.dtype)
        self._stored = _stored_names(self.model, checkpoint)
        self.attention = attention.removeprefix(f"{layer}.")
        self.output = f"{self.attention}.{output}" if output else self.attention
        stack = layer.removesuffix(".{layer}")
        try:
            self._layers = _submodule(self.model, stack)
        except AttributeError:
            raise SpecError("layer", layer, f"is nowhere in a {type(self.model).__name__}") from None
        self._stack = next(name for name, module in self.model.named_modules() if module is self._layers)
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._window = 0
        self._returns_tuple = False
        self._outside = {
            name: module
            for name, module in self.model.named_modules()
            if not f"{name}.".startswith(f"{self._stack}.")
            and next(module.parameters(recurse=False), None) is not None
        }
        for name, module in self._outside.items():
            module.register_forward_pre_hook(lambda module, _, name=name: self._fill(module, name))

    @property
    def num_layers(self) -> int:
        """How many layers it has."""
        return len(self._layers)

    @torch.no_grad()
    def begin(self, ids: Tensor) -> Tensor:
        """What goes into the first layer, ``[B, W, E]``, for token ids ``[B, W]``.

        Layers are afterwards called as the model would call them for windows of W tokens: a run that goes on from
        stored states begins with any one window. The weights it took stay until `release`.
        """
        if ids.shape[1] != self._window:
            # Of one window, so that masks and tables fit a batch of any size.
            self._calls = self._trace(ids[:1], self.num_layers)[1]
            self._window = ids.shape[1]
        return self._trace(ids, 1)[0]

    def module(self, index: int) -> nn.Module:
        """A layer with its weights, which are the caller's alone: when the module goes, so does their memory.

        Raises:
            CheckpointError: a tensor is missing, damaged or of another shape.
        """
        # Configs are shared: they are read only, and every module of the layer has one.
        shared = {id(m.config): m.config for m in self._layers[index].modules() if hasattr(m, "config")}
        module: nn.Module = copy.deepcopy(self._layers[index], shared)
        for name, part in module.named_modules(prefix=f"{self._stack}.{index}"):
            self._fill(part, name)
        return module

    def layer(self, index: int) -> nn.Module:
        """The old spelling of `module`."""
        warnings.warn("LayerwiseModel.layer is now LayerwiseModel.module", DeprecationWarning, stacklevel=2)
        return self.module(index)

    def run(self, index: int, module: nn.Module, hidden: Tensor, *, attention_output: Tensor | None = None) -> Tensor:
        """A layer's output ``[B, W, E]``, its module called as the model calls layer ``index``.

        Args:
            index: which layer.
            module: of `module`, or one made from it.
            hidden: ``[B, W, E]``, what goes in.
            attention_output: ``[B, W, E]`` in the place of what its attention would compute, which is then not run.

        Raises:
            ArgumentError: W is not what `begin` saw.
        """
        if hidden.shape[1] != self._window:
            rule = f"must be of windows of {self._window} tokens, as the model began with"
            raise ArgumentError("hidden", tuple(hidden.shape), rule)
        args, kwargs = self._calls[index]
        if attention_output is None:
            result = module(hidden, *args, **kwargs)
        else:
            given = (attention_output, None) if self.output == self.attention else attention_output
            with _instead([module.get_submodule(self.output)], lambda *_, **__: given):
                result = module(hidden, *args, **kwargs)
        self._returns_tuple = isinstance(result, tuple)
        return _states(result)

    def trace(self, index: int, module: nn.Module, hidden: Tensor) -> tuple[AttentionCall, Tensor]:
        """Run a layer and keep how its attention was called; see `run` for the arguments.

        Returns:
            The call, and the layer's output ``[B, W, E]``.
        """
        seen: list[AttentionCall] = []
        outputs: list[Tensor] = []

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            rest = dict(kwargs)
            inputs = args[0] if args else rest.pop("hidden_states")
            seen.append(AttentionCall(inputs, args[1:], rest, outputs[0]))

        def keep_output(_: nn.Module, __: tuple[Any, ...], result: Any) -> None:
            outputs.append(_states(result))

        handles = [
            module.get_submodule(self.output).register_forward_hook(keep_output),
            self.attention_of(module).register_forward_hook(keep, with_kwargs=True),
        ]
        try:
            output = self.run(index, module, hidden)
        finally:
            for handle in handles:
                handle.remove()
        return seen[0], output

    def attention_inputs(self, index: int, module: nn.Module, hidden: Tensor) -> Tensor:
        """What goes into a layer's attention ``[B, W, E]``; nothing after that is run."""
        seen: list[Tensor] = []

        def keep(*args: Any, **kwargs: Any) -> Any:
            seen.append(args[0] if args else kwargs["hidden_states"])
            raise _EnoughError

        with _instead([self.attention_of(module)], keep), suppress(_EnoughError):
            self.run(index, module, hidden)
        return seen[0]

    def attention_of(self, module: nn.Module) -> nn.Module:
        """The attention module of a layer."""
        return module.get_submodule(self.attention)

    @property
    def has_logits(self) -> bool:
        """Whether it is a language model, not an encoder."""
        return self.checkpoint.spec.is_causal

    def finish(self, hidden: Tensor) -> Tensor:
        """What the model makes of its last layer's output: logits ``[B, S, vocabulary]``, or an encoder's states.

        It works on each position by itself, so S may be any part of a window. The weights it took stay until
        `release`.
        """
        made = (hidden,) if self._returns_tuple else hidden
        embedding = self.model.get_input_embeddings()
        nothing = hidden.new_zeros(*hidden.shape[:2], embedding.embedding_dim)
        with _instead(self._layers, lambda *_, **__: made):
            outputs = self.model(inputs_embeds=nothing, use_cache=False)
        result: Tensor = outputs.logits if "logits" in outputs else outputs.last_hidden_state
        return result

    def finish_in_pieces(self, hidden: Tensor, positions: int = 256) -> Iterator[Tensor]:
        """`finish` of so many positions at a time, in order: the logits of a large vocabulary are large."""
        for piece in hidden.split(positions, dim=1):
            yield self.finish(piece)

    def release(self) -> None:
        """Give back the memory of embeddings, norms and head; they are read again when they are needed."""
        for module in self._outside.values():
            for name, parameter in module.named_parameters(recurse=False):
                module.register_parameter(name, _parameter(parameter.to("meta")))

    def _trace(self, ids: Tensor, layers: int) -> tuple[Tensor, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
        """The first layer's input, and how each of the first ``layers`` is called; the rest is not run."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        first: list[Tensor] = []

        def record(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            first.append(hidden_states)
            calls.append((args, kwargs))
            if len(calls) == layers:
                raise _EnoughError
            return hidden_states

        with _instead(self._layers, record), suppress(_EnoughError):
            self.model(ids, use_cache=False)
        return first[0], calls

    def _fill(self, module: nn.Module, path: str) -> None:
        """Read a module's own parameters, and those of its buffers that are stored."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                module.register_parameter(name, _parameter(self._read(f"{path}.{name}", parameter)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set and f"{path}.{name}" in self._stored:
                setattr(module, name, self._read(f"{path}.{name}", buffer))

    def _read(self, name: str, like: Tensor) -> Tensor:
        stored = self._stored.get(self.model.all_tied_weights_keys.get(name, name)) or self._stored.get(name, name)
        tensor = self.checkpoint.read(stored)
        if tensor.shape != like.shape:
            rule = f"must be {tuple(like.shape)} by the config"
            raise CheckpointError(f"{stored} shape", tuple(tensor.shape), rule)
        return tensor.to(like.dtype)


class _EnoughError(Exception):
    """Raised by the last layer of interest to end a forward pass."""


def _without_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The transformers model of a checkpoint with its parameters on the meta device and its buffers real."""
    builder = AutoModelForCausalLM if checkpoint.spec.is_causal else AutoModel
    config = stock_config(checkpoint.config)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = builder.from_config(config, dtype=dtype, trust_remote_code=False)
        # As from_pretrained does it: what is not stored, such as rotary frequencies, the model's own initialisation
        # computes. On the meta device that skips nothing but the numbers of the parameters.
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
        with torch.no_grad():
            model.initialize_weights()
    except Exception as error:  # a size, an activation or a scaling that only its modules look at
        raise refused("config.json", checkpoint.config.get("model_type"), error) from None
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model.eval()


def _stored_names(model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """The model's names of tensors → the checkpoint's, as transformers renames them when it loads a folder."""
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    own, prefix = model.state_dict(), model.base_model_prefix
    return {rename_source_key(name, renamings, [], prefix, own)[0]: name for name in checkpoint.tensors}


def _submodule(model: Any, path: str) -> Any:
    """A module by its path in the language model, also where ``model`` is the bare one inside it."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return model.get_submodule(path.removeprefix(f"{model.base_model_prefix}."))


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _states(result: Any) -> Tensor:
    """Modules give their states alone, or first in a tuple."""
    states: Tensor = result[0] if isinstance(result, tuple) else result
    return states


@contextmanager
def _instead(modules: Iterable[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Call something in the place of modules, which keep their attributes for those who look at them."""
    for module in modules:
        module.forward = forward
    try:
        yield
    finally:
        for module in modules:
            del module.forward
