"""Sizes that Python and the compiled kernels of trellis codes share: they are compiled into the library from here."""

from __future__ import annotations

CHANNELS = 16
"""Channels that share a number of bits, so that a kernel decodes them together; a section's last block may have
fewer."""

SINKS = 4
"""The first tokens of a sequence, which are stored without codes: attention rests on them, and their values are
unlike any others."""

TURN = 64
"""Slots after which the rotations of a layout's table are repeated, from a slot whose whole rotation is read."""


def definitions() -> tuple[str, ...]:
    """The sizes as a compiler's options, such as ``-DHEADWISE_SINKS=4``; the sources have no others."""
    return f"-DHEADWISE_CHANNELS={CHANNELS}", f"-DHEADWISE_SINKS={SINKS}", f"-DHEADWISE_TURN={TURN}"
