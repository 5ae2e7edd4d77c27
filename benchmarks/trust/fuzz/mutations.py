"""Ways to spoil a file that is whole: by its bytes, and by the structure of its format.

Each is a function of the content and of a `Draw`, so that an input follows from a seed alone.
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any


class Draw(random.Random):
    """What an input follows from, and words that its reader knows, such as names of fields."""

    words: Sequence[str] = ("type",)

    def word(self) -> str:
        """One of the words."""
        return self.choice(self.words)

    def known(self) -> Any:
        """A value of a kind that fields have: a switch, a small number, a word, or lists and objects of them."""
        kind = self.randrange(9)
        if kind < 4:
            return (True, False, self.randrange(9), self.random())[kind]
        if kind == 4:
            return {self.word(): self.known() for _ in range(self.randrange(4))}
        if kind == 5:
            some = [self.known() for _ in range(self.randrange(1, 4))]
            return [self.choice(some) for _ in range(self.randrange(9))]
        return self.word()


Mutation = Callable[[bytes, Draw], bytes]

INTEGERS = (0, 1, -1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = (
    "", " ", "\0", "a\nb", "\x1b[31mred\x1b[0m", "../../../etc/passwd", "/etc/passwd", "C:\\x", "a" * 5000,
    "\u202eabc", "\ud800", "<script>alert(1)</script>", "{{ 1/0 }}", "%s%n", "NaN", "-1", "1e999", "0x10", "null",
    "F32", "BF16", "float16", "llama", "qwen2", "gemma3_text", "model.safetensors",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    *INTEGERS, *TEXTS, 10**30, -(2**63), 0.5, -0.0, 1e308, 5e-324, math.nan, math.inf, -math.inf, True, False, None,
    [], {}, [[]], [0], [1, 2, 3], [None], ["x"], {"a": 1}, {"": {}},
)  # fmt: skip
"""What stands in the place of another value: sizes that lie, no numbers, other types, names that escape."""


def other_value(draw: Draw) -> Any:
    """One of `VALUES`, as an object of its own."""
    return copy.deepcopy(draw.choice(VALUES))


ENCODINGS = ("utf-16", "utf-32", "utf-8-sig", "latin-1", "utf-7")


def spoil_bytes(content: bytes, draw: Draw) -> bytes:
    """Flip, overwrite, insert, remove, repeat and cut bytes."""
    spoiled = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        kind, at = draw.randrange(8), draw.randrange(len(spoiled) + 1)
        length = draw.choice((1, 2, 4, 8, 32, 200))
        if kind == 0 and at < len(spoiled):
            spoiled[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            spoiled[at : at + length] = draw.randbytes(len(spoiled[at : at + length]))
        elif kind == 2:
            spoiled[at:at] = draw.choice((draw.randbytes(length), b"\0" * length, b"\xff" * length, b"[" * 3000))
        elif kind == 3:
            del spoiled[at : at + length]
        elif kind == 4:
            spoiled[at:at] = spoiled[at : at + length] * draw.choice((1, 2, 50))
        elif kind == 5:
            del spoiled[at:]
        elif kind == 6:
            spoiled[at : at + length] = (b"\0", b"\xff")[draw.randrange(2)] * len(spoiled[at : at + length])
        else:
            form = draw.choice("HIQ")
            number = draw.choice(INTEGERS) % 2 ** (8 * struct.calcsize(form))
            spoiled[at : at + struct.calcsize(form)] = struct.pack("<" + form, number)
    return bytes(spoiled)


def spoil_json(content: bytes, draw: Draw) -> bytes:
    """Exchange, remove, move and double values of a JSON document; sometimes its text or its encoding."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return spoil_bytes(content, draw)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        document = _spoil_value(document, draw)
    text = json.dumps(document, ensure_ascii=draw.random() < 0.9, indent=draw.choice((None, 1)))
    return _spoil_text(text, draw)


def _spoil_text(text: str, draw: Draw) -> bytes:
    """The bytes of a text, now and then with doubled keys, deep nesting, a huge number, or in another encoding."""
    kind = draw.randrange(24)
    if kind == 0:  # a key twice, with another value
        text = re.sub(r"\{", '{"model_type": 7, "hidden_size": -1, ', text, count=1)
    elif kind == 1:
        depth = draw.choice((500, 5000, 100_000))
        text = re.sub(r": ", lambda _: ": " + "[" * depth + "]" * depth, text, count=1)
    elif kind == 2:
        text = re.sub(r"\d+", "9" * draw.choice((25, 400, 5000)), text, count=1)
    elif kind == 3:
        return text.encode(draw.choice(ENCODINGS), errors="replace")
    elif kind == 4:
        return spoil_bytes(text.encode(errors="surrogatepass"), draw)
    return text.encode(errors="surrogatepass" if kind == 5 else "backslashreplace")


