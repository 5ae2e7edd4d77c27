"""Decoder layers by one kernel: stock results in every family that has them, and stock's way in every other case."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import headwise
from headwise.runtime.hf import HeadwiseCache, step
from headwise.runtime.kernels.native import built
from tests.closeness import assert_close
from tests.runtime.hf.test_coded import with_codes
from tests.tiny_families import save_family, tiny_family

FAMILIES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
pytestmark = pytest.mark.skipif(built().library is None, reason="there is no compiler")


def model_of(family: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    more: dict[str, Any] = {"sliding_window": None} if family == "mistral" else {}
    return tiny_family(family, **more, **sizes).to(dtype)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the kernel so far."""
    calls: list[str] = []

    def watched(kernel: str, *args: Any) -> None:
        calls.append(kernel)
        run(kernel, *args)

    run = step.run
    monkeypatch.setattr(step, "run", watched)
    return calls


def steps(model: Any, batch: int = 1, cache: Any = None, **options: Any) -> Tensor:
    """Logits of a prompt of nine tokens and of one, three and one more; all but the first text are padded."""
    ids = torch.randint(3, 30, (batch, 14), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1:, :4] = 0
    cache = HeadwiseCache(model) if cache is None else cache
    out = []
    for first, last in ((0, 9), (9, 10), (10, 13), (13, 14)):
        given = mask[:, :last] if batch > 1 else None
        call = model(ids[:, first:last], attention_mask=given, past_key_values=cache, **options)
        out.append(call.logits[mask[:, first:last].bool()])
    return torch.cat(out)


def assert_beams_equal(own: Any, kernels: list[str]) -> None:
    """Beams of a model are those of its optimised copy, which calls the kernel."""
    model = headwise.optimize(copy.deepcopy(own))
    ids = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(5))
    call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **call), own.generate(ids, **call))
    assert kernels


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_every_family_computes_what_stock_does(family: str, batch: int, kernels: list[str]) -> None:
    stock = model_of(family, mlp_bias=True) if family == "llama" else model_of(family)
    model = headwise.optimize(copy.deepcopy(stock))
    assert_close(steps(model, batch), steps(stock, batch), 1e-5)
    assert len(kernels) == 2 * 3  # layers, and calls behind the prompt


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_half_precision_is_rounded_where_stock_rounds_it(family: str, dtype: torch.dtype, kernels: list[str]) -> None:
    if dtype == torch.float16 and not built().has_half:
        pytest.skip("the compiler does not support float16")
    stock = model_of(family, dtype)
    exact = steps(copy.deepcopy(stock).double())
    model = headwise.optimize(copy.deepcopy(stock))
    ours, theirs = (steps(each).double() - exact for each in (model, stock))
    assert kernels
    assert ours.square().mean() < 1.2 * theirs.square().mean()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
@torch.inference_mode()
def test_generation_equals_that_of_stock(options: dict[str, Any], kernels: list[str]) -> None:
    stock = model_of("llama")
    model = headwise.optimize(copy.deepcopy(stock))
    batch = 1 if "prompt_lookup_num_tokens" in options else 2
    ids = torch.randint(3, 97, (batch, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1:, :4] = 0
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, **options}
    assert torch.equal(model.generate(ids, **call), stock.generate(ids, **call))
    assert kernels


