"""A converted folder is an ordinary transformers model: generate, batches, beams, save, caches, attention weights."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

import headwise
import headwise.hf
from headwise.measure.timing import cache_nbytes
from tests.closeness import assert_close
from tests.real_models import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hosting")
    source = save_tiny(root / "source", "qwen2", tie_word_embeddings=True)
    headwise.convert(source, root / "mla", to="mla", kv_budget=0.5, evaluate=False)
    return root / "mla"


@pytest.fixture(scope="module")
def lossless(folder: Path) -> Path:
    headwise.convert(folder.parent / "source", folder.parent / "lossless", to="mla", kv_budget=1.0, evaluate=False)
    return folder.parent / "lossless"


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (3, 20), generator=torch.Generator().manual_seed(2))


def test_stock_auto_classes_load_it_once_headwise_hf_is_imported(folder: Path) -> None:
    assert AutoConfig.from_pretrained(folder).model_type == "headwise_qwen2"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "HeadwiseQwen2ForCausalLM"
    assert isinstance(model.model.layers[1].self_attn, headwise.MultiHeadLatentAttention)


def test_without_headwise_transformers_says_what_is_missing(folder: Path) -> None:
    code = f"from transformers import AutoConfig; AutoConfig.from_pretrained({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "headwise_qwen2" in done.stderr


@torch.inference_mode()
def test_cached_decoding_is_the_whole_forward(folder: Path, ids: torch.Tensor) -> None:
    model = headwise.load(folder)
    whole = model(ids).logits
    cache = DynamicCache(config=model.config)
    parts = [
        model(ids[:, a:b], past_key_values=cache, use_cache=True).logits
        for a, b in ((0, 7), (7, 8), (8, 15), (15, 20))
    ]
    assert_close(torch.cat(parts, 1), whole, 1e-12)


@torch.inference_mode()
def test_the_cache_holds_the_converted_size(folder: Path, ids: torch.Tensor) -> None:
    model = headwise.load(folder)
    cache = model(ids, use_cache=True).past_key_values
    per_token = cache_nbytes(cache) / ids.numel()
    assert per_token == headwise.inspect(folder, dtype="float64").kv_bytes_per_token
    assert per_token == headwise.inspect(folder.parent / "source", dtype="float64").kv_bytes_per_token / 2


@torch.inference_mode()
def test_generate_is_what_repeated_forwards_give(folder: Path, ids: torch.Tensor) -> None:
    model = headwise.load(folder)
    prompt = ids[:1, :8]
    expected = prompt
    for _ in range(12):
        expected = torch.cat((expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False), expected)


@torch.inference_mode()
def test_a_left_padded_batch_gives_what_each_prompt_gives_alone(folder: Path, ids: torch.Tensor) -> None:
    model = headwise.load(folder)
    lengths = (5, 9, 9)
    batch, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for row, length in enumerate(lengths):
        batch[row, 9 - length :], mask[row, 9 - length :] = ids[row, :length], 1
    together = model.generate(batch, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for row, length in enumerate(lengths):
        alone = model.generate(ids[row : row + 1, :length], max_new_tokens=8, do_sample=False)
        assert torch.equal(together[row, 9:], alone[0, length:])


@torch.inference_mode()
def test_beam_search_is_the_sources(lossless: Path, ids: torch.Tensor) -> None:
    source = headwise.load(lossless.parent / "source")
    options = {"max_new_tokens": 10, "num_beams": 4, "do_sample": False, "num_return_sequences": 2}
    expected = source.generate(ids[:2, :6], **options)
    assert torch.equal(headwise.load(lossless).generate(ids[:2, :6], **options), expected)


@torch.inference_mode()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_mask_transformers_makes_is_understood(lossless: Path, ids: torch.Tensor, implementation: str) -> None:
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    source = headwise.load(lossless.parent / "source")
    model = AutoModelForCausalLM.from_pretrained(lossless, attn_implementation=implementation)
    expected = source(ids, attention_mask=mask).logits
    assert_close(model(ids, attention_mask=mask).logits[1, 4:], expected[1, 4:], 1e-9)
    assert_close(model(ids).logits, source(ids).logits, 1e-9)


@torch.inference_mode()
def test_a_static_cache_serves_too(folder: Path, ids: torch.Tensor) -> None:
    model = headwise.load(folder)
    whole = model(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    first = model(ids[:, :12], past_key_values=cache, use_cache=True).logits
    second = model(ids[:, 12:], past_key_values=cache, use_cache=True).logits
    assert_close(torch.cat((first, second), 1), whole, 1e-12)


@torch.inference_mode()
def test_attention_weights_are_the_sources(lossless: Path, ids: torch.Tensor) -> None:
    source = AutoModelForCausalLM.from_pretrained(lossless.parent / "source", attn_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(lossless, attn_implementation="eager")
    expected = source(ids, output_attentions=True).attentions
    attentions = model(ids, output_attentions=True).attentions
    assert len(attentions) == len(expected) == 2
    for own, other in zip(attentions, expected, strict=True):
        assert_close(own, other, 1e-6)


@torch.inference_mode()
def test_saving_and_loading_again_changes_nothing(folder: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    model = headwise.load(folder)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(headwise.load(tmp_path / "again")(ids).logits, model(ids).logits)
    assert headwise.inspect(tmp_path / "again").layers == headwise.inspect(folder).layers


@torch.inference_mode()
def test_the_bare_model_loads_without_its_head(folder: Path, ids: torch.Tensor) -> None:
    bare = AutoModel.from_pretrained(folder)
    model = headwise.load(folder)
    assert_close(model.lm_head(bare(ids).last_hidden_state), model(ids).logits, 1e-12)


def test_it_trains(folder: Path, ids: torch.Tensor) -> None:
    model = headwise.load(folder)
    with torch.inference_mode():
        model(ids)  # what it did before must not get in the way
    model.train()
    model.activation_checkpointing_enable()
    loss = model(ids, labels=ids).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_a_fresh_model_of_a_converted_config_starts_like_any_other(folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    spread = float(model.model.layers[0].self_attn.kv_b_proj.weight.detach().float().std())
    assert spread == pytest.approx(model.config.initializer_range, rel=0.1)


def test_a_config_that_lost_its_channels_is_refused(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.headwise = {**config.headwise, "rope_channels": [[0]]}
    with pytest.raises(headwise.SpecError, match="rope_channels"):
        AutoModelForCausalLM.from_config(config)


@torch.inference_mode()
def test_a_padding_mask_by_itself_is_still_causal(lossless: Path, ids: torch.Tensor) -> None:
    """Some attention implementations pass only the padding mask, instead of a whole mask."""
    model, source = headwise.load(lossless), headwise.load(lossless.parent / "source")
    layer = model.model.layers[0].self_attn
    states = torch.randn(3, 20, 48, dtype=torch.float64)
    tables = model.model.rotary_emb(states, torch.arange(20)[None])
    padding = torch.ones(3, 20, dtype=torch.bool)
    assert torch.equal(layer(states, tables, padding)[0], layer(states, tables)[0])
    assert torch.equal(layer(states, tables, padding.long())[0], layer(states, tables)[0])
    expected = source.model.layers[0].self_attn(states, tables, None)[0]
    assert_close(layer(states, tables, padding)[0], expected, 1e-9)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_implementations_whose_masks_are_no_tensors_are_refused(folder: Path, implementation: str) -> None:
    with pytest.raises((ValueError, ImportError)):
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation)


def test_a_worker_can_be_sent_the_model(folder: Path, ids: torch.Tensor) -> None:
    model = headwise.load(folder)
    again = pickle.loads(pickle.dumps(model))
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_no_plan_of_the_familys_splits_projections_that_are_gone(folder: Path) -> None:
    assert AutoConfig.from_pretrained(folder).base_model_tp_plan is None


@torch.inference_mode()
def test_it_compiles_whole(folder: Path, ids: torch.Tensor) -> None:
    model = headwise.load(folder)
    expected = model(ids, use_cache=False).logits
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(ids, use_cache=False).logits, expected, 1e-12)
    torch.compiler.reset()
