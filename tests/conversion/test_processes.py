"""Two processes compute what one computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headwise.base import processes
from tests.closeness import assert_close
from tests.real_models import save_tiny
from tests.warm import run

PROGRAM = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from headwise.models.checkpoints import open_checkpoint
from headwise.conversion.storage import Activations
from headwise.base.processes import all_sum, barrier, my_windows, process_index
from headwise.runtime.hf import LayerwiseModel

source, out, windows = Path(sys.argv[1]), Path(sys.argv[2]), 5
torch.set_grad_enabled(False)
if "RANK" in __import__("os").environ:
    dist.init_process_group("gloo")
ids = torch.randint(3, 97, (windows, 32), generator=torch.Generator().manual_seed(1))
model = LayerwiseModel(open_checkpoint(source), torch.float64)
store = Activations(out / "hidden", streams=("a",), shape=(windows, 32, 48), dtype=torch.float64)
for w in my_windows(windows):
    store.write("a", w, model.begin(ids[w : w + 1]))
store.commit()
grams = {}
for index in range(model.num_layers):
    module, gram, mine = model.module(index), torch.zeros(48, 48, dtype=torch.float64), 0
    for w in my_windows(windows):
        call, states = model.trace(index, module, store.read("a", w, w + 1))
        gram.addmm_(call.inputs[0].mT, call.inputs[0])
        store.write("a", w, states)
        mine += 1
    store.commit()
    own = gram.clone()
    grams[f"{index}"] = all_sum(gram)
    assert mine < windows or torch.equal(own, gram)
grams["hidden"] = store.read("a", 0, windows)
if process_index() == 0:
    save_file(grams, out / "grams.safetensors")
barrier()
"""


def test_two_processes_sum_to_one(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "qwen2")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    outputs = {}
    for ranks, name in ((1, "one"), (2, "two")):
        (tmp_path / name).mkdir()
        done = run(program, source, tmp_path / name, ranks=ranks)
        assert done.returncode == 0, done.stderr
        outputs[name] = load_file(tmp_path / name / "grams.safetensors")
    assert set(outputs["one"]) == {"0", "1", "hidden"}
    for name, expected in outputs["one"].items():
        assert_close(outputs["two"][name], expected, 1e-10)
    assert torch.equal(outputs["one"]["hidden"], outputs["two"]["hidden"])


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 6, 7])
def test_every_window_is_one_processs(monkeypatch: pytest.MonkeyPatch, world: int, count: int) -> None:
    monkeypatch.setattr(processes, "process_count", lambda: world)
    taken = []
    for index in range(world):
        monkeypatch.setattr(processes, "process_index", lambda index=index: index)
        mine = processes.my_windows(count)
        assert count // world <= len(mine) <= -(-count // world)
        taken += mine
    assert taken == list(range(count))


def test_a_single_process_shares_nothing() -> None:
    tensor = torch.randn(3)
    assert torch.equal(processes.all_sum(tensor.clone()), tensor)
    assert processes.my_windows(4) == range(4)
    assert (processes.process_index(), processes.process_count()) == (0, 1)
    processes.barrier()
