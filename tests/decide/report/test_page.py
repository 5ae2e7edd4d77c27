"""The page of a model in a real browser: its numbers are Python's, and it asks the network for nothing."""

from __future__ import annotations

import csv
import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwise.base.tables import Table, seconds_text
from headwise.costs.prediction import Pass, device, devices, operators, predict
from headwise.decide.advice import PREDICTED_ERROR, Measured, Question, candidates, ranked
from headwise.decide.report import ModelPart, Section, measured_steps, page, page_data, sections
from headwise.models.specs import ModelSpec, read_spec
from tests.costs.prediction.test_curves import measured_device, measured_gpu
from tests.decide.report.browser import Watched, browser_page, needs_browser

MODELS = (
    "llama-3-8b",
    "deepseek-v3",
    "deepseek-v3.2",
    "gpt-oss-120b",
    "gemma-2b",
    "mixtral-8x7b",
    "llama-4-scout",
    "deepseek-v4-flash",
    "granite-4.0-h-tiny",
    "gpt2",
    "smollm2-135m",
)
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"


def some_measured(model: ModelSpec, chosen: random.Random) -> dict[str, Measured]:
    return {
        each.target: Measured(
            target=each.target,
            cache_fraction=0.5,
            loss=chosen.choice([0.001, 0.024, 0.03, 0.2, float("inf")]),
            kl=0.1,
            file="",
            is_predicted=chosen.random() < 0.5,
        )
        for each in candidates(model)[1:]
        if chosen.random() < 0.6
    }


Place = dict[str, int]
"""The index of what is chosen on each axis of the grid."""


def answer(document: dict[str, Any], place: Place) -> list[tuple[Any, ...]]:
    """What the page's script shows at a place, by the same lookups."""
    answers, options = document["answers"], document["options"]
    h, c, b = (place[axis] for axis in ("hardware", "context", "batch"))
    found = answers["places"][h][c][b]
    judged = found["loss"][place["loss"]]
    rows = []
    for position in found["order"][place["goal"]]:
        index = found["running"][position]
        exact = (
            options[index]["target"],
            document["reasons"][int(judged["refused"][position])] or None,
            judged["dominated"][position] == "1",
            options[index]["is_predicted"],
        )
        numbers = (answers["cache"][c][b][index], found["seconds"][position], answers["memory"][c][b][index])
        rows.append((*exact, *numbers, answers["fit"][h][c][index], answers["rate"][h][c][index]))
    return sorted(rows, key=lambda row: row[1] is not None)


def question_of(document: dict[str, Any], place: Place, start: Question) -> Question:
    """The question that a place stands for."""
    chosen = {axis: document["axes"][axis][index] for axis, index in place.items()}
    loss, is_usual = chosen["loss"]
    step = replace(start.step, total=chosen["context"], batch=chosen["batch"])
    limits = {"max_quality_loss": loss, "is_usual": is_usual, "goal": chosen["goal"]}
    return replace(start, hardware=devices()[chosen["hardware"]], step=step, **limits)


def test_every_answer_is_the_one_of_advise() -> None:
    chosen, count, refusals = random.Random(3), 0, set[str | None]()
    for name in MODELS:
        model = read_spec(name)
        measured = some_measured(model, chosen)
        ranks = 1 if name in ("granite-4.0-h-tiny", "smollm2-135m") else chosen.choice([1, 2])
        dtype = chosen.choice(["bfloat16", "float32", "int8"])
        start = Question(
            hardware=device("h200"),
            step=Pass(batch=2, total=512, dtype=dtype, ranks=ranks),
            max_quality_loss=chosen.choice([None, 0.05]),
            is_usual=chosen.choice([False, True]),
        )
        other = chosen.choice(["b200", "l4", "mi300x", "rtx-4090"])
        document = page_data(model, start, measured, source=name, hardware={other: device(other)}).document
        for _ in range(4):
            place = {axis: chosen.randrange(len(values)) for axis, values in document["axes"].items()}
            same = question_of(document, place, start)
            tried = candidates(model, measured, device=same.hardware)
            expected = ranked(tried, same, measured, with_capacity=True)
            for ours, its in zip(answer(document, place), expected, strict=True):
                exact = (its.target, its.refused, its.is_dominated, its.is_predicted)
                numbers = [its.cache_bytes_per_token, its.decode_seconds, its.memory_bytes]
                numbers += [its.largest_batch, its.tokens_per_second]
                assert ours[:4] == exact, (name, place)
                assert ours[4:] == pytest.approx(numbers, rel=1e-6), (name, place)
                count += 1
                refusals.add(its.refused)
    assert count > 300
    assert {"loses too much", "may lose too much", "not measured", None} <= refusals


