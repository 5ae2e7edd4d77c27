"""Whole models on two ranks compute and generate what they do on one."""

from __future__ import annotations

import json
from pathlib import Path

import headwise
from tests.real_models import save_tiny
from tests.runtime.parallel.test_heads import run_on


def test_two_ranks_run_a_model_as_one_does(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", num_attention_heads=4, num_key_value_heads=2)
    headwise.convert(source, tmp_path / "mla", to="mla", kv_budget=0.5, evaluate=False)
    headwise.convert(source, tmp_path / "coarse", to="mqa", evaluate=False)
    odd = save_tiny(tmp_path / "odd", "gpt_neox", num_attention_heads=3)
    config = json.loads((odd / "config.json").read_text())
    del config["num_key_value_heads"]  # this family has none
    (odd / "config.json").write_text(json.dumps(config))
    assert "every model agrees" in run_on(2, "shared_models.py", tmp_path)
