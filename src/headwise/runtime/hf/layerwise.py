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

from headwise.errors import ArgumentError, CheckpointError, SpecError
from headwise.models.checkpoints import Checkpoint, has_family
from headwise.models.specs import AttentionSpec
from headwise.runtime.caches.cache import GivenCache, OneTokenCache, Update
from headwise.runtime.hf.models import config_in, refused


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments and the result of one call of a layer's attention module.

    Attributes:
        inputs: ``[B, W, E]``, the hidden states that it attends over; normed, in models that norm before attention.
        args: the other positional arguments.
        kwargs: the other keyword arguments: ``position_embeddings``, ``attention_mask`` and so on.
        output: ``[B, W, E]``, the attention's output before it is added to the residual stream.
    """

    inputs: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor

    def repeat(self, attention: nn.Module, inputs: Tensor | None = None) -> Tensor:
        """Call an attention module with these arguments.

        Args:
            attention: the module.
            inputs: ``[B, W, E]`` instead of the recorded ones.

        Returns:
            Its output, ``[B, W, E]``.
        """
        return _states(attention(self.inputs if inputs is None else inputs, *self.args, **self.kwargs))


def seen_positions(layer: AttentionSpec, positions: Tensor) -> Tensor:
    """The positions ``[W]`` at which a layer sees the tokens of a window, in place of ``positions``.

    A layer whose sliding window is shorter than a gap between positions never sees tokens across it: there the tokens
    follow each other, as after ``seen_positions(layer, torch.tensor([0, 1, 5000, 5001]))`` in a layer with a window
    of 4,096 tokens.
    """
    is_near = layer.sliding_window is None or int(positions[-1]) < layer.sliding_window
    return positions if is_near else torch.arange(len(positions), device=positions.device)


class LayerwiseModel:
    """A transformers model that reads the weights of one layer at a time.

    `begin` computes the embeddings and `finish` the logits; both run the model's forward pass with its layers
    skipped, so that embeddings, scalings, masks, rotary tables and logits are right for every family. Between them
    the caller runs the layers::

        model = LayerwiseModel(open_checkpoint("./model"))
        hidden = model.begin(ids)
        for index in range(model.num_layers):
            hidden = model.run(index, model.module(index), hidden)
        logits = model.finish(hidden)

    Batches may have any number B of windows. Windows are full: there is no padding.

    Args:
        checkpoint: a decoder, or an encoder, which is run without its pooler.
        dtype: the dtype to compute in; the dtype of most of the checkpoint when None.
        device: the device to compute on; the CPU when None.
        layer: path of a layer, such as ``model.layers.{layer}``; the module that holds the attention when None.
        attention: path of a layer's attention module; the family's when None.

    Raises:
        ArgumentError: the attention's path is not inside the layer's.
        CheckpointError: transformers cannot build the model.
        SpecError: the model has no module at the layers' path.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None = None,
        *,
        device: torch.device | None = None,
        layer: str | None = None,
        attention: str | None = None,
    ) -> None:
        output = None  # path of the output projection, where the module returns more than the attention's output
        if attention is None:
            family = checkpoint.family
            attention, layer, output = family.attention, family.layer, family.output
        layer = layer or attention.rpartition(".")[0]
        if not attention.startswith(f"{layer}."):
            raise ArgumentError("attention", attention, f"must be inside a layer, {layer}")
        self.checkpoint = checkpoint
        self.adds = checkpoint.family.adds if has_family(checkpoint.config.get("model_type")) else True
        self.dtype = dtype or checkpoint.dtype
        self.device = device or torch.device("cpu")
        self.model = _without_weights(checkpoint, self.dtype, self.device)
        self._stored = stored_names(self.model, checkpoint)
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
        self._placed: dict[tuple[int, ...], LayerwiseModel] = {}
        self._returns_tuple = False
        self._outside = {
            name: module
            for name, module in self.model.named_modules()
            if not f"{name}.".startswith(f"{self._stack}.")
            and next(module.parameters(recurse=False), None) is not None
        }
        # Embeddings, norms and head are read when a forward pass calls them, and again after `release`.
        for name, module in self._outside.items():
            module.register_forward_pre_hook(lambda module, _, name=name: self._fill(module, name))

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self._layers)

    @torch.no_grad()
    def begin(self, ids: Tensor) -> Tensor:
        """Compute the input of the first layer.

        `run` then calls layers with the masks and rotary tables for windows of W tokens. To continue from stored
        hidden states, call this first with any one window. The weights that are read stay in memory until `release`.

        Args:
            ids: token ids ``[B, W]``.

        Returns:
            The hidden states, ``[B, W, E]``.
        """
        ids = ids.to(self.device)
        if ids.shape[1] != self._window:
            # Traced with one window, so that masks and tables fit a batch of any size.
            self._calls = self._trace(self.num_layers, input_ids=ids[:1])[1]
            self._window = ids.shape[1]
            self._placed = {}
        return self._trace(1, input_ids=ids)[0]

    @torch.no_grad()
    def at(self, positions: Tensor) -> LayerwiseModel:
        """The model for windows whose tokens stand at other positions than 0 … W − 1; it shares this one's weights.

        Tokens attend to those before them in the window, however far their positions lie apart; see `seen_positions`
        for layers with a sliding window.

        Args:
            positions: the tokens' positions, ``[W]``, rising; the model began with windows of W tokens.

        Raises:
            ArgumentError: W differs from the windows that `begin` was called with.
        """
        if len(positions) != self._window:
            rule = f"must be of windows of {self._window} tokens, as the model began with"
            raise ArgumentError("positions", tuple(positions.shape), rule)
        if bool((positions == torch.arange(len(positions), device=positions.device)).all()):
            return self
        key = tuple(positions.tolist())
        if key not in self._placed:
            self._placed[key] = self._at(positions)
        return self._placed[key]

    @torch.no_grad()
    def of_width(self, width: int) -> LayerwiseModel:
        """The model for windows of another number of tokens than it began with; it shares this one's weights.

        For example ``model.of_width(1)`` runs the layers on ``[B, 1, E]``, the first tokens of B texts.
        """
        if width == self._window:
            return self
        key = tuple(range(width))
        if key not in self._placed:
            view = copy.copy(self)
            view._calls = self._trace(self.num_layers, inputs_embeds=self._zeros(width))[1]
            view._window = width
            self._placed[key] = view
        return self._placed[key]

    @torch.no_grad()
    def among(self, positions: Tensor, update: Update) -> LayerwiseModel:
        """The model for some tokens of each window, which attend to keys and values that a function gives them.

        Each attention calls the function with those of these tokens, and attends to what it returns: keys and values
        of all W tokens of the windows that the model began with. It shares this one's weights. For example
        ``model.among(torch.tensor([5, 9]), update)`` runs the layers on ``[B, 2, E]``.

        Args:
            positions: the positions of the tokens, ``[S]``, rising.
            update: the function, of keys ``[B, K, S, D]`` and values ``[B, K, S, V]``.
        """
        view, inputs = copy.copy(self), self._zeros(self._window)
        positions = positions.to(self.device)
        # All but the masks is taken from these calls: the rotary tables of S tokens, and the cache that gives keys.
        some = {"inputs_embeds": inputs[:, : len(positions)], "position_ids": positions[None]}
        calls = self._trace(self.num_layers, past_key_values=GivenCache(update), **some)[1]
        # Behind one token, because transformers leaves out masks of windows from their first token on.
        masked = self._trace(self.num_layers, past_key_values=OneTokenCache(), inputs_embeds=inputs)[1]

        def rows(own: Any, other: Any) -> Any:
            is_mask = isinstance(other, Tensor) and other.shape[-2:] == (self._window, self._window + 1)
            return other[..., positions, 1:] if is_mask else own

        view._calls = [
            (
                tuple(map(rows, args, others)),
                {name: rows(value, other_values[name]) for name, value in kwargs.items()},
            )
            for (args, kwargs), (others, other_values) in zip(calls, masked, strict=True)
        ]
        view._window, view._placed = len(positions), {}
        return view

    def _zeros(self, tokens: int) -> Tensor:
        """Embeddings of a window in the place of any: how layers are called does not depend on them."""
        width = self.model.get_input_embeddings().embedding_dim
        return torch.zeros(1, tokens, width, dtype=self.dtype, device=self.device)

    def _at(self, positions: Tensor) -> LayerwiseModel:
        embedding, positions = self.model.get_input_embeddings(), positions.to(self.device)
        # A mask of ones: without it, transformers takes a step between positions for the beginning of another text.
        placed = self._trace(
            self.num_layers,
            inputs_embeds=torch.zeros(
                1, len(positions), embedding.embedding_dim, dtype=self.dtype, device=self.device
            ),
            position_ids=positions[None],
            attention_mask=torch.ones_like(positions[None]),
        )[1]
        view = copy.copy(self)
        view._calls = [
            new if seen_positions(layer, positions) is positions else old
            for layer, old, new in zip(self.checkpoint.spec.layers, self._calls, placed, strict=True)
        ]
        return view

    def module(self, index: int) -> nn.Module:
        """Build a layer and read its weights; nothing else refers to them, so that the caller decides when they go.

        Args:
            index: the index of the layer, from 0.

        Raises:
            CheckpointError: a tensor is missing, damaged or of another shape.
        """
        # Configs are shared rather than copied, because every module of the layer has one and only reads it.
        shared = {id(m.config): m.config for m in self._layers[index].modules() if hasattr(m, "config")}
        module: nn.Module = copy.deepcopy(self._layers[index], shared)
        for name, part in module.named_modules(prefix=f"{self._stack}.{index}"):
            self._fill(part, name)
        return module

    def run(self, index: int, module: nn.Module, hidden: Tensor, *, attention_output: Tensor | None = None) -> Tensor:
        """Run a layer with the arguments that the model passes to layer ``index``.

        Args:
            index: the index of the layer, from 0.
            module: the layer that `module` built, perhaps changed since.
            hidden: ``[B, W, E]``, the layer's input.
            attention_output: ``[B, W, E]``, used instead of the attention's output; the attention is then not run.

        Returns:
            The layer's output, ``[B, W, E]``.

        Raises:
            ArgumentError: W differs from the windows that `begin` was called with.
        """
        if hidden.shape[1] != self._window:
            rule = f"must be of windows of {self._window} tokens, as the model began with"
            raise ArgumentError("hidden", tuple(hidden.shape), rule)
        args, kwargs = self._calls[index]
        if attention_output is None:
            result = module(hidden, *args, **kwargs)
        else:
            replacement = (attention_output, None) if self.output == self.attention else attention_output
            result = _with_forward(module, self.output, lambda *_, **__: replacement)(hidden, *args, **kwargs)
        self._returns_tuple = isinstance(result, tuple)
        return _states(result)

    def trace(self, index: int, module: nn.Module, hidden: Tensor) -> tuple[AttentionCall, Tensor]:
        """Run a layer and record the call of its attention; see `run` for the arguments.

        Returns:
            The call, and the layer's output ``[B, W, E]``.
        """
        calls: list[AttentionCall] = []
        outputs: list[Tensor] = []
        attention = self.attention_of(module)
        path = self.output.removeprefix(self.attention).removeprefix(".")
        projection = attention.get_submodule(path)

        def projected(*args: Any, **kwargs: Any) -> Any:
            result = projection.forward(*args, **kwargs)  # the view calls hooks
            outputs.append(_states(result))
            return result

        traced = _with_forward(attention, path, projected)

        def attended(*args: Any, **kwargs: Any) -> Any:
            result = traced.forward(*args, **kwargs)
            rest = dict(kwargs)
            inputs = args[0] if args else rest.pop("hidden_states")
            calls.append(AttentionCall(inputs, args[1:], rest, outputs[0]))
            return result

        output = self.run(index, _with_forward(module, self.attention, attended), hidden)
        return calls[0], output

    def attention_inputs(self, index: int, module: nn.Module, hidden: Tensor) -> Tensor:
        """Run a layer up to its attention; see `run` for the arguments.

        Returns:
            The attention's input, ``[B, W, E]``.
        """
        inputs: list[Tensor] = []

        def record(*args: Any, **kwargs: Any) -> Any:
            inputs.append(args[0] if args else kwargs["hidden_states"])
            raise _EnoughError

        with suppress(_EnoughError):
            self.run(index, _with_forward(module, self.attention, record), hidden)
        return inputs[0]

    def attention_of(self, module: nn.Module) -> nn.Module:
        """The attention module inside a layer's module."""
        return module.get_submodule(self.attention)

    @property
    def has_logits(self) -> bool:
        """Whether `finish` returns logits: the model is a decoder, and no encoder."""
        return self.checkpoint.spec.is_causal

    def finish(self, hidden: Tensor) -> Tensor:
        """Compute the model's output from its last layer's: the final norm and the head.

        Positions do not depend on each other, so a window may be passed in parts. The weights that are read stay in
        memory until `release`.

        Args:
            hidden: ``[B, S, E]``, the output of the last layer.

        Returns:
            Logits ``[B, S, vocabulary]``, or an encoder's hidden states ``[B, S, E]``.
        """
        layer_output = (hidden,) if self._returns_tuple else hidden
        embedding = self.model.get_input_embeddings()
        unused = hidden.new_zeros(*hidden.shape[:2], embedding.embedding_dim)
        with _replaced_forward(self._layers, lambda *_, **__: layer_output):
            outputs = self.model(inputs_embeds=unused, use_cache=False)
        result: Tensor = outputs.logits if "logits" in outputs else outputs.last_hidden_state
        return result

    def finish_in_pieces(self, hidden: Tensor, positions: int = 256) -> Iterator[Tensor]:
        """Yield `finish` of a few positions at a time, because the logits of a large vocabulary take much memory.

        Args:
            hidden: ``[B, W, E]``, the output of the last layer.
            positions: the most positions in each piece.
        """
        for piece in hidden.split(positions, dim=1):
            yield self.finish(piece)

    def release(self) -> None:
        """Free the memory of embeddings, norms and head; they are read again when they are needed."""
        for module in self._outside.values():
            for name, parameter in module.named_parameters(recurse=False):
                module.register_parameter(name, _parameter(parameter.to("meta")))

    def _trace(self, layers: int, **inputs: Tensor) -> tuple[Tensor, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
        """The first layer's input, and the other arguments of the first ``layers`` layers; no layer is run.

        Args:
            layers: the number of layers.
            inputs: the arguments of the model's forward pass.
        """
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        first: list[Tensor] = []

        def record(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            first.append(hidden_states)
            calls.append((args, kwargs))
            if len(calls) == layers:
                raise _EnoughError
            return hidden_states

        with _replaced_forward(self._layers, record), suppress(_EnoughError):
            self.model(**inputs, use_cache=False)
        return first[0], calls

    def _fill(self, module: nn.Module, path: str) -> None:
        """Read a module's parameters and stored buffers, without those of its submodules."""
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
        return tensor.to(self.device).to(like.dtype)  # the narrower one is moved


class _EnoughError(Exception):
    """Raised by the last layer of interest to end a forward pass."""


def _without_weights(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    """The transformers model of a checkpoint, its parameters on the meta device and its buffers on the given one."""
    builder = AutoModelForCausalLM if checkpoint.spec.is_causal else AutoModel
    config = config_in(dtype, checkpoint.config)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = builder.from_config(config, dtype=dtype, trust_remote_code=False)
        # As in from_pretrained: the model's initialisation computes the buffers that are not stored, such as rotary
        # frequencies. Parameters are on the meta device, where initialising them costs nothing.
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty_like(buffer, device=device))
        with torch.no_grad():
            model.initialize_weights()
    except Exception as error:  # a size, activation or scaling that only the modules check
        raise refused("config.json", checkpoint.config.get("model_type"), error) from None
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model.eval()


def stored_names(model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Map the model's name of each tensor to the checkpoint's, by transformers' rules for loading a folder."""
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    state, prefix = model.state_dict(), model.base_model_prefix
    return {rename_source_key(name, renamings, [], prefix, state)[0]: name for name in checkpoint.tensors}


def _submodule(model: Any, path: str) -> Any:
    """A module by its path in the language model, where ``model`` may be the base model inside that."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return model.get_submodule(path.removeprefix(f"{model.base_model_prefix}."))


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _states(result: Any) -> Tensor:
    """The hidden states that a module returns, alone or first in a tuple."""
    states: Tensor = result[0] if isinstance(result, tuple) else result
    return states


def _with_forward(module: nn.Module, path: str, forward: Callable[..., Any]) -> nn.Module:
    """A module with another forward of the submodule at a path, and its attributes and weights.

    The module itself stays as it is, so that other threads may run it.
    """
    view = copy.copy(module)
    if not path:
        view.forward = forward
        return view
    name, _, rest = path.partition(".")
    child = view.get_submodule(name)
    view._modules = {**view._modules, name: _with_forward(child, rest, forward)}
    return view


@contextmanager
def _replaced_forward(modules: Iterable[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of modules in the block; their attributes, which models read, stay."""
    for module in modules:
        module.forward = forward
    try:
        yield
    finally:
        for module in modules:
            del module.forward
