"""Files of codes (`kv_cache.safetensors`) that lie, made of a genuine one."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from benchmarks.trust.hostile import Draw
from safetensors.torch import load, save
from torch import Tensor

_SAVED = (
    *(torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.uint16, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)
_NUMBERS = (0, -1, 1, 2, 7, 8, 9, 16, 255, 2**31, -(2**63), 10**40, 3.0, 0.5, float("nan"), float("inf"), True)
_OTHER = (None, "4", "", [], [4], {}, {"a": 1})


class Content(NamedTuple):
    """A file's tensors, and what it says of them."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


def lie(content: bytes, draw: Draw) -> bytes:
    """The content of another file, in which one to three things are not as they were.

    Args:
        content: of a genuine file.
        draw: what is drawn.
    """
    if draw.chance(0.2):
        return _other_bytes(content, draw)
    size = struct.unpack("<Q", content[:8])[0]
    about = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["headwise"])
    said = Content(load(content), about)
    for _ in range(draw.pick.choice((1, 1, 1, 2, 3))):
        draw.pick.choice(_LIES)(said, draw)
    text = draw.pick.choice((json.dumps(said.about),) * 30 + ("", "[]", "null", "{", "[" * 10**5))
    saved = save(dict(said.tensors), metadata={"headwise": text} if draw.chance(0.98) else None)
    return _other_header(saved, draw) if draw.chance(0.2) else saved


def _other_bytes(content: bytes, draw: Draw) -> bytes:
    """The same file with other bytes, fewer, or more."""
    data, pick = bytearray(content), draw.pick
    for _ in range(pick.choice((1, 1, 3, 20))):
        place = pick.randrange(len(data) if draw.chance(0.3) else min(len(data), 2000))
        data[place] = pick.randrange(256)
    if draw.chance(0.2):
        del data[pick.randrange(len(data)) :]
    if draw.chance(0.1):
        data += bytes(pick.randrange(100))
    if draw.chance(0.1):
        data[:8] = struct.pack("<Q", pick.choice((0, 1, 7, len(data), 2**31, 2**63, 2**64 - 1)))
    return bytes(data)


def _other_header(content: bytes, draw: Draw) -> bytes:
    """The same tensors with another dtype, shape or place in the header."""
    size = struct.unpack("<Q", content[:8])[0]
    header, pick = json.loads(content[8 : 8 + size]), draw.pick
    name = pick.choice(list(header))
    entry = header[name]
    if name == "__metadata__":
        return content
    match pick.choice(("dtype", "shape", "data_offsets", "name")):
        case "dtype":
            entry["dtype"] = pick.choice(("F64", "F16", "I8", "U8", "BOOL", "F8_E8M0", "F4", "C64", "X", "", 3, None))
        case "shape":
            entry["shape"] = pick.choice(
                ([], [0], [-1], [2**63], [1, *entry["shape"]], [*entry["shape"], 1], 3, None)
            )
        case "data_offsets":
            first, last = entry["data_offsets"]
            entry["data_offsets"] = pick.choice(
                ([last, first], [first, 2**62], [0, last - first], [first + 4, last + 4])
            )
        case "name":
            header[pick.choice(("", "0.offset", "0.first_offset", "../0.scale", "0.offset\0"))] = header.pop(name)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


# --- what files say ---------------------------------------------------------------------------------------------


def _layer(said: Content, draw: Draw) -> dict[str, Any]:
    layers = said.about.get("layers")
    layer = draw.pick.choice(list(layers.values())) if isinstance(layers, dict) and layers else {}
    return layer if isinstance(layer, dict) else {}


def _numbers(said: Content, draw: Draw) -> list[Any]:
    """One of a layer's lists: of bits, of widths of sections, or of parts."""
    layer = _layer(said, draw)
    numbers = layer.get(draw.pick.choice(("bits", "first_bits", "sections", "parts")))
    return numbers if isinstance(numbers, list) else []


def _one_number(said: Content, draw: Draw) -> None:
    if numbers := _numbers(said, draw):
        numbers[draw.pick.randrange(len(numbers))] = draw.pick.choice((*_NUMBERS, *_NUMBERS, *_OTHER))


