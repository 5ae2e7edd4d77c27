"""Phi-3.5-mini and Phi-4-mini as they are published, in small: ``auto_map``, longrope, and a window that never acts.

Sources: config.json of huggingface.co/microsoft/Phi-3.5-mini-instruct and of Phi-4-mini-instruct.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import headwise
from headwise.measure.evaluation import evaluate
from headwise.models.checkpoints import load_tokenizer, open_checkpoint
from headwise.models.specs import read_config
from headwise.runtime.caches import HeadwiseCache
from tests.closeness import assert_close
from tests.conversion.test_resumed import TEXT
from tests.tiny_families import save_family

CODE = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
COMMON: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "use_cache": True,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Phi-3.5-mini": {
        **COMMON,
        "auto_map": CODE,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "Phi-4-mini": {
        **COMMON,
        "auto_map": CODE | {"AutoTokenizer": "Xenova/gpt-4o"},
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
    },
}


@pytest.fixture(params=PUBLISHED)
def phi(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder, with code beside it that says where it ran."""
    published = PUBLISHED[request.param]
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
    pairs = int(64 // published["num_attention_heads"] * published.get("partial_rotary_factor", 1.0)) // 2
    long = {"type": "longrope", "short_factor": [1.0 + i / 20 for i in range(pairs)]}
    long["long_factor"] = [1.0 + i for i in range(pairs)]
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    folder = save_family(tmp_path / "source", "phi3", **plain, **{name: published[name] for name in sizes})
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | published | {"rope_scaling": long}))
    for module in ("configuration_phi3", "modeling_phi3", "tokenization_phi3"):
        (folder / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    return folder


@torch.inference_mode()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(ids).logits
    return out


CONVERSIONS: dict[str, dict[str, Any]] = {
    "mla": {"to": "mla", "kv_budget": 1.0},
    "heads": {"to": "mha"},
    "mla in codes": {"to": "mla", "kv_budget": 1.0, "bits": 8},
    "same in codes": {"to": "same", "kv_bytes": 0.5},
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_it_is_converted_and_no_code_of_the_folder_is_run(phi: Path, tmp_path: Path, name: str) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)
    is_coded = "codes" in name
    calibrated = {"calibrate": str(text), "calibration_tokens": 1024, "calibration_window": 64} if is_coded else {}
    done = headwise.convert(phi, out, **CONVERSIONS[name], **calibrated, dtype="float64", evaluate=False)
    assert any(note.startswith("config.json names code in auto_map, which is not run") for note in done.notes)
    config = json.loads((out / "config.json").read_text())
    assert "auto_map" not in config
    assert config["sliding_window"] == 262144
    source = AutoModelForCausalLM.from_pretrained(phi, dtype=torch.float64, trust_remote_code=False)
    ids = torch.tensor([load_tokenizer(out)(TEXT[:60])["input_ids"]])
    model = headwise.load(out)
    if is_coded:
        ours, theirs = (logits(one, ids).log_softmax(-1) for one in (model, source))
        assert float((theirs.exp() * (theirs - ours)).sum(-1).mean()) < 0.02  # KL
        prompt = torch.tensor([[5, 6, 7]])
        assert model.generate(prompt, max_new_tokens=4, do_sample=False).shape == (1, 7)
    else:
        assert_close(logits(model, ids), logits(source, ids), 1e-9)
    assert not (tmp_path / "ran").exists()


def test_a_window_that_never_acts_is_none(phi: Path) -> None:
    assert {layer.sliding_window for layer in open_checkpoint(phi).spec.layers} == {None}
    config = open_checkpoint(phi).config
    for window, seen in ((131071, 131071), (131072, None)):
        assert read_config({**config, "sliding_window": window}).layers[0].sliding_window == seen


@torch.inference_mode()
def test_its_cache_keeps_all_tokens_and_can_be_quantised(phi: Path) -> None:
    """A window of 262,144 would have room for 65,536 tokens more at once."""
    model = headwise.load(phi)
    ids = torch.randint(3, 97, (1, 80), generator=torch.Generator().manual_seed(1))
    cache, stock = HeadwiseCache(model), DynamicCache(config=model.config)
    for piece in ids.split(20, dim=1):
        ours, theirs = (model(piece, past_key_values=one).logits for one in (cache, stock))
        assert torch.equal(ours, theirs)
    keys_and_values = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert keys_and_values <= cache.nbytes <= 4 * keys_and_values
    for code in ("kivi2:16:16", "int8"):
        coded = HeadwiseCache(model, quantize=code)
        assert bool(torch.isfinite(model(ids, past_key_values=coded).logits).all())


def test_plain_formats_are_measured(phi: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    text = str(tmp_path / "text.txt")
    done = evaluate(phi, against=phi, text=text, cache="kivi4:16", window=64, windows=1)
    assert done.kl is not None
