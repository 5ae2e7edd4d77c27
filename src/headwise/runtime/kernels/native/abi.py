"""What Python and the compiled kernels share: sizes, types, and the arguments of each kernel.

Each is declared once, here. `header` writes the declarations in C++; `headwise.runtime.kernels.native.build` compiles
the sources with them as ``abi.h``. Strides are in numbers, and the last dimension of a tensor is dense.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, N tokens in codes, D head dim, V value
dim, P rotary dims, F frequencies of the model.
"""

from __future__ import annotations

from ctypes import Array, Structure, c_double, c_int32, c_int64, c_void_p, sizeof
from typing import Any, ClassVar

import torch

CHANNELS = 16
"""Channels that share a number of bits, so that a kernel decodes them together; a section's last block may have
fewer."""

TURN = 64
"""Slots after which the rotations of a layout's table are repeated, from a slot whose whole rotation is read."""

MOST_ROWS = 8
"""The most rows that the linear kernel supports; up to about this number, reading the weights takes most of the
time."""

NO_MEMORY = 1
"""What a kernel returns where it could not allocate its working memory; it returns 0 where it has done its work."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of numbers that the kernels read, and their numbers in the sources."""


def _pointer(to: str) -> type[c_void_p]:
    """A pointer whose type in C++ is ``to *``."""
    return type("Pointer", (c_void_p,), {"to": to})


_INPUT, _OUTPUT = _pointer("const void"), _pointer("void")
_FLOATS, _BYTES, _WHOLE = _pointer("const float"), _pointer("const uint8_t"), _pointer("const int64_t")
_INTEGERS = _pointer("const int32_t")
_HALVES, _LEVELS, _BLOCKS = _pointer("const uint16_t"), _pointer("const int8_t"), _pointer("const CodedBlock")
_NEW_FLOATS, _NEW_BYTES = _pointer("float"), _pointer("uint8_t")
_STRIDES = c_int64 * 3


class CodedBlock(Structure):
    """Neighbouring channels in trellis codes of one number of bits."""

    _fields_: ClassVar[Any] = [
        ("column", c_int32),  # where their levels go
        ("width", c_int32),  # how many they are
        ("bits", c_int32),  # of each
        ("first", c_int32),  # the bit of the stream with which the first one's window begins
    ]


class Arguments(Structure):
    """What every kernel of attention is given. G query heads share a key–value head."""

    _fields_: ClassVar[Any] = [
        ("query", _INPUT),  # [B, H, S, D]
        ("key", _INPUT),  # [B, K, T, D]
        ("value", _INPUT),  # [B, K, T, V]
        ("out", _OUTPUT),  # [B, H, S, V]
        ("mask", _BYTES),  # true where a query attends, or null
        *((size, c_int64) for size in "BKGSTDV"),
        ("query_stride", _STRIDES),  # batch, head, token
        ("out_stride", _STRIDES),
        ("key_stride", _STRIDES),
        ("value_stride", _STRIDES),
        ("mask_stride", c_int64 * 4),  # batch, query head, new token, token
        ("lengths", _INTEGERS),  # [B], the tokens of each sequence, or null where all have T
        ("behind", c_int64),  # new tokens behind the S ones
        ("causal", c_int64),  # a new token sees those up to itself
        ("window", c_int64),  # the latest so many, or all when 0
        ("threads", c_int64),
        ("scale", c_double),  # multiplies the scores
    ]


class FusedArguments(Arguments):
    """Keys and values of the queries' type, or int8 with a factor for each token and head."""

    _fields_: ClassVar[Any] = [
        ("key_scale", _FLOATS),  # [B, K, T], or null
        ("value_scale", _FLOATS),
        ("key_scale_stride", _STRIDES),
        ("value_scale_stride", _STRIDES),
    ]


