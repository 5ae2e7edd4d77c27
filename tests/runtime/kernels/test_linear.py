"""Linear layers of a few tokens: torch's result, whatever the shapes, strides and dtypes."""

from __future__ import annotations

import random
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from headwise.runtime.hf.linears import FewTokensLinear, ManyTokensLinear, take_over_linears
from headwise.runtime.kernels.native import build, built, linear, linear_of_many

pytestmark = pytest.mark.skipif(built().library is None, reason=f"no compiled kernels: {built().reason}")

linear_module = sys.modules[linear.__module__]  # the package's name for it is that of the function

CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Tolerances, as fractions of the largest output."""


@pytest.mark.parametrize("part", range(10))
@torch.inference_mode()
def test_it_is_the_definition(part: int) -> None:
    for seed in range(part * 60, part * 60 + 60):
        chance = random.Random(seed)
        torch.manual_seed(seed)
        dtype = chance.choice(list(CLOSE))
        rows, inputs, outputs = chance.randint(1, 8), chance.randint(1, 700), chance.randint(1, 400)
        whole = torch.full((outputs, inputs + chance.choice([0, 0, 5])), float("nan"), dtype=dtype)
        weight = whole[:, :inputs]
        weight.copy_(torch.randn(outputs, inputs))
        bias = torch.randn(outputs).to(dtype) if chance.random() < 0.5 else None
        x = torch.randn(rows, inputs).to(dtype)
        if chance.random() < 0.3:
            x = torch.randn(inputs, rows).to(dtype).T
        x = x.reshape(1, rows, inputs) if chance.random() < 0.5 else x
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        out = linear(x, weight, bias)
        assert out.dtype == dtype
        assert out.shape == exact.shape
        error = (out.double() - exact).abs().max() / max(float(exact.abs().max()), inputs**0.5)
        assert error <= CLOSE[dtype], (seed, float(error))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_many_rows_gradients_and_watchers_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FewTokensLinear(24, 16)
    few, many = torch.randn(2, 24), torch.randn(40, 24)
    layer(few).sum().backward()
    assert layer.weight.grad is not None
    calls = []
    library = built().library
    assert library is not None
    monkeypatch.setattr(library, "headwise_linear", lambda *_: calls.append(1) or 0)
    with torch.no_grad():
        assert torch.equal(layer(many), F.linear(many, layer.weight, layer.bias))
        with FlopCounterMode(display=False) as counter:
            layer(few)
        assert counter.get_total_flops() == 2 * 2 * 24 * 16
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(few).dtype == torch.bfloat16
        assert torch.equal(torch.func.vmap(layer)(few), F.linear(few, layer.weight, layer.bias))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(few, torch.ones_like(few))
            assert torch.equal(
                forward_ad.unpack_dual(layer(dual)).tangent, F.linear(torch.ones_like(few), layer.weight)
            )
        sparse = layer.weight.detach().to_sparse_csr()
        assert (linear(few, sparse) - F.linear(few, layer.weight)).abs().max() < 1e-6
        assert layer.double()(few.double()).dtype == torch.float64
        assert not calls
        layer.float()(few)
    assert calls


@torch.inference_mode()
def test_many_rows_of_bfloat16_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor cannot multiply bfloat16, and where it can."""
    x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((3, 700, 96), (80, 96), (80,)))
    exact = F.linear(x.double(), weight.double(), bias.double())
    for has_products in (False, True):
        monkeypatch.setattr(linear_module, "multiplies_bfloat16", lambda has=has_products: has)
        out = linear_of_many(x, weight, bias)
        assert out.dtype == torch.bfloat16
        assert out.shape == (3, 700, 80)
        assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * 96**0.5).all()
        strided = linear_of_many(x[..., ::2], weight[:, :48])
        halved = F.linear(x[..., ::2].double(), weight[:, :48].double())
        assert ((strided.double() - halved).abs() <= 2**-8 * halved.abs() + 1e-5 * 48**0.5).all()
        if not has_products:
            assert torch.equal(strided, linear_of_many(x[..., ::2].contiguous(), weight[:, :48].contiguous()))
            assert torch.equal(out, F.linear(x.float(), weight.float(), bias.float()).bfloat16())


def test_many_rows_with_gradients_and_watchers_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "multiplies_bfloat16", lambda: False)
    layer = ManyTokensLinear(24, 16, dtype=torch.bfloat16)
    x = torch.randn(40, 24).bfloat16()
    out = layer(x)
    assert type(out.grad_fn) is type(F.linear(x, layer.weight, layer.bias).grad_fn)
    out.sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        assert torch.func.vmap(layer)(x[None]).shape == (1, 40, 16)  # which cannot write into a tensor of its own
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 40 * 24 * 16


def test_what_torch_refuses_is_refused() -> None:
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            linear(torch.zeros(1, 5), torch.zeros(3, 4))
        with pytest.raises(RuntimeError, match="dtype"):
            linear(torch.zeros(1, 4), torch.zeros(3, 4).bfloat16())


def test_no_rows_and_no_inputs() -> None:
    with torch.no_grad():
        assert linear(torch.zeros(0, 4), torch.zeros(3, 4)).shape == (0, 3)
        assert torch.equal(linear(torch.zeros(2, 0), torch.zeros(3, 0), torch.ones(3)), torch.ones(2, 3))


def test_without_a_compiler_it_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "built", lambda: build.Build(None, None, "none here"))
    x, weight = torch.randn(1, 64), torch.randn(32, 64)
    with torch.no_grad():
        assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_only_plain_layers_are_taken_over() -> None:
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Own(4, 4), torch.nn.Linear(4, 4))
    hooked = model[2]
    hooked.forward = lambda x: x
    weights = list(model.parameters())
    take_over_linears(model)
    assert [type(module) for module in model] == [FewTokensLinear, Own, torch.nn.Linear]
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))