def test_operators_and_prompts_are_those_of_predict() -> None:
    # The last ones on machines that were profiled.
    measured = {"deepseek-v2-lite": measured_device(), "mixtral-8x7b": measured_gpu()}
    for name in ("llama-3-8b", "gpt-oss-120b", *measured):
        model, card = read_spec(name), measured.get(name, device("mi300x"))
        step = Pass(batch=3, total=2049)
        document = page_data(model, Question(hardware=card, step=step), {}, hardware={}).document
        expected = predict(name, hardware=card, context=2049, batch=3)
        shown = document["operators"][0]
        timed = {each.name: each for each in expected.decode}
        assert {row[0] for row in shown["decode"]} == timed.keys()
        for row in shown["decode"]:
            assert row[4] == timed[row[0]].bound
            assert row[2] == seconds_text(timed[row[0]].seconds)
        prompt = f"a prompt of 2,049 tokens {seconds_text(expected.prefill_seconds)}."
        assert shown["sums"].endswith(f"a step {seconds_text(expected.decode_seconds)}, {prompt}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with measurements, a benchmark's plot below it, and names that are markup."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    model = read_spec("llama-3-8b")
    measured = {
        "int8": Measured(target="int8", cache_fraction=0.53, loss=0.0002, kl=1e-4, file="", is_format=True),
        "mla:0.5": Measured(target="mla:0.5", cache_fraction=0.5, loss=0.1, kl=0.1, file=""),
        "mqa": Measured(target="mqa", cache_fraction=0.1, loss=float("inf"), kl=None, file=""),
    }
    question = Question(hardware=device("h100"), step=Pass(batch=16, total=8192), max_quality_loss=0.05)
    data = page_data(model, question, measured, source=HOSTILE, hardware={"b200": device("b200")})
    data.document["options"][1]["label"] += f"</script>{HOSTILE}"
    case = {
        "name": HOSTILE,
        "limit_ms": 1.0,
        "flops": 2e9,
        "nbytes": 1e9,
        "read_bytes_per_second": 2e10,
        "matmul_flops_per_second": 1e12,
        "ways": {HOSTILE: {"ms": 60.0}},
    }
    results = sections({"kind": HOSTILE, "cases": [case]})
    file.write_text(page(data, results, notes=[HOSTILE], version=HOSTILE), encoding="utf-8")
    return file


def rows(watched: Watched) -> dict[str, list[str]]:
    """The table of options as a reader sees it."""
    found = watched.page.eval_on_selector_all(
        "#options tbody tr",
        "rows => rows.map(row => [row.dataset.target, [...row.cells].slice(1).map(cell => cell.textContent)])",
    )
    return dict(found)


def expected_rows(question: Question, measured_loss: dict[str, str]) -> dict[str, list[str]]:
    """The numbers that the table must show, for the options whose loss is given."""
    tried = candidates(read_spec("llama-3-8b"), device=question.hardware)
    found = ranked(tried, question, {}, with_capacity=True)
    return {
        option.target: [
            f"{option.cache_bytes_per_token / 1024:,.1f}",
            f"{option.decode_seconds * 1e3:,.2f} ms",
            f"{option.tokens_per_second:,.0f}",
            f"{option.largest_batch:,}",
        ]
        for option in found
        if option.target in measured_loss
    }


@needs_browser
def test_controls_change_the_numbers_to_pythons(llama: Path) -> None:
    with browser_page() as watched:
        watched.open(llama)
        page = watched.page
        assert page.text_content("#verdict").startswith("Do this: keep the model, and store its cache as int8.")
        before = rows(watched)
        assert before["mqa"][-2] == "diverged, too much"
        assert before["mla:0.5"][-2] == "×1.100, too much"
        assert before["gqa:4"][-2] == "not measured"
        for name, index in (("context", 3), ("batch", 1)):
            page.evaluate(
                """([name, index]) => {
                    const slider = document.getElementById(name);
                    slider.value = index;
                    slider.dispatchEvent(new Event("input"));
                }""",
                [name, index],
            )
        page.select_option("#hardware", label=device("b200").label)
        page.select_option("#goal", label="memory")
        page.select_option("#loss", label="any")
        assert page.text_content("#context-text") == "16,384"
        assert page.text_content("#batch-text") == "8"
        question = Question(hardware=device("b200"), step=Pass(batch=8, total=16_384), goal="memory")
        after = rows(watched)
        wanted = expected_rows(question, {"as it is": "", "int8": "", "mqa": "", "mla:0.5": ""})
        assert {name: after[name][:4] for name in wanted} == wanted
        assert after != before
        assert next(iter(after)) == "mqa"  # the smallest cache: it diverged, and any loss is allowed
        page.select_option("#shown", label="gqa:4")
        page.select_option("#pass", "prompt")
        assert page.text_content("#sums").startswith("gqa:4 (GQA 32/4 × 128)")
        formulas = page.eval_on_selector_all(
            "#operators tbody tr", "rows => rows.map(row => row.lastChild.textContent)"
        )
        assert "2·B·S·E·H·D" in formulas
        assert watched.is_quiet(llama)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_quiet_narrow_and_takes_no_markup_from_names(llama: Path, scheme: str) -> None:
    with browser_page(viewport={"width": 360, "height": 700}, color_scheme=scheme) as watched:
        watched.open(llama)
        page = watched.page
        assert watched.is_quiet(llama), (watched.requests, watched.messages)
        assert not watched.overflows()
        assert page.title().startswith(HOSTILE)
        assert page.locator("img").count() == 0
        for name in ("memory", "quality", "latency", "roofline", "figure-0"):
            assert page.locator(f"#{name} svg").count() == 1
        text, back, ink = page.evaluate(
            """[getComputedStyle(document.body).color, getComputedStyle(document.documentElement).colorScheme,
                getComputedStyle(document.querySelector("#memory svg text")).fill]"""
        )
        assert "dark" in back
        assert (text == "rgb(255, 255, 255)") == (scheme == "dark")
        assert ink == text
        page.emulate_media(media="print")
        assert not page.is_visible(".controls")
        assert page.is_visible("#options")


EVALUATION = {
    "model": "./kept/smollm2-135m",
    "against": None,
    "texts": [],
    "cache": None,
    "context": 512,
    "decode_ms": 40.0,
    "dtype": "float32",
    "device": "cpu",
    "threads": 2,
}


def test_steps_are_of_the_model_itself_or_its_reference() -> None:
    by_itself = measured_steps([EVALUATION], "smollm2-135m")
    where = "cpu, 2 threads, float32"
    assert by_itself == [{"target": "as it is", "context": 512, "seconds": 0.04, "dtype": "float32", "where": where}]
    coded = {**EVALUATION, "cache": "int4", "against": "smollm2-135m", "reference_decode_ms": 30.0}
    assert [(step["target"], step["seconds"]) for step in measured_steps([coded], "smollm2-135m")] == [
        ("int4", 0.04),
        ("as it is", 0.03),
    ]
    converted = {**coded, "model": "./out", "cache": None}
    assert [step["seconds"] for step in measured_steps([converted], "smollm2-135m")] == [0.03]
    assert measured_steps([{"points": []}, {**EVALUATION, "decode_ms": None}], "smollm2-135m") == []
    assert measured_steps([EVALUATION], "another") == []
    assert measured_steps([{**EVALUATION, "engine": "vllm 0.32.0"}], "smollm2-135m") == []


def test_measured_steps_stand_beside_predicted_ones() -> None:
    """At the context and the time measured, and in the roofline with the FLOPs and bytes of all operators."""
    model = read_spec("smollm2-135m")
    steps = measured_steps([EVALUATION], "smollm2-135m")
    question = Question(hardware=device("h100"), step=Pass(total=4096))
    data = page_data(model, question, {}, source="smollm2-135m", steps=steps, hardware={})
    # The steps were timed with weights in the dtype, whatever the file stores them in.
    work = operators(replace(model, stored=None), Pass(total=512, dtype="float32"))
    flops = sum(each.times * each.flops for each in work)
    found = {}
    for name, _, draw in data.plots:
        diamonds = (line for line in draw().axes[0].lines if line.get_marker() == "D")
        found[name] = [(line.get_xdata()[0], line.get_ydata()[0]) for line in diamonds]
    assert found["latency"] == [(512, 40)]
    ((intensity, speed),) = found["roofline"]
    assert speed == pytest.approx(flops / 0.04)
    assert intensity == pytest.approx(flops / sum(each.times * each.memory_bytes for each in work))


@needs_browser
def test_downloads_parse(llama: Path) -> None:
    with browser_page(accept_downloads=True) as watched:
        watched.open(llama)
        with watched.page.expect_download() as waiting:
            watched.page.click("#json")
        document = json.loads(Path(waiting.value.path()).read_text())
        with watched.page.expect_download() as waiting:
            watched.page.click("#csv")
        assert waiting.value.suggested_filename == "headwise-options.csv"
        records = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text())))
        assert document["source"] == HOSTILE
        assert [each["target"] for each in records] == [each["target"] for each in document["options"]]
        shown = rows(watched)
        for record, option in zip(records, document["options"], strict=True):
            assert float(record["decode_seconds"]) == option["decode_seconds"]
            assert shown[option["target"]][1] == f"{option['decode_seconds'] * 1e3:,.2f} ms"
            assert (float(record["loss"]) if record["loss"] else None) == option["loss"]
        assert watched.messages == []