class TrellisArguments(Arguments):
    """Tokens in trellis codes.

    K is 1 and G all query heads. The keys are the codes, uint8 ``[B, T, bytes]``, and the values those of first
    tokens, bfloat16 ``[B, wide, values of a token]``. Codes in pages are ``[pages, page, bytes]``, and the stride of
    a batch is then that of a page.
    """

    _fields_: ClassVar[Any] = [
        ("first", _WHOLE),  # [B], the slot of each sequence's first token
        ("blocks", _BLOCKS),  # [count]
        ("tables", _LEVELS),  # [9, 256], whole levels of the windows of codes of so many bits
        ("pairs", _LEVELS),  # [2^17, 2], those of two neighbours: of b bits from 2^(8 + b) on
        ("gains", _FLOATS),  # [16], of each gain number
        ("level_scale", _FLOATS),  # [columns], of a whole level; 0 in columns that pad
        ("level_offset", _FLOATS),  # [columns]
        ("turn_cos", _FLOATS),  # [TURN, half], rotation by a number of slots
        ("turn_sin", _FLOATS),
        ("cos", _FLOATS),  # [slots, F], rotation by a slot
        ("sin", _FLOATS),
        ("frequency", _WHOLE),  # [P / 2], each pair's column in those
        *((size, c_int64) for size in ("count", "P", "bytes", "frequencies")),
        ("wide", c_int64),  # the first tokens whose values replace their codes
        (
            "first_blocks",
            _BLOCKS,
        ),  # of a sequence's first token, whose code these are of; or null, and its value given
        ("first_scale", _FLOATS),
        ("first_offset", _FLOATS),
        ("table", _INTEGERS),  # [B, table_stride], the pages of each sequence in their order, or null
        *((size, c_int64) for size in ("table_stride", "page", "pages")),  # a page's tokens, and all pages
    ]


class CodedArguments(TrellisArguments):
    """Latents; D is R + P, or P where queries have no content, and V is R."""

    _fields_: ClassVar[Any] = [
        ("has_sums", c_int64)
    ]  # whether a row of the result ends with its sum of weights, 1 or 0


class HeadsArguments(TrellisArguments):
    """Keys and values of heads; those without codes are ``heads · (D + V)`` of a token."""

    _fields_: ClassVar[Any] = [("heads", c_int64)]


class RowFormat(Structure):
    """How the keys, or the values, of tokens are stored in integer codes."""

    _fields_: ClassVar[Any] = [
        ("bits", c_int64),
        ("group", c_int64),  # channels of a group
        ("groups", c_int64),  # 0 where scales belong to blocks
        ("codes", c_int64),  # bytes of a row before its groups' scales, which are followed by their zero points
    ]


class AffineArguments(Arguments):
    """Keys and values in integer codes: rows of bytes of the first N tokens, whose strides are in bytes."""

    _fields_: ClassVar[Any] = [
        ("key_rows", RowFormat),
        ("value_rows", RowFormat),
        ("coded", c_int64),  # N
        ("block", c_int64),  # the tokens of a block of keys whose channels have scales
        ("block_scale", _HALVES),  # float16, scales and then zero points [B, K, blocks, 2 D]; or null
        ("block_scale_stride", _STRIDES),
        ("late_key", _INPUT),  # of the other tokens, [B, K, T - N, D] of the queries' type
        ("late_value", _INPUT),
        ("late_key_stride", _STRIDES),
        ("late_value_stride", _STRIDES),
    ]


class LinearArguments(Structure):
    """``y = x Wᵀ + b``."""

    _fields_: ClassVar[Any] = [
        ("x", _INPUT),  # [rows, inputs]
        ("weight", _INPUT),  # [outputs, inputs]
        ("bias", _INPUT),  # [outputs], or null
        ("y", _OUTPUT),  # [rows, outputs]
        *((size, c_int64) for size in ("rows", "inputs", "outputs")),
        *((stride, c_int64) for stride in ("x_stride", "weight_stride", "y_stride")),
        ("threads", c_int64),
    ]


class ProjectionArguments(Structure):
    """A linear layer's parameters."""

    _fields_: ClassVar[Any] = [("weight", _INPUT), ("bias", _INPUT)]  # [outputs, inputs] and [outputs]; or null


class NormArguments(Structure):
    """RMSNorm's parameters."""

    _fields_: ClassVar[Any] = [("weight", _INPUT), ("eps", c_double)]  # [width], or null where there is no norm


