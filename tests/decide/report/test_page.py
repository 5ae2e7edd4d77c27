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
from plotly.offline import get_plotlyjs

from headwise.costs.prediction import Pass, device, devices, longest_context, operators, predict, seconds
from headwise.decide.advice import PREDICTED_ERROR, Measured, Question, candidates, ranked
from headwise.decide.report import measured_steps, page, page_data, sections
from headwise.decide.report.sections import Section
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


def asked(data: dict[str, Any], chosen: random.Random) -> dict[str, Any]:
    """A question that a reader may ask with the page's controls."""
    most = min(data["most_context"] or 2**21, 2**21)
    return {
        "hardware": chosen.choice(list(data["devices"])),
        "context": chosen.choice([1, 100, chosen.randint(1, most), min(most, 4096), most]),
        "batch": chosen.choice([1, 7, 64]),
        "dtype": chosen.choice(data["choices"]),
        "bits": None,
        "goal": chosen.choice(["latency", "throughput", "memory", "balanced"]),
        "max_quality_loss": chosen.choice([None, None, 0.05]),
        "is_usual": chosen.choice([False, True]),
        "usable": 0.9,
    }


def question_of(asked: dict[str, Any], ranks: int) -> Question:
    """The same question in Python."""
    step = Pass(batch=asked["batch"], total=asked["context"], dtype=asked["dtype"], ranks=ranks)
    hardware = devices()[asked["hardware"]]
    limits = {name: asked[name] for name in ("max_quality_loss", "is_usual")}
    return Question(hardware=hardware, step=step, goal=asked["goal"], usable=0.9, **limits)


@needs_browser
def test_the_pages_arithmetic_is_pythons() -> None:
    chosen, count, refusals = random.Random(3), 0, set[str | None]()
    with browser_page() as watched:
        watched.page.add_script_tag(path=str(Path("src/headwise/decide/report/arithmetic.js").resolve()))
        for name in MODELS:
            model = read_spec(name)
            measured = some_measured(model, chosen)
            ranks = 1 if name in ("granite-4.0-h-tiny", "smollm2-135m") else chosen.choice([1, 2])
            start = Question(hardware=device("h200"), step=Pass(batch=2, total=512, ranks=ranks))
            data = page_data(model, start, measured, source=name)
            for _ in range(3):
                question = asked(data, chosen)
                found = watched.page.evaluate(
                    """([data, question]) => headwise.ranked(data, question).map((each) => [
                        each.target, each.refused, each.isDominated, each.isPredicted, each.cacheBytesPerToken,
                        each.decodeSeconds, each.memory.total, each.largestBatch, each.tokensPerSecond])""",
                    [data, question],
                )
                same = question_of(question, ranks)
                tried = candidates(model, measured, device=same.hardware)
                expected = ranked(tried, same, measured, with_capacity=True)
                for ours, its in zip(found, expected, strict=True):
                    exact = [its.target, its.refused, its.is_dominated, its.is_predicted]
                    numbers = [its.cache_bytes_per_token, its.decode_seconds, its.memory_bytes]
                    numbers += [its.largest_batch, its.tokens_per_second]
                    assert ours[:4] == exact, (name, question)
                    assert ours[4:] == pytest.approx(numbers, rel=1e-9), (name, question)
                    count += 1
                    refusals.add(its.refused)
    assert count > 300
    assert {"loses too much", "may lose too much", "not measured", None} <= refusals


