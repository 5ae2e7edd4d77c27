"""Two processes that share out a model's tensors learn what one learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import headwise
from headwise.conversion.healing.loop import Loop
from tests.closeness import assert_close
from tests.conversion.healing.test_heal import TEXT
from tests.conversion.test_resumed import StoppedError, stop_at
from tests.real_models import save_tiny
from tests.warm import run

ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes", "2"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)


@pytest.mark.parametrize("train", ["all", "lora"])
def test_two_processes_learn_what_one_learns(train: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    (tmp_path / "text.txt").write_text(TEXT)
    headwise.convert(source, tmp_path / "half", to="mla", kv_budget=0.5, evaluate=False)
    results = []
    for processes in (1, 2):
        out = tmp_path / f"out{processes}"
        options = ("--teacher", source, "--text", tmp_path / "text.txt", "--steps", 8, "--window", 16, "--batch", 4)
        more = ("--learning-rate", 1e-3, "--dtype", "float32", "--train", train, "--no-evaluate", "--measurements", 2)
        done = run("-m", "headwise", "heal", tmp_path / "half", out, *options, *more, ranks=processes)
        assert done.returncode == 0, done.stderr
        document = json.loads((out / "healing.json").read_text())
        results.append((document, load_file(out / "model.safetensors")))
    (one, alone), (two, together) = results
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert one["losses"][-1] < one["losses"][0]
    assert two["trained_parameters"] == one["trained_parameters"]
    for name, tensor in alone.items():
        assert_close(together[name], tensor, 1e-4)


def test_a_killed_run_goes_on_with_more_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny(tmp_path / "source")
    (tmp_path / "text.txt").write_text(TEXT)
    keywords = {"teacher": source, "text": tmp_path / "text.txt", "steps": 8, "window": 16, "batch": 4}
    keywords |= {"learning_rate": 1e-3, "dtype": "float32", "evaluate": False, "measurements": 2}
    headwise.convert(source, tmp_path / "half", to="mla", kv_budget=0.5, evaluate=False)
    whole = headwise.heal(tmp_path / "half", tmp_path / "whole", **keywords)
    with monkeypatch.context() as patch:
        stop_at(patch, Loop, "_step", 6, after=True)
        with pytest.raises(StoppedError):
            headwise.heal(tmp_path / "half", tmp_path / "out", **keywords)
    options = ("--teacher", source, "--text", tmp_path / "text.txt", "--steps", 8, "--window", 16, "--batch", 4)
    more = ("--learning-rate", 1e-3, "--dtype", "float32", "--no-evaluate", "--measurements", 2)
    done = run("-m", "headwise", "heal", tmp_path / "half", tmp_path / "out", *options, *more, ranks=2)
    assert done.returncode == 0, done.stderr
    losses = json.loads((tmp_path / "out" / "healing.json").read_text())["losses"]
    assert losses[:4] == list(whole.losses[:4])  # these were done before, by one process
    assert losses == pytest.approx(whole.losses, rel=1e-4)


@pytest.mark.parametrize("is_real", [False, True], ids=["warm", "accelerate"])
def test_windows_that_processes_cannot_share_are_refused(is_real: bool, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    (tmp_path / "text.txt").write_text(TEXT)
    options = ("--teacher", source, "--text", tmp_path / "text.txt", "--steps", 2, "--window", 16, "--batch", 3)
    command = ("-m", "headwise", "heal", source, tmp_path / "out", *options)
    if is_real:
        words = [sys.executable, *ACCELERATE, *map(str, command)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    else:
        done = run(*command, ranks=2)
    assert done.returncode != 0
    assert "batch = 3: must be a multiple of 2, the processes" in done.stderr
    assert not (tmp_path / "out").exists()
