"""A converted model with a coded cache: a forward, caches of all kinds, batches, beams and crops see the same values.

In float64: a code changes by leaps, so that sums taken in another order may choose another one, and float64 leaves
that to chance of 1e-13.
"""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils import parametrize
from transformers import DynamicCache, StaticCache

import headwise
from headwise.errors import ArgumentError, CheckpointError
from headwise.runtime.caches.layers import SlidingLayer
from headwise.runtime.hf import HeadwiseCache
from headwise.runtime.hf.attention import CodedAttention
from headwise.runtime.quantization.transform_code import FILE, SINKS, codes_content, read_codes
from headwise.runtime.quantization.trellis_format import TrellisFormat
from tests.tiny_families import save_family

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 40


def with_codes(source: Path, folder: Path, **target: Any) -> Path:
    (folder / "text.txt").write_text(TEXT)
    sizes = {"calibration_tokens": 1024, "calibration_window": 64}
    options = {**target, **sizes, "calibrate": folder / "text.txt", "evaluate": False}
    headwise.convert(source, folder / "model", **options)
    return folder / "model"


@pytest.fixture(scope="module")
def coded(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"kv_lora_rank": 12, "qk_rope_head_dim": 8}
    return with_codes(tiny_llama_folder, tmp_path_factory.mktemp("coded"), to="mla", bits=3, **sizes)


@pytest.fixture(scope="module")
def model(coded: Path) -> Any:
    return headwise.load(coded, dtype=torch.float64)