def test_a_page_is_small_and_has_all_devices() -> None:
    model = read_spec("llama-3-8b")  # of which most is tried
    known = some_measured(model, random.Random(0))
    data = page_data(model, Question(hardware=device("h200"), step=Pass(total=4096), max_quality_loss=0.03), known)
    assert data.document["axes"]["hardware"] == ["h200", *(name for name in devices() if name != "h200")]
    assert len(page(data).encode()) < 2_000_000


def test_results_alone_make_a_page(tmp_path: Path) -> None:
    table = Table(("", "x & y"), [("<i>", "1")], title="A <b>", notes=["a < b"])
    text = page(None, [Section(table)], title="alone")
    assert "<h2>A &lt;b&gt;</h2>" in text
    assert "x &amp; y" in text
    assert "a &lt; b" in text
    assert 'id="options"' not in text


@needs_browser
def test_the_headline_says_what_the_terminal_says(tmp_path: Path) -> None:
    """Of a model that does not fit, of one that does, and of a conversion that measured itself."""
    model, card = read_spec("llama-3-8b"), device("rtx-4090")
    question = Question(hardware=card, step=Pass(batch=3, total=32_768))
    converted = "This model is a conversion, mla:0.5"

    def asked(*, converted: str = "", **step: int) -> ModelPart:
        same = replace(question, step=replace(question.step, **step))
        return page_data(model, same, {}, converted=converted, hardware={})

    pages = {
        "It does not fit as it is: store the cache as vllm:fp8.": asked(),
        "Nothing can be recommended (not measured:": asked(batch=4),
        "Change nothing: as it is it fits.": asked(total=4096),
        f"Change nothing more: it fits. {converted}": asked(total=4096, converted=converted),
    }
    file = tmp_path / "page.html"
    with browser_page(viewport={"width": 1280, "height": 900}) as watched:
        for said, data in pages.items():
            file.write_text(page(data), encoding="utf-8")
            watched.open(file)
            assert watched.page.text_content("#verdict").startswith(said)
            typed = watched.page.text_content("#commands").splitlines()
            assert ("vllm serve PREPARED --kv-cache-dtype fp8" in typed) == said.startswith("It does not fit")
            assert ("llama-server -m prepared.gguf -fa on -ctk q8_0 -ctv q8_0" in typed) == bool(typed)
            note = converted if said.endswith(converted) else "Nothing of this model"
            assert watched.page.text_content("#quality-note").startswith(note)
            assert watched.messages == []


