"""The evaluation that ends a conversion: its texts, its part of the card, and the failures that it survives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import metadata_load

import headwise
from headwise.conversion import STAGES
from headwise.measure.evaluation import beside_source, evaluate_windows, model_pair, open_pair
from headwise.measure.evaluation.beside_source import REFERENCE, choose_evaluation_set
from headwise.measure.texts import calibration_windows, language_reference, text_identity
from headwise.measure.texts.calibration import CalibrationTexts
from headwise.models.checkpoints import load_tokenizer, open_checkpoint
from tests.real_models import save_tiny
from tests.tiny_families import save_family

TEXT = "".join(f"{index:04d} the quick brown fox jumps over the lazy dog. " for index in range(60))
HALF: dict[str, Any] = {"to": "mla", "kv_budget": 0.5}
STUDY: dict[str, Any] = {**HALF, "calibration_tokens": 512, "without": ("refine",)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "source")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def card(folder: Path) -> str:
    return (folder / "README.md").read_text()


def test_it_ends_on_what_the_calibration_left_of_its_text(source: Path, text: Path, tmp_path: Path) -> None:
    done = headwise.convert(source, tmp_path / "out", calibrate=text, **STUDY)
    evaluation = done.evaluation
    assert evaluation is not None
    assert (evaluation.text, evaluation.windows, evaluation.window) == (f"{text} after 1,976 tokens", 2, 256)
    rest = tmp_path / "rest.txt"
    rest.write_text(TEXT[1976:])  # each character is a token
    again = headwise.evaluate(tmp_path / "out", against=source, text=rest, windows=2)
    for name in ("perplexity", "kl", "top1_agreement", "cache_bytes_per_token", "tokens"):
        assert getattr(evaluation, name) == getattr(again, name), name
    assert evaluation.reference is not None
    assert again.reference is not None
    assert evaluation.reference.perplexity == again.reference.perplexity
    assert (evaluation.model, evaluation.against) == (str(tmp_path / "out"), str(source))
    assert evaluation.cache_bytes_per_token == done.kv_bytes_per_token_after
    assert done.to_dict()["evaluation"] == evaluation.to_dict()


def test_of_several_texts_what_is_left_of_each(source: Path, text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("x" * 300)
    exam = choose_evaluation_set(
        open_checkpoint(source), calibrate=CalibrationTexts((text, short, text), 900), windows=3
    )
    # Windows of 225 tokens, two of the first text and one of each of the others; one of them has too few left.
    assert [name for name, _ in exam] == [f"{text} after 2,100 tokens"] * 2
    study = calibration_windows(load_tokenizer(source), [text, short, text], tokens=900, window=256)
    assert study.shape == (4, 225)
    tokens = load_tokenizer(source)(TEXT)["input_ids"]
    assert [batch.flatten().tolist() for _, batch in exam] == [tokens[2100:][:768]] * 2
    assert tokens[:225] == study[0].tolist()
    assert tokens[1050:1275] == study[3].tolist()


def test_a_text_that_is_used_up_is_not_evaluated_on(source: Path, text: Path, tmp_path: Path) -> None:
    for options in ({**STUDY, "calibrate": text, "calibration_tokens": 10**6}, HALF):
        done = headwise.convert(source, tmp_path / "out", **options, overwrite=True, evaluation_windows=1)
        assert done.evaluation is not None
        assert (done.evaluation.text, done.evaluation.windows) == (REFERENCE, 1)
        assert f"| `{REFERENCE}` | 255 |" in card(tmp_path / "out").replace("’", "'")


def test_a_text_can_be_named(source: Path, text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("hello there")
    done = headwise.convert(source, tmp_path / "out", **HALF, evaluate=short)
    assert done.evaluation is not None
    assert (done.evaluation.text, done.evaluation.window, done.evaluation.windows) == (str(short), 11, 1)
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1][:600])
    done = headwise.convert(source, tmp_path / "more", **HALF, evaluate=[other, text], evaluation_windows=3)
    assert done.evaluation is not None
    assert [(score.text, score.windows) for score in done.evaluation.texts] == [(str(other), 2), (str(text), 3)]
    with pytest.raises(headwise.ArgumentError, match=r"short.txt = '11 tokens': must be at least one window of 256"):
        headwise.convert(source, tmp_path / "none", **HALF, evaluate=[short, text])


def test_a_text_that_is_calibrated_on_is_refused(source: Path, text: Path, tmp_path: Path) -> None:
    """Whatever the text's name, and if statistics are of it, too."""
    copy, study = tmp_path / "copy.txt", tmp_path / "study"
    copy.write_text(TEXT)
    headwise.calibrate(source, study, calibrate=text, calibration_tokens=512)
    for known in ({"calibrate": text}, {"statistics": study}):
        for dry_run in (True, False):
            with pytest.raises(headwise.ArgumentError, match=r"evaluate = '.*copy.txt': is calibrated or trained on"):
                headwise.convert(source, tmp_path / "out", **HALF, **known, evaluate=copy, dry_run=dry_run)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("topics", [slice(None), slice(0, None, 2), slice(1, None, 2)], ids=str)
