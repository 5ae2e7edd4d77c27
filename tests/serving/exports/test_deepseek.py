"""A converted model as stock deepseek_v3: its outputs, its tensors, and the refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import headwise
from headwise.conversion import common_spec, deepseek_config, deepseek_layer, export_deepseek
from headwise.models.specs import LatentSpec
from tests.closeness import assert_close
from tests.conversion.test_lossless import MODELS
from tests.one_size import convert_to_one_size
from tests.real_models import save_tiny

NAMES = [name for name in MODELS if name != "dynamic rope"]
FLOAT32_NORM = 2e-6
"""transformers takes every RMSNorm's mean square in float32, whatever the model's dtype."""


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def logits(folder: Path, ids: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    out: torch.Tensor = headwise.load(folder, dtype=dtype)(ids).logits
    return out


def lossy(root: Path, model_type: str = "llama", *, rank: int = 12, rope: int = 8, **overrides: Any) -> Path:
    save_tiny(root / "source", model_type, **overrides)
    return convert_to_one_size(root / "source", root / "own", kv_lora_rank=rank, qk_rope_head_dim=rope)


@pytest.mark.parametrize("name", NAMES)
def test_a_lossless_conversion_is_the_same_as_deepseek_v3(name: str, tmp_path: Path, ids: torch.Tensor) -> None:
    model_type, overrides = MODELS[name]
    save_tiny(tmp_path / "source", model_type, **overrides)
    headwise.convert(tmp_path / "source", tmp_path / "own", to="mla", kv_budget=1.0, evaluate=False)
    export_deepseek(tmp_path / "own", tmp_path / "stock")
    assert type(headwise.load(tmp_path / "stock")).__name__ == "DeepseekV3ForCausalLM"
    assert_close(logits(tmp_path / "stock", ids), logits(tmp_path / "own", ids), FLOAT32_NORM)
    assert_close(logits(tmp_path / "stock", ids), logits(tmp_path / "source", ids), FLOAT32_NORM)


@pytest.mark.parametrize("name", ["gqa", "mha", "qwen2", "yarn", "llama3 rope", "untied and wide heads"])
def test_so_is_a_lossy_one_of_one_size(name: str, tmp_path: Path, ids: torch.Tensor) -> None:
    model_type, overrides = MODELS[name]
    folder = lossy(tmp_path, model_type, **overrides)
    export_deepseek(folder, tmp_path / "stock")
    expected = logits(folder, ids)
    assert float((expected - logits(tmp_path / "source", ids)).abs().max()) > 0.1  # the conversion is lossy
    assert_close(logits(tmp_path / "stock", ids), expected, FLOAT32_NORM)


def test_it_loads_and_generates_where_headwise_cannot_be_imported(tmp_path: Path, ids: torch.Tensor) -> None:
    folder = lossy(tmp_path, "qwen2")
    export_deepseek(folder, tmp_path / "stock")
    prompt = "a quick brown fox"
    code = f"""
