"""Compile the native kernels once on each machine, and keep the library in the user's cache folder.

A wheel could only contain code for the oldest processor it supports. These kernels use the widest vectors and the
bfloat16 products of the processor that they run on. Codes are unpacked with AVX-512's tables of bytes, two by two
with AVX2, or one by one, whichever the processor has.

What Python and the kernels share is declared in `headwise.runtime.kernels.native.abi`, and compiled into the library.
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
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import IO, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headwise.runtime.kernels.native.abi import KERNELS, NO_MEMORY, TYPES, header

_SOURCES = (
    "attention.cpp",
    "linear.cpp",
    "step.cpp",
    "codes/coded.cpp",
    "codes/heads.cpp",
    "codes/affine.cpp",
    "codes/encode.cpp",
    "codes/decode.cpp",
    "codes/moved.cpp",
)
_HEADERS = (
    *("attend.h", "linear.h", "matrix_tiles.h", "processor.h", "products.h"),
    *("codes/int16_scores.h", "codes/integers.h", "codes/trellis.h"),
)
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-w", "-pipe"),
    # A product and a sum may be rounded once; floating-point semantics are otherwise kept.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
_COMPILE_TIMEOUT = 300
"""Seconds that compiling may take; usually it takes some ten to forty, by the number of cores."""


@dataclass(frozen=True)
class Build:
    """The compiled kernels, or the reason why there are none.

    Attributes:
        library: the loaded library; None if it cannot be built or loaded.
        path: the path of the compiled library.
        reason: how it was built, or why it was not, in one line.
        has_pairs: whether the processor multiplies pairs of bfloat16; otherwise bfloat16 saves memory but no time.
        has_half: whether the compiler supports float16.
    """

    library: ctypes.CDLL | None
    path: Path | None
    reason: str
    has_pairs: bool = False
    has_half: bool = False


_BUILDING = Lock()


@cache
def built() -> Build:
    """The library, compiled if it is not there yet; a failure raises nothing, because torch can do the same."""
    with _BUILDING:  # another thread that needs it at the same time finds it made
        return _built()


def _built() -> Build:
    try:
        cxx = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        return Build(None, None, f"$CXX is no command: {error}")
    compiler = _compiler(cxx)
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
    is_missing = bool(cxx) and not shutil.which(cxx[0])
    note = f"; $CXX, {cxx[0]}, is not there" if is_missing else ""
    return Build(library, path, f"compiled by {compiler[0]}{note}", has_pairs, has_half)


def call(
    kernel: str, tensors: Mapping[str, Tensor | None], numbers: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> None:
    """Call a kernel.

    Args:
        kernel: one of `headwise.runtime.kernels.native.abi.KERNELS`.
        tensors: the arguments that are addresses, by name; None for a null pointer.
        numbers: the other arguments, by name, apart from the number of threads.
        dtype: the dtype of the result.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    addresses = {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
    run(kernel, KERNELS[kernel](**addresses, **numbers), dtype)


def run(kernel: str, arguments: Any, dtype: torch.dtype) -> None:
    """Call a kernel with a structure of arguments, whose number of threads is set here; see `call`.

    Args:
        kernel: see `call`.
        arguments: the structure.
        dtype: see `call`.

    Raises:
        MemoryError: see `call`.
    """
    library = built().library
    assert library is not None
    arguments.threads = torch.get_num_threads()
    status = getattr(library, kernel)(ctypes.byref(arguments), TYPES[dtype])
    if status == NO_MEMORY:
        raise MemoryError("no memory to compute in")
    assert status == 0


def why_not(dtype: torch.dtype, device: torch.device, *, needs_grad: bool = False) -> str | None:
    """The reason why the kernels do not support such tensors, or None if they do; may compile them first.

    Args:
        dtype: the dtype of the tensors.
        device: the device of the tensors.
        needs_grad: whether gradients are needed.
    """
    if device.type != "cpu":
        return f"it is for the CPU, not {device.type}"
    if dtype not in TYPES:
        return f"it takes {', '.join(str(supported) for supported in TYPES)}, not {dtype}"
    if needs_grad:
        return "it has no backward pass"
    if is_watched():
        return "a compiler, tracer, counter, transform or autocast has to see torch's operations"
    build = built()
    if build.library is None:
        return build.reason
    return "its compiler does not support float16" if dtype == torch.float16 and not build.has_half else None


def is_watched(device_type: str = "cpu") -> bool:
    """Whether torch's operations are recorded, replaced or recast.

    A compiler, a tracer, a FLOP counter, fake tensors, functional transforms, forward-mode derivatives and autocast
    see torch's operations only, and would miss the kernel's arithmetic.

    Args:
        device_type: the type of the devices whose autocast counts.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch.is_autocast_enabled(device_type)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether a kernel can read the elements of all tensors from the CPU's memory.

    Subclasses and sparse tensors may keep them elsewhere, and those of a lazily negated tensor have the other sign.

    Args:
        tensors: the tensors to check; None counts as plain.
    """
    return all(
        tensor is None
        or (type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_neg())
        for tensor in tensors
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def _compiler(cxx: list[str]) -> list[str] | None:
    """The compiler of $CXX, with its options, or the first of `_COMPILERS` that is installed."""
    for command in (cxx, *([name] for name in _COMPILERS)):
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    return None


def _native() -> str:
    return "-mcpu=native" if platform.machine().lower() in ("arm64", "aarch64", "ppc64le") else "-march=native"


def _folder() -> Path:
    """The cache folder, or a temporary one for this process if the cache folder cannot be written to."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(home).expanduser() / "headwise" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # each process then compiles, in a folder that no other user can write to
        temporary = Path(tempfile.mkdtemp(prefix="headwise-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return temporary


def _fingerprint(command: list[str]) -> str:
    """A hash of everything the library depends on: sources, command, compiler, processor and torch."""
    digest = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        digest.update((Path(__file__).parent / name).read_bytes())
    digest.update(header().encode())
    compiler = Path(command[0]).resolve()
    digest.update(f"{command} {compiler} {compiler.stat().st_mtime_ns} {_processor()} {torch.__version__}".encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """The processor's model and features, which may differ between machines that share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    values = {key.strip(): value for key, _, value in (line.partition(":") for line in lines)}
    return platform.machine() + "".join(values.get(name, "") for name in names)


def _compile(command: list[str], path: Path) -> None:
    """Compile in a temporary folder and rename, so that concurrent processes find a whole library or none."""
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder, here = Path(name), Path(__file__).parent
        (folder / "abi.h").write_text(header())
        objects = {here / source: folder / f"{source.replace('/', '-')}.o" for source in _SOURCES}
        command = [*command, f"-I{folder}"]
        _run([[*command, "-c", str(source), "-o", str(compiled)] for source, compiled in objects.items()])
        library = folder / path.name
        library.touch()
        _run([[*command, *map(str, objects.values()), "-o", str(library)]])
        _load(library)  # fails if the compiler wrote something else
        with open(library, "r+b") as file:
            content = file.read()
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(library, path)


def _run(commands: list[list[str]]) -> None:
    """Run compilers side by side; after an interruption or timeout, end them and every process that they started.

    Raises:
        subprocess.SubprocessError: one failed or they took too long.
    """
    end = time.monotonic() + _COMPILE_TIMEOUT
    with ExitStack() as files:
        waiting = commands[::-1]
        running: list[tuple[subprocess.Popen[bytes], list[str], IO[bytes]]] = []
        try:
            while waiting or running:
                while waiting and len(running) < (os.cpu_count() or 1):
                    errors = files.enter_context(tempfile.TemporaryFile())
                    command = waiting.pop()
                    # In a session of its own, so that the processes that it starts can be ended with it.
                    started = subprocess.Popen(
                        command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
                    )
                    running.append((started, command, errors))
                for ended in [each for each in running if each[0].poll() is not None]:
                    running.remove(ended)
                    process, command, written = ended
                    if process.returncode:
                        written.seek(0)
                        text = written.read().decode(errors="replace")
                        raise subprocess.CalledProcessError(process.returncode, command, stderr=text)
                if running and time.monotonic() > end:
                    raise subprocess.TimeoutExpired(running[0][1], _COMPILE_TIMEOUT)
                time.sleep(0.01)
        finally:
            for process, _, _ in running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _is_whole(path: Path) -> bool:
    """Whether a library's checksum is right; loading a truncated file would crash the process."""
    if not path.exists():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


_DIGEST = hashlib.sha256().digest_size


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in KERNELS.items():
        getattr(library, name).argtypes = [ctypes.POINTER(arguments), ctypes.c_int]
    return library


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = (line for words in ("No space left", "error") for line in lines if words in line)
    return next(errors, lines[0] if lines else "it printed nothing")