def as_before(coded: Path, folder: Path) -> Any:
    """The model as the first version of the file had it, whose first tokens are in bfloat16."""
    shutil.copytree(coded, folder)
    codes = read_codes(folder)
    codes = {index: replace(code, first=None) for index, code in codes.items()}
    (folder / FILE).write_bytes(codes_content(codes))
    return headwise.load(folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def old_model(coded: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return as_before(coded, tmp_path_factory.mktemp("old") / "model")


class Case(NamedTuple):
    """A model with codes, as both versions of the file have it, and how close its ways of caching are."""

    model: Any
    old_model: Any
    atol: float
    has_windows: bool

    def cache(self, length: int | None = None) -> HeadwiseCache:
        """A cache that can be cropped; windows have to be told."""
        cache = HeadwiseCache(self.model, length)
        if self.has_windows:
            cache.activate_past_recording()
        return cache


@pytest.fixture(scope="module", params=["latents", "latents in windows", "heads in some windows"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """All tokens are seen, or windows of 7 and of 5, which three of their lengths pass after a prompt of 3.

    A window rotates by slots that move with it, whose angles are float32.
    """
    if request.param == "latents":
        return Case(request.getfixturevalue("model"), request.getfixturevalue("old_model"), 1e-10, False)
    folder = tmp_path_factory.mktemp("windows")
    if request.param == "latents in windows":
        target, family = {"to": "mla", "kv_lora_rank": 20, "qk_rope_head_dim": 8}, "mistral"
    else:
        target, family = {"to": "same"}, "gemma3_text"
    coded = with_codes(save_family(folder / "source", family), folder, bits=3, **target)
    return Case(headwise.load(coded, dtype=torch.float64), as_before(coded, folder / "old"), 1e-4, True)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(2, 30, (2, 24), generator=torch.Generator().manual_seed(0))


def stepwise(model: Any, ids: Tensor, cache: Any, prompt: int = 5, **more: Any) -> Tensor:
    parts = [model(ids[:, :prompt], past_key_values=cache, **more).logits]
    for place in range(prompt, ids.shape[1]):
        parts.append(model(ids[:, place : place + 1], past_key_values=cache, **more).logits)
    return torch.cat(parts, 1)


@torch.no_grad()
def test_rounding_changes_what_is_computed(model: Any, old_model: Any, coded: Path, ids: Tensor) -> None:
    wide = headwise.load(coded, dtype=torch.float64)
    for layer in wide.model.layers:
        layer.self_attn.set_code(None, None)
    expected = wide(ids).logits

    def difference(model: Any) -> Tensor:
        return (model(ids).logits - expected).abs().amax((0, 2))

    assert float(difference(model).min()) > 1e-3
    first, coded_ones = difference(old_model).split_with_sizes((SINKS, ids.shape[1] - SINKS))
    assert float(first.max()) < 1e-3 < float(coded_ones.max())  # only bfloat16's rounding, and codes


@torch.no_grad()
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("prompt", [1, 2, 5, 24])
def test_any_cache_gives_what_one_forward_gives(case: Case, ids: Tensor, prompt: int, version: int) -> None:
    model = case.old_model if version == 1 else case.model
    expected = model(ids, use_cache=False).logits
    caches = [
        HeadwiseCache(model),
        HeadwiseCache(model, max_length=24),
        DynamicCache(config=model.config),
        StaticCache(config=model.config, max_cache_len=30),
    ]
    for cache in caches:
        assert torch.allclose(stepwise(model, ids, cache, prompt), expected, atol=case.atol)
    assert any(isinstance(layer, SlidingLayer) for layer in caches[0].layers) == case.has_windows
    assert all(isinstance(layer.codec, TrellisFormat) for layer in caches[0].layers)


@torch.no_grad()
def test_padding_on_the_left_changes_nothing(case: Case, ids: Tensor) -> None:
    model = case.model
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.int64), ids), 1)
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    mask[1, :1] = 0
    padded[1, 1:3] = 9
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    alone = [model(padded[row : row + 1, skipped:]).logits for row, skipped in ((0, 3), (1, 1))]
    together = model(padded, attention_mask=mask, position_ids=positions).logits
    cache = HeadwiseCache(model)
    parts = []
    for end in range(1, padded.shape[1] + 1):
        start = 0 if end == 6 else end - 1
        if end >= 6:
            inputs = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            parts.append(model(padded[:, start:end], past_key_values=cache, **inputs).logits)
    by_steps = torch.cat(parts, 1)
    for row, (skipped, expected) in enumerate(zip((3, 1), alone, strict=True)):
        # Angles are float32, and differ by the padding.
        assert torch.allclose(together[row, skipped:], expected[0], atol=1e-4)
        assert torch.allclose(by_steps[row, skipped:], expected[0], atol=1e-4)


@torch.no_grad()
def test_generate_stores_codes_by_itself(case: Case, ids: Tensor) -> None:
    model = case.model
    out = model.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
    assert all(isinstance(layer.codec, TrellisFormat) for layer in out.past_key_values.layers)
    logits = model(out.sequences, use_cache=False).logits
    assert torch.equal(logits[:, 23:-1].argmax(-1), out.sequences[:, 24:])


@torch.no_grad()
def test_the_kernel_attends_to_what_a_window_holds(case: Case, ids: Tensor) -> None:
    model = copy.deepcopy(case.model).float()
    layers, outputs = [layer.self_attn for layer in model.model.layers], []
    layers[0].register_forward_hook(lambda _, args, result: outputs.append(result[0]))
    cache = HeadwiseCache(model)
    model(ids[:, :20], past_key_values=cache)
    for backend in ("auto", "reference"):
        for layer in layers:
            layer.backend = backend
        model(ids[:, 20:21], past_key_values=copy.deepcopy(cache))
    assert torch.allclose(outputs[1], outputs[2], atol=1e-4)


@torch.no_grad()
def test_beams_are_those_of_a_wide_cache(case: Case, ids: Tensor) -> None:
    model = case.model
    settings = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    by_codes = model.generate(ids, **settings)
    wide = model.generate(ids, past_key_values=DynamicCache(config=model.config), **settings)
    assert torch.equal(by_codes, wide)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(15, 16), (2, 1)])
def test_a_cropped_and_a_copied_cache_go_on(case: Case, ids: Tensor, lengths: tuple[int, int]) -> None:
    model, cache = case.model, case.cache()
    expected = model(ids, use_cache=False).logits
    model(ids[:, :20], past_key_values=cache)
    for length in lengths:
        cache.crop(length - cache.length)
        other = copy.deepcopy(cache)
        for one in (cache, other):
            logits = stepwise(model, ids[:, length:], one, 1)
            assert torch.allclose(logits, expected[:, length:], atol=case.atol)


