"""What commands and libraries print, without control characters.

Text from files is escaped before it reaches a terminal. What libraries print while a command works is held back, so
that an error is one line on stderr.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from headwise.base.printable import printable
from headwise.base.tables import Table
from headwise.errors import HeadwiseError


class PrintableConsole(Console):
    """A rich console that escapes control characters of the text; rich adds its own for colours afterwards."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape and render a string; rich calls this for every string, in tables too."""
        return super().render_str(printable(text), **options)

    def print_table(self, table: Table, columns: int = 0) -> None:
        """Print a table, in up to so many columns where no terminal limits them."""
        before = self._width
        if not self.is_terminal:
            self._width = max(self.width, columns)
        try:
            self.print(table.terminal())
        finally:
            self._width = before

    def lead_to(self, file: IO[str] | None) -> None:
        """Print to a file from now on, or when None to the current standard stream."""
        self._file = file


@contextmanager
def held_back(err: PrintableConsole) -> Iterator[None]:
    """Hold back warnings, logs and the output of native code until the end of the block.

    They are then written to stderr, unless the block ends with an error of the user's or an interruption, for which
    one line is enough, or a quiet process ends it without an error. Python's own stdout is not held back: a JSON
    document goes there, and nothing else.

    Args:
        err: the console that keeps printing on stderr during the block.
    """
    try:
        buffer = tempfile.NamedTemporaryFile(buffering=0)  # noqa: SIM115  (closed below)
    except OSError:  # no temporary folder has space
        yield
        return
    is_shown = True
    with buffer:
        try:
            with ExitStack() as redirections:
                if _is_standard(sys.stderr, 2):
                    redirections.enter_context(_printed_after_a_crash(buffer.name))
                redirections.enter_context(_warnings_into(buffer))
                redirections.enter_context(_descriptor_into(buffer, 1, sys.stdout, _replace_stdout(sys.stdout)))
                redirections.enter_context(_descriptor_into(buffer, 2, sys.stderr, err.lead_to))
                yield
            is_shown = not err.quiet
        except (HeadwiseError, KeyboardInterrupt):
            is_shown = False
            raise
        finally:
            buffer.seek(0)
            if is_shown and (text := buffer.read().decode(errors="replace")):
                sys.stderr.write(printable(text))


@contextmanager
def _printed_after_a_crash(file: str) -> Iterator[None]:
    """Have a shell print a file on stderr and remove it, should native code end this process within the block.

    The only message of such an end is in the file, and no code of this process runs after it.
    """
    command = 'read -r left || { cat -v "$0" >&2; rm -f "$0"; }'
    try:
        shell = subprocess.Popen(["sh", "-c", command, file], stdin=subprocess.PIPE, bufsize=0)
    except OSError:  # there is no shell
        yield
        return
    with shell:
        try:
            yield
        finally:
            with suppress(OSError):  # Ctrl-C has ended the shell too
                assert shell.stdin is not None
                shell.stdin.write(b"\n")


@contextmanager
def _warnings_into(buffer: IO[bytes]) -> Iterator[None]:
    def write(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
    ) -> None:
        with suppress(OSError):
            buffer.write(warnings.formatwarning(message, category, filename, lineno).encode(errors="replace"))

    before, warnings.showwarning = warnings.showwarning, write
    try:
        yield
    finally:
        warnings.showwarning = before


def _replace_stdout(stream: Any) -> Callable[[IO[str] | None], None]:
    def replace(file: IO[str] | None) -> None:
        sys.stdout = file or stream

    return replace


@contextmanager
def _descriptor_into(
    buffer: IO[bytes], number: int, stream: Any, replace: Callable[[IO[str] | None], None]
) -> Iterator[None]:
    """Redirect a standard file descriptor, on which native code prints, to a file.

    Args:
        buffer: the file.
        number: the descriptor.
        stream: Python's stream for the descriptor. If it writes elsewhere, such as into memory in a test, nothing is
            redirected.
        replace: called with a stream that writes where the descriptor wrote before, and with None at the end.
    """
    if not _is_standard(stream, number):
        yield
        return
    stream.flush()
    before = os.dup(number)
    with open(os.dup(number), "w", encoding=stream.encoding, errors=stream.errors, buffering=1) as terminal:
        os.dup2(buffer.fileno(), number)
        replace(terminal)
        try:
            yield
        finally:
            with suppress(OSError):
                stream.flush()  # writes what is left to the buffer
            os.dup2(before, number)
            os.close(before)
            replace(None)


def _is_standard(stream: Any, number: int) -> bool:
    """Whether a stream writes to a descriptor; False for a stream in memory, or a closed one."""
    with suppress(OSError, ValueError):
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    return False
