"""The campaign under sanitizers: its cases, without sanitizers; and that it counts, and finds what goes wrong."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from benchmarks.trust.hostile import Draw, Guarded
from benchmarks.trust.lying_codes import lie
from safetensors.torch import load

from benchmarks.trust import kernel_calls, sanitizers
from headwise.runtime.kernels.native import built
from headwise.runtime.kernels.native.abi import KERNELS
from headwise.runtime.quantization.transform_code import FILE

pytestmark = pytest.mark.skipif(built().library is None, reason=f"no compiled kernel: {built().reason}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    sanitizers.prepare(folder)
    return folder


def test_cases_end_well_and_call_every_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built().library
    for name in KERNELS:
        monkeypatch.setattr(library, name, getattr(library, name))  # as count_calls changes it
    calls, guarded = kernel_calls.count_calls(), Guarded()
    for part in kernel_calls.parts(folder).values():
        ended = Counter(kernel_calls.attempt(part.case, Draw(seed, guarded)) for seed in range(6))
        assert ended.keys() <= {"done", "refused"}
        assert all(calls[kernel] for kernel in part.kernels)
    assert calls.keys() == KERNELS.keys()


def test_a_file_that_lies_is_another_one(folder: Path) -> None:
    genuine = (folder / "latents" / FILE).read_bytes()
    lies = {lie(genuine, Draw(seed, None)) for seed in range(40)}
    assert len(lies) > 35
    assert load(genuine).keys()  # is unchanged


def test_tensors_end_where_memory_ends() -> None:
    draw, x = Draw(3, Guarded(), is_interpreted=True), torch.arange(24.0).view(2, 3, 4)
    for _ in range(5):
        placed = draw.placed(x)
        assert torch.equal(placed, x)
        last = sum((size - 1) * step for size, step in zip(placed.shape, placed.stride(), strict=True))
        assert (placed.data_ptr() + 4 * last + 4) % 4096 == 0


def test_what_ends_a_process_is_found_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import json, sys
start = int(sys.argv[1])
for seed in range(start, 5):
    if seed == 2:
        sys.exit("x.cpp:3:4: runtime error: shift exponent 40 is too large")
    print(json.dumps({"seed": seed, "outcome": "done", "calls": {"headwise_code": 2}}))
"""
    monkeypatch.setattr(
        sanitizers, "command", lambda module, folder, what, *more: [sys.executable, "-c", code, more[1]]
    )
    found = list(sanitizers.Runner("", tmp_path, {}).cases("coding", 1))
    assert [case["seed"] for case in found] == [0, 1, 2, 3, 4]
    assert found[2]["outcome"] == "x.cpp:3:4: runtime error: shift exponent 40 is too large (status 1)"
    assert all(case["outcome"] == "done" for case in (*found[:2], *found[3:]))


def test_a_fault_that_is_not_reported_ends_the_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizers, "command", lambda *_: [sys.executable, "-c", ""])
    with pytest.raises(SystemExit, match="the fault 'heap' was not reported"):
        sanitizers.Runner("", tmp_path, {}).check_faults(["heap"])


def test_the_result_counts_calls_in_each_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {"calls": dict.fromkeys(KERNELS, 7), "findings": []}
    monkeypatch.setattr(sanitizers, "try_set", lambda *_: tried)
    results = folder / "results.json"
    sanitizers.main(["--folder", str(folder), "--sets", "avx2", "avx512", "--json", str(results)])
    report = json.loads(results.read_text())
    assert report["calls"] == dict.fromkeys(KERNELS, 14)
    assert report["findings"] == 0
    assert report["run"].keys() == {"commit", "command", "machine", "versions"}