@torch.no_grad()
def test_tokens_that_a_window_has_dropped_do_not_come_back(case: Case, ids: Tensor) -> None:
    cache = case.cache()
    case.model(ids[:, :20], past_key_values=cache)
    cache.crop(-2)
    if not case.has_windows:
        cache.crop(-2)
        return
    with pytest.raises(ArgumentError, match=r"tokens_to_remove = -2: .* it holds"):
        cache.crop(-2)


@torch.no_grad()
def test_rows_of_a_batch_are_chosen_and_repeated(case: Case, ids: Tensor) -> None:
    model, cache = case.model, case.cache()
    model(ids[:, :20], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    expected = model(ids.flip(0), use_cache=False).logits[:, 20:]
    assert torch.allclose(stepwise(model, ids.flip(0)[:, 20:], cache, 1), expected, atol=case.atol)


@torch.no_grad()
@pytest.mark.parametrize("prompt", [2, 20])
def test_beams_change_places(case: Case, ids: Tensor, prompt: int) -> None:
    order, model = torch.tensor([1, 0]), case.model
    cache = HeadwiseCache(model)
    model(ids[:, :prompt], past_key_values=cache)
    cache.reorder_cache(order)
    expected = model(ids[order], use_cache=False).logits[:, prompt:]
    assert torch.allclose(stepwise(model, ids[order][:, prompt:], cache, 1), expected, atol=case.atol)


@torch.no_grad()
def test_prompts_may_come_in_parts(case: Case, ids: Tensor) -> None:
    expected, cache = case.model(ids, use_cache=False).logits, HeadwiseCache(case.model)
    ends = (3, 4, 9, 20, 24)
    parts = [case.model(ids[:, a:b], past_key_values=cache).logits for a, b in pairwise((0, *ends))]
    assert torch.allclose(torch.cat(parts, 1), expected, atol=case.atol)


@torch.no_grad()
def test_a_window_keeps_what_a_new_token_sees(case: Case, ids: Tensor) -> None:
    cache = HeadwiseCache(case.model)
    allocated = []
    for place in range(ids.shape[1]):
        case.model(ids[:, place : place + 1], past_key_values=cache)
        allocated.append(cache.nbytes)
    for layer in cache.layers:
        held = layer.sliding_window - 1 if isinstance(layer, SlidingLayer) else ids.shape[1]
        assert layer.keys.shape[2] == held
    assert len(set(allocated[-12:])) == 1


@torch.no_grad()
@pytest.mark.parametrize("move", ["reorder", "repeat"])
def test_positions_go_with_their_rows(case: Case, ids: Tensor, move: str) -> None:
    model, mask = case.model, torch.ones_like(ids)
    mask[1, :3] = 0
    places = (mask.cumsum(1) - 1).clamp(0)
    cache = HeadwiseCache(model)
    model(ids[:, :20], mask[:, :20], places[:, :20], past_key_values=cache)
    if move == "reorder":
        rows = torch.tensor([1, 0])
        cache.reorder_cache(rows)
    else:
        rows = torch.tensor([1])
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3]))
    ids, mask, places = ids[rows], mask[rows], places[rows]
    expected = model(ids, mask, places, use_cache=False).logits[:, 20:]
    logits = model(ids[:, 20:], mask, places[:, 20:], past_key_values=cache).logits
    assert torch.allclose(logits, expected, atol=case.atol)


def test_a_cache_of_other_codes_is_refused(model: Any, coded: Path, ids: Tensor, tmp_path: Path) -> None:
    folder = shutil.copytree(coded, tmp_path / "model")
    codes = read_codes(folder)
    codes = {index: replace(code, scale=2 * code.scale) for index, code in codes.items()}
    (folder / FILE).write_bytes(codes_content(codes))
    other, copied = headwise.load(folder, dtype=torch.float64), headwise.load(coded, dtype=torch.float64)
    cache = HeadwiseCache(model)
    with torch.no_grad():
        with pytest.raises(ArgumentError, match="past_key_values = 'layer 0': was made for another model"):
            other(ids, past_key_values=cache)
        assert torch.equal(copied(ids, past_key_values=cache).logits, model(ids).logits)