import sys
sys.modules["headwise"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "stock")!r})
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path / "stock")!r})
prompt = tokenizer({prompt!r}, return_tensors="pt")
made = model.generate(**prompt, max_new_tokens=24, do_sample=False)
torch.save([type(model).__name__, prompt["input_ids"], made], {str(tmp_path / "made.pt")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    name, given, tokens = torch.load(tmp_path / "made.pt", weights_only=True)
    assert name == "DeepseekV3ForCausalLM"
    assert given.shape[1] == len(prompt)
    with torch.inference_mode():
        expected = headwise.load(folder).generate(given, max_new_tokens=24, do_sample=False)
    assert torch.equal(tokens, expected)


def test_what_comes_along_and_what_it_says_of_itself(tmp_path: Path) -> None:
    folder = lossy(tmp_path, tie_word_embeddings=True)
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    export_deepseek(folder, tmp_path / "stock")
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "stock" / name).read_bytes() == (folder / name).read_bytes()
    inspection = headwise.inspect(tmp_path / "stock", dtype="float64")
    # The constant is one value more than the layer's 12 + 8.
    assert inspection.kv_bytes_per_token == 2 * (12 + 1 + 8) * 8
    assert inspection.weights is not None
    stored = load_file(tmp_path / "stock/model.safetensors")
    assert inspection.weights["total"] == sum(tensor.numel() for tensor in stored.values())
    assert "lm_head.weight" not in stored


def test_saving_it_again_changes_nothing(tmp_path: Path, ids: torch.Tensor) -> None:
    export_deepseek(lossy(tmp_path), tmp_path / "stock")
    AutoModelForCausalLM.from_pretrained(tmp_path / "stock").save_pretrained(tmp_path / "again")
    assert torch.equal(logits(tmp_path / "again", ids), logits(tmp_path / "stock", ids))


@pytest.mark.parametrize("name", ["gqa", "llama3 rope", "yarn"])
def test_frequencies_are_the_sources_to_the_last_bit_or_nearly(name: str, tmp_path: Path) -> None:
    model_type, overrides = MODELS[name]
    folder = lossy(tmp_path, model_type, **overrides)
    export_deepseek(folder, tmp_path / "stock")
    model, source = headwise.load(tmp_path / "stock"), headwise.load(tmp_path / "source")
    channels = json.loads((folder / "config.json").read_text())["headwise"]["rope_channels"][0]
    expected = source.model.rotary_emb.inv_freq[channels]
    frequencies = model.model.rotary_emb.inv_freq
    if name == "gqa":  # themselves reciprocals of float32 numbers
        assert torch.equal(frequencies, expected)
    torch.testing.assert_close(frequencies, expected, rtol=1.2e-7, atol=0)
    assert model.model.rotary_emb.attention_scaling == source.model.rotary_emb.attention_scaling
    layer = model.model.layers[0].self_attn
    assert layer.scaling == layer.qk_head_dim**-0.5  # no mscale
    with torch.inference_mode():  # beyond the positions that the source was scaled for, with the same list
        cos, _ = model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(250, 300)[None])
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert cos.isfinite().all()


def test_layers_of_other_ranks_are_filled_up_with_zeros(tmp_path: Path, ids: torch.Tensor) -> None:
    folder = lossy(tmp_path, "qwen2")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.1.self_attn"
    keep = [*range(7), *range(12, 20)]  # 7 of the 12 latent channels, and the rotary key
    for name in ("weight", "bias"):
        tensors[f"{prefix}.kv_a_proj_with_mqa.{name}"] = tensors[f"{prefix}.kv_a_proj_with_mqa.{name}"][keep]
    tensors[f"{prefix}.kv_b_proj.weight"] = tensors[f"{prefix}.kv_b_proj.weight"][:, :7].contiguous()
    (entry,) = config["headwise"]["attention"]
    config["headwise"]["attention"] = [{**entry, "layers": [0]}, {**entry, "layers": [1], "kv_lora_rank": 7}]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    export_deepseek(folder, tmp_path / "stock")
    assert_close(logits(tmp_path / "stock", ids), logits(folder, ids), FLOAT32_NORM)
    down = load_file(tmp_path / "stock/model.safetensors")[f"{prefix}.kv_a_proj_with_mqa.weight"]
    assert down.shape == (12 + 1 + 8, 48)
    assert not down[7:13].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_narrow_dtypes_lose_no_more_than_headwises_own_format(
    dtype: str, model_type: str, tmp_path: Path, ids: torch.Tensor
) -> None:
    folder = lossy(tmp_path, model_type)
    expected = logits(folder, ids)
    narrow = headwise.load(folder, dtype=dtype)
    narrow.save_pretrained(tmp_path / "narrow")
    export_deepseek(tmp_path / "narrow", tmp_path / "stock")
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
        assert str(model.dtype) == f"torch.{dtype}"
        error, usual = ((m(ids).logits.double() - expected).square().mean() for m in (model, narrow))
    assert error < 3 * usual


