"""Calls of the GPU's kernels with hostile tensors, by Triton's interpreter, on a machine without a GPU.

The interpreter reads and writes memory at the addresses that a kernel computes. No sanitizer watches it; but all that
a kernel is given lies at the end of pages behind which nothing may be touched (`hostile`), so that a read behind it
ends the process. `benchmarks.trust.sanitizers` runs this module with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from benchmarks.trust.hostile import Draw, Guarded
from benchmarks.trust.kernel_calls import (
    Part,
    arguments_of,
    integers,
    problem,
    random_code,
    run_part,
    scoring,
    trellis,
)
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from headwise.runtime.kernels import gpu
from headwise.runtime.quantization import groups, transform_code, trellis_format
from headwise.runtime.quantization.transform_code import channel_layout, latent_shape
from headwise.runtime.quantization.trellis import tables


def plain(draw: Draw) -> None:
    """Keys and values as they are."""
    B, K, G, S, T, dtype = sizes = problem(draw)
    D, V = draw.pick.choices((16, 20, 33, 64), k=2)
    query = draw.placed(draw.numbers(B, K * G, S, D, dtype=dtype))
    key, value = (draw.placed(draw.numbers(B, K, T, width, dtype=dtype)) for width in (D, V))
    gpu.attend_split(query, key, value, scoring(draw, sizes, T), parts=2)


def coding(draw: Draw) -> None:
    """Trellis codes of values of any finite size, and what any bytes are decoded as.

    Where all errors are NaN, the interpreter finds no least one and says so; a GPU takes any.
    """
    code = random_code(draw, latent_shape(draw.pick.choice((1, 7, 16, 20)), draw.pick.choice((0, 2))))
    W, rows = code.width, draw.pick.choice((1, 2))
    values, squares = (draw.placed(draw.finite(rows, W).clamp(-1e9, 1e9)) for _ in range(2))
    starts, bits = draw.placed(draw.bits(rows)), draw.placed(code.channel_bits, is_dense=True)
    gpu.encode_windows(values, squares, bits, draw.placed(tables(), is_dense=True), starts)
    codes = draw.placed(draw.bits(5, code.token_bytes))
    gpu.decode_trellis(codes, torch.arange(5) * codes.stride(0), placed_layout(draw, code), torch.float32)


def placed_layout(draw: Draw, code: Any) -> gpu.ChannelLayout:
    """A code's layout, whose tensors end where memory ends."""
    layout = channel_layout(code, None, None)
    tensors = {field.name: getattr(layout, field.name) for field in fields(layout)}
    own = {name: draw.placed(x, is_dense=True) for name, x in tensors.items() if isinstance(x, Tensor) and x.numel()}
    return replace(layout, **own)


PARTS = {
    "plain": Part(plain, ("attend_part", "join_parts"), is_interpreted=True),
    "integers": Part(integers, ("attend_part_of_codes",), is_interpreted=True),
    "trellis": Part(trellis, ("attend_part_of_trellis",), is_interpreted=True),
    "coding": Part(coding, ("walk_trellis", "decode_tokens"), is_interpreted=True),
}
"""Cases by name, and the kernels that each is to launch."""


def read_behind_pages() -> None:
    """The last row of codes is one byte short, behind which is no memory."""
    draw = Draw(0, Guarded(), is_interpreted=True)
    code = random_code(draw, latent_shape(16, 0))
    codes = draw.placed(draw.bits(1, code.token_bytes - 1), is_dense=True)
    gpu.decode_trellis(codes, torch.tensor([0]), placed_layout(draw, code), torch.float32)


FAULTS: dict[str, Callable[[], None]] = {"pages": read_behind_pages}
"""What must end a process."""


def count_launches() -> Counter[str]:
    """Launches of each kernel from now on; tensors of the CPU are then taken for those of a GPU."""
    launches, run = Counter[str](), InterpretedFunction.run

    def counted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        launches[self.fn.__name__] += 1
        return run(self, *arguments, **keywords)

    InterpretedFunction.run = counted
    for module in (groups, transform_code, trellis_format):
        module.is_on_gpu = lambda _: True  # type: ignore[assignment]
    transform_code.can_encode = lambda: False  # type: ignore[assignment]
    return launches


def main(arguments: Sequence[str] | None = None) -> None:
    options = arguments_of(arguments, __doc__)
    if options.what in FAULTS:
        FAULTS[options.what]()
    else:
        run_part(PARTS[options.what], count_launches(), options.start, options.wanted, Counter(options.so_far))


if __name__ == "__main__":
    main()
