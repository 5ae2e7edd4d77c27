"""Models whose rotary frequencies depend on how long a text is: codes follow them, and what cannot says so.

What is right is what transformers computes of a text that it reads at once, without codes and in a new model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import headwise
from headwise.measure.evaluation import beside_source
from headwise.measure.evaluation.scoring import score_window
from headwise.models.specs import RopeSpec
from headwise.runtime.attention import GroupedQueryAttention
from headwise.runtime.hf import HeadwiseCache
from tests.tiny_families import save_family

CHANGE, POSITIONS = 24, 96
KINDS: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 3.0, 6.0, 9.0],
        "original_max_position_embeddings": CHANGE,
        "attention_factor": 1.2,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 1.0},
}
MODELS = [
    ("llama", "dynamic", "mla"),
    ("llama", "longrope", "same"),
    ("mistral", "dynamic", "same"),
    ("qwen2", "longrope", "mla"),
    ("phi3", "longrope", "mla"),
    ("phi3", "longrope", "same"),
]
LENGTHS = [CHANGE // 2 + 2, CHANGE, CHANGE + 1, 3 * CHANGE, CHANGE + 9, CHANGE, 5]
"""Of texts in turn: short ones after long ones, and one between both."""


RULE = f"beyond {CHANGE} tokens rotary frequencies change, and what is cached was computed with those of shorter"


def save(folder: Path, family: str, kind: str, **more: Any) -> Path:
    if family == "phi3":
        more["original_max_position_embeddings"] = CHANGE
    positions = CHANGE if kind == "dynamic" else POSITIONS
    rope = dict(KINDS[kind])
    return save_family(
        folder, family, rope_parameters=rope, max_position_embeddings=positions, sliding_window=None, **more
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog, and then it does so again. " * 40)
    return file


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def folder(request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, kind, to = request.param
    place = tmp_path_factory.mktemp("lengths")
    options = {"to": to, "bits": 8, "calibration_tokens": 256, "calibration_window": CHANGE, "evaluate": False}
    if to == "mla":
        options |= {"kv_lora_rank": 24, "qk_rope_head_dim": 24, "without": ("refine",)}
    headwise.convert(save(place / "source", family, kind), place / "model", calibrate=text, **options)
    return place / "model"


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return headwise.load(folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def uncoded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def tokens(count: int) -> Tensor:
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(count))


@pytest.fixture
def first_layer(model: Any) -> Any:
    """The model cut behind its first layer: what that caches is a function of each token alone."""
    cut = copy.deepcopy(model)
    cut.model.layers = cut.model.layers[:1]
    cut.config.num_hidden_layers = 1
    return cut


def divergence(logits: Tensor, expected: Tensor) -> float:
    """The mean KL of the positions, in nats; of other frequencies it is above 1 here."""
    return float(
        F.kl_div(logits.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
    )


@torch.no_grad()
@pytest.mark.parametrize("inference", [False, True])
def test_codes_follow_the_length_of_each_text(model: Any, uncoded: Any, inference: bool) -> None:
    for count in LENGTHS:
        expected = copy.deepcopy(uncoded)(tokens(count), use_cache=False).logits
        with torch.inference_mode(inference):
            found = [model(tokens(count), use_cache=use_cache).logits for use_cache in (False, True)]
        assert max(divergence(logits, expected) for logits in found) < 0.1, count


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:beyond")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_coded_cache_follows_a_text_that_grows(first_layer: Any, dtype: torch.dtype) -> None:
    model = first_layer.to(dtype)  # in float32 a kernel reads the codes, where there is one
    ids, cache, exact = tokens(CHANGE + 8), HeadwiseCache(model), 1e-9 if dtype == torch.float64 else 1e-4
    model(ids[:, : CHANGE - 4], past_key_values=cache)
    for place in range(CHANGE - 4, ids.shape[1]):
        logits = model(ids[:, place : place + 1], past_key_values=cache).logits
        at_once = model(ids[:, : place + 1], use_cache=False).logits[:, -1:]
        assert torch.allclose(logits, at_once, atol=exact), place
    # A cache that is cropped goes back to the frequencies of shorter texts.
    cache.crop(CHANGE - 4 - cache.length)
    again = model(ids[:, CHANGE - 4 : CHANGE - 2], past_key_values=cache).logits
    assert torch.allclose(again, model(ids[:, : CHANGE - 2]).logits[:, -2:], atol=exact)


@pytest.mark.filterwarnings("ignore:beyond")
def test_it_generates_beyond_the_change(first_layer: Any) -> None:
    ids = tokens(CHANGE - 3)
    with torch.inference_mode():
        out = first_layer.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    for count in range(ids.shape[1], out.shape[1]):
        with torch.no_grad():
            assert int(first_layer(out[:, :count]).logits[0, -1].argmax()) == int(out[0, count])


def test_a_coded_cache_says_what_it_cannot_follow(model: Any) -> None:
    with torch.no_grad():
        cache = model(tokens(CHANGE), use_cache=True).past_key_values
        with pytest.warns(UserWarning, match=RULE):
            model(tokens(2), past_key_values=cache)


@pytest.mark.parametrize(("family", "kind"), [("llama", "dynamic"), ("qwen2", "longrope"), ("gpt_neox", "dynamic")])
def test_any_cache_says_that_it_cannot_follow(family: str, kind: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", family, kind)
    loaded = headwise.load(folder)
    ids = tokens(CHANGE + 2)
    with torch.no_grad():
        cache = loaded(ids[:, :CHANGE], use_cache=True).past_key_values
        with pytest.warns(UserWarning, match=RULE):
            loaded(ids[:, CHANGE:], past_key_values=cache)
        loaded(ids)  # a text that is read at once is not warned of, before or behind a long one
        loaded(ids[:, :5])


def test_phi3_generates_with_keys_that_are_cached_anew(tmp_path: Path) -> None:
    loaded = headwise.load(save(tmp_path / "model", "phi3", "longrope"))
    out = loaded.generate(tokens(CHANGE - 3), max_new_tokens=6, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        for count in range(CHANGE - 3, out.shape[1]):
            assert int(loaded(out[:, :count]).logits[0, -1].argmax()) == int(out[0, count])


def test_layers_say_so_too() -> None:
    numbers = {name: tuple(value) if isinstance(value, list) else value for name, value in KINDS["longrope"].items()}
    spec = RopeSpec(
        dim=8,
        rope_type="longrope",
        max_position_embeddings=POSITIONS,
        parameters=tuple((k, v) for k, v in numbers.items() if k[:4] != "rope"),
    )
    layer = GroupedQueryAttention(16, 2, 1, rope=spec).eval()
    states, cache = torch.randn(1, CHANGE + 2, 16), layer.new_cache(1, 40)
    with torch.no_grad():
        layer(states[:, :CHANGE], is_causal=True, cache=cache)
        with pytest.warns(UserWarning, match=RULE):
            layer(states[:, CHANGE:], is_causal=True, cache=cache)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_scored_with_the_frequencies_of_its_texts(kind: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "llama", kind)
    ids = tokens(3 * CHANGE)[0]
    with torch.no_grad():
        stock = transformers.AutoModelForCausalLM.from_pretrained(folder)
        parts = [copy.deepcopy(stock)(part[None]).logits[0] for part in (ids[:CHANGE], ids)]
    expected = F.cross_entropy(torch.cat((parts[0], parts[1][CHANGE:-1])), ids[1:], reduction="none").double()
    assert torch.allclose(score_window({"model": headwise.load(folder)}, ids)["nll"], expected, atol=1e-5)


def test_a_conversion_is_evaluated_beyond_the_change(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_source, "WINDOW", CHANGE - 4)  # as 2,048 is less than Phi-3's 4,096
    monkeypatch.setattr(beside_source, "BEYOND", 10)
    source = save(tmp_path / "source", "phi3", "longrope")
    options = {"calibrate": text, "calibration_tokens": 256, "calibration_window": CHANGE, "without": ("refine",)}
    coded = headwise.convert(source, tmp_path / "coded", to="same", bits=8, **options)
    assert coded.evaluation is not None
    assert coded.evaluation.window == CHANGE + 10
    assert coded.evaluation.kl is not None
    assert coded.evaluation.kl < 0.1
    assert [note for note in coded.notes if "frequencies" in note] == [f"{RULE} texts"]
    short = tmp_path / "short.txt"
    short.write_text(text.read_text()[: CHANGE + 5])
    brief = headwise.convert(source, tmp_path / "brief", to="same", bits=8, evaluate=short, **options)
    assert brief.evaluation is not None
    assert brief.evaluation.window == CHANGE - 4
    assert any(f"evaluated on {CHANGE - 4} tokens at a time" in note for note in brief.notes)