@needs_browser
def test_prompts_operators_and_contexts_are_pythons() -> None:
    with browser_page() as watched:
        watched.page.add_script_tag(path=str(Path("src/headwise/decide/report/arithmetic.js").resolve()))
        # The last ones on machines that were profiled.
        measured = {"deepseek-v2-lite": measured_device(), "mixtral-8x7b": measured_gpu(), "kimi-k2": measured_gpu()}
        for name in ("llama-3-8b", "deepseek-v3.2", "gpt-oss-120b", "qwen3-next-80b-a3b", *measured):
            model, card = read_spec(name), measured.get(name, device("mi300x"))
            for context, bits in ((1, None), (2049, None), (70_000, 4.5)):
                step = Pass(batch=3, total=context, cache_bits=bits)
                data = page_data(model, Question(hardware=card, step=step), {})
                prompt, longest, work = watched.page.evaluate(
                    """(data) => {
                        const [option, question] = [data.options[0], data.question];
                        const card = data.devices[question.hardware];
                        const { bits, batch, context } = question;
                        const pass = headwise.passOf(data, question, bits, batch, 1, context);
                        return [
                            headwise.prefillSeconds(data, option, question, card, question.context),
                            headwise.longestContext(data, option, question, 2 ** 39),
                            headwise.timed(data, card, question.dtype, headwise.operators(option.work, pass), pass),
                        ];
                    }""",
                    data,
                )
                expected = predict(name, hardware=card, context=context, batch=3, cache_bits=bits)
                assert prompt == pytest.approx(expected.prefill_seconds, rel=1e-9)
                assert longest == longest_context(model, step, 2**39)
                timed = seconds(operators(model, step), card, step)
                assert sum(each["seconds"] for each in work) == pytest.approx(sum(each.seconds for each in timed))
                bounds = {each.name: each.bound for each in timed}
                assert {each["name"] for each in work} == set(bounds)


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
    data = page_data(model, question, measured, source=HOSTILE)
    data["options"][1]["label"] += f"</script>{HOSTILE}"
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
        page.fill("#context", "40000")
        page.evaluate(
            "const s = document.getElementById('batch-slider'); s.value = 20; s.dispatchEvent(new Event('input'))"
        )
        page.select_option("#hardware", "b200")
        page.select_option("#dtype", "float32")
        page.select_option("#goal", "memory")
        page.fill("#max_quality_loss", "")
        page.wait_for_timeout(300)
        question = Question(
            hardware=device("b200"), step=Pass(batch=32, total=40_000, dtype="float32"), goal="memory"
        )
        after = rows(watched)
        wanted = expected_rows(question, {"as it is": "", "int8": "", "mqa": "", "mla:0.5": ""})
        assert {name: after[name][:4] for name in wanted} == wanted
        assert after != before
        assert page.input_value("#batch") == "32"
        # Bits of the cache are those of options that have none of their own, whose loss is then not known.
        page.evaluate("const s = document.getElementById('bits'); s.value = 8; s.dispatchEvent(new Event('input'))")
        page.wait_for_timeout(300)
        eight = rows(watched)
        step = replace(question.step, cache_bits=8)
        model = read_spec("llama-3-8b")
        read = sum(each.seconds for each in seconds(operators(model, step), device("b200"), step))
        assert eight["as it is"][1] == f"{read * 1e3:,.2f} ms"
        assert "not measured" in eight["as it is"][-2]
        assert eight["int8"] == after["int8"]
        # An impossible number changes nothing, and is marked.
        page.fill("#context", "0")
        page.wait_for_timeout(200)
        assert rows(watched) == eight
        assert page.evaluate("document.getElementById('context').matches(':invalid')")
        page.select_option("#shown", "gqa:4")
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
    with browser_page(viewport={"width": 375, "height": 700}, color_scheme=scheme) as watched:
        watched.open(llama)
        page = watched.page
        page.wait_for_timeout(200)
        assert watched.is_quiet(llama), (watched.requests, watched.messages)
        assert not watched.overflows()
        assert page.title().startswith(HOSTILE)
        assert page.locator("img").count() == 0
        assert page.locator("h1 img, td img, th img").count() == 0
        assert page.locator("#roofline-plot svg, #memory-plot svg, #latency-plot svg, #figure-0 svg").count() >= 4
        assert page.locator("#quality-plot svg").count() > 0
        text, back = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.documentElement).colorScheme]"
        )
        assert "dark" in back
        assert (text == "rgb(255, 255, 255)") == (scheme == "dark")
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


@needs_browser
def test_measured_steps_stand_beside_predicted_ones(tmp_path: Path) -> None:
    """At the context and the time measured, and in the roofline with the FLOPs and bytes of all operators."""
    model, step = read_spec("smollm2-135m"), Pass(total=4096)
    steps = measured_steps([EVALUATION], "smollm2-135m")
    data = page_data(model, Question(hardware=device("h100"), step=step), {}, source="smollm2-135m", steps=steps)
    file = tmp_path / "page.html"
    file.write_text(page(data), encoding="utf-8")
    # The steps were timed with weights in the dtype, whatever the file stores them in.
    work = operators(replace(model, stored=None), Pass(total=512, dtype="float32"))
    flops = sum(each.times * each.flops for each in work)
    with browser_page() as watched:
        watched.open(file)
        found = {
            name: watched.page.evaluate(
                """(id) => document.getElementById(id).data.filter((each) => each.marker?.symbol === "diamond")
                .map((each) => [each.x[0], each.y[0]])""",
                name,
            )
            for name in ("latency-plot", "roofline-plot")
        }
        assert watched.messages == []
    assert found["latency-plot"] == [[512, 40]]
    ((intensity, speed),) = found["roofline-plot"]
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


