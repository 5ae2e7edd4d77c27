"""Greedy continuations part where full forwards without a cache say, and a near tie is one by the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from headwise.measure.evaluation import Pair, evaluate, open_pair
from headwise.measure.evaluation.continuations import NEAR_TIE, Continuations, compare_continuations, cut_prompts
from headwise.measure.texts import token_windows
from headwise.models.checkpoints import load_tokenizer
from headwise.runtime.hf import HeadwiseCache
from tests.real_models import save_tiny, tiny_model

TEXT = "Whatever is worth measuring is worth measuring twice, side by side; and saying how. " * 20
SMALL: dict[str, Any] = {"window": 100, "windows": 4, "context": 10}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("continuations")
    save_tiny(root / "source")
    (root / "text.txt").write_text(TEXT)
    save_perturbed(root / "perturbed", 0.01)
    headwise.convert(root / "perturbed", root / "near", to="mla", kv_budget=1.0, evaluate=False)
    return root


def save_perturbed(folder: Path, size: float) -> None:
    """The source with errors of its weights, so that it parts from it after some tokens."""
    save_tiny(folder)
    model, generator = tiny_model(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    model.save_pretrained(folder)


def windows(folder: Path, window: int = 100, count: int = 4) -> list[tuple[str, Tensor]]:
    return [("text.txt", token_windows(load_tokenizer(folder), TEXT, window=window, windows=count))]


def compared(pair: Pair, texts: list[tuple[str, Tensor]], count: int) -> Continuations:
    return compare_continuations(pair, cut_prompts(texts, count, positions=pair.positions))


def without_a_cache(model: Any, ids: Tensor) -> Tensor:
    """The logits of the token after a sequence ``[S]``, by a forward over all of it."""
    return model(ids[None], use_cache=False).logits[0, -1]


@torch.inference_mode()
def by_hand(
    model: Any, reference: Any, prompt: Tensor, tokens: int, step: Callable[[Any, Tensor], Tensor] = without_a_cache
) -> tuple[int, float | None]:
    """The equal tokens, and the reference's gap where the two part; ``step`` gives the model's logits."""
    ids = prompt
    for count in range(tokens):
        logits = without_a_cache(reference, ids)
        if int(step(model, ids).argmax()) != int(logits.argmax()):
            best, second = logits.double().log_softmax(-1).sort(descending=True).values[:2]
            return count, float(best - second)
        ids = torch.cat((ids, logits.argmax()[None]))
    return tokens, None


def test_they_part_where_full_forwards_without_a_cache_do(root: Path) -> None:
    evaluation = headwise.evaluate(
        root / "near", against=root / "source", text=root / "text.txt", **SMALL, continuations=4
    )
    found = evaluation.continuations
    assert found is not None
    assert (found.prompts, found.prompt_tokens, found.tokens) == (4, 100, 156)  # of 256 positions
    near, source = headwise.load(root / "near"), headwise.load(root / "source")
    prompts = windows(root / "source")[0][1]
    for number, one in enumerate(found.each):
        assert (one.text, one.window, one.start, one.tokens) == (str(root / "text.txt"), number, 0, 156)
        equal, gap = by_hand(near, source, prompts[number], 156)
        assert one.equal == equal
        assert one.gap == (gap if gap is None else pytest.approx(gap, rel=1e-4))
    assert len({one.equal for one in found.each} - {0, 156}) > 1
    ordered = sorted(one.equal for one in found.each)
    assert found.median_equal == (ordered[1] + ordered[2]) / 2
    assert found.equal == sum(one.gap is None for one in found.each)
    assert found.equal_share == found.equal / 4
    assert found.near_ties == sum(one.gap is not None and one.gap <= NEAR_TIE for one in found.each)
    assert evaluation.to_dict()["continuations"]["each"][0]["equal"] == found.each[0].equal


def test_a_model_continues_as_itself(root: Path) -> None:
    pair = open_pair(root / "source", against=root / "source")
    found = compared(pair, windows(root / "source"), 3)
    assert (found.equal, found.equal_share, found.median_equal, found.near_ties) == (3, 1, 156, 0)
    assert all(one.gap is None for one in found.each)
    assert found.line == "3 of 3 continuations of 156 tokens equal · median 156 equal tokens"


@pytest.mark.parametrize("cache", ["int4", "kivi2:16"])
def test_a_quantised_cache_is_decoded_from(root: Path, cache: str) -> None:
    """Each prompt by itself, as it is served: a prompt that fills the cache, and then a token at a time."""
    model = headwise.load(root / "source")
    pair = open_pair(root / "source", against=root / "source")
    texts = windows(root / "source")
    with pair.caching(cache):
        found = compared(pair, texts, 3)
    assert found.equal < 3
    for number, one in enumerate(found.each):
        caches = [HeadwiseCache(model, quantize=cache)]

        def step(model: Any, ids: Tensor, caches: list[HeadwiseCache] = caches) -> Tensor:
            (cached,) = caches
            return model(ids[None, cached.length :], past_key_values=cached).logits[0, -1]

        row = texts[0][1][number * 4 // 3]
        assert one.equal == by_hand(model, model, row, 156, step=step)[0]


def part_at_once(folder: Path, *, near: bool) -> Continuations:
    """Models that differ in the logits of two tokens alone, which are the likeliest behind the prompt."""
    source = tiny_model()
    texts = windows(save_tiny(folder / "tokenizer"))
    with torch.no_grad():
        source.lm_head.weight *= 20
        best, second = without_a_cache(source, texts[0][1][0]).topk(2).indices.tolist()
        if near:
            source.lm_head.weight[second] = (1 - 1e-4) * source.lm_head.weight[best]
        source.save_pretrained(folder / "source")
        source.lm_head.weight[[best, second]] = source.lm_head.weight[[second, best]]
        source.save_pretrained(folder / "other")
    pair = open_pair(folder / "other", against=folder / "source")
    return compared(pair, texts, 1)


@pytest.mark.parametrize("near", [True, False])
def test_a_near_tie_is_told_from_a_loss(tmp_path: Path, near: bool) -> None:
    found = part_at_once(tmp_path, near=near)
    (one,) = found.each
    best, second = (
        without_a_cache(headwise.load(tmp_path / "source"), windows(tmp_path / "tokenizer")[0][1][0])
        .topk(2)
        .values.tolist()
    )
    assert (one.equal, one.gap) == (0, pytest.approx(best - second, rel=1e-3))
    assert (best - second <= NEAR_TIE) == near == bool(found.near_ties)
    assert found.line.endswith(f" · {int(near)} of 1 part at a near tie")


def test_what_is_behind_the_references_end_is_not_compared(root: Path, tmp_path: Path) -> None:
    texts = windows(root / "source")
    near, source = headwise.load(root / "near"), headwise.load(root / "source")
    parting = [by_hand(near, source, row, 156)[0] for row in texts[0][1]]
    number = max(range(4), key=parting.__getitem__)
    assert 0 < parting[number] < 156
    end = int(without_a_cache(source, texts[0][1][number]).argmax())  # the first token that both write
    save_tiny(tmp_path / "ending", eos_token_id=end)
    pair = open_pair(root / "near", against=tmp_path / "ending")
    one = compared(pair, texts, 4).each[number]
    assert (one.tokens, one.equal, one.gap) == (1, 1, None)


def test_prompts_are_spread_over_the_text_and_begin_as_windows_do(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", max_position_embeddings=1024)
    ids = windows(source, window=400, count=2)[0][1]
    pair = open_pair(source, against=source)
    seen: list[Tensor] = []

    def watch(_: object, args: tuple[Tensor, ...]) -> None:
        if args[0].shape[1] > 1:
            seen.append(args[0])

    pair.models["model"].register_forward_pre_hook(watch)
    found = compare_continuations(pair, cut_prompts([("text", ids)], 4, positions=1024, begin=2))
    assert (found.prompt_tokens, found.tokens) == (128, 256)
    places = [(one.window, one.start) for one in found.each]
    assert places == [(0, 2), (0, 2 + 126), (1, 2), (1, 2 + 126)]
    (prompts,) = seen
    for prompt, (window, start) in zip(prompts, places, strict=True):
        assert prompt.tolist() == [*ids[window, :2].tolist(), *ids[window, start : start + 126].tolist()]
    with pytest.raises(headwise.ArgumentError, match="continuations = 7: must be at most 6: text has no more"):
        cut_prompts([("text", ids)], 7, begin=2)


@pytest.mark.parametrize(("dtype", "rows"), [("float64", 3), ("float32", 3), ("bfloat16", 1)])
def test_a_batch_is_used_where_it_rounds_too_finely_to_matter(root: Path, dtype: str, rows: int) -> None:
    pair = open_pair(root / "source", against=root / "source", dtype=dtype)
    seen: set[int] = set()
    for model in pair.models.values():
        model.register_forward_pre_hook(lambda _, args: seen.add(len(args[0])))
    compared(pair, windows(root / "source"), 3)
    assert seen == {rows}


def test_without_a_reference_or_enough_text_there_are_none(root: Path) -> None:
    options = {"text": root / "text.txt", **SMALL}
    with pytest.raises(headwise.ArgumentError, match="continuations = 1: needs a reference to compare with: against"):
        headwise.evaluate(root / "source", **options, continuations=1)
    with pytest.raises(headwise.ArgumentError, match="continuations = -1: must be at least 0"):
        evaluate(open_pair(root / "source"), **options, continuations=-1)
    pair = open_pair(root / "source", against=root / "source")
    with pytest.raises(headwise.ArgumentError, match=r"continuations = 5: must be at most 4: .*text\.txt has"):
        evaluate(pair, **options, continuations=5)
    assert "models" not in vars(pair)  # before any weight is read
    assert evaluate(pair, **options).continuations is None