def _places(value: Any, found: list[tuple[Any, Any]], depth: int = 0) -> list[tuple[Any, Any]]:
    """Every container with a key of it."""
    if depth < 30 and isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            _places(value[key], found, depth + 1)
    return found


def _spoil_value(document: Any, draw: Draw) -> Any:
    places = _places(document, [])
    if not places or draw.random() < 0.01:
        return other_value(draw)
    container, key = draw.choice(places)
    other, from_key = draw.choice(places)
    kind = draw.randrange(14)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[draw.choice((*TEXTS, from_key if isinstance(from_key, str) else "x"))] = container.pop(key)
    elif kind == 2:
        container[key] = json.loads(json.dumps(other[from_key])) if from_key in _keys(other) else None
    elif kind == 3 and isinstance(container[key], list):
        container[key] = container[key] * draw.choice((2, 100)) or [other_value(draw)]
    elif kind == 4 and isinstance(container[key], int | float):
        container[key] = draw.choice((-1, 2, 0.5, 1 / 3, 1000, 1e9)) * container[key] + draw.choice((0, 0, 1, -1))
    elif kind == 5 and isinstance(container[key], str):
        text = container[key]
        at = draw.randrange(len(text) + 1)
        container[key] = draw.choice((text[:at], text[at:], text[:at] + draw.choice(TEXTS) + text[at:], text.upper()))
    elif kind < 9 and isinstance(container, dict):
        container[draw.word()] = draw.known()
    elif kind == 9:
        container[key] = draw.known()
    else:
        container[key] = other_value(draw)
    return document


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def spoil_jsonl(content: bytes, draw: Draw) -> bytes:
    """Spoil one line of JSON lines, or the lines."""
    lines = content.splitlines(keepends=True)
    if draw.random() < 0.2 or not lines:
        return spoil_bytes(content, draw)
    at = draw.randrange(len(lines))
    lines[at] = spoil_json(lines[at], draw) + draw.choice((b"\n", b"\r\n", b"", b"\n\n"))
    return b"".join(lines)