class GainsArguments(Structure):
    """The gains of the codes of rows of values."""

    _fields_: ClassVar[Any] = [
        ("values", _FLOATS),  # [rows, width]
        ("offset", _FLOATS),  # [width]
        ("scale", _FLOATS),
        ("noise", _FLOATS),  # [width], of the bits of each channel
        ("reach", _FLOATS),
        ("gains", _FLOATS),  # [16], of each number
        ("parts", _WHOLE),  # [count], the widths of the parts with a gain of their own
        ("starts", _NEW_BYTES),  # [rows], the numbers of a token's gains, four bits each
        ("normal", _NEW_FLOATS),  # [rows, width], values over scale and gain
        ("of_channel", _NEW_FLOATS),  # [rows, width], the gain
        *((size, c_int64) for size in ("rows", "width", "count", "tried")),
        ("zero", c_int64),  # the number of the gain 1
        ("threads", c_int64),
        ("step", c_double),  # between neighbouring gains, as a factor
    ]


class CoderArguments(GainsArguments):
    """The codes of tokens, gains and all. ``starts``, ``normal`` and ``of_channel`` are null."""

    _fields_: ClassVar[Any] = [
        ("bits", _BYTES),  # [width], 1 to 8
        ("tables", _FLOATS),  # [9, 256], the levels of codes of 0 to 8 bits
        ("codes", _NEW_BYTES),  # [pages, page, bytes], whose strides are given
        ("slots", _WHOLE),  # [rows], the number of a page times its tokens, plus the place in it; below 0 for none
        *((size, c_int64) for size in ("page", "bytes", "page_stride", "token_stride")),
    ]


