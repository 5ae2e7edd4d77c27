"""A model of images and text: its text part is converted, and images are seen as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

import headwise
from headwise.models.checkpoints import open_checkpoint
from headwise.runtime.caches.cache import HeadwiseCache
from tests.closeness import assert_close
from tests.conversion.test_resumed import TEXT
from tests.tiny_families import save_family

IMAGE = 96
"""The token that stands for a part of an image."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("images") / "source", "gemma3")


def inputs() -> dict[str, torch.Tensor]:
    """A text with an image of four tokens, longer than the model's windows."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 90, (1, 16), generator=draw)
    ids[:, 6:10] = IMAGE
    pixels = torch.randn(1, 3, 8, 8, dtype=torch.float64, generator=draw)
    return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}


@torch.inference_mode()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("how", [{"to": "mha"}, {"to": "mla", "kv_budget": 1.0}], ids=["mha", "mla"])
def test_images_are_seen_as_by_the_source(
    how: dict[str, Any], implementation: str, source: Path, tmp_path: Path
) -> None:
    headwise.convert(source, tmp_path / "out", **how, evaluate=False)
    before, after = (
        AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=implementation)
        for folder in (source, tmp_path / "out")
    )
    given = inputs()
    expected = before(**given).logits
    assert_close(after(**given).logits, expected, 1e-6)  # norms of queries and keys are in float32
    features = (model.get_image_features(given["pixel_values"]).pooler_output for model in (before, after))
    assert torch.equal(*features)
    # The tokens of an image see each other, whichever comes first: its last part changes what its first one becomes.
    turned = {**given, "pixel_values": given["pixel_values"].flip(-2)}
    causal = after(**{**given, "token_type_ids": torch.zeros_like(given["input_ids"])}).logits
    assert (after(**turned).logits - expected).abs().max() > 1e-3
    assert (causal[0, 6] - expected[0, 6]).abs().max() > 1e-3
    tokens = [model.generate(**given, max_new_tokens=6, do_sample=False) for model in (before, after)]
    assert torch.equal(*tokens)


def test_what_is_no_text_is_carried_over(source: Path, tmp_path: Path) -> None:
    headwise.convert(source, tmp_path / "out", to="mqa", evaluate=False)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    others = {name for name in before.tensors if not name.startswith("model.language_model.layers")}
    assert {"model.multi_modal_projector.mm_input_projection_weight"} <= others
    assert all(torch.equal(before.read(name), after.read(name)) for name in others)
    assert after.config["text_config"] == before.config["text_config"] | {"num_key_value_heads": 1}
    assert after.config["vision_config"] == before.config["vision_config"]
    assert headwise.inspect(tmp_path / "out").layers[0].spec["num_kv_heads"] == 1


@torch.inference_mode()
def test_names_of_published_folders(source: Path, tmp_path: Path) -> None:
    old = save_family(tmp_path / "old", "gemma3")
    tensors = load_file(old / "model.safetensors")
    assert any(name.startswith("language_model.model.layers") for name in tensors)
    published = {name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in tensors.items()}
    save_file(published, old / "model.safetensors", metadata={"format": "pt"})
    assert open_checkpoint(old).tensors == open_checkpoint(source).tensors
    headwise.convert(old, tmp_path / "out", to="mha", evaluate=False)
    assert_close(headwise.load(tmp_path / "out")(**inputs()).logits, headwise.load(old)(**inputs()).logits, 0)


@torch.inference_mode()
@pytest.mark.parametrize("to", ["mla", "same"])
def test_codes_of_its_cache(to: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    how: dict[str, Any] = {"calibrate": tmp_path / "text.txt", "calibration_tokens": 256, "evaluate": False}
    headwise.convert(source, tmp_path / "out", to=to, kv_bytes=0.5, **how)
    model, ids = headwise.load(tmp_path / "out"), inputs()["input_ids"].clamp(max=90)
    cache = HeadwiseCache(model)
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 9), (9, 10), (10, 16))]
    assert_close(torch.cat(parts, 1), model(ids, use_cache=False).logits, 1e-6)


def test_a_head_of_another_task_is_refused(source: Path, tmp_path: Path) -> None:
    config = open_checkpoint(source).config | {"architectures": ["Gemma3ForSequenceClassification"]}
    with pytest.raises(headwise.CheckpointError, match=r"^architectures = 'Gemma3ForSequenceClassification'"):
        headwise.runtime.hf.models.model_class(config)
