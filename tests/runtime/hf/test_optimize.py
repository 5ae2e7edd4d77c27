"""`headwise.optimize`: the same parameters, the same outputs, headwise's attention."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

import headwise
from headwise.conversion import export_deepseek
from headwise.runtime.hf.optimize import OptimizedLatentAttention
from tests.closeness import assert_close
from tests.one_size import convert_to_one_size
from tests.real_models import save_tiny, tiny_model
from tests.toy_configs import TOYS

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "compressed query": {},
    "plain query": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "half-split": {"rope_interleave": False},
    "yarn": {"rope_parameters": YARN},
    "experts": {"first_k_dense_replace": 1},
}


def deepseek(model_type: str = "deepseek_v3", **overrides: Any) -> Any:
    toy = {key: value for key, value in TOYS[model_type].items() if key != "model_type"}
    model = tiny_model(model_type, **{**toy, "num_hidden_layers": 3, "first_k_dense_replace": 3, **overrides})
    model.set_experts_implementation("eager")  # torch has no grouped product of float64
    return model


def attentions(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith("self_attn")]


@pytest.fixture(autouse=True)
def _wide_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock norms go through float32, which hides what differs by less or makes more of it; here they do not."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    monkeypatch.setattr(DeepseekV3RMSNorm, "forward", forward)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (3, 20), generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=[name for name in VARIANTS if name != "experts"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A stock model and an optimised one with the same weights."""
    stock = deepseek(**VARIANTS[request.param])
    return stock, headwise.optimize(copy.deepcopy(stock))


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("impl", ["expanded", "absorbed"])
@torch.inference_mode()
def test_each_module_is_what_it_was(variant: str, impl: str) -> None:
    stock = deepseek(**VARIANTS[variant])
    model = headwise.optimize(copy.deepcopy(stock))
    states = torch.randn(2, 11, 64, dtype=torch.float64)
    tables = stock.model.rotary_emb(states, torch.arange(30, 41)[None])
    mask = torch.ones(11, 11, dtype=torch.bool).tril().expand(2, 1, 11, 11)
    for theirs, ours in zip(attentions(stock), attentions(model), strict=True):
        ours.impl = impl
        expected = theirs(states, tables, mask)[0]
        assert_close(ours(states, tables, mask)[0], expected, 1e-12)


@torch.inference_mode()
def test_logits_equal_those_of_stock(pair: tuple[Any, Any], ids: torch.Tensor) -> None:
    stock, model = pair
    assert_close(model(ids).logits, stock(ids).logits, 1e-10)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    actual, expected = (m(ids, attention_mask=mask).logits for m in (model, stock))
    assert_close(actual[mask.bool()], expected[mask.bool()], 1e-10)


@torch.inference_mode()
def test_experts_stand_beside_it_as_far_as_they_are_chosen_in_float32(ids: torch.Tensor) -> None:
    stock = deepseek(**VARIANTS["experts"])
    model = headwise.optimize(copy.deepcopy(stock))
    assert_close(model(ids).logits, stock(ids).logits, 1e-6)


@torch.inference_mode()
def test_cached_steps_and_the_cache_equal_those_of_stock(pair: tuple[Any, Any], ids: torch.Tensor) -> None:
    stock, model = pair
    whole = stock(ids).logits
    for module in attentions(model):
        module.impl = "absorbed"
    cache = DynamicCache(config=model.config)
    parts = [
        model(ids[:, a:b], past_key_values=cache, use_cache=True).logits
        for a, b in ((0, 7), (7, 8), (8, 15), (15, 20))
    ]
    assert_close(torch.cat(parts, 1), whole, 1e-10)
    for layer in cache.layers:  # one tensor of the latent and the rotary key
        assert layer.keys.shape == (3, 1, 20, 16 + 4)
        assert layer.values.numel() == 0


@torch.inference_mode()
def test_generation_equals_that_of_stock(pair: tuple[Any, Any], ids: torch.Tensor) -> None:
    stock, model = pair
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for more in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, **more}
        assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))


@torch.inference_mode()
def test_a_static_cache_serves_too(ids: torch.Tensor) -> None:
    model = headwise.optimize(deepseek())
    cache = StaticCache(config=model.config, max_cache_len=32)
    parts = [
        model(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in ((0, 12), (12, 13), (13, 20))
    ]
    assert_close(torch.cat(parts, 1), model(ids).logits, 1e-10)


def test_parameters_are_the_same_objects_and_twice_is_once(tmp_path: Path) -> None:
    model = deepseek(attention_bias=True)
    before = dict(model.named_parameters())
    assert headwise.optimize(model) is model
    modules = attentions(model)
    assert all(isinstance(module, headwise.MultiHeadLatentAttention) for module in modules)
    assert headwise.optimize(model) is model
    assert attentions(model) == modules
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again).__name__ == "DeepseekV3ForCausalLM"
    assert not isinstance(again.model.layers[0].self_attn, OptimizedLatentAttention)
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.named_parameters())