class StepArguments(FusedArguments):
    """A layer of a decoder, of Llama's form, for a few new tokens; R latent rank, P rotary dims.

    The cache, ``key`` and ``value``, has room for the new tokens at its end. Where it holds codes they are ``key``,
    which queries attend to by the arguments of its own kernel. Where R is not 0, K is 1 and D is N + P; latents, each
    with its rotary key, or their codes are ``key``, and their queries attend to them.
    """

    _fields_: ClassVar[Any] = [
        ("x", _INPUT),  # [B, S, hidden]
        ("y", _OUTPUT),  # [B, S, hidden]
        ("cos", _INPUT),  # [B, S, …], of the P / 2 pairs of a head's last dims
        ("sin", _INPUT),
        ("angle_stride", c_int64 * 2),  # batch, token
        *((name, NormArguments) for name in ("norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, ProjectionArguments) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("decoder", _INPUT),  # of latents, [H, N + V, R]; k is then what latents and rotary keys are of x
        *((size, c_int64) for size in ("hidden", "inner", "P", "R")),
        ("coder", _pointer("const CoderArguments")),  # or null; without values, slots, codes and their strides
        ("heads", _pointer("const HeadsArguments")),  # or null; without what all kernels of attention are given
        ("latents", _pointer("const CodedArguments")),
    ]


class DecoderArguments(Structure):
    """Values ``[rows, width]`` of rows of trellis codes."""

    _fields_: ClassVar[Any] = [
        ("codes", _BYTES),  # [rows, stride]
        ("blocks", _BLOCKS),  # [count]
        ("tables", _LEVELS),  # [9, 256], whole levels of the windows of codes of so many bits
        ("pairs", _LEVELS),  # [2^17, 2], those of two neighbours: of b bits from 2^(8 + b) on
        ("gains", _FLOATS),  # [16], of each gain number
        ("level_scale", _FLOATS),  # [columns], of a whole level
        ("level_offset", _FLOATS),  # [columns]
        ("out", _OUTPUT),  # [rows, width]
        *((size, c_int64) for size in ("rows", "width", "count", "bytes", "stride")),
        ("part", c_int64),  # the channels that have a token's first gain
        ("threads", c_int64),
    ]


class EncoderArguments(Structure):
    """Trellis codes of rows of values."""

    _fields_: ClassVar[Any] = [
        ("values", _FLOATS),  # [rows, width]
        ("gains", _FLOATS),  # [rows, width], factors of a value's error, or null
        ("weights", _FLOATS),  # [width], of squared errors
        ("bits", _BYTES),  # [width], 1 to 8
        ("tables", _FLOATS),  # [9, 256], the levels of codes of 0 to 8 bits
        ("starts", _BYTES),  # [rows], the byte of the stream before a row's codes
        ("codes", _NEW_BYTES),  # [rows, stride], or null; zero at first
        ("levels", _NEW_FLOATS),  # [rows, width]
        *((size, c_int64) for size in ("rows", "width", "stride", "threads")),
    ]


class MovedArguments(Structure):
    """Mean squares of the steps of blocks of keys after moves, each of which adds multiples of one or two rows."""

    _fields_: ClassVar[Any] = [
        ("keys", _FLOATS),  # [K, D, T]
        ("pairs", _FLOATS),  # [K, channels, T], the channels that are moved
        ("steps", _FLOATS),  # [moves, channels, channels]; times ``pairs`` they are what a move adds of the rows
        ("rows", _FLOATS),  # [channels, D]
        ("out", _NEW_FLOATS),  # [moves, K, D / block]
        *((size, c_int64) for size in ("moves", "K", "channels", "D", "T", "block")),
        ("range", c_int64),  # whether a step is the range of a block's numbers, and not the largest size; 1 or 0
        ("threads", c_int64),
    ]


KERNELS: dict[str, type[Structure]] = {
    "headwise_attention": FusedArguments,
    "headwise_coded": CodedArguments,
    "headwise_heads": HeadsArguments,
    "headwise_affine": AffineArguments,
    "headwise_linear": LinearArguments,
    "headwise_gains": GainsArguments,
    "headwise_trellis": EncoderArguments,
    "headwise_code": CoderArguments,
    "headwise_decode": DecoderArguments,
    "headwise_step": StepArguments,
    "headwise_moved": MovedArguments,
}
"""The kernels, and the arguments of each."""


def header() -> str:
    """``abi.h``: sizes, types, arguments and kernels as the sources know them."""
    sizes = {"CHANNELS": CHANNELS, "TURN": TURN, "MOST_ROWS": MOST_ROWS, "NO_MEMORY": NO_MEMORY}
    types = {str(dtype).removeprefix("torch.").upper(): number for dtype, number in TYPES.items()}
    declared: list[type[Structure]] = [CodedBlock, *KERNELS.values()]
    structures = dict.fromkeys(part for each in declared for part in _parts(each))
    lines = (
        "#pragma once",
        "#include <cstdint>",
        *(f"constexpr int {name} = {number};" for name, number in (sizes | types).items()),
        *map(_declaration, structures),
        *(f'extern "C" int {name}(const {call.__name__}*, int type);' for name, call in KERNELS.items()),
    )
    return "".join(f"{line}\n" for line in lines)


def _parts(structure: type[Structure]) -> list[type[Structure]]:
    """A structure behind those that its declaration names."""
    bases = [base for base in structure.__bases__ if base is not Structure]
    members = [kind for _, kind in structure._fields_ if issubclass(kind, Structure)]  # type: ignore[misc]
    return [part for other in (*bases, *members) for part in _parts(other)] + [structure]


def _declaration(structure: type[Structure]) -> str:
    base = structure.__bases__[0]
    heads = "" if base is Structure else f" : {base.__name__}"
    fields = "".join(f"  {_field(name, kind)};\n" for name, kind in structure._fields_)  # type: ignore[misc]
    name = structure.__name__
    return f"struct {name}{heads} {{\n{fields}}};\nstatic_assert(sizeof({name}) == {sizeof(structure)});"


def _field(name: str, kind: Any) -> str:
    if issubclass(kind, Array):
        return f"{_field(name, kind._type_)}[{kind._length_}]"
    if issubclass(kind, c_void_p):
        return f"{kind.to}* {name}"
    return f"{_NUMBERS.get(kind, kind.__name__)} {name}"


_NUMBERS = {c_int32: "int32_t", c_int64: "int64_t", c_double: "double"}