@pytest.fixture(scope="module", params=["latents", "heads", "heads behind norms"])
def coded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose cache is in codes."""
    folder = tmp_path_factory.mktemp("coded")
    target: dict[str, Any] = {"to": "same"}
    if request.param == "latents":
        target = {"to": "mla", "kv_lora_rank": 20, "qk_rope_head_dim": 8}
    source = save_family(folder / "source", "qwen3" if "norms" in request.param else "llama")
    return headwise.load(with_codes(source, folder, bits=3, **target), dtype=torch.float32)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
@torch.inference_mode()
def test_codes_are_those_of_the_layers_own_forward(coded: Any, batch: int, version: int, kernels: list[str]) -> None:
    own = copy.deepcopy(coded)
    if version == 1:  # whose first tokens are in bfloat16
        for layer in own.model.layers:
            layer.self_attn.set_code(replace(layer.self_attn.code, first=None), layer.self_attn.slots)
    model = headwise.optimize(copy.deepcopy(own))
    theirs, ours = HeadwiseCache(own), HeadwiseCache(model)
    assert_close(steps(model, batch, ours), steps(own, batch, theirs), 1e-5)
    assert len(kernels) == 2 * 3
    for expected, actual in zip(theirs.layers, ours.layers, strict=True):
        assert torch.equal(actual.keys, expected.keys)
        assert actual.values.shape == expected.values.shape


@torch.inference_mode()
def test_what_the_kernel_has_the_addresses_of_stays_where_another_thread_makes_it_anew(coded: Any) -> None:
    model = headwise.optimize(copy.deepcopy(coded))
    steps(model)
    for layer in model.model.layers:
        code = layer.self_attn.code
        made = weakref.ref(code.coder)
        del vars(code)["coder"]  # from Python 3.12 on the last one of two threads is kept
        assert made() is not None


@torch.inference_mode()
def test_codes_in_bfloat16_are_as_far_from_float32_as_without_the_kernel(coded: Any, kernels: list[str]) -> None:
    exact = steps(coded).double()
    own = copy.deepcopy(coded).bfloat16()
    model = headwise.optimize(copy.deepcopy(own))
    ours, theirs = (steps(each).double() - exact for each in (model, own))
    assert kernels
    assert ours.square().mean() < 1.5 * theirs.square().mean()


@torch.inference_mode()
def test_coded_layers_that_the_kernel_does_not_know_go_their_own_way(coded: Any, kernels: list[str]) -> None:
    own = copy.deepcopy(coded)
    own.model.layers[0].self_attn.o_proj.register_forward_hook(lambda _, args, out: out * 1.5)
    own.model.layers[1].self_attn.set_code(None, None)
    model = headwise.optimize(copy.deepcopy(own))
    assert_close(steps(model), steps(own), 1e-5)
    assert len(kernels) == (3 if hasattr(own.model.layers[1].self_attn, "kv_b_proj") else 0)  # latents are known


WIDE = {"with content": 8, "without content": 12}
"""Latents as they are: the width of the rotary key, of heads 12 wide."""


@pytest.fixture(scope="module", params=WIDE)
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of MLA whose latents are cached as they are."""
    folder = tmp_path_factory.mktemp("wide")
    source = save_family(folder / "source", "llama")
    size: dict[str, Any] = {"kv_lora_rank": 20, "qk_rope_head_dim": WIDE[request.param]}
    headwise.convert(source, folder / "mla", to="mla", evaluate=False, **size)
    return headwise.load(folder / "mla", dtype=torch.float32)


@pytest.mark.parametrize("batch", [1, 2])
@torch.inference_mode()
def test_latents_are_those_of_the_layers_own_forward(wide: Any, batch: int, kernels: list[str]) -> None:
    model = headwise.optimize(copy.deepcopy(wide))
    theirs, ours = HeadwiseCache(wide), HeadwiseCache(model)
    assert_close(steps(model, batch, ours), steps(wide, batch, theirs), 1e-5)
    assert len(kernels) == 2 * 3
    for expected, actual in zip(theirs.layers, ours.layers, strict=True):
        assert_close(actual.keys, expected.keys, 1e-5)
        assert actual.values.shape == expected.values.shape
    for cache in (ours, theirs):
        cache.crop(-5)
    assert_close(steps(model, batch, ours), steps(wide, batch, theirs), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_latents_in_half_precision_are_as_far_from_float64_as_without_the_kernel(
    wide: Any, dtype: torch.dtype, kernels: list[str]
) -> None:
    if dtype == torch.float16 and not built().has_half:
        pytest.skip("the compiler does not support float16")
    own = copy.deepcopy(wide).to(dtype)
    exact = steps(copy.deepcopy(own).double())
    model = headwise.optimize(copy.deepcopy(own))
    ours, theirs = (steps(each).double() - exact for each in (model, own))
    assert kernels
    assert ours.square().mean() < 1.5 * theirs.square().mean()


@torch.inference_mode()
def test_beams_over_latents_equal_those_without_the_kernel(wide: Any, kernels: list[str]) -> None:
    assert_beams_equal(wide, kernels)


@torch.inference_mode()
def test_latents_that_are_to_be_expanded_go_the_layers_own_way(wide: Any, kernels: list[str]) -> None:
    model = headwise.optimize(copy.deepcopy(wide))
    steps(model)
    kernels.clear()
    for layer in model.model.layers:
        layer.self_attn.impl = "expanded"
    assert_close(steps(model), steps(wide), 1e-5)
    assert not kernels


@torch.inference_mode()
def test_beams_over_codes_equal_those_without_the_kernel(coded: Any, kernels: list[str]) -> None:
    assert_beams_equal(copy.deepcopy(coded), kernels)


@torch.inference_mode()
def test_a_cropped_cache_goes_on() -> None:
    stock = model_of("qwen3")
    model = headwise.optimize(copy.deepcopy(stock))
    out = []
    for each in (stock, model):
        cache = HeadwiseCache(each)
        steps(each, cache=cache)
        cache.crop(-5)
        out.append(steps(each, cache=cache))
    assert_close(out[1], out[0], 1e-5)


def hooked(path: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.get_submodule(path).register_forward_hook(lambda _, args, out: out * 1.5)

    return change


def hooked_before(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))


def with_own_forward(model: Any) -> None:
    norm = model.model.layers[1].post_attention_layernorm
    norm.forward = lambda x: x * 0.5


def with_adapter(model: Any) -> None:
    attention = model.model.layers[1].self_attn

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) * 1.5

    attention.v_proj = Adapted(attention.v_proj)


def with_other_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()


def with_other_mlp(model: Any) -> None:
    torch.manual_seed(1)
    model.model.layers[1].mlp = nn.Sequential(nn.Linear(48, 48), nn.SiLU())


