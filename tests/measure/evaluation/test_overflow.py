"""A model whose activations overflow in a dtype is refused wherever its logits are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise
from headwise.measure.evaluation import evaluate_choices, evaluate_planted
from headwise.runtime.hf.generate import decode_recorded
from tests.real_models import save_tiny


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("overflow")
    weights = load_file(save_tiny(root / "model") / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 60_000  # below float16's largest number still
    weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(weights, root / "model" / "model.safetensors", metadata={"format": "pt"})
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    item = {"question": "what", "choices": ["a fox", "a dog"], "answer": 1}
    (root / "items.jsonl").write_text(json.dumps(item))
    return root


READERS: dict[str, Callable[[Path, str], object]] = {
    "evaluate": lambda root, dtype: headwise.evaluate(
        root / "model", text=root / "text.txt", window=64, windows=1, context=16, dtype=dtype
    ),
    "choices": lambda root, dtype: evaluate_choices(root / "model", file=root / "items.jsonl", dtype=dtype),
    "planted": lambda root, dtype: evaluate_planted(
        root / "model", text=root / "text.txt", context=200, codes=2, trials=1, dtype=dtype
    ),
    "generate": lambda root, dtype: headwise.generate(root / "model", "the", max_new_tokens=4, dtype=dtype),
    "recorded": lambda root, dtype: decode_recorded(
        headwise.load(root / "model", dtype=dtype), torch.tensor([[5, 6, 7]]), 4
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_logits_that_overflow_are_refused(reader: str, root: Path) -> None:
    READERS[reader](root, "bfloat16")
    with pytest.raises(headwise.CheckpointError, match=r"model'?: computes NaN or infinite logits in float16"):
        READERS[reader](root, "float16")
