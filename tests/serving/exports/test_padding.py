"""deepseek_v3 folders that are filled up with zeros: the same outputs, and the sizes that were asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headwise
from headwise.conversion import export_gguf
from headwise.errors import ArgumentError
from headwise.models.checkpoints import load_tokenizer
from headwise.serving.exports.deepseek import parse_padding
from tests.closeness import assert_close
from tests.serving.exports.test_gguf import TEXT, _give_tokenizer, save_plain

FLOAT32_NORM = 2e-6
"""transformers takes every RMSNorm's mean square in float32, whatever the model's dtype."""


@torch.inference_mode()
def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = headwise.load(folder, dtype="float64")(ids).logits
    return out


@pytest.mark.parametrize(
    ("model_type", "bias_free", "pad_to"),
    [
        *(("llama", False, "32+8"), ("llama", True, "20+16"), ("llama", True, "64+64")),
        *(("qwen2", True, "32+8"), ("qwen2", False, "20+16"), ("qwen2", False, "64+64")),
    ],
)
def test_zeros_change_nothing(model_type: str, bias_free: bool, pad_to: str, tmp_path: Path) -> None:
    source, text = save_plain(tmp_path / "source", model_type), tmp_path / "text.txt"
    _give_tokenizer(source)
    text.write_text(TEXT * 20)
    how: dict[str, Any] = {"to": "mla", "kv_lora_rank": 20, "qk_rope_head_dim": 4, "format": "deepseek"}
    how |= {"bias_free": bias_free, "calibrate": text, "calibration_tokens": 512, "evaluate": False}
    how["without"] = ["refine"]
    headwise.convert(source, tmp_path / "plain", **how)
    done = headwise.convert(source, tmp_path / "padded", pad_to=pad_to, **how)
    rank, rope = parse_padding(pad_to)
    assert done.label == f"MLA {rank} + {rope}"
    # Without biases a norm's constant is near 1 on the text alone; where it is near 0, roundings are magnified.
    ids = load_tokenizer(source)(TEXT * 2, return_tensors="pt").input_ids[:, :80].view(2, 40)
    padded = logits(tmp_path / "padded", ids)
    assert_close(padded, logits(tmp_path / "plain", ids), 20 * FLOAT32_NORM)
    config = json.loads((tmp_path / "padded" / "config.json").read_text())
    expected = (64, 128) if rope == 64 else (8, 8)  # the smallest heads of a kernel; none has these rotary dims
    assert (config["qk_nope_head_dim"], config["v_head_dim"]) == expected
    tensors = load_file(tmp_path / "padded" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (rank + rope, 48)
    if bias_free:
        export_gguf(tmp_path / "padded", tmp_path / "padded.gguf")
        assert_close(logits(tmp_path / "padded.gguf", ids), padded, 10 * FLOAT32_NORM)


@pytest.mark.parametrize("text", ["", "512", "512+", "512 64", "-1+2", "512+63", "1e3+64", "512+64+1"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"pad_to = .*: must be R\+P"):
        parse_padding(text)


def test_sizes_that_are_too_small_or_of_another_format(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "source")
    how: dict[str, Any] = {"to": "mla", "kv_lora_rank": 20, "qk_rope_head_dim": 4, "evaluate": False}
    with pytest.raises(ArgumentError, match=r"pad_to = '16\+8': must be at least 20\+4"):
        headwise.convert(source, tmp_path / "out", format="deepseek", pad_to="16+8", **how)
    for other in ("headwise", "deepseek-longrope", "gguf"):
        with pytest.raises(ArgumentError, match=r"pad_to = '64\+64': goes with format deepseek"):
            headwise.convert(source, tmp_path / "out", format=other, pad_to="64+64", **how)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
