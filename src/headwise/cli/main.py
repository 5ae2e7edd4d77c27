"""The entry point of the ``headwise`` command: errors in one line, and exit statuses."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import threading
from functools import cache
from typing import Any

from headwise.base.printable import printable
from headwise.errors import ArgumentError, HeadwiseError

_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status.

    The status is 0 for success, 2 for bad input (with one line on stderr), 130 for an interruption and 1 for any
    other failure.

    Args:
        arguments: the words after ``headwise``; those of the process when None.
    """
    _let_waiting_threads_sleep()
    import typer

    from headwise.cli.app import StoppedError

    arguments = sys.argv[1:] if arguments is None else arguments
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as for Ctrl-C, to clean up half-written files
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (closed by the caller)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals that cannot show a table's ×
    # Some versions of typer contain a copy of click; typer's public exception inherits from the class that is raised.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    word = "interrupted"
    try:
        status = _command()(args=arguments, prog_name="headwise", standalone_mode=False)
        sys.stdout.flush()
    except HeadwiseError as error:
        _complain(str(_as_options(error, arguments)))
    except usage_error as error:
        _complain(_usage(error, arguments))
    except StoppedError as stopped:
        word, status = f"{word}; {stopped}", _INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        status = _INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stderr.write("headwise: no space left to write to\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at its end
        sys.exit(1)
    except BaseException as error:
        if not _is_out_of_memory(error):
            raise
        sys.stderr.write("headwise: out of memory: smaller sizes or another machine are needed\n")
        sys.exit(1)
    if status == _INTERRUPTED:  # also typer's status for Ctrl-C
        sys.stderr.write(f"headwise: {printable(word)}\n")
    sys.exit(status if isinstance(status, int) else 0)


_NO_MEMORY = (
    "allocate memory",  # of the CPU
    "out of memory",  # of a GPU
    "could not create a primitive",  # of oneDNN
    "failed to map segment",  # of a library that is imported
    "PyObject pointer is null",  # of a library in Rust, which panics
)
"""What libraries say where there is no memory."""


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY)


@cache
def _command() -> Any:
    """The command line with all its commands, which typer makes of their signatures in a fifth of a second."""
    import typer

    from headwise.cli.app import app

    register_commands()
    return typer.main.get_command(app)


def _let_waiting_threads_sleep() -> None:
    """Have threads sleep while they wait for each other, unless the user says otherwise; before torch is imported.

    By default they spin, up to a millisecond each time. Where other programs use the processors, a thread then spins
    for as long as the one it waits for has none: beside four others a conversion's steps took four times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _as_options(error: HeadwiseError, arguments: list[str]) -> HeadwiseError:
    """An error about arguments of Python, with the names that the command's options have here."""
    if not isinstance(error, ArgumentError):
        return error  # it names keys of configs and tensors
    command = _command()
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    options = {
        option.removeprefix("--").replace("-", "_"): option for param in command.params for option in param.opts
    }
    rule = error.rule
    for name, option in options.items():
        if "_" in name:  # others are words that a rule may use for something else
            rule = re.sub(rf"\b{name}\b", option, rule)
    rule += _percentage(str(error.value), is_fraction="fraction" in rule or "at most 1" in rule)
    return ArgumentError(options.get(error.field, error.field), error.value, rule)


def _percentage(value: str, *, is_fraction: bool = False) -> str:
    """A hint where a percentage stands in place of a fraction: ``25%``, or 25 where only fractions are allowed."""
    match = re.search(r"(?:^|[:@])(\d{1,3}(?:\.\d{1,9})?)(%?)$", value)
    if match is None or not (match[2] or (is_fraction and float(match[1]) > 1)):
        return ""
    return f"; write {float(match[1]):g} % as {float(match[1]) / 100:g}"


def _usage(error: Exception, arguments: list[str]) -> str:
    """The parser's message about an option, with the option's value, which the parser leaves out."""
    message: str = error.format_message()  # type: ignore[attr-defined]
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for index, argument in reversed(list(enumerate(arguments))):  # the last value of a repeated option counts
            if argument == option and index + 1 < len(arguments):
                return f"{option} = {arguments[index + 1]!r}: {message}{_percentage(arguments[index + 1])}"
            if argument.startswith(f"{option}="):
                value = argument.partition("=")[2]
                return f"{option} = {value!r}: {message}{_percentage(value)}"
    return message


def _complain(message: str) -> None:
    sys.stderr.write(f"headwise: {printable(' '.join(message.split()))}\n")
    sys.exit(2)


def register_commands() -> None:
    """Import the files of all commands, each of which registers its own."""
    from headwise.cli.commands import (  # noqa: F401
        advise,
        audit,
        bench,
        calibrate,
        compare,
        complexity,
        convert,
        count,
        demo,
        design,
        doctor,
        engines,
        evaluate,
        export,
        frontier,
        generate,
        guide,
        heal,
        inspect,
        migrate,
        predict,
        prepare,
        profile,
        report,
        sample,
        serve,
        verify,
    )