@torch.no_grad()
def test_bytes_are_those_of_the_codes(model: Any, old_model: Any, coded: Path, ids: Tensor) -> None:
    cache = HeadwiseCache(model, max_length=24)
    model(ids, past_key_values=cache)
    codes = read_codes(coded)
    starts = 2 * 8 * len(codes)
    assert cache.nbytes == 2 * 24 * sum(code.token_bytes for code in codes.values()) + starts
    old = HeadwiseCache(old_model, max_length=24)
    old_model(ids, past_key_values=old)
    assert old.nbytes == cache.nbytes + sum(2 * 2 * SINKS * code.width for code in codes.values())


@torch.no_grad()
def test_spare_memory_is_never_read(case: Case, ids: Tensor) -> None:
    model, cache = case.model, HeadwiseCache(case.model, max_length=64)
    expected = model(ids, use_cache=False).logits
    model(ids[:, :20], past_key_values=cache)
    for layer in cache.layers:
        held = layer.keys.clone()
        layer.memory["keys"].fill_(255)
        layer.keys.copy_(held)
    assert torch.allclose(stepwise(model, ids[:, 20:], cache, 1), expected[:, 20:], atol=case.atol)


def test_another_batch_is_refused(model: Any, ids: Tensor) -> None:
    cache = HeadwiseCache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ArgumentError, match="batch = 1: must be 2"):
            model(ids[:1, :1], past_key_values=cache)


def test_positions_may_begin_anywhere(model: Any, ids: Tensor) -> None:
    places = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.allclose(model(ids, position_ids=places + 100).logits, expected, atol=1e-9)
        cache = HeadwiseCache(model)
        model(ids[:, :20], position_ids=places[:, :20] + 100, past_key_values=cache)
        last = model(ids[:, 20:], position_ids=places[:, 20:] + 100, past_key_values=cache).logits
        assert torch.allclose(last, expected[:, 20:], atol=1e-9)
        # Sequences in a row, and one that begins behind padding.
        model(ids, position_ids=torch.cat((places[:, :9], places[:, :-9]), 1))
        model(ids, torch.cat((torch.zeros(2, 3), torch.ones(2, 21)), 1), (places - 3).clamp(0))


@pytest.mark.parametrize("steps", [2, 0])
def test_positions_that_are_not_slots_apart_are_refused(model: Any, ids: Tensor, steps: int) -> None:
    places, rule = torch.arange(1, ids.shape[1] + 1)[None], r"position_ids = '.* in slot .*must be as far"
    wrong = places[:, :1] + steps * (places - places[:, :1])
    with torch.no_grad(), pytest.raises(ArgumentError, match=rule):
        model(ids, position_ids=wrong)
    with torch.no_grad(), pytest.raises(ArgumentError, match=rule):
        model(ids, None, wrong)
    cache = HeadwiseCache(model)
    with torch.no_grad():
        model(ids[:, :9], position_ids=places[:, :9], past_key_values=cache)
        with pytest.raises(ArgumentError, match=rule):
            model(ids[:, 9:10], position_ids=places[:, 8 + steps : 9 + steps], past_key_values=cache)
    # Padding between the tokens takes a slot, and no position.
    mask = torch.ones_like(ids)
    mask[1, 5] = 0
    with torch.no_grad(), pytest.raises(ArgumentError, match=rule):
        model(ids, mask, mask.cumsum(1))


def test_damaged_codes_are_refused(coded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(coded, tmp_path / "model")
    codes, path = read_codes(folder), folder / FILE
    parts = (codes[1].width - 8 - 1, 9)
    assert codes[1].first is not None
    other = replace(codes[1], parts=parts, first=replace(codes[1].first, parts=parts))
    wrong = {
        "kv_cache.safetensors = '1 codes': must have a code for each of the model's 2 layers": {0: codes[0]},
        "'0 codes': must have a code": {},
        "= 1: codes a layer that the model does not have": {**codes, 1: other},
    }
    for message, content in wrong.items():
        path.write_bytes(codes_content(content))
        with pytest.raises(CheckpointError, match=message):
            headwise.load(folder)
    path.write_bytes(b"no codes")
    with pytest.raises(CheckpointError, match="damaged"):
        headwise.load(folder)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="damaged"):
        headwise.load(folder)


