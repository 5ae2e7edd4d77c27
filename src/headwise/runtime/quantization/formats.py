"""Formats of a cache of keys and values, and how a user spells them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from headwise.costs.formulas.target import GROUP, GROUPS
from headwise.costs.prediction import GGML_TYPES, SERVING_ENGINES, EngineCache
from headwise.errors import ArgumentError
from headwise.runtime.kernels import attend, attend_quantized, dequantize, pack, unpack
from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.kernels.native import are_plain, why_not
from headwise.runtime.quantization.codec import Codec, Stored, refuse_latents
from headwise.runtime.quantization.engine_code import MLX_BITS, QUANTO_BITS, EngineCode, MlxCode, QuantoCode
from headwise.runtime.quantization.ggml import LlamaCppCode
from headwise.runtime.quantization.groups import (
    BITS,
    HADAMARD,
    KIVI_BITS,
    KIVI_BLOCK,
    Float8Code,
    GroupCode,
    KiviCode,
    TokenCode,
    attend_to_codes,
    can_attend_to_codes,
    rotated,
)
from headwise.runtime.quantization.vllm import (
    EngineFloat8Code,
    Float4Code,
    Int4TokenCode,
    Int8TokenCode,
    TurboKeyCode,
    TurboValueCode,
)

LLAMA_CPP = "llama.cpp"

_SIZE = "|".join(map(str, GROUPS))
_INTEGERS = re.compile(rf"int({'|'.join(map(str, BITS))})(?::({_SIZE}))?({re.escape(HADAMARD)})?")
_KIVI = re.compile(rf"kivi({'|'.join(map(str, KIVI_BITS))})(?::({_SIZE})(?::([0-9]{{1,6}}))?)?")


@dataclass(frozen=True)
class TokenFormat(Codec):
    """A format in which each token's keys and values are coded by themselves.

    Attributes:
        keys: the code of the keys.
        values: the code of the values.
    """

    keys: TokenCode
    values: TokenCode

    def __str__(self) -> str:
        return str(self.keys) if self.keys == self.values else f"{self.keys}/{self.values}"

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Rows of the keys and of the values; see `Codec.encode`."""
        refuse_latents(values, self)
        return self.keys.encode(keys), self.values.encode(values)

    def decode(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """See `Codec.decode`."""
        (keys, values), (D, V), dtype = stored
        return self.keys.decode(keys, D, dtype), self.values.decode(values, V, dtype)

    def can_attend(self, keys: Tensor, values: Tensor) -> bool:
        """Whether keys and values are in integers, which kernels read; see `Codec.can_attend`."""
        return all(isinstance(code, GroupCode) for code in (self.keys, self.values)) and can_attend_to_codes(
            keys, values
        )

    def attend(self, query: Tensor, stored: Stored, scoring: Scoring) -> Tensor:
        """See `Codec.attend`."""
        (key_rows, value_rows), (D, V), _ = stored
        assert isinstance(self.keys, GroupCode)
        assert isinstance(self.values, GroupCode)
        keys, values = self.keys.as_affine(key_rows, D), self.values.as_affine(value_rows, V)
        if self.keys.hadamard:
            query = rotated(query.float()).to(query.dtype)
        out = attend_to_codes(query, keys, values, scoring)
        return rotated(out.float()).to(out.dtype) if self.values.hadamard else out


@dataclass(frozen=True)
class EngineFormat(TokenFormat):
    """The format of an engine's own cache, rounded as that engine rounds; each token is coded by itself.

    Attributes:
        keys: the code of the keys.
        values: the code of the values.
        engine: the name of the engine.
        unquantised_ends: how many layers at each end of a model keep their cache as it is; half of all at most.
    """

    keys: EngineCode
    values: EngineCode
    engine: str
    unquantised_ends: int = 0

    def __str__(self) -> str:
        sides = dict.fromkeys((str(self.keys), str(self.values)))
        return f"{self.engine}:{'/'.join(sides)}"

    def can_attend(self, keys: Tensor, values: Tensor) -> bool:
        """Always: attention then rounds queries too, as the engine does."""
        return True

    def attend(self, query: Tensor, stored: Stored, scoring: Scoring) -> Tensor:
        """Attend with the numbers that the engine would use, queries rounded among them; see `Codec.attend`."""
        (key_rows, value_rows), (D, V), _ = stored
        keys, values = self.keys.as_read(key_rows, D), self.values.as_read(value_rows, V)
        queries = self.keys.rounded_queries(self.keys.turned(query.float()))
        out = attend(queries, keys, values, scoring.mask, 0.0, scoring.is_causal, scoring.scale)
        return self.values.turned_back(out).to(query.dtype)

    def rounded(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention has them of this cache; derivatives pass as if none was rounded.

        What is rounded is turned, and turned back here, which no product sees: `kernels.attend` of the result is
        what `attend` computes. For example ``parse_format("llama.cpp:q4_0").rounded(query, key, value)``.

        Args:
            query: ``[B, H, S, D]``.
            key: ``[B, K, T, D]``.
            value: ``[B, K, T, V]``.
        """

        def replaced(states: Tensor, side: EngineCode, read: Callable[[Tensor], Tensor]) -> Tensor:
            own = states.detach()
            return states + (side.turned_back(read(side.turned(own.float()))).to(states.dtype) - own)

        def stored(states: Tensor, side: EngineCode) -> Tensor:
            return replaced(states, side, lambda turned: side.as_read(side.stored(turned), states.shape[3]))

        queries = replaced(query, self.keys, self.keys.rounded_queries)
        return queries, stored(key, self.keys), stored(value, self.values)

    def interleaved(self) -> EngineFormat:
        """The format for a model whose file keeps the channels of a rotary pair side by side; see `EngineCode`."""
        return replace(self, keys=self.keys.interleaved(), values=self.values.interleaved())

    def is_unquantised(self, layer: int, layers: int) -> bool:
        """Whether a layer of a model keeps its cache as it is.

        Args:
            layer: the index of the layer, from 0.
            layers: how many the model has.
        """
        ends = min(self.unquantised_ends, layers // 2)
        return not ends <= layer < layers - ends


class Int8Format(Codec):
    """Integers of 8 bits with one scale for each token and head, which headwise's attention reads by its kernel.

    A row has a token's codes, and then the bytes of its scale (`headwise.runtime.kernels.pack`). A prompt attends to
    its keys and values as they are.
    """

    exact_prompt: ClassVar[bool] = True

    def __str__(self) -> str:
        return "int8"

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Rows of the keys and of the values, int8; see `Codec.encode`."""
        refuse_latents(values, self)
        return pack(keys), pack(values)

    def decode(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """See `Codec.decode`."""
        keys, values = (dequantize(*unpack(rows), stored.dtype) for rows in stored.tensors)
        return keys, values

    def can_attend(self, keys: Tensor, values: Tensor) -> bool:
        """Whether the compiled kernel reads them; attention to decoded ones is the same."""
        return are_plain(keys, values) and why_not(keys.dtype, keys.device) is None

    def attend(self, query: Tensor, stored: Stored, scoring: Scoring) -> Tensor:
        """See `Codec.attend`."""
        keys, values = map(unpack, stored.tensors)
        return attend_quantized(query, keys, values, scoring.mask, scoring.is_causal, scoring.scale)


def _same(engine: str, *codes: EngineCode) -> dict[str, EngineFormat]:
    return {str(code): EngineFormat(code, code, engine) for code in codes}


def _turboquant(cache: EngineCache) -> EngineFormat:
    """vLLM's TurboQuant, whose keys are rotated integers, or 8-bit floats."""
    name = cache.name
    turned = TurboKeyCode(int(cache.key_bits), name)
    keys = turned if cache.rotates else EngineFloat8Code(rounds_queries=False, name=name)
    values = TurboValueCode(int(cache.value_bits), name)
    return EngineFormat(keys, values, "vllm", unquantised_ends=cache.unquantised_ends)


ENGINE_FORMATS: dict[str, dict[str, EngineFormat]] = {
    LLAMA_CPP: {
        kind: EngineFormat(LlamaCppCode(kind, is_keys=True), LlamaCppCode(kind, is_keys=False), LLAMA_CPP)
        for kind in GGML_TYPES
    },
    "mlx": _same("mlx", *map(MlxCode, MLX_BITS)),
    "vllm": {
        **_same("vllm", EngineFloat8Code(), Int8TokenCode(), Int4TokenCode()),
        **{cache.name: _turboquant(cache) for cache in SERVING_ENGINES["vllm"].caches if cache.unquantised_ends},
    },
    "sglang": _same("sglang", EngineFloat8Code(saturates=False), Float4Code()),
    "transformers": _same("transformers", *map(QuantoCode, QUANTO_BITS)),
}
"""The formats of each engine, by the engine's name and the format's."""

CacheFormat = TokenFormat | KiviCode
"""A format of the keys and values of a cache."""


def _any_of(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


INTEGERS, KIVI = [f"int{bits}" for bits in BITS], [f"kivi{bits}" for bits in KIVI_BITS]
SPELLINGS = (
    f"{_any_of(INTEGERS)}, {Float8Code()}, int8/int4 (keys/values), {_any_of(KIVI)}, or an engine's own, such as"
    " llama.cpp:q4_0; docs/speed.md has all"
)
"""The families of formats, in words."""


def parse_format(spelling: object, *, name: str = "quantize") -> CacheFormat:
    """Read a user's spelling of a cache format.

    For example ``str(parse_format("int8/int8"))`` is ``"int8"``, and ``parse_format("kivi4").block`` is 64.

    Args:
        spelling: the user's spelling of one of `SPELLINGS`.
        name: what an error calls the argument.

    Raises:
        ArgumentError: the spelling is not one of `SPELLINGS`.
    """
    if isinstance(spelling, str):
        if (parts := _KIVI.fullmatch(spelling)) is not None:
            bits, block, recent = parts.groups()
            return KiviCode(int(bits), int(block or KIVI_BLOCK), int(recent or 0))
        engine, _, names = spelling.partition(":")
        caches, sides = ENGINE_FORMATS.get(engine, {}), names.split("/")
        if len(sides) <= (2 if engine == LLAMA_CPP else 1) and all(side in caches for side in sides):
            return replace(caches[sides[0]], values=caches[sides[-1]].values)
        if caches:
            two = ", or two of them (q8_0/q4_0)" if engine == LLAMA_CPP else ""
            raise ArgumentError(name, spelling, f"must be {engine}: with {_any_of(caches)}{two}")
        codes = [_token_code(part) for part in spelling.split("/")]
        match codes:
            case [GroupCode() | Float8Code() as both]:
                return TokenFormat(both, both)
            case [GroupCode() | Float8Code() as keys, GroupCode() | Float8Code() as values]:
                return TokenFormat(keys, values)
    raise ArgumentError(name, spelling, f"must be {SPELLINGS}")


def parse_engine_format(spelling: object, *, name: str) -> EngineFormat:
    """Read a user's spelling of an engine's own cache.

    For example ``parse_engine_format("llama.cpp:q4_0", name="for").engine`` is ``"llama.cpp"``.

    Args:
        spelling: an engine, a colon and a name of `ENGINE_FORMATS`.
        name: what an error calls the argument.

    Raises:
        ArgumentError: the spelling names no engine or none of its formats.
    """
    if str(spelling).partition(":")[0] not in ENGINE_FORMATS:
        examples = _any_of(f"{engine}:{list(caches)[-1]}" for engine, caches in ENGINE_FORMATS.items())
        raise ArgumentError(
            name, spelling, f"must be an engine's own cache, such as {examples}; docs/prepare.md has all"
        )
    code = parse_format(spelling, name=name)
    assert isinstance(code, EngineFormat)
    return code


def _token_code(spelling: str) -> GroupCode | Float8Code | None:
    """The code of a part of a spelling; None where there is none."""
    if spelling == str(Float8Code()):
        return Float8Code()
    if (parts := _INTEGERS.fullmatch(spelling)) is None:
        return None
    bits, group, rotation = parts.groups()
    return GroupCode(int(bits), int(group or GROUP), rotation is not None)