def with_parametrization(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)


def with_other_weights(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data = model.model.layers[1].mlp.up_proj.weight.data.T.contiguous().T


CHANGES = {
    "a hook of a projection": hooked("model.layers.1.self_attn.q_proj"),
    "a hook of a norm": hooked("model.layers.1.input_layernorm"),
    "a hook before the MLP": hooked_before,
    "a forward of its own": with_own_forward,
    "an adapter": with_adapter,
    "another activation": with_other_activation,
    "another MLP": with_other_mlp,
    "a parametrization": with_parametrization,
    "weights that lie otherwise": with_other_weights,
}


@pytest.mark.parametrize("change", CHANGES)
@torch.inference_mode()
def test_a_changed_layer_goes_the_stock_way(change: str, kernels: list[str]) -> None:
    stock = model_of("llama")
    model = headwise.optimize(copy.deepcopy(stock))
    unchanged = steps(model)
    kernels.clear()
    for each in (stock, model):
        CHANGES[change](each)
    assert_close(steps(model), steps(stock), 1e-5)
    assert len(kernels) == 3, "only the other layer's"
    if change not in ("a parametrization", "weights that lie otherwise"):
        assert (steps(model) - unchanged).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
@torch.inference_mode()
def test_a_weight_of_another_shape_is_left_to_torch(name: str, kernels: list[str]) -> None:
    """The kernel would read behind its end."""
    model = headwise.optimize(model_of("llama"))
    cache = HeadwiseCache(model)
    model(torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11]]), past_key_values=cache)
    linear = model.model.layers[0].get_submodule(name)
    linear.weight = nn.Parameter(linear.weight[:, :5].clone())
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.tensor([[3]]), past_key_values=cache)
    assert not kernels


@torch.inference_mode()
def test_weights_that_were_replaced_are_read(kernels: list[str]) -> None:
    stock = model_of("llama")
    model = headwise.optimize(copy.deepcopy(stock))
    before = steps(model)
    for each in (stock, model):
        for layer in each.model.layers:
            layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight * 2, requires_grad=False)
            layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data * 0.5
            layer.input_layernorm.weight.mul_(1.5)
    assert_close(steps(model), steps(stock), 1e-5)
    assert (steps(model) - before).abs().max() > 1e-3
    assert kernels


CALLS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any]]] = {
    "gradients": (torch.enable_grad, {}),
    "returned weights": (nullcontext, {"output_attentions": True}),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), {}),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_asks_for_goes_the_stock_way(call: str, kernels: list[str]) -> None:
    context, options = CALLS[call]
    stock = model_of("llama")
    stock.set_attn_implementation("eager")
    model = headwise.optimize(copy.deepcopy(stock))
    with torch.no_grad(), context():
        assert_close(steps(model, **options), steps(stock, **options), 1e-5 if call != "autocast" else 2e-2)
    assert not kernels


@torch.inference_mode()
def test_hidden_states_are_those_of_stock(kernels: list[str]) -> None:
    stock = model_of("llama")
    model = headwise.optimize(copy.deepcopy(stock))
    ids = torch.randint(3, 97, (1, 9))
    for _ in range(2):
        theirs, ours = (
            each(ids[:, 8:], past_key_values=cache, output_hidden_states=True).hidden_states
            for each in (stock, model)
            for cache in [HeadwiseCache(each)]
            if each(ids[:, :8], past_key_values=cache) is not None
        )
        for expected, actual in zip(theirs, ours, strict=True):
            assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "int8", "sliding", "training", "many"])
@torch.inference_mode()
def test_other_caches_training_and_many_tokens_go_the_stock_way(kind: str, kernels: list[str]) -> None:
    stock = tiny_family("mistral").float() if kind == "sliding" else model_of("llama")
    model = headwise.optimize(copy.deepcopy(stock))
    batch = 9 if kind == "many" else 1
    caches: dict[str, Callable[[Any], Any]] = {
        "dynamic": lambda each: DynamicCache(config=each.config),
        "int8": lambda each: HeadwiseCache(each, quantize="int8:16"),
    }
    if kind == "training":
        for each in (stock, model):
            each.train()
    theirs, ours = (steps(each, batch, caches.get(kind, HeadwiseCache)(each)) for each in (stock, model))
    assert_close(ours, theirs, 1e-5)
    assert not kernels


@torch.inference_mode()
def test_parameters_copies_and_pickles_stay(tmp_path: Any, kernels: list[str]) -> None:
    stock = model_of("qwen2")
    model = copy.deepcopy(stock)
    parameters = dict(model.named_parameters())
    expected = steps(headwise.optimize(headwise.optimize(model)))
    assert all(parameters[name] is tensor for name, tensor in model.named_parameters())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        kernels.clear()
        assert_close(steps(other), expected, 1e-6)
        assert kernels
    model.save_pretrained(tmp_path)
    again = type(stock).from_pretrained(tmp_path)
    assert type(again.model.layers[0]) is type(stock.model.layers[0])
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
