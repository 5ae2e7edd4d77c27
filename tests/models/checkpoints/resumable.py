"""A conversion without a model, which `test_resume` runs in separate processes and kills again and again.

Each layer's weights follow from the activations that the layers before it made, so that work left out, done twice
or taken from a half-written file shows in the output's bytes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import torch

from headwise.conversion.storage import Activations, LayerFiles
from headwise.models.checkpoints import FolderWriter, TensorInfo

LAYERS, N, W, E = 3, 2, 3, 64
INFO = {
    # Written early, at the end of their shard: it has its whole size long before it has all its bytes.
    "embed": TensorInfo((4, E), torch.bfloat16),
    "norm": TensorInfo((E * E,), torch.float32),
    **{f"{layer}.{name}": TensorInfo((E, E), torch.float32) for layer in range(LAYERS) for name in ("down", "up")},
}
SHARD_BYTES = 40_000  # so that layers and shards do not end together


def convert(out: Path, run: str = "run") -> None:
    with FolderWriter(out, INFO, run=run, overwrite=True, shard_bytes=SHARD_BYTES) as writer:
        results = LayerFiles(writer.work / "layers")
        streams = Activations(writer.work / "activations", streams=("only",), shape=(N, W, E), run=run)
        if streams.layer is None:
            streams.write("only", 0, torch.arange(N * W * E, dtype=torch.float32).view(N, W, E).sin())
            streams.commit()
        log = []
        for name in ("embed", "norm"):
            if not writer.has(name):
                writer.add(name, torch.ones(INFO[name].shape, dtype=INFO[name].dtype))
        for layer in range(LAYERS):
            if streams.layer <= layer:
                states = streams.read("only", 0, N)
                gram = states.flatten(0, 1).mT @ states.flatten(0, 1)
                results.save(layer, {"down": gram, "up": gram.cos()}, {"sum": float(gram.sum())})
                streams.write("only", 0, (states @ gram + layer).sin())
                streams.commit()
            kept = results.load(layer)
            assert kept is not None, layer
            log.append(kept[1])
            for name, tensor in kept[0].items():
                if f"{layer}.{name}" in writer.missing:
                    writer.add(f"{layer}.{name}", tensor)
        writer.write_json("config.json", {"log": log})


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def attempt(out: Path, prepare: Callable[[], None], delay: float | None = None) -> int:
    """Convert in a separate process, which dies by itself or is killed after a while, and return its status."""
    child = os.fork()
    if child == 0:
        prepare()
        convert(out)
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dying_at(moment: int) -> Callable[[], None]:
    """Die at the n-th opening, renaming, removal or listing of a file."""

    def prepare() -> None:
        left = moment

        def hook(event: str, _: object) -> None:
            nonlocal left
            if event == "open" or event.startswith(("os.", "shutil.")):
                left -= 1
                if left == 0:
                    os._exit(9)

        sys.addaudithook(hook)

    return prepare


def every_moment(folder: Path) -> Iterator[Path]:
    for moment in count(1):
        out = folder / f"moment-{moment}" / "out"
        if attempt(out, dying_at(moment)) == 0:
            return
        yield out


def random_moments(folder: Path, kills: int) -> Iterator[Path]:
    start = time.perf_counter()
    assert attempt(folder / "timed" / "out", lambda: None) == 0
    seconds = time.perf_counter() - start
    for number in count():
        out = folder / f"random-{number}" / "out"
        while kills and attempt(out, lambda: None, random.uniform(0, seconds)) != 0:
            kills -= 1
        yield out
        if not kills:
            return


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # a kill is no power cut: what was written need not wait for the disk
    convert(folder / "whole" / "out")
    expected = content(folder / "whole" / "out")
    counts = {"moments": 0, "outputs": 0, "late": 0}
    for kind, outs in {"moments": every_moment(folder), "outputs": random_moments(folder, 30)}.items():
        for out in outs:
            counts[kind] += 1
            if (out / "config.json").exists():  # all was done, or all but clearing up
                # By how late a random kill comes, the machine's other load has a say; a moment's number has not.
                counts["late"] += kind == "moments"
                assert content(out) == expected, out
            convert(out)
            assert content(out) == expected, out
            assert [path.name for path in out.parent.iterdir()] == ["out"], out
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
