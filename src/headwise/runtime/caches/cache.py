"""A transformers cache that appends tokens without copying those it has, and can quantise them.

Two more caches stand for others: they give attention, and show masks, what the caller says.

Shapes: B batch, K key–value heads, T cached tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from headwise.errors import ArgumentError
from headwise.models.checkpoints import family_of, has_family
from headwise.models.specs import HOSTED_PREFIX, hides_tokens
from headwise.runtime.caches.layers import GrowingLayer, SlidingLayer
from headwise.runtime.quantization.codec import Codec
from headwise.runtime.quantization.formats import EngineFormat, Int8Format, parse_format

NAME = "headwise"
"""The value of ``attn_implementation`` by which a transformers model's attention is headwise's."""


class HeadwiseCache(DynamicCache):
    """A `DynamicCache` with spare memory, to which tokens are appended in place.

    transformers' `DynamicCache` concatenates all tokens into a new tensor for every token and layer. Beam search,
    cropping, batches, sliding windows and left padding work as with that; layers of other kinds (recurrent states)
    are transformers' own.

    Quantised tokens are coded as they arrive, and attention of any implementation is given what the codes stand for;
    where it is ``headwise`` (by name or `headwise.optimize`), a kernel for the CPU reads integer codes themselves.
    With ``int8`` and that attention, a prompt attends to itself unquantised. Sliding windows are quantised too,
    except by kivi. In an `EncoderDecoderCache`, this is for the decoder's own tokens, not for the encoder's.

    Args:
        model: the model to be run with the cache, or its config.
        max_length: allocate memory for so many tokens, and refuse more. When None, memory is doubled as needed.
        quantize: how keys and values are stored: ``int8``, ``int4``, ``int3``, ``int2`` (integers with a scale and a
            zero point for each 64 channels of a token; ``int4:32`` for 32), ``int4+hadamard`` (rotated first),
            ``fp8``, ``int8/int4`` (keys/values), ``kivi4``, ``kivi3`` or ``kivi2``
            (`headwise.runtime.quantization.groups.KiviCode`; ``kivi2:32:128`` for blocks of 32 and 128 recent
            tokens); or an engine's own: ``llama.cpp:q4_0``, ``mlx:4``, ``vllm:fp8``, … As they are when
            None. An engine's queries are rounded too where the attention is ``headwise``.

    Raises:
        ArgumentError: ``max_length`` is not a whole number of at least 1, or ``quantize`` is no such format or
            quantises none of the model's layers.

    >>> model.generate(**inputs, past_key_values=HeadwiseCache(model, quantize="int4"))  # doctest: +SKIP
    """

    def __init__(self, model: Any, max_length: int | None = None, *, quantize: str | None = None) -> None:
        codec: Codec | None = None if quantize is None else parse_format(quantize)
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise ArgumentError("max_length", max_length, "must be a whole number of at least 1, or None")
        config = getattr(model, "config", model)
        if not hasattr(config, "get_text_config"):
            raise ArgumentError("model", type(model).__name__, "must be a transformers model or config")
        if isinstance(codec, EngineFormat) and has_family(model_type := getattr(config, "model_type", None)):
            codec = codec.interleaved() if family_of(str(model_type)).gguf_interleaved else codec
        super().__init__(config=config)
        self.max_length = max_length
        # How far the last token's position is ahead of its slot, int64 [B], where the model has codes and told it.
        self.positions_ahead: Tensor | None = None
        longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        options: dict[str, Any] = {"max_length": max_length, "reads_stored": _reads_stored(config)}
        count = len(self.layers)
        self.layers: list[Any] = [
            _replace_layer(layer, longest, _codec_of_layer(codec, index, count), options)
            for index, layer in enumerate(self.layers)
        ]
        if codec is not None and all(getattr(layer, "codec", None) is None for layer in self.layers):
            kinds = {type(layer) for layer in self.layers}
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            why = ": it cannot store sliding windows" if SlidingLayer in kinds else f", all of kind {names}"
            raise ArgumentError("quantize", quantize, f"quantises none of this model's layers{why}")
        for module in model.modules() if isinstance(model, nn.Module) else ():
            new_layer = getattr(module, "cache_layer", None)
            coded = None if new_layer is None else new_layer(max_length)
            if coded is not None and quantize is not None:
                raise ArgumentError("quantize", quantize, "must be left out: the model's cache has codes of its own")
            if coded is not None:
                self.layers[int(module.layer_idx)] = coded  # type: ignore[arg-type]  # a number, of such modules

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Copy row ``beam_idx[b]`` to row b of the batch, for every b.

        Args:
            beam_idx: ``[B]``.
        """
        super().reorder_cache(beam_idx)
        self._select_positions(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the rows of the batch.

        Args:
            indices: the indices of the rows to keep.
        """
        super().batch_select_indices(indices)
        self._select_positions(indices)

    def _select_positions(self, indices: Tensor) -> None:
        ahead = self.positions_ahead
        if ahead is not None and len(ahead) > 1:  # one number may be of all rows
            self.positions_ahead = ahead[indices.to(ahead.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch so many times."""
        super().batch_repeat_interleave(repeats)
        if self.positions_ahead is not None and len(self.positions_ahead) > 1:
            self.positions_ahead = self.positions_ahead.repeat_interleave(repeats)

    @property
    def length(self) -> int:
        """Tokens that the cache has been given, also where a sliding window has dropped them."""
        return int(self.get_seq_length())

    @property
    def nbytes(self) -> int:
        """Bytes of memory allocated for keys and values, used or not; scales and recent tokens are included."""
        tensors = [
            getattr(layer, name, None)
            for layer in self.layers
            for name in getattr(layer, "tensor_names", ("keys", "values"))
        ]
        tensors += [memory for layer in self.layers for memory in getattr(layer, "memory", {}).values()]
        storages = (states.untyped_storage() for states in tensors if isinstance(states, Tensor))
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def expect(self, tokens: int) -> None:
        """Limit the memory that a growing cache allocates in advance.

        Args:
            tokens: the most tokens that the cache will hold; it still grows beyond them if it must.
        """
        for layer in self.layers:
            if isinstance(layer, GrowingLayer):
                layer.expected = tokens


@contextmanager
def default_cache(model: Any, quantize: str) -> Iterator[None]:
    """Run every call of a model that is given no cache with a new quantised `HeadwiseCache`.

    For example ``with default_cache(model, "int4"): model(ids)`` computes the logits that a prompt has with this
    cache; the output has the cache in ``past_key_values``.

    Args:
        model: a transformers model.
        quantize: see `HeadwiseCache`.

    Raises:
        ArgumentError: see `HeadwiseCache`.
    """
    HeadwiseCache(model, quantize=quantize)  # refuses a wrong format before any work

    def give_cache(_: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if keywords.get("past_key_values") is None:
            keywords = {**keywords, "past_key_values": HeadwiseCache(model, quantize=quantize), "use_cache": True}
        return args, keywords

    hook = model.register_forward_pre_hook(give_cache, with_kwargs=True)
    try:
        with rounded_queries(model, quantize):
            yield
    finally:
        hook.remove()


@contextmanager
def rounded_queries(model: Any, quantize: str) -> Iterator[None]:
    """Attend as an engine does whose cache a model is run with: headwise's attention rounds queries, too.

    Args:
        model: a transformers model.
        quantize: see `HeadwiseCache`; with formats that are no engine's, attention stays as it is.
    """
    before = model.config._attn_implementation
    if not isinstance(parse_format(quantize), EngineFormat) or before == NAME:
        yield
        return
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _reads_stored(config: Any) -> bool:
    """Whether the model's attention is headwise's by name; a converted model's layers take keys and values."""
    is_hosted = str(getattr(config, "model_type", "")).startswith(HOSTED_PREFIX)
    return getattr(config, "_attn_implementation", None) == NAME and not is_hosted


def _codec_of_layer(codec: Codec | None, layer: int, layers: int) -> Codec | None:
    """The codec of one of a model's layers, which an engine may leave as it is."""
    return None if isinstance(codec, EngineFormat) and codec.is_unquantised(layer, layers) else codec


def _replace_layer(layer: Any, longest: int | None, codec: Codec | None, options: dict[str, Any]) -> Any:
    """The layer of headwise's that replaces one of transformers' own; other kinds are returned as they are.

    Args:
        layer: the layer of a transformers cache.
        longest: the model's positions; a window as long as they are drops nothing, and keeps all tokens here.
        codec: the codec of the layer; None for keys and values as they are.
        options: the other arguments of `GrowingLayer` and `SlidingLayer`.
    """
    is_sliding = type(layer) is DynamicSlidingWindowLayer
    if is_sliding and hides_tokens(layer.sliding_window, longest):
        # What drops out of a window is single tokens, and never a block of them.
        return SlidingLayer(layer.sliding_window, None if codec is None or codec.block > 1 else codec, **options)
    if not is_sliding and type(layer) is not DynamicLayer:
        return layer
    if str(codec) == str(Int8Format()) and options["reads_stored"]:
        codec = Int8Format()
    return GrowingLayer(codec, **options)


Update = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Gives attention keys ``[B, K, T, D]`` and values ``[B, K, T, V]`` for those that it computed of S tokens."""


class GivenCache(DynamicCache):
    """A cache that gives attention what a function returns.

    Args:
        update: the function.
    """

    def __init__(self, update: Update) -> None:
        super().__init__()
        self._update = update

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys ``[B, K, T, D]`` and values ``[B, K, T, V]`` in place of those given."""
        return self._update(key_states, value_states)


class OneTokenCache(DynamicCache):
    """A cache as masks see it that holds one token."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens that it holds."""
        return 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the next token."""
        return 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many tokens there are with ``query_length`` more, and the position of their first."""
        return 1 + query_length, 0
