"""Formats of a cache of keys and values, and how a user spells them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from headwise.costs.formulas.target import GROUP, GROUPS
from headwise.costs.prediction import GGML_TYPES, SERVING_ENGINES, EngineCache
from headwise.errors import ArgumentError
from headwise.runtime.quantization import kivi
from headwise.runtime.quantization.engine_code import EngineCode
from headwise.runtime.quantization.floats import EngineFloat8Code, Float4Code
from headwise.runtime.quantization.ggml import GgmlCode, LlamaCppCode
from headwise.runtime.quantization.groups import BITS, HADAMARD, Float8Code, GroupCode, TokenCode
from headwise.runtime.quantization.kivi import KiviCode
from headwise.runtime.quantization.mlx import BITS as MLX_BITS
from headwise.runtime.quantization.mlx import MlxCode
from headwise.runtime.quantization.quanto import BITS as QUANTO_BITS
from headwise.runtime.quantization.quanto import QuantoCode
from headwise.runtime.quantization.vllm import Int4TokenCode, Int8TokenCode, TurboKeyCode, TurboValueCode

LLAMA_CPP = "llama.cpp"

_SIZE = "|".join(map(str, GROUPS))
_INTEGERS = re.compile(rf"int({'|'.join(map(str, BITS))})(?::({_SIZE}))?({re.escape(HADAMARD)})?")
_KIVI = re.compile(rf"kivi({'|'.join(map(str, kivi.BITS))})(?::({_SIZE})(?::([0-9]{{1,6}}))?)?")


@dataclass(frozen=True)
class TokenFormat:
    """A format in which each token's keys and values are coded by themselves.

    Attributes:
        keys: the code of the keys.
        values: the code of the values.
    """

    keys: TokenCode
    values: TokenCode

    def __str__(self) -> str:
        return str(self.keys) if self.keys == self.values else f"{self.keys}/{self.values}"


@dataclass(frozen=True)
class EngineFormat:
    """The format of an engine's own cache, rounded as that engine rounds; each token is coded by itself.

    Attributes:
        engine: its name.
        keys: the code of the keys.
        values: the code of the values.
        wide_ends: how many layers at each end of a model keep their cache as it is; half of all at most.
    """

    engine: str
    keys: EngineCode
    values: EngineCode
    wide_ends: int = 0

    def __str__(self) -> str:
        sides = dict.fromkeys((str(self.keys), str(self.values)))
        return f"{self.engine}:{'/'.join(sides)}"

    def interleaved(self) -> EngineFormat:
        """The format for a model whose file keeps the channels of a rotary pair side by side; see `EngineCode`."""
        return replace(self, keys=self.keys.interleaved(), values=self.values.interleaved())

    def is_wide(self, layer: int, layers: int) -> bool:
        """Whether a layer of a model keeps its cache as it is.

        Args:
            layer: its number.
            layers: how many the model has.
        """
        ends = min(self.wide_ends, layers // 2)
        return not ends <= layer < layers - ends


def _same(engine: str, *codes: EngineCode) -> dict[str, EngineFormat]:
    return {str(code): EngineFormat(engine, code, code) for code in codes}


def _turboquant(cache: EngineCache) -> EngineFormat:
    """vLLM's TurboQuant, whose keys are rotated integers, or 8-bit floats."""
    name = cache.name
    turned = TurboKeyCode(int(cache.key_bits), name)
    keys = turned if cache.rotates else EngineFloat8Code(rounds_queries=False, name=name)
    return EngineFormat("vllm", keys, TurboValueCode(int(cache.value_bits), name), wide_ends=cache.unquantised_ends)


ENGINES: dict[str, dict[str, EngineFormat]] = {
    LLAMA_CPP: {
        kind: EngineFormat(
            LLAMA_CPP, LlamaCppCode(GgmlCode(kind), is_keys=True), LlamaCppCode(GgmlCode(kind), is_keys=False)
        )
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

TokenwiseFormat = TokenFormat | EngineFormat
"""A format in which each token is coded by itself."""

CacheFormat = TokenwiseFormat | KiviCode
"""A format of the keys and values of a cache."""


def _any_of(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


INTEGERS, KIVI = [f"int{bits}" for bits in BITS], [f"kivi{bits}" for bits in kivi.BITS]
SPELLINGS = (
    f"{_any_of(INTEGERS)}, {Float8Code()}, int8/int4 (keys/values), {_any_of(KIVI)}, or an engine's own, such as"
    " llama.cpp:q4_0; docs/speed.md has all"
)
"""The families of formats, in words."""


def parse_format(spelling: object, *, name: str = "quantize") -> CacheFormat:
    """Read a user's spelling of a cache format.

    For example ``str(parse_format("int8/int8"))`` is ``"int8"``, and ``parse_format("kivi4").block`` is 64.

    Args:
        spelling: of one of `SPELLINGS`.
        name: what an error calls the argument.

    Raises:
        ArgumentError: it is not one of them.
    """
    if isinstance(spelling, str):
        if (parts := _KIVI.fullmatch(spelling)) is not None:
            bits, block, recent = parts.groups()
            return KiviCode(int(bits), int(block or kivi.BLOCK), int(recent or 0))
        engine, _, names = spelling.partition(":")
        caches, sides = ENGINES.get(engine, {}), names.split("/")
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
        spelling: an engine, a colon and a name of `ENGINES`.
        name: what an error calls the argument.

    Raises:
        ArgumentError: it is not one of them.
    """
    if str(spelling).partition(":")[0] not in ENGINES:
        examples = _any_of(f"{engine}:{list(caches)[-1]}" for engine, caches in ENGINES.items())
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
