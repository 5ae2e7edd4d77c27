"""A transformers cache that appends tokens without copying those it has, and can quantise them.

Shapes: B batch, K key–value heads, T cached tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from headwise.errors import ArgumentError
from headwise.models.checkpoints import family_of, has_family
from headwise.models.specs import HOSTED_PREFIX, hides_tokens
from headwise.runtime.caches.growing import GrowingLayer, SlidingLayer
from headwise.runtime.caches.quantized import KiviLayer, QuantizedLayer, TokenwiseLayer, TokenwiseSlidingLayer
from headwise.runtime.quantization.formats import CacheFormat, EngineFormat, TokenFormat, parse_format
from headwise.runtime.quantization.kivi import KiviCode

NAME = "headwise"
"""The value of ``attn_implementation`` by which a transformers model's attention is headwise's."""

_FUSED = "int8"
"""The format that headwise's attention reads with one scale for a token and head."""


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
            (`headwise.runtime.quantization.kivi.KiviCode`; ``kivi2:32:128`` for blocks of 32 and 128 recent tokens);
            or an
            engine's own: ``llama.cpp:q4_0``, ``mlx:4``, ``vllm:fp8``, … As they are when None. An engine's queries
            are rounded too where the attention is ``headwise``.

    Raises:
        ArgumentError: ``max_length`` is not a whole number of at least 1, or ``quantize`` is no such format or
            quantises none of the model's layers.

    >>> model.generate(**inputs, past_key_values=HeadwiseCache(model, quantize="int4"))  # doctest: +SKIP
    """

    def __init__(self, model: Any, max_length: int | None = None, *, quantize: str | None = None) -> None:
        code = None if quantize is None else parse_format(quantize)
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise ArgumentError("max_length", max_length, "must be a whole number of at least 1, or None")
        config = getattr(model, "config", model)
        if not hasattr(config, "get_text_config"):
            raise ArgumentError("model", type(model).__name__, "must be a transformers model or config")
        if isinstance(code, EngineFormat) and has_family(model_type := getattr(config, "model_type", None)):
            code = code.interleaved() if family_of(str(model_type)).gguf_interleaved else code
        super().__init__(config=config)
        self.max_length = max_length
        # How far the last token's position is ahead of its slot, int64 [B], where the model has codes and told it.
        self.positions_ahead: Tensor | None = None
        kernel = None if not _reads_codes(config) else "int8" if str(code) == _FUSED else "codes"
        longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        codes = [_of_layer(code, index, len(self.layers)) for index in range(len(self.layers))]
        self.layers: list[Any] = [
            _with_room(layer, longest, max_length, own, kernel) for layer, own in zip(self.layers, codes, strict=True)
        ]
        quantised = (QuantizedLayer, TokenwiseLayer, TokenwiseSlidingLayer, KiviLayer)
        if code is not None and not any(isinstance(layer, quantised) for layer in self.layers):
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
            indices: of the rows.
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
        tensors = [getattr(layer, name, None) for layer in self.layers for name in _names(layer)]
        tensors += [room.memory for layer in self.layers for room in getattr(layer, "rooms", ())]
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


def _names(layer: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = getattr(layer, "tensor_names", ("keys", "values"))
    return names


def _reads_codes(config: Any) -> bool:
    """Whether the model's attention is headwise's by name; a converted model's layers take no codes."""
    is_hosted = str(getattr(config, "model_type", "")).startswith(HOSTED_PREFIX)
    return getattr(config, "_attn_implementation", None) == NAME and not is_hosted


def _of_layer(code: CacheFormat | None, layer: int, layers: int) -> CacheFormat | None:
    """The format of one of a model's layers, which an engine may leave as it is."""
    return None if isinstance(code, EngineFormat) and code.is_wide(layer, layers) else code


def _with_room(
    layer: Any, longest: int | None, max_length: int | None, code: CacheFormat | None, kernel: str | None
) -> Any:
    """The layer of headwise's that replaces one of transformers' own; other kinds are returned as they are.

    Args:
        layer: transformers' own.
        longest: the model's positions; a window as long as they are drops nothing, and keeps all tokens here.
        max_length: see `HeadwiseCache`.
        code: the format.
        kernel: what attention reads of it without decoding: ``int8``, ``codes`` or nothing.
    """
    is_read = kernel is not None
    is_sliding = type(layer) is DynamicSlidingWindowLayer
    if is_sliding and hides_tokens(layer.sliding_window, longest):
        if isinstance(code, TokenFormat | EngineFormat):
            return TokenwiseSlidingLayer(code, layer.sliding_window, max_length, is_read=is_read)
        return SlidingLayer(layer.sliding_window, max_length)
    if not is_sliding and type(layer) is not DynamicLayer:
        return layer
    if code is None:
        return GrowingLayer(max_length)
    if isinstance(code, KiviCode):
        return KiviLayer(code, max_length, is_read=is_read)
    return QuantizedLayer(max_length) if kernel == "int8" else TokenwiseLayer(code, max_length, is_read=is_read)
