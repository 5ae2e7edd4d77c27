"""Hidden states on disk: the last commit is read, whenever the run was killed."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.conversion.storage import Activations, Spill
from headwise.errors import CheckpointError

N, W, E = 5, 4, 6
LAYERS = 3
STREAMS = ("source", "converted")


def opened(folder: Path, **options: Any) -> Activations:
    return Activations(folder, **{"streams": STREAMS, "shape": (N, W, E), **options})


def embedded(stream: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(stream))
    return torch.randn(N, W, E, generator=generator)


def go_on(store: Activations) -> dict[str, torch.Tensor]:
    """Run some layers from where the store stands; the final states."""
    if store.layer is None:
        for stream, window in itertools.product(STREAMS, range(N)):
            store.write(stream, window, embedded(stream)[window : window + 1])
        store.commit()
    for layer in range(store.layer, LAYERS):
        for stream, start in itertools.product(STREAMS, range(0, N, 2)):
            stop = min(start + 2, N)
            states = store.read(stream, start, stop)
            # The streams differ, and so do layers, so that a layer run twice or left out shows.
            store.write(stream, start, (states * 1.1 + layer + len(stream)).sin())
        store.commit()
    return {stream: store.read(stream, 0, N) for stream in STREAMS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_read_is_what_was_committed(tmp_path: Path, dtype: torch.dtype) -> None:
    store = opened(tmp_path, dtype=dtype)
    assert len(store) == N
    assert store.layer is None
    first, second = torch.randn(2, N, W, E).to(dtype)
    for states, layer in ((first, 0), (second, 1)):
        for stream in STREAMS:
            for window in reversed(range(N)):
                store.write(stream, window, states[window : window + 1] + len(stream))
                if layer:
                    assert torch.equal(store.read(stream, 0, N), first + len(stream))
        store.commit()
        assert store.layer == layer
        for stream in STREAMS:
            assert torch.equal(store.read(stream, 0, N), states + len(stream))
            assert torch.equal(store.read(stream, 1, 3), states[1:3] + len(stream))
    assert sorted(file.stat().st_size for file in tmp_path.glob("*.activations")) == [first.nbytes] * 2


def test_a_layer_with_a_window_missing_is_not_committed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for stream in STREAMS:
        store.write(stream, 0, torch.zeros(N, W, E))
    store.commit()
    store.write(STREAMS[0], 0, torch.zeros(N, W, E))
    store.write(STREAMS[1], 0, torch.zeros(N - 1, W, E))
    with pytest.raises(AssertionError, match="a window was not written"):
        store.commit()


class Killed(BaseException):
    """The process is killed: no handler catches this."""


def test_a_run_killed_at_any_moment_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is killed at every opening, renaming and removal of a file, and started again until it finishes."""
    expected = go_on(opened(tmp_path / "whole"))
    stops = 0
    for moment in itertools.count(1):
        left = moment

        def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed
                return function(*args, **kwargs)

            return call

        folder = tmp_path / f"killed-{moment}"
        with monkeypatch.context() as patch:
            for name in ("open", "replace"):
                patch.setattr(os, name, deadly(getattr(os, name)))
            for name in ("open", "unlink", "write_text"):
                patch.setattr(Path, name, deadly(getattr(Path, name)))
            try:
                go_on(opened(folder))
                break
            except Killed:
                stops += 1
        done = go_on(opened(folder))
        assert all(torch.equal(done[stream], expected[stream]) for stream in STREAMS), moment
    assert stops > 60


def test_a_committed_layer_is_not_done_again(tmp_path: Path) -> None:
    go_on(opened(tmp_path))
    store = opened(tmp_path)
    assert store.layer == LAYERS
    store.write("source", 0, torch.zeros(N, W, E))  # of a layer never committed
    assert opened(tmp_path).layer == LAYERS
    assert len(list(tmp_path.glob("*.activations"))) == len(STREAMS)


@pytest.mark.parametrize(
    "other",
    [{"run": "another"}, {"shape": (N, E, W)}, {"dtype": torch.float64}, {"streams": ("source", "other")}],
    ids=str,
)
def test_states_of_another_run_are_thrown_away(tmp_path: Path, other: dict[str, Any]) -> None:
    go_on(opened(tmp_path))
    assert opened(tmp_path, **other).layer is None
    assert list(tmp_path.glob("*.activations")) == []


@pytest.mark.parametrize("spoil", ["cut", "changed", "gone", "state cut", "state of another kind"])
def test_states_that_a_power_cut_lost_are_not_gone_on_from(tmp_path: Path, spoil: str) -> None:
    go_on(opened(tmp_path))
    state, file = tmp_path / "activations.json", next(tmp_path.glob("*.activations"))
    content = file.read_bytes()
    if spoil == "cut":
        file.write_bytes(content[:-1])
    elif spoil == "changed":
        file.write_bytes(bytes(len(content)))
    elif spoil == "gone":
        file.unlink()
    else:
        state.write_text(state.read_text()[:-5] if spoil == "state cut" else "[]")
    assert opened(tmp_path).layer is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for stream in STREAMS:
        store.write(stream, 0, embedded(stream))
    store.commit()
    full = tmp_path / "converted-1.activations"
    full.symlink_to("/dev/full")
    with pytest.raises(CheckpointError) as error:
        go_on(store)
    line = f"activations = '{tmp_path}': could not be written: No space left on device"
    assert str(error.value) == line
    full.unlink()
    expected = go_on(opened(tmp_path / "whole"))
    done = go_on(opened(tmp_path))
    assert all(torch.equal(done[stream], expected[stream]) for stream in STREAMS)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"^activations = '.*file/inside': could not be prepared: Not a directory"
    ):
        opened(tmp_path / "file" / "inside")


PROGRAM = """
import sys
from pathlib import Path
import torch
from headwise.conversion.storage import Activations, Spill

def resident(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

store = Activations(Path(sys.argv[1]), streams=("a", "b"), shape=(60, 256, 1024))
states = torch.randn(1, 256, 1024)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = resident("VmRSS")
for layer in range(2):
    for stream in "ab":
        for window in range(60):
            if layer:
                states = store.read(stream, window, window + 1)
            store.write(stream, window, states)
    store.commit()
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_windows(tmp_path: Path) -> None:
    """Two streams of 60 MB; a window is 1 MB."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False)
    for file in tmp_path.glob("*.activations"):
        file.unlink()
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 20e6


def test_windows_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "some.spill", (N, W, E))
    with pytest.raises(CheckpointError, match=r"some\.spill': could not be read: No such file"):
        spill.read(0)
    spill.write(1, torch.ones(W, E))
    assert torch.equal(spill.read(1), torch.ones(W, E))
    with pytest.raises(CheckpointError, match="are cut short"):
        spill.read(2)
