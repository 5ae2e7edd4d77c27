"""A run that ends early in any way is continued, and writes the bytes of an uninterrupted run."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headwise.errors import ArgumentError, CheckpointError, StorageError
from headwise.models.checkpoints import FolderCheckpoint, FolderWriter, TensorInfo, run_identity
from tests.models.checkpoints import resumable

INFO = {
    "a": TensorInfo((4, 2), torch.float32),
    "b": TensorInfo((3,), torch.bfloat16),
    "c": TensorInfo((64, 64), torch.float32),
    "d": TensorInfo((5,), torch.float16),
}
SHARD_BYTES = 64  # a and b, c, d


def value(name: str) -> torch.Tensor:
    return torch.full(INFO[name].shape, float(ord(name)), dtype=INFO[name].dtype)


def writer(out: Path, run: str | None = "run", **options: object) -> FolderWriter:
    return FolderWriter(out, INFO, **{"run": run, "shard_bytes": SHARD_BYTES, **options})


def finish(out: Path, **options: object) -> tuple[list[str], tuple[str, ...]]:
    """Run to the end; return the tensors that were added, and the notes."""
    with writer(out, **options) as going:
        added = going.missing
        for name in added:
            going.add(name, value(name))
        going.write_json("config.json", {})
    return added, going.notes


def stop_after(out: Path, names: str, error: BaseException | None = None, **options: object) -> None:
    error = error or KeyboardInterrupt()

    def stopped() -> None:
        with writer(out, **options) as going:
            for name in names:
                going.add(name, value(name))
            raise error

    with pytest.raises(type(error)):
        stopped()


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    (tmp_path / "expected").mkdir()
    finish(tmp_path / "expected" / "out")
    return resumable.content(tmp_path / "expected" / "out")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here" / "out"


def left(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


# --- killed --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks what it kills")
def test_killed_at_every_moment_and_at_random_ones_the_bytes_are_the_same(tmp_path: Path) -> None:
    """Each file that is opened, renamed, removed or listed is a moment; then SIGKILL, many times an output."""
    run = subprocess.run(
        [sys.executable, resumable.__file__, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout)
    assert counts["moments"] > 80
    assert counts["late"] < counts["moments"]


# --- stopped in other ways -----------------------------------------------------------------------------------


def test_what_a_finished_run_left_goes_once_its_folder_is_found(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(FolderWriter, "_leave", lambda _, stays: None)  # killed just before
        going = writer(out)
        with going:
            for name in going.missing:
                going.add(name, value(name))
    assert left(out) == [".out.headwise-partial", "out"]
    assert going._lock is not None
    going._lock.release()  # as the end of the process does
    with pytest.raises(ArgumentError, match="exists and is not empty"):
        writer(out)
    assert left(out) == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a bug"), OSError(5, "Input/output error")])
def test_what_was_done_before_a_failure_is_not_done_again(
    out: Path, expected: dict[str, bytes], error: BaseException
) -> None:
    stop_after(out, "abc", error)
    assert left(out) == [".out.headwise-partial"]
    assert finish(out) == (["d"], ())
    assert left(out) == ["out"]
    assert resumable.content(out) == expected


def test_tensors_of_a_shard_that_was_not_finished_are_asked_for_again(out: Path, expected: dict[str, bytes]) -> None:
    stop_after(out, "acd")
    with writer(out) as going:
        assert going.missing == ["a", "b"]
        assert [name for name in INFO if going.has(name)] == ["c", "d"]
        for name in ("b", "a"):
            going.add(name, value(name))
            assert going.has(name)
        going.write_json("config.json", {})
    assert resumable.content(out) == expected


def test_a_run_with_nothing_to_go_on_from_leaves_nothing(out: Path) -> None:
    stop_after(out, "a")
    assert left(out) == []
    with pytest.raises(KeyboardInterrupt), writer(out.parent / "new" / "deeper" / "out"):
        raise KeyboardInterrupt
    assert left(out) == []


def test_work_alone_is_gone_on_from(out: Path, expected: dict[str, bytes]) -> None:
    def stopped() -> None:
        with writer(out) as going:
            statistics = going.work / "statistics"
            notes.append(statistics.exists() and statistics.read_text())
            statistics.write_text("of an hour")
            raise KeyboardInterrupt

    notes: list[str | bool] = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            stopped()
    assert notes == [False, "of an hour"]
    finish(out)
    assert left(out) == ["out"]
    assert resumable.content(out) == expected


@pytest.mark.parametrize(
    "other",
    [{"run": "another"}, {"run": None}, {"shard_bytes": 65}],
    ids=str,
)
def test_another_run_discards_what_was_done_and_says_so(
    out: Path, expected: dict[str, bytes], other: dict[str, object]
) -> None:
    stop_after(out, "abc")
    (out.parent / ".out.headwise-partial" / "work" / "theirs").write_text("")
    stop_after(out, "", **other)
    assert left(out) == []
    stop_after(out, "abc")
    added, notes = finish(out, **other)
    assert added == list(INFO)
    assert notes == ("discarded what another conversion to this folder had left unfinished",)
    assert left(out) == ["out"]


def test_other_tensors_are_another_run(out: Path) -> None:
    stop_after(out, "abc")
    with FolderWriter(
        out, {**INFO, "d": TensorInfo((6,), torch.float16)}, run="run", shard_bytes=SHARD_BYTES
    ) as going:
        assert len(going.missing) == 4
        for name in "abc":
            going.add(name, value(name))
        going.add("d", torch.zeros(6, dtype=torch.float16))


@pytest.mark.parametrize("spoil", ["cut", "long", "header", "gone", "folder"])
def test_a_damaged_shard_is_written_again(out: Path, expected: dict[str, bytes], spoil: str) -> None:
    stop_after(out, "abc")
    model = out.parent / ".out.headwise-partial" / "model"
    shard = model / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.unlink()
    if spoil == "folder":
        shard.mkdir()
    elif spoil != "gone":
        spoiled = {"cut": whole[:-1], "long": whole + b"0", "header": whole.replace(b'"c"', b'"x"')}
        shard.write_bytes(spoiled[spoil])
    (model / "nobody.json").write_text("{}")
    assert finish(out)[0] == ["c", "d"]
    assert resumable.content(out) == expected


# --- a full disk ---------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(out: Path, expected: dict[str, bytes]) -> None:
    kept = f"; what is done is kept in {out.parent}/.out.headwise-partial, and the same command continues from there"
    for _ in range(2):
        with full_disk(10_000), pytest.raises(CheckpointError) as error:
            finish(out)
        assert str(error.value) == f"output = '{out}': could not be written: File too large{kept}"
        assert left(out) == [".out.headwise-partial"]
        # What could not be finished gives its room back.
        model = out.parent / ".out.headwise-partial" / "model"
        assert [path.name for path in model.iterdir()] == ["model-00001-of-00003.safetensors"]
    assert finish(out)[0] == ["c", "d"]
    assert resumable.content(out) == expected


def test_a_disk_that_is_full_at_once_keeps_nothing(out: Path) -> None:
    with full_disk(100), pytest.raises(CheckpointError) as error:
        finish(out)
    assert str(error.value) == f"output = '{out}': could not be written: File too large"
    assert left(out) == []


def test_too_little_room_counts_what_is_there(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(out, "abc")
    free = 64 * 1024**2 + 10  # d, beside the headroom
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": free - 1}))
    with pytest.raises(CheckpointError, match=r"needs 0.07 GB of disk and 0.07 GB are free; what is done is kept"):
        finish(out)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": free}))
    assert finish(out)[0] == ["d"]


def test_a_full_disk_elsewhere_in_the_run_says_that_it_can_be_gone_on_from(out: Path) -> None:
    def fail(error: type[CheckpointError]) -> None:
        with writer(out) as going:
            for name in going.missing[:3]:
                going.add(name, value(name))
            raise error("activations", "there", "could not be written")

    with pytest.raises(CheckpointError, match=r"^activations = 'there': could not be written; what is done is kept"):
        fail(StorageError)
    with pytest.raises(CheckpointError, match=r"^activations = 'there': could not be written$"):
        fail(CheckpointError)


# --- two at once ---------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_the_first_goes_on(out: Path, expected: dict[str, bytes]) -> None:
    with writer(out) as first:
        for name in "ab":
            first.add(name, value(name))
        for run in ("run", "another", None):
            with pytest.raises(ArgumentError) as error:
                finish(out, run=run)
            assert str(error.value) == f"output = '{out}': is being written by process {os.getpid()}"
        for name in "cd":
            first.add(name, value(name))
        first.write_json("config.json", {})
    assert resumable.content(out) == expected
    assert left(out) == ["out"]


def test_a_lock_whose_process_is_gone_blocks_nobody(out: Path) -> None:
    stop_after(out, "abc")
    lock = out.parent / ".out.headwise-partial" / "lock"
    assert lock.read_text() == str(os.getpid())
    lock.write_text("1")  # there always is a process 1
    finish(out)


def test_an_output_that_someone_else_made_meanwhile_is_left_alone(out: Path) -> None:
    def interfered_with() -> None:
        with writer(out) as going:
            for name in INFO:
                going.add(name, value(name))
            out.mkdir()
            (out / "theirs").write_text("")

    with pytest.raises(ArgumentError, match="exists and is not empty"):
        interfered_with()
    assert left(out) == [".out.headwise-partial", "out"]
    (out / "theirs").unlink()
    assert finish(out)[0] == []


def test_a_partial_folder_that_is_a_link_is_not_followed(out: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("")
    (out.parent / ".out.headwise-partial").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match=r"cannot be written: \.out\.headwise-partial is a link"):
        finish(out)
    assert (tmp_path / "precious" / "file").exists()


# --- what is written -----------------------------------------------------------------------------------------


def test_the_bytes_are_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5),
        "a": torch.randn(7, dtype=torch.bfloat16),
        'é "quoted" \\ 😀': torch.randn(1, dtype=torch.float16),
        "Z": torch.randn((), dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "turned": torch.randn(4, 6).mT,
    }
    with FolderWriter(
        tmp_path / "out", {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in tensors.items()}
    ) as going:
        for name in reversed(tensors):
            going.add(name, tensors[name])
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_it_can_be_read_before_it_is_moved(tiny_llama_folder: Path, out: Path) -> None:
    source = FolderCheckpoint(tiny_llama_folder)
    with FolderWriter(out, source.tensors, run="run", shard_bytes=20_000) as going:
        for name in source.tensors:
            going.add(name, source.read(name))
        going.write_json("config.json", source.config)
        early = FolderCheckpoint(going.folder)
        assert early.tensors == source.tensors
    assert torch.equal(FolderCheckpoint(out).read("lm_head.weight"), source.read("lm_head.weight"))


PROGRAM = """
import sys
from pathlib import Path
import torch
from headwise.models.checkpoints import FolderWriter, TensorInfo

def resident(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

info = {str(i): TensorInfo((1024, 1024), torch.float32) for i in range(16)}
with FolderWriter(Path(sys.argv[1]), info) as writer:
    writer.add("0", torch.randn(1024, 1024))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    for name in writer.missing:
        writer.add(name, torch.randn(1024, 1024))
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_hold_a_shard(tmp_path: Path) -> None:
    """One file of 64 MB; a tensor is 4 MB."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 20e6


# --- which run it is -----------------------------------------------------------------------------------------


def test_the_identity_of_a_run_changes_with_all_that_decides_it(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identity(**decides: object) -> str:
        return run_identity(FolderCheckpoint(tiny_llama), **{"to": "mla", "rank": 8, **decides})

    first = identity()
    assert first == identity() == identity(rank=8)
    identities = {first, identity(rank=9), identity(more=None)}
    weights = tiny_llama / "model.safetensors"
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    identities.add(identity())
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert identity() == first
    monkeypatch.setattr("headwise.models.checkpoints.checkpoint.version", lambda _: "0")
    identities.add(identity())
    monkeypatch.undo()
    (tiny_llama / "more.json").write_text("{}")
    identities.add(identity())
    assert len(identities) == 6