def test_the_reference_is_no_exam_of_what_was_calibrated_on_it(source: Path, tmp_path: Path, topics: slice) -> None:
    study = tmp_path / "study.txt"
    study.write_text(language_reference(topics), encoding="utf-8")
    with pytest.raises(headwise.ArgumentError, match="evaluate = None: must be named: all texts are calibrated on"):
        choose_evaluation_set(open_checkpoint(source), calibrated_on=[text_identity(study)])
    study.write_text(language_reference(topics)[:-1], encoding="utf-8")
    ((name, _),) = choose_evaluation_set(open_checkpoint(source), calibrated_on=[text_identity(study)])
    assert name == REFERENCE


def test_a_conversion_that_nothing_is_left_to_measure_says_so(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_source, "language_reference", lambda *_: TEXT)
    done = headwise.convert(source, tmp_path / "out", **{**STUDY, "calibration_tokens": 10**6}, calibrate=text)
    assert done.evaluation is None
    assert done.notes[-1].startswith("not evaluated: evaluate = None: must be named")


def test_windows_of_the_exam_are_as_wide_as_they_are_asked_for(source: Path, text: Path) -> None:
    """The calibration windows do not change, so that the rest of the text begins at one place."""
    checkpoint = open_checkpoint(source)
    tokens = load_tokenizer(source)(TEXT)["input_ids"]
    for window in (40, 256):
        ((name, left),) = choose_evaluation_set(checkpoint, calibrate=CalibrationTexts((text,), 512), window=window)
        assert name == f"{text} after 1,976 tokens"
        assert left.tolist() == [tokens[1976 + at * window :][:window] for at in range(2)]
        ((_, named),) = choose_evaluation_set(checkpoint, [text], window=window, windows=3)
        assert named.tolist() == [tokens[at * window :][:window] for at in range(3)]
        ((_, reference),) = choose_evaluation_set(checkpoint, window=window)
        assert reference.shape == (2, window)


def test_it_can_be_skipped(source: Path, tmp_path: Path) -> None:
    done = headwise.convert(source, tmp_path / "out", **HALF, evaluate=False)
    assert done.evaluation is None
    assert not any("evaluat" in note for note in done.notes)
    assert "\n## Measured\n\nNot measured.\n" in card(tmp_path / "out")
    dry = headwise.convert(source, tmp_path / "dry", **HALF, dry_run=True)
    assert dry.evaluation is None