def spoil_safetensors(content: bytes, draw: Draw) -> bytes:
    """Spoil the header of a safetensors file, its length, or the numbers behind it."""
    if draw.random() < 0.1 or len(content) < 8:
        return spoil_bytes(content, draw)
    size = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + size], content[8 + size :]
    kind = draw.randrange(12)
    if kind < 7:
        header = _spoil_tensors(header, draw) if draw.random() < 0.7 else spoil_json(header, draw)
        header += b" " * (-len(header) % 8)
    elif kind < 10:
        data = _spoil_numbers(data, draw)
    else:
        header, data = spoil_bytes(header, draw), data[: draw.choice((len(data), len(data) // 2))]
    length = draw.choice(INTEGERS) % 2**64 if draw.random() < 0.07 else len(header)
    return length.to_bytes(8, "little") + header + data


def _spoil_tensors(header: bytes, draw: Draw) -> bytes:
    """Lie about the shape, the dtype or the place of a tensor; or let two share a place."""
    document = json.loads(header)
    names = [name for name in document if name != "__metadata__"]
    if not names:
        return spoil_json(header, draw)
    entry = document[draw.choice(names)]
    other = document[draw.choice(names)]
    kind = draw.randrange(7)
    if kind == 0:
        entry["data_offsets"] = list(other["data_offsets"])
    elif kind == 1:
        entry["data_offsets"][draw.randrange(2)] = draw.choice((*INTEGERS, entry["data_offsets"][0] + 1))
    elif kind == 2:
        entry["dtype"] = draw.choice(("F64", "F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "x"))
    elif kind == 3:
        shape = entry["shape"]
        others = ([*shape, 1], shape[::-1], [math.prod(shape)], [], [0], [2**62, 2**62], shape * 9)
        entry["shape"] = draw.choice(others)
    elif kind == 4 and entry["shape"]:
        entry["shape"][draw.randrange(len(entry["shape"]))] = draw.choice(INTEGERS)
    elif kind == 5:
        document[draw.choice(TEXTS)] = entry
    else:
        del document[draw.choice(names)]
    return json.dumps(document).encode(errors="backslashreplace")


def _spoil_numbers(data: bytes, draw: Draw) -> bytes:
    """Put NaN, infinity, huge and denormal numbers, zeros and noise among numbers of any dtype."""
    spoiled = bytearray(data)
    for _ in range(draw.choice((1, 1, 4, 30))):
        if not spoiled:
            break
        at = draw.randrange(len(spoiled)) // 4 * 4
        piece = draw.choice(
            (
                struct.pack("<f", math.nan), struct.pack("<f", math.inf), struct.pack("<f", 3e38), b"\x00\x7e" * 2,
                b"\x00\x7c" * 2, b"\xff\x7b" * 2, b"\x01\x00" * 2, b"\x80\x7f" * 2, b"\xff" * 8, b"\0" * 64,
                draw.randbytes(draw.choice((1, 2, 34, 144))),
            )
        )  # fmt: skip
        spoiled[at : at + len(piece)] = piece[: len(spoiled) - at]
    return bytes(spoiled)


def spoil_gguf(content: bytes, draw: Draw) -> bytes:
    """Lie in a field of a GGUF header, exchange a value's type, or spoil the blocks behind it."""
    try:
        fields, end = _gguf_fields(content)
    except (struct.error, IndexError, KeyError):
        return spoil_bytes(content, draw)
    kind = draw.randrange(10)
    spoiled = bytearray(content)
    if kind < 6:
        for _ in range(draw.choice((1, 1, 2, 4))):
            at, form = draw.choice(fields)
            if form == "s":
                size = int.from_bytes(spoiled[at : at + 8], "little")
                text = draw.choice((draw.choice(TEXTS).encode(errors="surrogatepass"), draw.randbytes(size)))
                text = text[:size].ljust(size, draw.choice((b"a", b"\0", b"\xff")))  # offsets behind it stay
                spoiled[at + 8 : at + 8 + size] = text
            else:
                width = struct.calcsize(form)
                was = int.from_bytes(spoiled[at : at + width], "little")
                number = draw.choice((*INTEGERS, was + 1, was - 1, 2 * was, was // 2, 30, 13, 12, 9, 8, 4))
                spoiled[at : at + width] = (int(number) % 2 ** (8 * width)).to_bytes(width, "little")
        return bytes(spoiled)
    strings = [at for at, form in fields if form == "s"]
    if kind == 6 and strings:
        at = draw.choice(strings)
        size = int.from_bytes(content[at : at + 8], "little")
        text = draw.choice((draw.word(), draw.choice(TEXTS))).encode(errors="surrogatepass")
        header = content[:at] + len(text).to_bytes(8, "little") + text + content[at + 8 + size : end]
        return header + b"\0" * (-len(header) % 32) + content[end + -end % 32 :]
    if kind == 7:
        return content[:end] + _spoil_numbers(content[end:], draw)
    return spoil_bytes(content[:end], draw) + content[end:] if kind == 8 else spoil_bytes(content, draw)


def spoil_blocks(content: bytes, draw: Draw) -> bytes:
    """Spoil what lies behind a GGUF header mostly: the blocks of quantised numbers."""
    try:
        _, end = _gguf_fields(content)
    except (struct.error, IndexError, KeyError):
        return spoil_bytes(content, draw)
    if draw.random() < 0.2:
        return spoil_gguf(content, draw)
    return content[:end] + _spoil_numbers(content[end:], draw)


_WIDTHS = {0: "B", 1: "B", 2: "H", 3: "H", 4: "I", 5: "I", 6: "I", 7: "B", 10: "Q", 11: "Q", 12: "Q"}


def _gguf_fields(content: bytes) -> tuple[list[tuple[int, str]], int]:
    """The offset and the form of every number and string of a whole header, and the offset of its end."""
    fields: list[tuple[int, str]] = []
    at = 4

    def number(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, content, at)
        fields.append((at, form))
        at += struct.calcsize(form)
        return int(value)

    def string() -> None:
        nonlocal at
        size = number("Q")
        fields[-1] = (at - 8, draw_string)
        fields.append((at - 8, "Q"))
        at += size

    def value(kind: int) -> None:
        if kind == 8:
            string()
        elif kind == 9:
            item, count = number("I"), number("Q")
            for _ in range(count):
                value(item)
        else:
            number(_WIDTHS[kind])

    draw_string = "s"
    number("I")
    tensors, entries = number("Q"), number("Q")
    for _ in range(entries):
        string()
        value(number("I"))
    for _ in range(tensors):
        string()
        for _ in range(number("I")):
            number("Q")
        number("I"), number("Q")
    return fields, at


def spoil_lines(content: bytes, draw: Draw) -> bytes:
    """Spoil the words of a text of lines, such as TOML or a list of checksums."""
    lines = content.decode(errors="replace").splitlines(keepends=True)
    if draw.random() < 0.25 or not lines:
        return spoil_bytes(content, draw)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(lines))
        words = re.split(r"(\s+|[=\[\],.]|\"[^\"]*\")", lines[at])
        others = ("nan", "-inf", "[a]", "1979-05-27", '"""', "=", "0o7")
        word = draw.choice((*TEXTS, *map(json.dumps, (*VALUES, draw.known())), draw.word(), *others))
        kind = draw.randrange(5)
        if kind == 0:
            lines[at] = lines[draw.randrange(len(lines))] * draw.choice((1, 2, 40))
        elif kind == 1:
            lines[at] = ""
        else:
            words[draw.randrange(len(words))] = word
            lines[at] = "".join(words)
    text = "".join(lines)
    return text.encode(draw.choice(ENCODINGS), "replace") if draw.random() < 0.03 else text.encode(errors="replace")