def test_a_page_is_small_without_the_plots_script(llama: Path) -> None:
    text = llama.read_text(encoding="utf-8")
    script = get_plotlyjs()
    assert script in text
    assert len(text.encode()) - len(script.encode()) < 1_500_000
    biggest = read_spec("deepseek-v3.2")
    data = page_data(biggest, Question(hardware=device("h200"), step=Pass(total=4096, ranks=8)), {})
    assert len(page(data).encode()) - len(script.encode()) < 1_500_000


def test_results_alone_make_a_page(tmp_path: Path) -> None:
    section = Section(title="A <b>", heading=("", "x & y"), rows=[("<i>", "1")], notes=["a < b"])
    text = page(None, [section], title="alone")
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
    pages = {
        "It does not fit as it is: store the cache as vllm:fp8.": page_data(model, question, {}),
        "Nothing can be recommended (not measured:": page_data(
            model, replace(question, step=Pass(batch=4, total=32_768)), {}
        ),
        "Change nothing: as it is it fits.": page_data(model, replace(question, step=Pass(total=4096)), {}),
        f"Change nothing more: it fits. {converted}": page_data(
            model, replace(question, step=Pass(total=4096)), {}, converted=converted
        ),
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
            assert watched.page.text_content("#quality-note").startswith(data["converted"] or "Nothing of this model")
            assert watched.messages == []


@needs_browser
def test_what_is_predicted_is_never_called_measured(tmp_path: Path) -> None:
    model, file = read_spec("llama-3-8b"), tmp_path / "page.html"

    def predicted(target: str, loss: float) -> Measured:
        return Measured(target=target, cache_fraction=0.3, loss=loss, kl=None, file="", is_predicted=True)

    known = {each.target: each for each in (predicted("llama.cpp:q4_0", 0.02), predicted("kivi2", 0.04))}
    question = Question(hardware=device("h100"), step=Pass(total=4096), goal="memory", max_quality_loss=0.05)
    file.write_text(page(page_data(model, question, known)), encoding="utf-8")
    with browser_page() as watched:
        watched.open(file)
        verdict = watched.page.text_content("#verdict")
        assert verdict.startswith("Do this: keep the model, and store its cache as llama.cpp:q4_0.")
        assert verdict.endswith(f"; perplexity ~×1.020, predicted, not measured: {PREDICTED_ERROR}.")
        shown = rows(watched)
        assert shown["llama.cpp:q4_0"][-2] == "~×1.020"
        assert shown["kivi2"][-2] == "~×1.040, too much?"
        assert PREDICTED_ERROR in watched.page.text_content("#limits")
        (trace,) = watched.page.evaluate("document.getElementById('quality-plot').data")
        assert trace["marker"]["symbol"].count("circle-open") == 2
        assert sorted(text for _, text in trace["customdata"]) == ["~×1.020", "~×1.040", "×1.000"]
        title = watched.page.text_content("#quality-plot .ytitle")
        assert title == "perplexity ratio − 1; hollow: predicted"
        watched.page.fill("#max_quality_loss", "9")
        watched.page.wait_for_timeout(200)
        assert rows(watched)["kivi2"][-2] == "~×1.040"
        assert watched.messages == []


@needs_browser
def test_no_column_is_cut_off_and_no_name_is_printed_over_another(llama: Path) -> None:
    with browser_page(viewport={"width": 1280, "height": 900}) as watched:
        watched.open(llama)
        watched.page.wait_for_timeout(300)
        widths = watched.page.eval_on_selector_all(".wide", "all => all.map(e => [e.scrollWidth, e.clientWidth])")
        assert all(needed <= shown for needed, shown in widths)
        for option in ("as it is", "mla:0.5"):
            watched.page.select_option("#shown", option)
            watched.page.wait_for_timeout(200)
            boxes = watched.page.eval_on_selector_all(
                "#roofline-plot .textpoint text",
                """all => all.filter((each) => each.textContent).map((each) => {
                    const { left, right, top, bottom } = each.getBoundingClientRect();
                    return [left, right, top, bottom];
                })""",
            )
            assert len(boxes) >= 2
            for index, (left, right, top, bottom) in enumerate(boxes):
                for other_left, other_right, other_top, other_bottom in boxes[:index]:
                    is_beside = left >= other_right or other_left >= right
                    assert is_beside or top >= other_bottom or other_top >= bottom, (option, boxes)
