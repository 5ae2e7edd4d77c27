"""The kernels' library: compiled once a machine by its own compiler, and kept in the user's cache folder.

A wheel could only hold code for the least of all processors; what these kernels are for, the widest vectors and
products of pairs that a processor has, is known where it runs.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad

_SOURCES = ("attention.cpp", "linear.cpp")
_HEADERS = ("lanes.h", "sight.h", "threads.h", "tiles.h", "vectors.h")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-w", "-pipe"),
    # Sums may be contracted; nothing else of what numbers mean is given up.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What may be stored, and its number in the sources."""

_PATIENCE = 300
"""Seconds that compiling may take; it takes a few."""


@dataclass(frozen=True)
class Build:
    """The compiled kernels, or why there are none.

    Attributes:
        library: None where it cannot be built or loaded.
        path: of the library's file.
        reason: one line: how it was built, or why it was not.
        has_pairs: whether the processor multiplies bfloat16 by pairs; without that it gains nothing but bytes.
        has_half: whether the compiler knows float16.
    """

    library: ctypes.CDLL | None
    path: Path | None
    reason: str
    has_pairs: bool = False
    has_half: bool = False


@cache
def built() -> Build:
    """The kernels, compiled now if they were not before; never an error: without them torch's own ways serve."""
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        return Build(None, None, f"$CXX is no command: {error}")
    compiler = _compiler(given)
    if compiler is None:
        return Build(None, None, f"no C++ compiler: neither $CXX nor {', '.join(_COMPILERS)}")
    command = [*compiler, *_FLAGS, _native()]
    try:
        path = _folder() / f"kernels-{_fingerprint(command)}.so"
        if not _is_whole(path):
            _compile(command, path)
        library = _load(path)
    except subprocess.CalledProcessError as error:
        return Build(None, None, f"{compiler[0]} failed: {_first_error(error.stderr)}")
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return Build(None, None, f"{compiler[0]}: {error}")
    has_pairs, has_half = bool(library.headwise_has_pairs()), bool(library.headwise_has_half())
    instead = f"; $CXX, {given[0]}, is not there" if given and not shutil.which(given[0]) else ""
    return Build(library, path, f"compiled by {compiler[0]}{instead}", has_pairs, has_half)


def why_not(dtype: torch.dtype, device: torch.device, *, needs_grad: bool = False) -> str | None:
    """Why the kernels cannot serve such tensors, or None where they can; compiles them if they are not there yet."""
    if device.type != "cpu":
        return f"it is for the CPU, not {device.type}"
    if dtype not in TYPES:
        return f"it knows {', '.join(str(known) for known in TYPES)}, not {dtype}"
    if needs_grad:
        return "it has no backward pass"
    if _is_watched():
        return "something watches torch's operations, or chooses their dtypes"
    build = built()
    if build.library is None:
        return build.reason
    return "its compiler does not know float16" if dtype == torch.float16 and not build.has_half else None


def _is_watched() -> bool:
    """Whether something between the caller and the arithmetic watches, replaces or recasts torch's operations.

    A compiler, a tracer, a counter of FLOPs, fake tensors, functional transforms, forward-mode derivatives and
    autocast see torch's calls only.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether all lie in the CPU's memory as they are; those of a subclass, or of sparse tensors, may be anywhere."""
    return all(
        one is None or (type(one) in _PLAIN and one.is_cpu and one.layout is torch.strided and not one.is_neg())
        for one in tensors
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def _compiler(given: list[str]) -> list[str] | None:
    """The one that is asked for, or the first that is there."""
    for name in (given, *([name] for name in _COMPILERS)):
        if name and (found := shutil.which(name[0])):
            return [found, *name[1:]]
    return None


def _native() -> str:
    return "-mcpu=native" if platform.machine().lower() in ("arm64", "aarch64", "ppc64le") else "-march=native"


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(home).expanduser() / "headwise" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # nowhere to keep it: once a process then, where nobody else can put a library
        own = Path(tempfile.mkdtemp(prefix="headwise-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return own


def _fingerprint(command: list[str]) -> str:
    """Of all that decides what the library is: sources, command, compiler and processor."""
    told = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        told.update(Path(__file__).with_name(name).read_bytes())
    compiler = Path(command[0]).resolve()
    told.update(f"{command} {compiler} {compiler.stat().st_mtime_ns} {_processor()} {torch.__version__}".encode())
    return told.hexdigest()[:20]


def _processor() -> str:
    """What the processor is and can; a home folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    kept = {key.strip(): value for key, _, value in (line.partition(":") for line in lines)}
    return platform.machine() + "".join(kept.get(name, "") for name in names)


def _compile(command: list[str], path: Path) -> None:
    """To a name of its own first: a library is there whole or not at all, whoever else is at it."""
    handle, made = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        sources = (str(Path(__file__).with_name(name)) for name in _SOURCES)
        _run([*command, *sources, "-o", made])
        _load(Path(made))  # what is no such library is not kept
        with open(made, "r+b") as file:
            content = file.read()
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    """Compile; when that is ended, whatever the compiler has started is too."""
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=_PATIENCE)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def _is_whole(path: Path) -> bool:
    """Whether a library is there as it was made: the loader ends the process at a file that was cut."""
    if not path.exists():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


_DIGEST = hashlib.sha256().digest_size


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.headwise_decode.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    library.headwise_linear.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return library


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    said = (line for words in ("No space left", "error") for line in lines if words in line)
    return next(said, lines[0] if lines else "it said nothing")