def latent_layer(bias: bool | str | tuple[str, ...], **more: Any) -> headwise.MultiHeadLatentAttention:
    return headwise.MultiHeadLatentAttention(
        24,
        3,
        **{"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, **more},
        bias=bias,
        rope=headwise.RopeSpec(dim=4),
    ).double()


@pytest.mark.parametrize("bias", [False, "qkv", True, ("kv_b_proj",), ("o_proj", "kv_a_proj_with_mqa")])
@pytest.mark.parametrize("impl", ["expanded", "absorbed"])
def test_one_layer_in_float64(bias: bool | str | tuple[str, ...], impl: str) -> None:
    """The stock layer in headwise's code, whose norms are float64, for the longest inputs that a norm gives."""
    layer = latent_layer(bias, latent_norm=False, softmax_scale=0.37)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    gain = torch.randn(24, dtype=torch.float64)
    q_lora_rank = 25 if "q_proj" in layer.spec.bias else None
    config = {"kv_lora_rank": 14, "q_lora_rank": q_lora_rank, "dtype": "float64"}
    config |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    stock = latent_layer("hf", kv_lora_rank=14, q_lora_rank=q_lora_rank, impl=impl)
    made = deepseek_layer(layer.state_dict(), layer.spec, config, gain)
    # deepseek_v3 has these biases in every layer.
    assert set(made) == set(stock.state_dict())
    stock.load_state_dict(made)
    states = torch.randn(2, 9, 24, dtype=torch.float64)
    _, _, longest = torch.linalg.svd(layer.kv_a_proj_with_mqa.weight[:10].detach() * gain)
    states[0, 0] = longest[0]  # no output of the norm has a longer latent
    states = gain * torch.nn.functional.rms_norm(states, (24,))
    with torch.inference_mode():
        # At worst 5e-7 of a latent, and its effect on the scores.
        assert_close(stock(states, is_causal=True), layer(states, is_causal=True), 5e-6)


def plan(**changes: Any) -> LatentSpec:
    spec = LatentSpec(
        hidden_size=24,
        num_heads=3,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        latent_norm=False,
    )
    return replace(spec, **changes)


def test_a_common_spec_is_all_but_the_rank() -> None:
    assert common_spec([plan(), plan(kv_lora_rank=3)], [[0, 1], [0, 1]]) == plan()


@pytest.mark.parametrize(
    ("second", "channels", "rule"),
    [
        (plan(), [0, 2], r"rope_channels of layer 1 = \[0, 2\]: must be layer 0's"),
        (plan(), [1, 0], r"rope_channels of layer 1 = \[1, 0\]: must be layer 0's"),
        (plan(qk_rope_head_dim=2), [0], "qk_rope_head_dim of layer 1 = 2: must be 4"),
        (plan(qk_nope_head_dim=0), [0, 1], "qk_nope_head_dim of layer 1 = 0: must be 6"),
        (plan(v_head_dim=6), [0, 1], "v_head_dim of layer 1 = 6: must be 5"),
        (plan(sliding_window=8), [0, 1], "sliding_window = 8: deepseek_v3 has none"),
        (plan(latent_norm=True), [0, 1], "latent_norm of layer 1 = True: must be False"),
        (plan(latent_norm=True, bias=["o_proj"]), [0, 1], r"attention = 'MLA 10 \+ 4': must be MLA as convert makes"),
    ],
)
def test_layers_that_differ_are_refused(second: LatentSpec, channels: list[int], rule: str) -> None:
    with pytest.raises(headwise.HeadwiseError, match=rule):
        common_spec([plan(), second], [[0, 1], channels])


def test_what_deepseek_v3_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    folder = lossy(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    source = json.loads((tmp_path / "source/config.json").read_text())
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for changed, rule in (
        (source, "model_type = 'llama': must be an MLA model in headwise's own format"),
        ({**config, "model_type": "headwise_gpt2"}, "model_type = 'gpt2': has other blocks than deepseek_v3's"),
        ({**config, "mlp_bias": True}, "mlp_bias = True: deepseek_v3's feed-forward networks have no biases"),
        ({**config, "rope_parameters": dynamic}, "rope_type = 'dynamic': deepseek_v3 can hold frequencies"),
    ):
        with pytest.raises(headwise.SpecError, match=rule):
            deepseek_config(changed)


def test_a_conversion_with_a_plan_for_each_layer_is_refused_and_nothing_written(tmp_path: Path) -> None:
    folder = lossy(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["headwise"]["rope_channels"][1].reverse()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(headwise.ArgumentError, match="rope_channels of layer 1"):
        export_deepseek(folder, tmp_path / "stock")
    assert not (tmp_path / "stock").exists()


def test_a_taken_output_is_refused_unless_told_to_replace_it(tmp_path: Path, ids: torch.Tensor) -> None:
    folder = lossy(tmp_path)
    with pytest.raises(headwise.ArgumentError, match="overwrite"):
        export_deepseek(folder, tmp_path / "source")
    with pytest.raises(headwise.ArgumentError, match="must not be the source, or a folder that holds it"):
        export_deepseek(folder, folder, overwrite=True)
    export_deepseek(folder, tmp_path / "source", overwrite=True)
    assert_close(logits(tmp_path / "source", ids), logits(folder, ids), FLOAT32_NORM)
