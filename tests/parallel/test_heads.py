"""Ranks that share a layer's heads compute what one computes: forward, backward and decoding with a cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "shared_heads.py"


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_what_one_computes(ranks: int) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, *launch, str(PROGRAM)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "every mechanism agrees" in run.stdout