def _other_bits(said: Content, draw: Draw) -> None:
    """Bits that codes may have, and that the file was not made with: they lie, and none can tell."""
    layer = _layer(said, draw)
    for name in ("bits", "first_bits"):
        if isinstance(layer.get(name), list):
            layer[name] = [draw.pick.randint(1, 8) for _ in layer[name]]


def _other_order(said: Content, draw: Draw) -> None:
    draw.pick.shuffle(_numbers(said, draw))


def _moved_border(said: Content, draw: Draw) -> None:
    """Two neighbouring widths with another border between them."""
    numbers = _numbers(said, draw)
    if len(numbers) > 1 and all(type(number) is int for number in numbers):
        at, by = draw.pick.randrange(len(numbers) - 1), draw.pick.choice((1, -1, 4, numbers[0]))
        numbers[at], numbers[at + 1] = numbers[at] + by, numbers[at + 1] - by


def _other_length(said: Content, draw: Draw) -> None:
    numbers = _numbers(said, draw)
    if numbers and draw.chance(0.5):
        numbers.pop()
    else:
        numbers += numbers[:1] * draw.pick.choice((1, 2, 10**4))


def _other_field(said: Content, draw: Draw) -> None:
    where = draw.pick.choice((said.about, _layer(said, draw)))
    if where:
        where[draw.pick.choice(list(where))] = draw.pick.choice((*_NUMBERS, *_OTHER))


def _other_name(said: Content, draw: Draw) -> None:
    layers = said.about.get("layers")
    if isinstance(layers, dict) and layers:
        name = draw.pick.choice(list(layers))
        layers[draw.pick.choice(("-1", "00", "7", "x", "1e0", "9" * 5000, "٣", "")) if draw.chance(0.7) else "0"] = (
            layers[name]
        )
        if draw.chance(0.5):
            layers.pop(name)


def _tensor_name(said: Content, draw: Draw) -> str | None:
    return draw.pick.choice(sorted(said.tensors)) if said.tensors else None


def _other_numbers(said: Content, draw: Draw) -> None:
    """Offsets and scales of any size, most of which no rule forbids."""
    if (name := _tensor_name(said, draw)) is not None:
        x = said.tensors[name]
        kind: Callable[..., Tensor] = draw.pick.choice((draw.numbers, draw.finite, draw.positive, draw.positive))
        said.tensors[name] = kind(*x.shape)


def _other_dtype(said: Content, draw: Draw) -> None:
    if (name := _tensor_name(said, draw)) is not None:
        said.tensors[name] = draw.bits(len(said.tensors[name].flatten()), dtype=draw.pick.choice(_SAVED))


def _other_shape(said: Content, draw: Draw) -> None:
    if (name := _tensor_name(said, draw)) is not None:
        x = said.tensors[name].flatten()
        shapes = (
            x[:-1],
            x[:0],
            x[:1],
            x[None],
            x[:, None],
            x[:1].reshape(()),
            torch.cat((x, x)),
            torch.cat((x, x[:1])),
        )
        said.tensors[name] = draw.pick.choice(shapes).clone()


def _exchanged(said: Content, draw: Draw) -> None:
    """Two tensors with each other's names, such as those of two layers."""
    if said.tensors:
        first, second = (draw.pick.choice(sorted(said.tensors)) for _ in range(2))
        said.tensors[first], said.tensors[second] = said.tensors[second].clone(), said.tensors[first].clone()


def _dropped(said: Content, draw: Draw) -> None:
    if (name := _tensor_name(said, draw)) is not None:
        del said.tensors[name]


def _as_first_version(said: Content, draw: Draw) -> None:
    """A file of the first version, whose first tokens have no code of their own; its other tensors stay."""
    said.about["format"] = draw.pick.choice((1, 1, 1, 1.0, True, 0, 3, "1", None))


_LIES: tuple[Callable[[Content, Draw], None], ...] = (
    *(_one_number, *(_other_bits,) * 5, _other_order, _moved_border, _other_length, _other_field, _other_name),
    *(*(_other_numbers,) * 5, _exchanged, _other_dtype, _other_shape, _exchanged, _dropped, _as_first_version),
)
