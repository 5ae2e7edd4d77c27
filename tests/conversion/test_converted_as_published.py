"""``convert`` with a published method's name is that method on the source's own activations, without other stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.conversion.methods.mha2mla import mha2mla
from headwise.conversion.methods.transmla import transmla
from headwise.models.checkpoints import load_tokenizer, open_checkpoint
from headwise.models.specs import GroupedSpec, LatentSpec
from headwise.runtime.hf import HostedLatentAttention
from tests.closeness import assert_close
from tests.real_models import save_tiny
from tests.tiny_families import save_family

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 40
TOKENS = 512  # two windows of 256: one is calibrated on, and one is held out


@pytest.fixture(autouse=True)
def layers_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are compared with those of the whole model in float32."""
    monkeypatch.setattr("headwise.conversion.solvers.device.QUICK", False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    save_tiny(folder / "source", "qwen2", num_attention_heads=4, num_key_value_heads=2)
    (folder / "text.txt").write_text(TEXT)
    return folder


def moments(source: Path) -> list[torch.Tensor]:
    """E[x xᵀ] of the inputs of each of the source's attentions, with a constant 1 last."""
    model: Any = headwise.load(source, dtype="float32")
    ids = load_tokenizer(source)(TEXT, add_special_tokens=False)["input_ids"][: TOKENS // 2]
    calls: list[torch.Tensor] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        hidden = kwargs["hidden_states"][0].double()
        calls.append(torch.cat((hidden, torch.ones(len(hidden), 1)), dim=1))

    hooks = [layer.self_attn.register_forward_pre_hook(look, with_kwargs=True) for layer in model.model.layers]
    with torch.inference_mode():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return [rows.mT @ rows / len(rows) for rows in calls]


@pytest.mark.parametrize("method", ["mha2mla", "transmla", "transmla:2", "transmla:6"])
def test_it_is_the_method_layer_by_layer(method: str, place: Path, tmp_path: Path) -> None:
    source = place / "source"
    done = headwise.convert(
        source,
        tmp_path / "out",
        to="mla",
        kv_lora_rank=20,
        qk_rope_head_dim=8,
        calibrate=place / "text.txt",
        calibration_tokens=TOKENS,
        method=method,
        evaluate=False,
    )
    assert done.method == method
    checkpoint, model = open_checkpoint(source), headwise.load(source)
    targets = open_checkpoint(tmp_path / "out").spec.layers
    for index, (layer, target, gram) in enumerate(zip(checkpoint.spec.layers, targets, moments(source), strict=True)):
        assert isinstance(layer, GroupedSpec)
        assert isinstance(target, LatentSpec)
        state = checkpoint.family.read_attention(checkpoint.read, index, layer)
        if method == "mha2mla":
            tensors, channels = mha2mla(state, layer, target, moments=gram)
        else:
            fold = int(method.partition(":")[2] or 1)
            tensors, channels = transmla(state, layer, target, moments=gram, freqfold=fold)
        hosted = HostedLatentAttention(target, model.config, index, channels).double().eval()
        hosted.load_state_dict(tensors)
        model.model.layers[index].self_attn = hosted
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, plain = model(ids).logits, headwise.load(source)(ids).logits
        got = headwise.load(tmp_path / "out")(ids).logits
    assert float((expected - plain).abs().max() / plain.abs().max()) > 1e-2  # this size is lossy
    assert_close(got, expected, 1e-4)


def test_weights_alone_do_for_mha2mla(place: Path, tmp_path: Path) -> None:
    done = headwise.convert(
        place / "source", tmp_path / "out", to="mla", kv_budget=0.5, method="mha2mla", evaluate=False
    )
    assert done.calibration_tokens == 0
    assert any("no calibration text" in note for note in done.notes)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"method": "transmla"}, "calibrate = None: is required: transmla finds its channels on a text"),
        ({"method": "transmla:5"}, "freqfold = 5: must divide the 6 frequencies of a head"),
        ({"method": "transmla:0"}, "freqfold = 0: must divide"),
        (
            {"method": "transmla:x"},
            "method = 'transmla:x': must be one of aligned, first_head, mean, random; or for mla headwise, mha2mla",
        ),
        ({"method": "mha2mla", "to": "mqa", "kv_budget": None}, "method = 'mha2mla': goes with mla"),
        ({"method": "mha2mla", "without": ["refit"]}, "without = 'refit': is a stage of headwise's own"),
        (
            {"method": "mean", "to": "mqa", "kv_budget": None, "without": ["refit"]},
            "without = 'refit': is a stage of headwise's own methods, and mean has none",
        ),
        (
            {"to": "mqa", "kv_budget": None, "without": ["refit", "channels"]},
            "without = 'channels': is no stage of aligned, which has recall, starts, sensitivity, sequence, refine, "
            "refit",
        ),
        ({"without": ["refit"]}, "without = 'refit': is a stage of calibrate, and no text is given"),
        ({"kv_budget": 1.0, "without": ["refit"]}, "is a stage of calibrate, and nothing is lost at this size"),
        ({"method": "mha2mla", "format": "deepseek"}, "format = 'deepseek': goes with headwise's own method"),
        ({"method": "aligned"}, "method = 'aligned': merges key–value heads, and none are merged here"),
    ],
    ids=str,
)
def test_bad_input(options: dict[str, Any], line: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(headwise.ArgumentError) as error:
        headwise.convert(place / "source", tmp_path / "out", **{"to": "mla", "kv_budget": 0.5, **options})
    assert line in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["gpt2", "phi3"])  # no rotation, and partial rotation
def test_models_without_whole_rotation_are_refused(family: str, tmp_path: Path) -> None:
    save_family(tmp_path / "source", family)
    with pytest.raises(headwise.ArgumentError, match="needs rotary embeddings on all of a head's dims"):
        headwise.convert(tmp_path / "source", tmp_path / "out", to="mla", kv_budget=0.5, method="mha2mla")
