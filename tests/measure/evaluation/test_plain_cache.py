"""The bytes of a cache where numbers are bfloat16, the formats nearest to them, and what chance may do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import headwise
from headwise.costs.formulas import model as cost
from headwise.costs.formulas.target import PLAIN_FORMATS, plain_formats
from headwise.measure.evaluation.beside_source import (
    bfloat16_bytes,
    compared_formats,
    log_perplexity_margin,
    nearest_formats,
)
from headwise.models.checkpoints import Checkpoint, open_checkpoint
from headwise.runtime.quantization.formats import TokenFormat, parse_format
from headwise.runtime.quantization.groups import KiviCode
from tests.real_models import save_tiny
from tests.tiny_families import save_family

WIDTH, HEADS, LAYERS = 64, 2, 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model with heads as wide as those of real ones."""
    folder = tmp_path_factory.mktemp("plain") / "source"
    sizes = {"num_attention_heads": 4, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS}
    return open_checkpoint(save_tiny(folder, hidden_size=4 * WIDTH, **sizes))


def test_bytes_are_those_of_the_codes_and_bfloat16_for_the_rest(source: Checkpoint) -> None:
    assert bfloat16_bytes(source, 128) == cost.cache_bytes_per_token(source.spec) == LAYERS * HEADS * 2 * WIDTH * 2
    for spelling in map(str, PLAIN_FORMATS):
        code = parse_format(spelling)
        if isinstance(code, TokenFormat):
            expected = code.keys.token_bytes(WIDTH) + code.values.token_bytes(WIDTH)
            assert bfloat16_bytes(source, 100, spelling) == LAYERS * HEADS * expected
        else:
            assert isinstance(code, KiviCode)
            block = code.block_bytes(WIDTH, WIDTH)
            assert bfloat16_bytes(source, 2 * code.block, spelling) == LAYERS * HEADS * block / code.block
            # Tokens that fill no block yet have room for as many as ever wait, in bfloat16.
            waiting = (code.block - 1) * 2 * WIDTH * 2
            assert bfloat16_bytes(source, 129, spelling) * 129 == LAYERS * HEADS * (
                128 // code.block * block + waiting
            )


@pytest.mark.parametrize("width", [4, 14, 32, 64, 72, 80, 96, 100, 112, 120, 128, 160, 192, 200, 256])
def test_heads_of_every_width_have_every_format_but_rotated_ones(width: int, tmp_path: Path) -> None:
    source = open_checkpoint(save_tiny(tmp_path / "source", head_dim=width))
    formats = plain_formats(source.spec)
    kinds = [re.sub(r":\d+", "", name) for name in formats]
    is_power = width & (width - 1) == 0
    wanted = ["int8", "int8/int4", "kivi4", *(["int4+hadamard/int4"] if is_power else []), "kivi3", "kivi2"]
    assert list(dict.fromkeys(kinds)) == wanted
    tokens = 512  # whole blocks of every format
    sizes = {name: bfloat16_bytes(source, tokens, name) for name in formats}
    if width >= 64:  # scales of narrower heads weigh more than bits
        assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    for name, form in formats.items():
        assert str(parse_format(name)) == name
        assert form.bits(source.spec) == 16 * sizes[name] / bfloat16_bytes(source, tokens), name


def test_windows_stay_as_they_are_beside_blocks_of_tokens(tmp_path: Path) -> None:
    mixed = open_checkpoint(save_family(tmp_path / "source", "gemma3_text"))
    assert {layer.sliding_window is None for layer in mixed.spec.layers} == {True, False}
    formats = plain_formats(mixed.spec)
    assert {name.partition(":")[0] for name in formats} >= {"int8", "kivi4", "kivi2"}
    assert formats["kivi4"].bits(mixed.spec) > formats["int8"].bits(mixed.spec)
    sliding = open_checkpoint(save_family(tmp_path / "other", "mistral"))
    assert not any(name.startswith("kivi") for name in plain_formats(sliding.spec))


def test_a_window_that_slides_holds_its_own_tokens_only(tmp_path: Path) -> None:
    sliding = open_checkpoint(save_family(tmp_path / "source", "mistral"))
    assert bfloat16_bytes(sliding, 512) < cost.cache_bytes_per_token(sliding.spec) / 4
    assert bfloat16_bytes(sliding, 512, "int8") < bfloat16_bytes(sliding, 512)
    with pytest.raises(headwise.ArgumentError, match="quantises none of this model's layers"):
        bfloat16_bytes(sliding, 64, "kivi4")


