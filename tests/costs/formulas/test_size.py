from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from headwise import cost
from headwise.costs.formulas.layer import call_of, kept_activations
from headwise.costs.formulas.stages import KERNELS, Kernel, Size
from headwise.models.specs import ExpertLatentSpec, LatentSpaceSpec
from tests.strategies import AnySpec, causal, runnable_specs

VALUES = {"E": 12, "H": 3, "D": 1, "P": 0, "S": 7}


def evaluated(formula: str, symbols: dict[str, int]) -> Fraction:
    """The value of a formula, exactly."""
    names: dict[str, Any] = {name: Fraction(value) for name, value in symbols.items()}
    return Fraction(eval(formula.replace("·", "*").replace("−", "-"), {"__builtins__": {}}, names))


leaves = st.sampled_from([Size(value, name) for name, value in VALUES.items()]) | st.integers(0, 20)


@st.composite
def expressions(draw: st.DrawFn, depth: int = 4) -> tuple[Any, int]:
    """Random expressions, each of sizes and of plain ints."""
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        leaf = draw(leaves)
        return leaf, int(leaf)
    (left, plain_left), (right, plain_right) = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    match draw(st.sampled_from("+-*")):
        case "+":
            return left + right, plain_left + plain_right
        case "-":
            return left - right, plain_left - plain_right
        case _:
            return left * right, plain_left * plain_right


@given(expressions())
def test_arithmetic_is_that_of_ints_and_the_formula_is_its_value(pair: tuple[Any, int]) -> None:
    size, plain = pair
    assert size == plain
    assert type(int(size)) is int
    assume(isinstance(size, Size))
    assert evaluated(size.formula, VALUES) == plain


def test_a_formula_reads_as_it_was_written() -> None:
    E, H, D = (Size(VALUES[name], name) for name in "EHD")
    assert (2 * E * (H * D + 64)).formula == "2·E·(H·D + 64)"
    assert (E - (H + D)).formula == "E − H − D"
    assert ((E - H) * D).formula == "(E − H)·D"
    assert (E - H - D).formula == "E − H − D"
    assert (sum([E, H])).formula == "E + H"
    assert Size(5).formula == "5"


def test_plain_zeros_and_ones_leave_no_trace_but_symbols_of_their_value_do() -> None:
    E, one, none = Size(12, "E"), Size(1, "D"), Size(0, "P")
    assert [(E + 0).formula, (0 + E).formula, (1 * E).formula, (E * 1).formula] == ["E"] * 4
    assert [(0 * E).formula, (E * 0).formula] == ["0", "0"]
    assert (E * one).formula == "E·D"
    assert (E + none).formula == "E + P"
    assert (E * none).formula == "E·P"


def test_a_size_is_copied_and_pickled_with_its_formula() -> None:
    size = Size(3, "H") + 1
    for twin in (copy.copy(size), copy.deepcopy(size), pickle.loads(pickle.dumps(size))):
        assert (twin, twin.formula, (twin * 2).formula) == (4, "H + 1", "2·(H + 1)")


def symbols_of(spec: AnySpec) -> dict[str, int]:
    names = {
        "E": "hidden_size",
        "H": "num_heads",
        "K": "num_kv_heads",
        "D": "head_dim",
        "V": "v_head_dim",
        "N": "qk_nope_head_dim",
        "P": "qk_rope_head_dim",
        "Q": "q_lora_rank",
        "C": "kv_dim",
        "X": "num_experts",
        "w": "sliding_window",
    }
    sizes = {symbol: getattr(spec, name, None) for symbol, name in names.items()}
    sizes["R"] = getattr(spec, "latent_dim", None) or getattr(spec, "kv_lora_rank", None)
    if isinstance(spec, ExpertLatentSpec):
        sizes["K"] = spec.latent_kv_heads
    if sizes["P"] is None and spec.rope is not None:
        sizes["P"] = spec.rope.dim
    return {symbol: value for symbol, value in sizes.items() if value is not None}


sizes = st.integers(1, 30)


@given(
    runnable_specs(), sizes, st.integers(0, 30), st.integers(1, 3), st.booleans(), st.sampled_from(KERNELS), st.data()
)
def test_every_formula_of_a_layer_is_its_value(
    spec: AnySpec, S: int, past: int, B: int, is_causal: bool, kernel: Kernel, data: st.DataObject
) -> None:
    is_causal = is_causal and getattr(spec, "conditioning", "token") == "token"
    call = call_of(spec, S, S + past, batch=B, causal=is_causal)
    symbols = symbols_of(spec) | {"B": B, "S": S, "T": S + past, "pairs": int(call.pairs)}
    for value in (call.pairs, call.total, cost.formulas(spec).cache_values(spec)):
        assert evaluated(value.formula, symbols) == value
    impl = data.draw(st.sampled_from(cost.formulas(spec).IMPLS))
    for stage in cost.stages(spec, impl, new_tokens=S):
        flops = stage.forward_flops(call, kernel), stage.backward_flops(call, kernel, input_gradient=is_causal)
        for value in (stage.parameters, *flops):
            if isinstance(value, Size):
                assert evaluated(value.formula, symbols) == value
            else:
                assert value == 0
    if impl != "cached_kv":
        call = call_of(spec, S, batch=B, causal=is_causal)
        kept = kept_activations(spec, call, cross=False, dtype="float32", causal=is_causal, impl=impl, kernel=kernel)
        total = sum((tensor.nbytes(call, Size(4)) for tensor in kept), Size(0))
        assert evaluated(total.formula, symbols) == total


def test_the_formulas_have_the_symbols_of_the_papers() -> None:
    spec = LatentSpaceSpec(hidden_size=512, num_heads=8, latent_dim=256, head_dim=64)
    names = {stage.name: stage for stage in cost.stages(spec)}
    assert names["v_out_proj"].parameters.formula == "H·D·R"  # type: ignore[attr-defined]
    call = call_of(causal(spec), 10, 30, batch=2)
    assert call.pairs.formula == "S·(T − S) + S·(S + 1)/2"
    assert call_of(causal(spec), 1, 30).pairs.formula == "S·T"
    assert call_of(causal(spec), 30).pairs.formula == "S·(S + 1)/2"
    windowed = causal(spec, sliding_window=4)
    assert call_of(windowed, 30).pairs.formula == "w·S − w·(w − 1)/2"
    assert call_of(windowed, 2, 30).pairs.formula == "S·w"
    assert call_of(windowed, 2, 30).total.formula == "S + w − 1"
    assert names["attention"].forward_flops(call, "unfused").formula == ("4·B·H·(S·(T − S) + S·(S + 1)/2)·R/H")