@torch.no_grad()
def test_a_call_without_a_cache_returns_codes(model: Any, ids: Tensor) -> None:
    for out in (model(ids), model(ids, use_cache=True), model(ids, None)):
        assert all(isinstance(layer.codec, TrellisFormat) for layer in out.past_key_values.layers)
    assert model(ids, use_cache=False).past_key_values is None


def test_derivatives_pass_the_rounding(model: Any, coded: Path, ids: Tensor) -> None:
    wide = headwise.load(coded, dtype=torch.float64)
    for layer in wide.model.layers:
        layer.self_attn.set_code(None, None)
    gradients = []
    for one in (model, wide):
        weight = one.model.layers[0].self_attn.kv_a_proj_with_mqa.weight
        loss = one(ids, use_cache=False).logits.square().mean()
        gradients.append(torch.autograd.grad(loss, weight)[0].flatten())
    assert float(torch.cosine_similarity(*gradients, dim=0)) > 0.95


@torch.no_grad()
def test_a_new_process_can_be_sent_the_model(model: Any, ids: Tensor) -> None:
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def same_folder(one: Path, other: Path) -> bool:
    """Whether two folders have the same tensors, codes and class."""
    tensors = [load_file(folder / "model.safetensors") for folder in (one, other)]
    indexes = [json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (one, other)]
    assert all(index["weight_map"] == dict.fromkeys(tensors[0], "model.safetensors") for index in indexes)
    codes = [(folder / FILE).read_bytes() for folder in (one, other)]
    classes = [json.loads((folder / "config.json").read_text())["architectures"] for folder in (one, other)]
    same = tensors[0].keys() == tensors[1].keys() and codes[0] == codes[1] and classes[0] == classes[1]
    return same and all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "opt", "phi3"])
def test_a_saved_model_is_the_folder_of_its_family(family: str, ids: Tensor, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    source = save_family(tmp_path / "source", family)
    calibration = {"calibrate": tmp_path / "text.txt", "calibration_tokens": 256, "calibration_window": 64}
    headwise.convert(source, tmp_path / "coded", to="same", bits=3, evaluate=False, **calibration)
    model = headwise.load(tmp_path / "coded")
    model.save_pretrained(tmp_path / "saved")
    assert same_folder(tmp_path / "coded", tmp_path / "saved")
    assert torch.equal(headwise.load(tmp_path / "saved")(ids).logits, model(ids).logits)
    layer = next(module for module in model.modules() if isinstance(module, CodedAttention))
    parametrize.register_parametrization(layer.q_proj, "weight", torch.nn.Identity())
    with pytest.raises(ArgumentError, match=r"state_dict = .* such as adapters': merge them before"):
        model.save_pretrained(tmp_path / "adapted")


@torch.no_grad()
def test_a_converted_model_is_saved_with_its_codes(coded: Path, ids: Tensor, tmp_path: Path) -> None:
    model = headwise.load(coded)
    model.save_pretrained(tmp_path / "saved", state_dict=model.state_dict())
    assert same_folder(coded, tmp_path / "saved")
    assert torch.equal(headwise.load(tmp_path / "saved")(ids).logits, model(ids).logits)


@pytest.mark.parametrize("how", ["save_pretrained", "push_to_hub"])
def test_codes_are_uploaded_too(model: Any, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Mock(spec=HfApi)
    hub.create_repo.return_value.repo_id = "someone/model"
    for module in ("modeling_utils", "utils.hub"):
        monkeypatch.setattr(f"transformers.{module}.hf_api", lambda: hub)
        card = f"transformers.{module}.create_and_tag_model_card"
        monkeypatch.setattr(card, lambda *_, **__: ModelCard("a card"))
    if how == "push_to_hub":
        model.push_to_hub("someone/model")
    else:
        model.save_pretrained(tmp_path / "model", push_to_hub=True)
    assert FILE in [operation.path_in_repo for operation in hub.create_commit.call_args.kwargs["operations"]]


@torch.no_grad()
def test_evaluation_reads_bytes_off_the_codes(coded: Path, tiny_llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    result = headwise.evaluate(
        coded, against=tiny_llama_folder, text=tmp_path / "text.txt", window=64, windows=2, context=32
    )
    codes = read_codes(coded).values()
    expected = sum(code.token_bytes + 8 / 64 for code in codes)
    assert result.cache_bytes_per_token == expected