def test_the_nearest_formats_are_the_largest_that_is_no_larger_and_the_smallest_that_is(source: Checkpoint) -> None:
    whole = bfloat16_bytes(source, 2048)
    for share, nearest in [
        (0.9, ["int8"]),
        (0.5, ["int8/int4", "int8"]),
        (0.30, ["kivi4", "int8/int4"]),
        (0.28, ["kivi4", "int8/int4"]),  # which has 28.1 %
        (0.27, ["kivi3:32", "kivi4"]),
        (0.19, ["kivi2:32", "kivi3"]),
        (0.06, ["kivi2"]),
    ]:
        found = nearest_formats(source, 2048, share * whole)
        assert found == {name: bfloat16_bytes(source, 2048, name) for name in nearest}, share
        assert list(found) == nearest


@pytest.mark.parametrize(("width", "below", "above"), [(80, 0.400, 0.525), (96, 0.396, 0.521), (100, 0.395, 0.520)])
def test_a_conversion_to_two_fifths_has_a_format_of_about_its_bytes(
    width: int, below: float, above: float, tmp_path: Path
) -> None:
    odd = open_checkpoint(save_tiny(tmp_path / "source", head_dim=width))
    whole = bfloat16_bytes(odd, 2048)
    shares = [size / whole for size in nearest_formats(odd, 2048, 0.405 * whole).values()]
    assert shares == pytest.approx([below, above], abs=1e-3)


def test_the_margin_is_two_standard_errors_of_a_difference_of_logits() -> None:
    """A token drawn from the source costs more in each of two models whose logits have small errors of their own."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 50, generator=generator, dtype=torch.float64)
    drawn = logits.softmax(-1).multinomial(1, generator=generator)
    costs, divergences = [], []
    for size in (0.1, 0.2):
        errors = size * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        model = (logits + errors).log_softmax(-1)
        costs.append(-model.gather(-1, drawn))
        source = logits.log_softmax(-1)
        divergences.append(float((source.exp() * (source - model)).sum(-1).mean()))
    difference = costs[1] - costs[0]
    measured = 2 * float(difference.std()) / len(difference) ** 0.5
    assert log_perplexity_margin(*divergences, len(difference)) == pytest.approx(measured, rel=0.05)


def test_an_engines_own_caches_are_what_its_user_compares_with(tmp_path: Path) -> None:
    source = open_checkpoint(save_tiny(tmp_path / "source", head_dim=64))
    whole = bfloat16_bytes(source, 512)
    assert compared_formats(source.spec, "llama.cpp") == ["llama.cpp:q8_0", "llama.cpp:q4_0"]
    found = nearest_formats(source, 512, whole / 2, "llama.cpp")
    assert {name: taken / whole for name, taken in found.items()} == {
        "llama.cpp:q4_0": 4.5 / 16,
        "llama.cpp:q8_0": 8.5 / 16,
    }
    # Where headwise computes none of an engine's, and where none suits the heads: those of the field.
    narrow = open_checkpoint(save_tiny(tmp_path / "narrow", head_dim=14))
    for checkpoint, engine in ((narrow, "llama.cpp"), (source, None)):
        assert compared_formats(checkpoint.spec, engine) == list(plain_formats(checkpoint.spec))


def test_layers_that_an_engine_leaves_wide_are_counted_by_themselves(tmp_path: Path) -> None:
    """vLLM's TurboQuant leaves the first and the last two layers of a model as they are, and codes those between."""
    whole, coded = {}, {}
    for layers in (4, 5, 6, 8):
        model = open_checkpoint(save_tiny(tmp_path / f"{layers}", head_dim=WIDTH, num_hidden_layers=layers))
        whole[layers] = bfloat16_bytes(model, 128)
        if layers > 4:
            coded[layers] = bfloat16_bytes(model, 128, "vllm:turboquant_4bit_nc")
    assert coded[5] - whole[4] == coded[6] - coded[5] == (coded[8] - coded[6]) / 2
    assert 0 < coded[5] - whole[4] < (whole[5] - whole[4]) / 2
