"""The compiled kernel against the float64 definition, with random shapes, strides, masks and lengths."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from headwise.errors import ArgumentError
from headwise.runtime.kernels import attend, choose_backend
from headwise.runtime.kernels.native import build, built
from headwise.runtime.kernels.native.abi import header

pytestmark = pytest.mark.skipif(built().library is None, reason=f"no compiled kernel: {built().reason}")

NAN = float("nan")
CLOSE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Tolerances, as fractions of the largest output, or of the largest value where those nearly cancel."""


@dataclass
class Case:
    """Tensors as a cache returns them, and the other arguments of `attend`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    window: int | None
    scale: float | None

    @property
    def seen(self) -> Tensor:
        """``[B, H, S, T]``."""
        B, H, S, _ = self.query.shape
        T = self.key.shape[2]
        allowed = torch.ones(B, H, S, T, dtype=torch.bool)
        if self.mask is not None:
            allowed &= self.mask[:, None, None] if self.mask.dim() == 2 else self.mask
        behind = torch.arange(T - S, T)[:, None] - torch.arange(T)  # how far a token lies behind a query
        if self.is_causal:
            allowed &= behind >= 0
        return allowed if self.window is None else allowed & (behind < self.window)

    def fused(self) -> Tensor:
        return attend(
            self.query,
            self.key,
            self.value,
            self.mask,
            is_causal=self.is_causal,
            window=self.window,
            scale=self.scale,
            backend="fused",
        )

    def expected(self) -> Tensor:
        """The output in float64, with zeros for tokens that no query sees."""
        B, H, S, D = self.query.shape
        K = self.key.shape[1]
        key, value = (x.double().nan_to_num(0) for x in (self.key, self.value))
        scale = D**-0.5 if self.scale is None else self.scale
        scores = self.query.double().reshape(B, K, -1, D) @ key.mT * scale  # heads that share keys, one below another
        scores = scores.view(B, H, S, -1).masked_fill(~self.seen, float("-inf"))
        return (scores.softmax(-1).nan_to_num(0).view(B, K, H // K * S, -1) @ value).view(B, H, S, -1)


def draw(seed: int) -> Case:
    """Draw a case of any shape, with NaN in all memory that no query may read."""
    pick, noise = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=noise)

    dtype = pick.choice(list(CLOSE))
    B, K, S = pick.choice([1, 1, 2, 3]), pick.choice([1, 1, 2, 3, 5]), pick.choice([1, 1, 1, 1, 2, 3, 5, 40, 150])
    H = K * pick.choice([1, 2, 3, 4, 5, 7, 8, 13, 16, 33])
    T = pick.choice([1, 2, 3, 17, 63, 64, 65, 127, 130, 200, 515])
    D = pick.choice([64, 128, 96, 32, 16, 40, 7, 1, 576, 80])
    V = pick.choice([D, D, 64, 128, 512, 33])
    query = normal(B, S, H, D).transpose(1, 2) if pick.random() < 0.5 else normal(B, H, S, D)
    room = T + pick.choice([0, 5])
    keys, values = (torch.full((B, K, room, n + pick.choice([0, 8])), NAN, dtype=dtype) for n in (D, V))
    key, value = keys[:, :, :T, :D], values[:, :, :T, :V]
    key.copy_(normal(B, K, T, D))
    value.copy_(normal(B, K, T, V))
    if shared := D >= V and pick.random() < 0.3:  # as MLA's latent is
        value = key[..., :V]
    mask = {
        "none": lambda: None,
        "padding": lambda: torch.arange(T) >= torch.randint(0, T + 1, (B, 1), generator=noise),
        "holes": lambda: torch.rand(B, 1, 1, T, generator=noise) < 0.5,
        "heads": lambda: torch.rand(1, H, 1, T, generator=noise) < 0.5,
        "every": lambda: torch.rand(B, H, S, T, generator=noise) < 0.3,
        "turned": lambda: torch.rand(B, 1, T, S, generator=noise).mT < 0.5,
    }[pick.choice(["none", "none", "padding", "holes", "heads", "every", "turned"])]()
    is_causal = pick.random() < 0.5
    window = pick.choice([None, None, 1, 3, 60]) if is_causal else None
    case = Case(query.to(dtype), key, value, mask, is_causal, window, pick.choice([None, None, 0.3, -0.5, 0.0]))
    nobody = ~case.seen.view(B, K, -1, T).any(2)
    key[nobody] = NAN
    if not shared:
        value[nobody] = NAN
    return case


@pytest.mark.parametrize("part", range(10))
def test_it_is_the_definition(part: int) -> None:
    for seed in range(100 * part, 100 * (part + 1)):
        case = draw(seed)
        out, expected = case.fused(), case.expected()
        largest = max(expected.abs().max().item(), case.value.nan_to_num(0).abs().max().item() * 0.05)
        assert out.dtype == case.query.dtype
        assert (out.double() - expected).abs().max().item() <= CLOSE[out.dtype] * largest, seed
        assert (out[~case.seen.any(-1)] == 0).all(), seed


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("lengths", [(4000,), (4000, 17, 0, 900)])
def test_threads_share_long_rows_and_take_short_ones_whole(threads: int, lengths: tuple[int, ...]) -> None:
    B, T = len(lengths), max(lengths)
    noise = torch.Generator().manual_seed(threads)
    query = torch.randn(B, 8, 1, 64, generator=noise)
    key, value = torch.randn(2, B, 2, T, 64, generator=noise)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    case = Case(query, key, value, mask, False, None, None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        out = case.fused()
    finally:
        torch.set_num_threads(before)
    assert (out.double() - case.expected()).abs().max() <= 1e-5


def test_callers_in_several_threads_do_not_meet() -> None:
    cases = [draw(seed) for seed in range(40, 60)]
    expected = [case.fused() for case in cases]
    wrong: list[int] = []

    def call(first: int) -> None:
        for turn in range(60):
            at = (first + turn) % len(cases)
            if not torch.equal(cases[at].fused(), expected[at]):
                wrong.append(at)

    threads = [threading.Thread(target=call, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_scores_far_apart_and_infinite_values() -> None:
    query = torch.full((1, 1, 1, 64), 10.0)
    key = torch.cat((torch.full((1, 1, 80, 64), -10.0), torch.full((1, 1, 80, 64), 10.0)), dim=2)
    value = torch.arange(160.0).view(1, 1, 160, 1).expand(1, 1, 160, 64)
    assert (attend(query, key, value, scale=1.0, backend="fused") - 119.5).abs().max() < 1e-4
    assert (attend(-query, key, value, scale=1.0, backend="fused") - 39.5).abs().max() < 1e-4
    value = value.clone()
    value[0, 0, 3] = float("inf")
    assert attend(-query, key, value, scale=1.0, backend="fused").isinf().all()
    value[0, 0, 3] = NAN
    assert attend(-query, key, value, scale=1.0, backend="fused").isnan().all()


def test_no_keys_and_no_queries() -> None:
    query, none = torch.randn(2, 4, 1, 64), torch.empty(2, 2, 0, 64)
    assert torch.equal(attend(query, none, none, backend="fused"), torch.zeros_like(query))
    assert attend(torch.empty(0, 4, 1, 64), *2 * [torch.empty(0, 2, 5, 64)], backend="fused").shape == (0, 4, 1, 64)
    assert attend(torch.empty(2, 4, 0, 64), *2 * [torch.randn(2, 2, 5, 64)], backend="fused").shape == (2, 4, 0, 64)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"dtype": torch.float64}, "it takes torch.float32, torch.bfloat16, torch.float16, not torch.float64"),
        ({"requires_grad": True}, "it has no backward pass"),
    ],
)
def test_what_it_cannot_is_refused_and_auto_goes_another_way(change: dict[str, object], rule: str) -> None:
    query, key, value = (torch.randn(1, 2, 1, 16, **change) for _ in range(3))  # type: ignore[call-overload]
    with pytest.raises(
        ArgumentError, match=f"backend = 'fused': cannot compute this call: {rule}; use another, or auto"
    ):
        attend(query, key, value, backend="fused")
    assert attend(query, key, value).shape == (1, 2, 1, 16)


def test_a_mask_that_lies_elsewhere_is_refused() -> None:
    query = torch.randn(1, 2, 1, 16)
    with pytest.raises(ArgumentError, match="attn_mask device = 'meta': must be cpu, the query's"):
        attend(query, query, query, torch.ones(1, 1, dtype=torch.bool, device="meta"))


def test_dropout_and_weights_are_refused() -> None:
    query = torch.randn(1, 2, 1, 16)
    with pytest.raises(ArgumentError, match="backend = 'fused': has no dropout"):
        attend(query, query, query, dropout_p=0.5, backend="fused")
    with pytest.raises(ArgumentError, match="backend = 'fused': never holds the weights"):
        attend(query, query, query, backend="fused", return_weights=True)


# --- where it cannot be built ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Path:
    """The library that the other tests use, which takes half a minute to compile."""
    path = build.built().path
    assert path is not None
    return path


@pytest.fixture
def afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no library in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "built", build.built.__wrapped__)
    return tmp_path


@pytest.fixture
def ready(library: Path, afresh: Path) -> Path:
    """A cache folder in which the library is compiled already."""
    copy = afresh / "headwise" / "kernels" / library.name
    copy.parent.mkdir(parents=True)
    shutil.copyfile(library, copy)
    return copy


def test_it_is_compiled_once_and_again_where_it_was_cut(
    library: Path, afresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler that copies what the real one made, and counts its calls; each process loads one file."""
    linked, calls, compiler = afresh / "linked", afresh / "calls", afresh / "copies"
    linked.write_bytes(library.read_bytes()[: -build._DIGEST])
    compiler.write_text(
        f'#!/bin/sh\nfor last; do :; done; echo "$last" >> {calls}\n'
        f'case "$last" in *.so) cp {linked} "$last";; *) : > "$last";; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    code = "from headwise.runtime.kernels.native.build import built; print(built())"

    def compiled() -> Path:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert f"compiled by {compiler}" in result.stdout
        (file,) = (afresh / "headwise" / "kernels").iterdir()
        assert build._is_whole(file)
        return file

    def links() -> int:
        return sum(line.endswith(".so") for line in calls.read_text().splitlines())

    file = compiled()
    assert links() == 1
    modified, whole = file.stat().st_mtime_ns, file.read_bytes()
    assert whole == library.read_bytes()
    assert compiled() == file
    assert links() == 1
    assert file.stat().st_mtime_ns == modified
    for content in (whole[:4096], b"", b"junk" * 99, whole[:100_000]):
        file.write_bytes(content)
        assert not build._is_whole(file)
    assert compiled() == file
    assert links() == 2
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "file too short"),
        ("echo 'ld: error: cannot go on' >&2; echo 'as: x.o: No space left on device' >&2; exit 1", "No space left"),
        ("printf 'caf\\351 error: none' >&2; exit 1", "failed: caf� error: none"),
        ('for last; do :; done; echo "void f() {}" | c++ -x c++ -shared -fPIC - -o "$last"', "headwise_attention"),
    ],
)
def test_a_compiler_that_writes_something_else_is_reported(
    afresh: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    compiler = afresh / "odd"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    library = build.built()
    assert library.library is None
    assert reason in library.reason
    assert list((afresh / "headwise" / "kernels").iterdir()) == []


def test_without_a_compiler_it_says_so(afresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(afresh))
    monkeypatch.delenv("CXX", raising=False)
    assert build.built() == build.Build(None, None, "no C++ compiler: neither $CXX nor c++, g++, clang++")


def test_a_missing_compiler_is_reported(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/none/such -O1")
    found = build.built()
    assert found.library is not None
    assert found.path is not None
    assert found.path.parent == ready.parent
    assert found.reason.endswith("; $CXX, /none/such, is not there")


def test_a_compiler_that_fails_is_quoted(afresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = afresh / "broken"
    compiler.write_text("#!/bin/sh\necho 'attention.cpp:1: error: no such language' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    library = build.built()
    assert library.library is None
    assert library.reason == f"{compiler} failed: attention.cpp:1: error: no such language"
    assert list((afresh / "headwise" / "kernels").iterdir()) == []


def test_a_command_that_cannot_be_read_and_no_home_are_no_errors(
    afresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", 'c++ "')
    assert build.built().reason == "$CXX is no command: No closing quotation"
    monkeypatch.delenv("CXX")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", lambda _: (_ for _ in ()).throw(RuntimeError("no home")))
    monkeypatch.setattr(build.tempfile, "mkdtemp", lambda prefix: str(afresh))
    later: list[tuple[object, ...]] = []
    monkeypatch.setattr(build.atexit, "register", lambda *call, **_: later.append(call))
    assert build._folder() == afresh
    assert later == [(shutil.rmtree, afresh)]


def test_float16_needs_a_compiler_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "built", lambda: replace(built(), has_half=False))
    query = torch.randn(1, 2, 1, 16).half()
    assert (
        "its compiler does not support float16" in choose_backend(query.shape, query.shape, dtype=query.dtype).reason
    )
    with pytest.raises(ArgumentError, match="its compiler does not support float16"):
        attend(query, query, query, backend="fused")
    assert attend(query, query, query).dtype == torch.float16


def test_numbers_that_are_not_what_lies_in_memory_go_by_torch() -> None:
    twice = torch.view_as_complex(torch.randn(1, 2, 5, 16, 2)).conj()
    query = torch.view_as_real(torch.view_as_complex(torch.randn(1, 2, 1, 16, 2)))[..., 0]
    negative = twice.imag  # torch negates it when it is read
    assert negative.is_neg()
    expected = attend(query, negative.clone(), negative.clone(), backend="reference")
    assert (attend(query, negative, negative) - expected).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
def test_forward_derivatives_are_not_lost() -> None:
    query, key, value, change = (torch.randn(1, 2, size, 16) for size in (1, 5, 5, 1))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, change)
        assert forward_ad.unpack_dual(attend(dual, key, value, backend="reference")).tangent is not None
        with pytest.raises(NotImplementedError, match="forward AD"):  # torch's product has none
            attend(dual, key, value)


def test_without_it_auto_is_packed() -> None:
    code = (
        "import torch; from headwise import attend, choose_backend; q = torch.randn(1, 2, 1, 16);"
        "attend(q, q, q); print(choose_backend(q.shape, q.shape))"
    )
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "backend='packed'" in result.stdout
    assert "not the fused kernel: no C++ compiler" in result.stdout
    assert choose_backend((1, 2, 1, 16), (1, 2, 1, 16)).backend == "fused"


# --- what only tools see -----------------------------------------------------------------------------------------

SOURCE = Path(build.__file__).parent


@pytest.mark.parametrize("source", ["watched.cpp", "watched_coded.cpp", "watched_affine.cpp", "watched_heads.cpp"])
@pytest.mark.parametrize(
    ("sanitizer", "processor"),
    [("thread", "native"), ("address,undefined", "native"), ("address,undefined", "haswell")],
)
def test_sanitizers_find_nothing(sanitizer: str, processor: str, source: str, tmp_path: Path) -> None:
    """Races by ThreadSanitizer, on threads it can see; reads past the end by AddressSanitizer.

    ``haswell`` has AVX2 alone, whose code wider processors do not run.
    """
    if processor != "native" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip(f"this processor is no {processor}")
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no compiler with sanitizers")
    program = tmp_path / "watched"
    flags = [
        *("-O0", "-g1", "-std=c++17", "-w", "-DFRESH_THREADS", "-pthread"),
        *(f"-fsanitize={sanitizer}", f"-march={processor}"),
    ]
    # Less is compiled. Undefined behaviour ends the program by a signal, without a message; AddressSanitizer checks
    # by calls, and finds null pointers and ends of objects by itself; the programs use two of the three dtypes,
    # but scales of affine codes are read as the third.
    if "undefined" in sanitizer:
        flags += ["-fsanitize-undefined-trap-on-error", "-fno-sanitize=null,object-size,vptr"]
        flags += ["--param=asan-instrumentation-with-call-threshold=0"] * compiler.endswith("/g++")
    if source != "watched_affine.cpp":
        flags.append("-U__FLT16_MAX__")
    (tmp_path / "abi.h").write_text(header())
    folders = [f"-I{SOURCE}", f"-I{tmp_path}"]
    command = [compiler, *flags, str(Path(__file__).with_name(source)), *folders, "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    result = subprocess.run([program], env={}, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "no differences\n"
