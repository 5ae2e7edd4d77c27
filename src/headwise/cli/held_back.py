"""What libraries print by themselves, held back while a command works, so that a refusal is one line."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, BinaryIO

from headwise.cli.printable import PrintableConsole, printable
from headwise.errors import HeadwiseError


@contextmanager
def held_back(err: PrintableConsole) -> Iterator[None]:
    """Keep warnings, logs and what native code prints until the block is over.

    It follows on stderr then, unless the block is refused or interrupted, of which one line says all. Python's own
    stdout goes on printing, as a document on it must hold nothing else.

    Args:
        err: prints on stderr all the while.
    """
    try:
        held: BinaryIO = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (closed below)
    except OSError:  # no room for it anywhere
        yield
        return
    is_shown = True
    with held:
        try:
            with ExitStack() as until:
                until.enter_context(_warnings_into(held))
                until.enter_context(_descriptor_into(held, 1, sys.stdout, _lead_stdout(sys.stdout)))
                until.enter_context(_descriptor_into(held, 2, sys.stderr, err.lead_to))
                yield
        except (HeadwiseError, KeyboardInterrupt):
            is_shown = False
            raise
        finally:
            held.seek(0)
            if is_shown and (text := held.read().decode(errors="replace")):
                sys.stderr.write(printable(text))


@contextmanager
def _warnings_into(held: BinaryIO) -> Iterator[None]:
    def keep(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        with suppress(OSError):
            held.write(warnings.formatwarning(message, category, filename, lineno).encode(errors="replace"))

    before, warnings.showwarning = warnings.showwarning, keep
    try:
        yield
    finally:
        warnings.showwarning = before


def _lead_stdout(stream: Any) -> Callable[[IO[str] | None], None]:
    def lead(file: IO[str] | None) -> None:
        sys.stdout = file or stream

    return lead


@contextmanager
def _descriptor_into(
    held: BinaryIO, number: int, stream: Any, lead: Callable[[IO[str] | None], None]
) -> Iterator[None]:
    """Let a standard descriptor, on which native code prints, lead to ``held``.

    Args:
        held: the file.
        number: the descriptor.
        stream: Python's, at it; where it is elsewhere, such as a test's in memory, nothing is changed.
        lead: told the file that leads where the descriptor did before, and None at the end.
    """
    if not isinstance(stream, io.TextIOWrapper) or _descriptor(stream) != number:
        yield
        return
    stream.flush()
    before = os.dup(number)
    with open(os.dup(number), "w", encoding=stream.encoding, errors=stream.errors, buffering=1) as terminal:
        os.dup2(held.fileno(), number)
        lead(terminal)
        try:
            yield
        finally:
            with suppress(OSError):
                stream.flush()  # into the file
            os.dup2(before, number)
            os.close(before)
            lead(None)


def _descriptor(stream: io.TextIOWrapper) -> int | None:
    """Where a stream leads; None for one that is kept in memory, or closed."""
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None
