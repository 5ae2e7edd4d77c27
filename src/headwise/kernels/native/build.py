"""The kernels' library: compiled once on each machine by its own compiler, and kept in the user's cache folder.

A wheel could only hold code for the oldest processor it supports. These kernels need the widest vectors and the
bfloat16 products that a processor has, and which these are is known only where they run.
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
    # A product and a sum may be rounded once; floating-point semantics are otherwise kept.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of keys and values that the kernels read, and their numbers in the sources."""

_COMPILE_TIMEOUT = 300
"""Seconds that compiling may take; usually it takes a few."""


@dataclass(frozen=True)
class Build:
    """The compiled kernels, or why there are none.

    Attributes:
        library: None where it cannot be built or loaded.
        path: of the library's file.
        reason: one line: how it was built, or why it was not.
        has_pairs: whether the processor multiplies pairs of bfloat16; without that, bfloat16 saves memory only.
        has_half: whether the compiler supports float16.
    """

    library: ctypes.CDLL | None
    path: Path | None
    reason: str
    has_pairs: bool = False
    has_half: bool = False


@cache
def built() -> Build:
    """The kernels, compiled now unless they were before; a failure is no error, because torch can do without them."""
    try:
        asked_for = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        return Build(None, None, f"$CXX is no command: {error}")
    compiler = _compiler(asked_for)
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
    is_missing = bool(asked_for) and not shutil.which(asked_for[0])
    note = f"; $CXX, {asked_for[0]}, is not there" if is_missing else ""
    return Build(library, path, f"compiled by {compiler[0]}{note}", has_pairs, has_half)


def why_not(dtype: torch.dtype, device: torch.device, *, needs_grad: bool = False) -> str | None:
    """Why the kernels cannot take such tensors, or None where they can; compiles them if that was not done yet."""
    if device.type != "cpu":
        return f"it is for the CPU, not {device.type}"
    if dtype not in TYPES:
        return f"it takes {', '.join(str(supported) for supported in TYPES)}, not {dtype}"
    if needs_grad:
        return "it has no backward pass"
    if _is_watched():
        return "something watches torch's operations, or chooses their dtypes"
    build = built()
    if build.library is None:
        return build.reason
    return "its compiler does not support float16" if dtype == torch.float16 and not build.has_half else None


def _is_watched() -> bool:
    """Whether something between the caller and the arithmetic watches, replaces or recasts torch's operations.

    A compiler, a tracer, a FLOP counter, fake tensors, functional transforms, forward-mode derivatives and autocast
    see only torch's own calls, and would miss the kernel's.
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
    """Whether the numbers of all tensors lie in the CPU's memory as torch shows them.

    Those of subclasses and sparse tensors may be elsewhere, and a lazily negated tensor's are negated by torch alone.
    """
    return all(
        tensor is None
        or (type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_neg())
        for tensor in tensors
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def _compiler(asked_for: list[str]) -> list[str] | None:
    """The compiler that $CXX names, with its options, or the first of `_COMPILERS` that is installed."""
    for command in (asked_for, *([name] for name in _COMPILERS)):
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    return None


def _native() -> str:
    return "-mcpu=native" if platform.machine().lower() in ("arm64", "aarch64", "ppc64le") else "-march=native"


def _folder() -> Path:
    """The cache folder; a temporary one of this process where nothing can be written there."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(home).expanduser() / "headwise" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # compiled once a process then, where nobody else can put a library
        temporary = Path(tempfile.mkdtemp(prefix="headwise-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return temporary


def _fingerprint(command: list[str]) -> str:
    """A hash of everything the library depends on: sources, command, compiler, processor and torch."""
    digest = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        digest.update(Path(__file__).with_name(name).read_bytes())
    compiler = Path(command[0]).resolve()
    digest.update(f"{command} {compiler} {compiler.stat().st_mtime_ns} {_processor()} {torch.__version__}".encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """The processor's model and features; machines that share a home folder may differ in them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    values = {key.strip(): value for key, _, value in (line.partition(":") for line in lines)}
    return platform.machine() + "".join(values.get(name, "") for name in names)


def _compile(command: list[str], path: Path) -> None:
    """Compile under a temporary name first: the library is there whole or not at all, whoever else compiles it."""
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        sources = (str(Path(__file__).with_name(name)) for name in _SOURCES)
        _run([*command, *sources, "-o", temporary])
        _load(Path(temporary))  # fails for a file that is no such library
        with open(temporary, "r+b") as file:
            content = file.read()
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    """Run the compiler; if that is interrupted, end every process it has started."""
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=_COMPILE_TIMEOUT)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=errors)


def _is_whole(path: Path) -> bool:
    """Whether a library's checksum fits: loading a truncated file would crash the process."""
    if not path.exists():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


_DIGEST = hashlib.sha256().digest_size


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.headwise_attention.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    library.headwise_linear.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return library


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = (line for words in ("No space left", "error") for line in lines if words in line)
    return next(errors, lines[0] if lines else "it said nothing")