@needs_browser
def test_what_is_predicted_is_never_called_measured(tmp_path: Path) -> None:
    model, file = read_spec("llama-3-8b"), tmp_path / "page.html"

    def predicted(target: str, loss: float) -> Measured:
        return Measured(target=target, cache_fraction=0.3, loss=loss, kl=None, file="", is_predicted=True)

    known = {each.target: each for each in (predicted("llama.cpp:q4_0", 0.02), predicted("kivi2", 0.04))}
    question = Question(hardware=device("h100"), step=Pass(total=4096), goal="memory", max_quality_loss=0.05)
    data = page_data(model, question, known, hardware={})
    file.write_text(page(data), encoding="utf-8")
    ((_, caption, draw),) = (plot for plot in data.plots if plot[0] == "quality")
    assert caption == "Quality against cache; hollow: predicted"
    axes = draw().axes[0]
    assert axes.get_ylabel() == "known rise of perplexity, %"
    fills = [line.get_fillstyle() for line in axes.lines if line.get_marker() == "o"]
    assert sorted(fills) == ["full", "none", "none"]
    with browser_page() as watched:
        watched.open(file)
        verdict = watched.page.text_content("#verdict")
        assert verdict.startswith("Do this: keep the model, and store its cache as llama.cpp:q4_0.")
        assert verdict.endswith(f"; perplexity ~×1.020, predicted, not measured: {PREDICTED_ERROR}.")
        shown = rows(watched)
        assert shown["llama.cpp:q4_0"][-2] == "~×1.020"
        assert shown["kivi2"][-2] == "~×1.040, too much?"
        assert PREDICTED_ERROR in watched.page.text_content("#limits")
        watched.page.select_option("#loss", label="10 %")
        assert rows(watched)["kivi2"][-2] == "~×1.040"
        assert watched.messages == []


@needs_browser
def test_no_column_is_cut_off_and_no_name_is_printed_over_another(llama: Path) -> None:
    with browser_page(viewport={"width": 1280, "height": 900}) as watched:
        watched.open(llama)
        widths = watched.page.eval_on_selector_all(".wide", "all => all.map(e => [e.scrollWidth, e.clientWidth])")
        assert all(needed <= shown for needed, shown in widths)
        boxes = watched.page.eval_on_selector_all(
            "#roofline svg text",
            """all => all.filter((each) => /_proj|^head|attention|norm/.test(each.textContent)).map((each) => {
                const { left, right, top, bottom } = each.getBoundingClientRect();
                return [left, right, top, bottom];
            })""",
        )
        assert len(boxes) >= 2
        for index, (left, right, top, bottom) in enumerate(boxes):
            for other_left, other_right, other_top, other_bottom in boxes[:index]:
                is_beside = left >= other_right or other_left >= right
                assert is_beside or top >= other_bottom or other_top >= bottom, boxes