@torch.inference_mode()
def test_hooks_go_on_and_attention_weights_are_returned(ids: torch.Tensor) -> None:
    model = deepseek()
    model.set_attn_implementation("eager")
    calls: list[Any] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *args: calls.append(args[2][0]))
    expected = model(ids, output_attentions=True).attentions
    fresh = headwise.optimize(deepseek())  # of the same numbers, and never asked for weights before
    fresh.set_attn_implementation("eager")
    for optimised in (headwise.optimize(model), fresh):
        attentions = optimised(ids, output_attentions=True).attentions
        assert len(attentions) == len(expected) == 3
        for own, other in zip(attentions, expected, strict=True):
            assert_close(own, other, 1e-6)  # theirs go through a softmax in float32
    assert len(calls) == 2


def test_gradients_equal_those_of_stock(ids: torch.Tensor) -> None:
    stock = deepseek(attention_bias=True)
    model = headwise.optimize(copy.deepcopy(stock)).train()
    for m in (stock, model):
        m(ids, labels=ids).loss.backward()
    for (name, own), other in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert other.grad is not None, name
        assert_close(own.grad, other.grad, 1e-9)


@torch.inference_mode()
def test_v2_is_too_as_far_as_it_rotates_in_float32(ids: torch.Tensor) -> None:
    for overrides in ({}, {"q_lora_rank": None}, {"attention_bias": True}, {"rope_parameters": YARN}):
        stock = deepseek("deepseek_v2", **overrides)
        model = headwise.optimize(copy.deepcopy(stock))
        assert isinstance(model.model.layers[0].self_attn, OptimizedLatentAttention)
        assert_close(model(ids).logits, stock(ids).logits, 1e-5)
        assert torch.equal(
            model.generate(ids, max_new_tokens=8, do_sample=False),
            stock.generate(ids, max_new_tokens=8, do_sample=False),
        )


@torch.inference_mode()
def test_an_exported_folder_decodes_absorbed(tmp_path: Path, ids: torch.Tensor) -> None:
    save_tiny(tmp_path / "source", "qwen2")
    folder = convert_to_one_size(tmp_path / "source", tmp_path / "own", kv_lora_rank=12, qk_rope_head_dim=8)
    export_deepseek(folder, tmp_path / "stock")
    model = headwise.optimize(headwise.load(tmp_path / "stock"))
    for module in attentions(model):
        module.impl = "absorbed"
    assert_close(model(ids).logits, headwise.load(folder)(ids).logits, 2e-6)
    options = {"max_new_tokens": 16, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), headwise.load(folder).generate(ids, **options))


def test_a_new_process_can_be_sent_the_model(tmp_path: Path, ids: torch.Tensor) -> None:
    model = headwise.optimize(deepseek().float())
    (tmp_path / "model").write_bytes(pickle.dumps((model, ids)))
    code = f"""
import pickle, torch
model, ids = pickle.loads(open({str(tmp_path / "model")!r}, "rb").read())
torch.save([type(model.model.layers[0].self_attn).__name__, model(ids).logits.detach()], {str(tmp_path / "said")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    name, logits = torch.load(tmp_path / "said", weights_only=True)
    assert name == "OptimizedDeepseekV3Attention"
    with torch.inference_mode():
        assert_close(logits, model(ids).logits, 1e-5)  # its norms are stock again, in float32


@torch.inference_mode()
def test_the_bare_model_a_pickled_one_and_a_compiled_one(tmp_path: Path, ids: torch.Tensor) -> None:
    model = deepseek()
    model.save_pretrained(tmp_path)
    bare = AutoModel.from_pretrained(tmp_path)
    expected = bare(ids).last_hidden_state
    assert_close(headwise.optimize(bare)(ids).last_hidden_state, expected, 1e-10)
    again = pickle.loads(pickle.dumps(headwise.optimize(model)))
    assert torch.equal(again(ids).logits, model(ids).logits)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(ids, use_cache=False).logits, model(ids).logits, 1e-10)
    torch.compiler.reset()


def test_a_converted_model_is_left_as_it_is(tmp_path: Path) -> None:
    save_tiny(tmp_path / "source")
    headwise.convert(tmp_path / "source", tmp_path / "own", to="mla", kv_budget=0.5, evaluate=False)
    model = headwise.load(tmp_path / "own")
    before = attentions(model)
    assert headwise.optimize(model) is model
    assert attentions(model) == before


def test_a_module_that_cannot_be_taken_over_leaves_all_of_them_alone(ids: torch.Tensor) -> None:
    class Narrow(torch.nn.Linear):
        pass

    for change, rule in (
        (
            lambda layer: setattr(layer, "kv_b_proj", Narrow(16, 8 * 14, bias=False)),
            r"self_attn\.kv_b_proj = 'Narrow'",
        ),
        (
            lambda layer: setattr(layer, "kv_b_proj", torch.nn.Linear(16, 4 * 14, bias=False)),
            "must be a whole, plain",
        ),
        (lambda layer: setattr(layer, "forward", layer.forward), "has a forward of its own"),
    ):
        model = deepseek()
        change(model.model.layers[2].self_attn)
        with pytest.raises(headwise.ArgumentError, match=rule):
            headwise.optimize(model)
        assert not any(isinstance(module, OptimizedLatentAttention) for module in attentions(model))


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_implementations_whose_masks_are_no_tensors_are_refused(implementation: str) -> None:
    model = deepseek()
    model.config._attn_implementation = implementation
    with pytest.raises(headwise.ArgumentError, match=implementation):
        headwise.optimize(model)