@pytest.mark.parametrize(
    ("evaluate", "windows", "rule"),
    [
        ("nowhere.txt", 2, "evaluate = 'nowhere.txt': could not be read"),
        ("empty.txt", 2, "evaluate .*empty.txt = '0 tokens': must be at least one window of 2 tokens"),
        ([], 2, r"evaluate = \[\]: must be at least one file"),
        (True, 0, "evaluation_windows = 0: must be at least 1"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_cannot_be_is_refused_before_any_work(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluate: str | bool | list[str],
    windows: int,
    rule: str,
    dry_run: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    monkeypatch.setattr("headwise.conversion.methods.headwise.convert_to_latent", None)
    with pytest.raises(headwise.ArgumentError, match=rule):
        headwise.convert(source, "out", **HALF, evaluate=evaluate, evaluation_windows=windows, dry_run=dry_run)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("bert", "model_type = 'bert': is an encoder, which predicts no next token; headwise evaluate --retrieval"),
        ("whisper", "model_type = 'whisper': attends to an encoder"),
    ],
)
def test_models_that_text_cannot_evaluate_are_noted(name: str, rule: str, text: Path, tmp_path: Path) -> None:
    source = save_family(tmp_path / "source", name)
    done = headwise.convert(source, tmp_path / "out", to="gqa:2")
    assert done.evaluation is None
    assert any(note.startswith(f"not evaluated: {rule}") for note in done.notes)
    with pytest.raises(headwise.SpecError, match=rule):
        headwise.convert(source, tmp_path / "other", to="gqa:2", evaluate=text)
    assert not (tmp_path / "other").exists()


def test_without_a_tokenizer_the_folder_is_there_and_says_why(source: Path, tmp_path: Path) -> None:
    for file in source.glob("tokenizer*"):
        file.unlink()
    done = headwise.convert(source, tmp_path / "out", **HALF)
    assert done.evaluation is None
    assert "not evaluated: tokenizer = " in done.notes[-1]
    assert str(tmp_path) not in card(tmp_path / "out")


@pytest.mark.parametrize("error", [RuntimeError("no such\nluck"), MemoryError(), headwise.ArgumentError("a", 1, "b")])
def test_an_evaluation_that_fails_loses_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(beside_source, "evaluate_windows", fail)
    done = headwise.convert(source, tmp_path / "out", **HALF)
    assert done.evaluation is None
    assert done.notes[-1].startswith("not evaluated: ")
    assert "\n" not in done.notes[-1]
    assert headwise.inspect(tmp_path / "out").mechanism == "mla"
    assert "Not measured." in card(tmp_path / "out")


def test_models_that_do_not_fit_in_memory_are_not_loaded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_source, "available_bytes", lambda: 500_000)
    monkeypatch.setattr(beside_source, "evaluate_windows", None)
    done = headwise.convert(source, tmp_path / "out", **HALF)
    assert done.notes[-1] == "not evaluated: both models take 0.0 GB of memory and 0.0 GB are free"


@pytest.mark.parametrize("evaluate", [True, False])
def test_ctrl_c_during_it_keeps_the_conversion(
    evaluate: bool, source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(stage: str, done: int, _: int) -> None:
        if (stage, done) == ("perplexity", 1):
            raise KeyboardInterrupt

    whole = headwise.convert(source, tmp_path / "whole", calibrate=text, **STUDY)
    with pytest.raises(KeyboardInterrupt) as stopped:
        headwise.convert(source, tmp_path / "out", calibrate=text, **STUDY, progress=impatient)
    assert stopped.value.__notes__ == [
        "interrupted during the evaluation, which --no-evaluate leaves out",
        f"what is done is kept in {tmp_path}/.out.headwise-partial, and the same command continues from there",
    ]
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("headwise.conversion.methods.headwise.convert_to_latent", None)  # nothing is solved again
    done = headwise.convert(source, tmp_path / "out", calibrate=text, **STUDY, evaluate=evaluate)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "text.txt", "whole"]
    assert ("Not measured." in card(tmp_path / "out")) is not evaluate
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    if evaluate:
        assert done.evaluation is not None
        assert whole.evaluation is not None
        assert done.evaluation.perplexity == whole.evaluation.perplexity
        assert done.evaluation.model == str(tmp_path / "out")


def test_the_card_tells_the_conversion(source: Path, text: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text("---\nlicense: apache-2.0\ntags: [theirs]\n---\n# Theirs\n")
    done = headwise.convert(source, tmp_path / "out", calibrate=text, **STUDY)
    assert done.evaluation is not None
    readme = card(tmp_path / "out")
    assert metadata_load(tmp_path / "out/README.md") == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "tags": ["headwise", "mla", "kv-cache"],
    }
    assert "Theirs" not in readme
    assert str(tmp_path) not in readme
    score = done.evaluation
    assert score.reference is not None
    assert f"| `text.txt after 1,976 tokens` | {score.tokens} | {score.reference.perplexity:.3f}" in readme
    measured = f"{score.kl:.4f} | {score.kl_999:.4f} | {score.top1_agreement:.1%} | {score.top1_changed} |"
    assert f"| {score.perplexity_ratio:.3f} | {measured}" in readme
    assert (
        "- steps: recall, starts, sensitivity, channels, sequence, refit\n"
        "- calibrated on 512 tokens of `text.txt`, in windows of 256\n" in readme
    )
    assert f"- took {done.seconds:,.0f} s\n- versions: headwise {headwise.__version__}, torch " in readme
    assert f"- parameters: {done.parameters_before:,} → {done.parameters_after:,}\n" in readme
    assert "import headwise.hf" in readme


@pytest.mark.parametrize(
    ("name", "auto"),
    [("gpt2", "AutoModelForCausalLM"), ("bert", "AutoModel"), ("whisper", "AutoModelForSpeechSeq2Seq")],
)
def test_the_card_loads_the_model_by_its_own_class(name: str, auto: str, tmp_path: Path) -> None:
    source = save_family(tmp_path / "source", name)
    for to in ("mha", "gqa:2"):
        headwise.convert(source, tmp_path / to, to=to, evaluate=False)
        text = card(tmp_path / to)
        assert f"model = {auto}.from_pretrained(folder)" in text
        assert ("import headwise.hf" in text) == (to == "gqa:2")


def test_unmeasured_folders_are_the_same_to_the_last_file(source: Path, text: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        headwise.convert(source, tmp_path / name, calibrate=text, **STUDY, evaluate=False)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "README.md" in files
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


SHARED = "tokens evaluated on lie in passages of 20 or more tokens that the calibration text has too"


def test_an_exam_that_repeats_the_calibration_is_noted(source: Path, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Pack my box with five dozen jugs: " + "".join(f"{n * n}, " for n in range(400)))
    done = {}
    for name, exam in (("repeated", tmp_path / "copy.txt"), ("other", other)):
        (tmp_path / "copy.txt").write_text(f"{TEXT}\n")
        study = {**STUDY, "without": STAGES}  # the target does not matter here
        done[name] = headwise.convert(source, tmp_path / name, calibrate=text, **study, evaluate=exam)
    (note,) = [note for note in done["repeated"].notes if SHARED in note]
    assert f"- {note}\n" in card(tmp_path / "repeated")
    assert not any(SHARED in note for note in done["other"].notes)
    lossless = headwise.convert(source, tmp_path / "whole", to="mla", kv_budget=1.0, calibrate=text, evaluate=other)
    assert not any(SHARED in note for note in lossless.notes)  # calibration was not needed


def test_how_much_an_exam_repeats_is_counted_on_the_windows_that_are_calibrated_on(source: Path, text: Path) -> None:
    checkpoint, texts = open_checkpoint(source), CalibrationTexts((text,), 512)
    tokens = torch.tensor(load_tokenizer(source)(TEXT)["input_ids"])
    (line,) = beside_source.overlap_notes(checkpoint, [("a", tokens[:256][None])], texts)
    assert line.startswith(f"100.0% of the 256 {SHARED}")
    assert beside_source.overlap_notes(checkpoint, [], texts) == []
    assert beside_source.overlap_notes(checkpoint, [("a", tokens[:256][None])], CalibrationTexts()) == []


def test_a_model_beside_itself_is_loaded_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And still is two models, of which one alone has the quantised cache."""
    loads: list[Path] = []
    own = model_pair.load
    monkeypatch.setattr(model_pair, "load", lambda path, **how: loads.append(path) or own(path, **how))
    pair = open_pair(source, against=source)
    both = pair.models
    assert len(loads) == 1
    first, second = (dict(both[name].named_parameters()) for name in ("model", "against"))
    assert all(first[name] is second[name] for name in first)
    assert both["model"] is not both["against"]
    assert pair.nbytes == sum(info.numel for info in pair.checkpoints["model"].tensors.values()) * pair.dtype.itemsize
    text = [("text", torch.arange(48)[None])]
    coarse = evaluate_windows(pair, text, cache="int2")
    assert coarse.kl is not None
    assert coarse.kl > 0
    assert evaluate_windows(pair, text).kl == pytest.approx(0, abs=1e-6)


def test_a_dry_run_counts_the_evaluation(source: Path, text: Path, tmp_path: Path) -> None:
    for how in ({"calibrate": text, **STUDY}, HALF):
        dry = headwise.convert(source, tmp_path / "out", **how, dry_run=True)
        assert dry.seconds_evaluating > 0
        assert headwise.convert(source, tmp_path / "out", **how, dry_run=True, evaluate=False).seconds_evaluating == 0
    done = headwise.convert(source, tmp_path / "out", **HALF)
    assert done.seconds_evaluating > 0
