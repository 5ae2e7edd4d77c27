"""A frontier converts and evaluates each candidate once, even if runs are interrupted, and leaves nothing else."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.base.documents import as_document
from headwise.conversion.frontiers import run as results
from headwise.measure.texts.calibration import CalibrationTexts, open_windows
from headwise.models.checkpoints import open_checkpoint
from headwise.runtime.quantization.groups import KiviCode
from tests import warm
from tests.conversion.test_resumed import StoppedError
from tests.real_models import save_tiny
from tests.tiny_families import save_family

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 40
OTHER = "pack my box with five dozen liquor jugs, said the judge to the wizard. " * 40
NAMES: dict[str, Any] = vars(results)
SMALL: dict[str, Any] = {"calibration_tokens": 256, "window": 48, "windows": 2, "plot": False}
TARGETS = ("mla:0.5", "mqa")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and texts; not to be changed."""
    folder = tmp_path_factory.mktemp("frontier")
    save_tiny(folder / "source", hidden_size=32, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1)
    for name, text in (("study", TEXT), ("exam", OTHER), ("second", OTHER[::-1])):
        (folder / f"{name}.txt").write_text(text)
    return folder


def climb(place: Path, output: Path, **options: Any) -> headwise.Frontier:
    named: dict[str, Any] = {"calibrate": place / "study.txt", "evaluate": place / "exam.txt", "targets": TARGETS}
    return headwise.frontier(place / "source", output, **{**named, **SMALL, **options})


def without_times(value: Any) -> Any:
    """The parts of a result that are equal in every run."""
    timed = {"decode_ms", "reference_decode_ms", "peak_rss_bytes"} | {
        f"seconds{kind}" for kind in ("", "_reading", "_writing")
    }
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in timed}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def document(output: Path, name: str = "frontier") -> Any:
    return json.loads((output / f"{name}.json").read_text())


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Record the arguments of a function of the frontier's from now on."""
    calls: list[Any] = []
    original = _own(name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return original(*args, **kwargs)

    monkeypatch.setitem(NAMES, name, counting)
    return calls


def _own(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = NAMES[name]
    return function


def stop(monkeypatch: pytest.MonkeyPatch, name: str, call: int, *, after: bool) -> None:
    """End the run at the n-th call of a function of the frontier's, before the call or after it."""
    original, count = _own(name), 0

    def stopping(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and not after:
            raise StoppedError
        done = original(*args, **kwargs)
        if count == call:
            raise StoppedError
        return done

    monkeypatch.setitem(NAMES, name, stopping)


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """The output of an uninterrupted run."""
    climb(place, place / "whole")
    return place / "whole"


@pytest.fixture(scope="module")
def of_mqa(place: Path) -> headwise.Frontier:
    """A frontier of one target, whose folder is not to be changed."""
    return climb(place, place / "of mqa", targets=["mqa"])


def test_it_is_what_convert_and_evaluate_say(place: Path, tmp_path: Path) -> None:
    texts = [place / "exam.txt", place / "second.txt"]
    frontier = climb(place, tmp_path / "out", evaluate=texts)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "SHA256SUMS",
        "frontier.json",
        "frontier.md",
        "results",
    }
    by_hand = {"mla:0.5": {"to": "mla", "kv_budget": 0.5}, "mqa": {"to": "mqa"}}
    assert [point.target for point in frontier.points] == list(by_hand)
    for point in frontier.points:
        folder = tmp_path / point.mechanism
        options = {**by_hand[point.target], "calibrate": place / "study.txt", "calibration_tokens": 256}
        conversion = headwise.convert(place / "source", folder, **options, evaluate=False)
        evaluation = headwise.evaluate(folder, against=place / "source", text=texts, window=48, windows=2)
        assert point.label == conversion.label
        assert point.perplexity_ratio == evaluation.perplexity_ratio
        for number in ("kl", "kl_999", "top1_agreement", "top1_changed"):
            assert getattr(point, number) == getattr(evaluation, number)
        assert point.ratios == {score.text: score.perplexity_ratio for score in evaluation.texts}
        itemsize = open_checkpoint(place / "source").dtype.itemsize
        assert point.cache_bytes_per_token == evaluation.cache_bytes_per_token * 2 / itemsize  # as in bfloat16
        assert evaluation.reference is not None
        assert frontier.cache_bytes_per_token == evaluation.reference.cache_bytes_per_token * 2 / itemsize
        assert point.cache_fraction == point.cache_bytes_per_token / frontier.cache_bytes_per_token
        assert point.conversion is not None
        assert point.conversion["parameters_after"] == conversion.parameters_after
    assert frontier.perplexities == {score.text: score.perplexity for score in evaluation.reference.texts}
    assert json.loads(json.dumps(frontier.to_dict())) == document(tmp_path / "out")
    assert document(tmp_path / "out")["versions"]["torch"] == torch.__version__


def test_formats_and_codes_are_measured_beside_conversions(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 48 tokens leave KIVI with 16 that fill no block, and are counted as bfloat16."""
    frontier = climb(place, tmp_path / "out", targets=["kivi4:32", "mqa", "mla@0.5", "same@0.5"])
    assert [point.kind for point in frontier.points] == ["quantised", "converted", "both", "quantised"]
    kivi, _, both, same = frontier.points
    of_format = headwise.evaluate(
        place / "source", against=place / "source", text=place / "exam.txt", window=48, windows=2, cache="kivi4:32"
    )
    assert (kivi.perplexity_ratio, kivi.kl) == (of_format.perplexity_ratio, of_format.kl)
    assert (kivi.conversion, kivi.seconds) == (None, 0)
    heads = 4
    code = KiviCode(4, 32)
    recent = min(31, 48) * 2 * 8 * 2  # room for those that wait for a block: keys and values of 8 channels
    assert kivi.cache_bytes_per_token == heads * (code.block_bytes(8, 8) + recent) / 48
    for point in (both, same):
        assert point.conversion is not None
        assert point.conversion["kv_bytes_per_token_after"] < point.cache_bytes_per_token  # and the first tokens
        assert point.evaluation["cache_bytes_per_token"] == point.cache_bytes_per_token
        assert point.cache_fraction < 1
    assert frontier.verdict[0].most == 1
    conversions, evaluations = counted(monkeypatch, "convert"), counted(monkeypatch, "evaluate_windows")
    changed = climb(place, tmp_path / "out", targets=["kivi4:32"], calibration_tokens=300)
    assert changed.points[0].evaluation == kivi.evaluation  # nothing is calibrated: the result is still the one
    assert not conversions
    assert not evaluations


def test_continuations_are_measured_on_request_and_kept_results_go_without(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (without,) = climb(place, tmp_path / "out", targets=["int4"]).points
    (file,) = (tmp_path / "out/results").iterdir()
    kept = json.loads(file.read_text())
    for name in ("kl_999", "top1_changed", "continuations"):  # as results of before have none
        del kept["evaluation"][name]
    file.write_text(json.dumps(kept))
    evaluations = counted(monkeypatch, "evaluate_windows")
    (older,) = climb(place, tmp_path / "out", targets=["int4"]).points
    assert not evaluations
    assert (older.kl, older.top1_changed) == (without.kl, None)
    assert "ties" not in (tmp_path / "out/frontier.md").read_text()
    (point,) = climb(place, tmp_path / "out", targets=["int4"], continuations=2).points
    assert len(evaluations) == 1
    assert point.kl_999 == without.kl_999
    texts: dict[str, Any] = {"text": place / "exam.txt", "window": 48, "windows": 2, "continuations": 2}
    by_hand = headwise.evaluate(place / "source", against=place / "source", cache="int4", **texts).continuations
    assert by_hand is not None
    (kept_point,) = document(tmp_path / "out")["points"]
    assert kept_point["evaluation"]["continuations"] == json.loads(json.dumps(as_document(by_hand)))
    page = (tmp_path / "out/frontier.md").read_text()
    assert "| equal | until | ties |" in page
    parting = by_hand.prompts - by_hand.equal
    assert f"| {by_hand.equal}/2 | {by_hand.median_equal:g} | {by_hand.near_ties}/{parting} |" in page
    with pytest.raises(headwise.ArgumentError, match=r"continuations = 3: must be at most 2"):
        climb(place, tmp_path / "refused", continuations=3)


STOPS = [
    ("convert", 1, True),  # converted, and nobody was told
    ("kept_model", 1, True),
    ("evaluate_windows", 1, False),
    ("evaluate_windows", 1, True),
    ("convert", 2, False),
    ("evaluate_windows", 2, True),
    ("remembered", 2, True),
]


@pytest.mark.parametrize(("name", "call", "after"), STOPS, ids=str)
def test_a_run_that_ended_early_goes_on(
    name: str, call: int, after: bool, place: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop(patch, name, call, after=after)
        with pytest.raises(StoppedError):
            climb(place, tmp_path / "out")
    assert not (tmp_path / "out/frontier.json").exists()
    climb(place, tmp_path / "out")
    assert without_times(document(tmp_path / "out")) == without_times(document(whole))
    files = [sorted(str(path.relative_to(top)) for path in top.rglob("*")) for top in (tmp_path / "out", whole)]
    assert files[0] == files[1]


KILLED = """
import os, signal, sys
from pathlib import Path
from headwise.base import disk
from tests.conversion.frontiers.test_run import climb

left, own = int(sys.argv[1]), disk.replace

def dying(source, destination):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    own(source, destination)

disk.replace = dying
climb(Path(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
@pytest.mark.parametrize("moment", [5, 10])  # in the first conversion, and once there is a result
def test_a_run_that_was_killed_goes_on(moment: int, place: Path, whole: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of writing a file; nobody cleans up."""
    killed = warm.run("-c", KILLED, moment, place, tmp_path / "out")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "out/.headwise-work").is_dir()
    assert (tmp_path / "out/results").is_dir() == (moment == 10)
    climb(place, tmp_path / "out")
    assert without_times(document(tmp_path / "out")) == without_times(document(whole))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "SHA256SUMS",
        "frontier.json",
        "frontier.md",
        "results",
    }


def test_what_is_done_is_not_done_again(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop(patch, "evaluate_windows", 2, after=False)
        with pytest.raises(StoppedError):
            climb(place, tmp_path / "out")
    conversions, evaluations = counted(monkeypatch, "convert"), counted(monkeypatch, "evaluate_windows")
    climb(place, tmp_path / "out")
    assert (len(conversions), len(evaluations)) == (0, 1)
    whole = document(tmp_path / "out")
    climb(place, tmp_path / "out")
    assert (len(conversions), len(evaluations)) == (0, 1)
    assert document(tmp_path / "out") == whole  # times too: nothing was measured again
    climb(place, tmp_path / "out", targets=("mqa", "gqa:2", "mla:.50"))
    assert [call[1]["to"] for call in conversions] == ["gqa:2"]
    assert [point["target"] for point in document(tmp_path / "out")["points"]] == ["mqa", "gqa:2", "mla:0.5"]


@pytest.mark.parametrize(
    "change",
    [{"calibration_tokens": 300}, {"windows": 3}, {"dtype": "float32"}, {"calibrate": "second.txt"}],
    ids=str,
)
def test_results_of_other_arguments_are_not_mixed(
    change: dict[str, Any], of_mqa: headwise.Frontier, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(place / "of mqa", tmp_path / "out")
    change = {key: place / value if key == "calibrate" else value for key, value in change.items()}
    conversions = counted(monkeypatch, "convert")
    second = climb(place, tmp_path / "out", targets=["mqa"], **change)
    assert len(conversions) == 1
    assert second.points[0].perplexity_ratio != of_mqa.points[0].perplexity_ratio
    again = climb(place, tmp_path / "out", targets=["mqa"])  # those of before are still there
    assert len(conversions) == 1
    assert again == of_mqa


def test_models_are_kept_when_asked_for(
    of_mqa: headwise.Frontier, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(place / "of mqa", tmp_path / "out")
    conversions, evaluations = counted(monkeypatch, "convert"), counted(monkeypatch, "evaluate_windows")
    kept = climb(place, tmp_path / "out", targets=["mqa"], keep=True)
    assert (len(conversions), len(evaluations)) == (1, 0)  # the result is there, and the model was not
    assert headwise.inspect(tmp_path / "out/models/mqa").mechanism == "mqa"
    climb(place, tmp_path / "out", targets=["mqa"], keep=True)
    assert len(conversions) == 1
    other = climb(place, tmp_path / "out", targets=["mqa"], keep=True, calibration_tokens=300)
    assert len(conversions) == 2  # another model takes its place
    tokens = [found.points[0].conversion or {} for found in (kept, other)]
    assert [one["calibration_tokens"] for one in tokens] == [256, 300]


def test_without_a_text_to_measure_on_it_is_what_calibration_leaves(place: Path, tmp_path: Path) -> None:
    frontier = climb(place, tmp_path / "out", targets=["mqa"], evaluate=None)
    assert frontier.texts == (f"{place / 'study.txt'} after 1,856 tokens",)
    (tmp_path / "rest.txt").write_text(TEXT[1856:])  # a character is a token
    same = headwise.convert(
        place / "source",
        tmp_path / "mqa",
        to="mqa",
        calibrate=place / "study.txt",
        calibration_tokens=256,
        evaluate=False,
    )
    rest = headwise.evaluate(same.output, against=place / "source", text=tmp_path / "rest.txt", window=48, windows=2)
    assert frontier.points[0].perplexity_ratio == rest.perplexity_ratio


def test_methods(place: Path, tmp_path: Path) -> None:
    frontier = climb(place, tmp_path / "out", methods=True)
    ways = {(point.target, point.way) for point in frontier.points}
    every = [stage for stage in headwise.conversion.STAGES if stage != "spread"]  # a single layer has none
    stages = {target: every if target == "mla:0.5" else [s for s in every if s != "channels"] for target in TARGETS}
    assert {(target, f"headwise without {stage}") for target in TARGETS for stage in stages[target]} <= ways
    assert {(target, "headwise without any stage") for target in TARGETS} <= ways
    assert {("mla:0.5", "mha2mla"), ("mla:0.5", "transmla:4"), ("mqa", "mean"), ("mqa", "random")} <= ways
    for target in TARGETS:
        points = [point for point in frontier.points if point.target == target]
        assert len({point.cache_bytes_per_token for point in points}) == 1
        ratios = {point.way: point.perplexity_ratio for point in points if not point.way.startswith("transmla")}
        assert len(ratios) == len(stages[target]) + 2 + (1 if target == "mla:0.5" else 3)
        assert ratios.pop("headwise without sequence") == ratios["headwise"]  # of layers there is one
        assert ratios.pop("headwise without recall") == ratios["headwise"]  # of two windows none repeats passages
        assert len({*ratios.values()}) == len(ratios), ratios  # they are different conversions
    assert document(tmp_path / "out", "methods")["methods"] is True
    assert "TransMLA (fold " in (tmp_path / "out/methods.md").read_text()
    fold = next(point for point in frontier.points if point.way == "transmla:4")
    options: dict[str, Any] = {"calibrate": place / "study.txt", "calibration_tokens": 256, "evaluate": False}
    headwise.convert(place / "source", tmp_path / "fold", to="mla", kv_budget=0.5, method="transmla:4", **options)
    windows, held_out, _ = open_windows(
        open_checkpoint(place / "source"), CalibrationTexts((place / "study.txt",), 256)
    )
    with torch.inference_mode():
        logits = headwise.load(tmp_path / "fold")(windows[-held_out:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[-held_out:, 1:].flatten())
    assert fold.held_out_loss == pytest.approx(float(loss), rel=1e-4)
    (tmp_path / "pooled").mkdir()
    headwise.convert(place / "source", tmp_path / "pooled", to="mqa", method="mean", evaluate=False)
    pooled = headwise.evaluate(
        tmp_path / "pooled", against=place / "source", text=place / "exam.txt", window=48, windows=2
    )
    mean = next(point for point in frontier.points if point.way == "mean")
    assert mean.perplexity_ratio == pooled.perplexity_ratio


@pytest.mark.parametrize("kind", [headwise.CheckpointError, headwise.ArgumentError])
@pytest.mark.parametrize("name", ["convert", "evaluate_windows"])
def test_a_conversion_that_cannot_be_measured_is_left_out_and_noted(
    name: str, kind: type[headwise.HeadwiseError], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = _own(name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise kind("model", str(tmp_path), "computes NaN")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setitem(NAMES, name, failing)
        frontier = climb(place, tmp_path / "out")
    assert [point.target for point in frontier.points] == ["mqa"]
    assert frontier.notes == ("not measured: mla:0.5, headwise (model computes NaN)",)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "SHA256SUMS",
        "frontier.json",
        "frontier.md",
        "results",
    }
    again = climb(place, tmp_path / "out")  # by then it can be
    assert [point.target for point in again.points] == ["mla:0.5", "mqa"]
    assert again.notes == ()


def test_where_none_can_be_measured_the_first_reason_is_given(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, to: str, **__: Any) -> Any:
        raise headwise.CheckpointError("tensor", to, "does not fit in float16")

    monkeypatch.setitem(NAMES, "convert", failing)
    with pytest.raises(headwise.CheckpointError, match="tensor = 'mla': does not fit"):
        climb(place, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_ends_it(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is reported whatever errors are raised on the way."""
    tried = []

    def full(*_: Any, to: str, **__: Any) -> Any:
        tried.append(to)
        try:
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError as error:
                raise headwise.StorageError("results", "layers", f"could not be written: {error}") from None
        except headwise.StorageError as error:
            raise headwise.StorageError("results", "layers", "could not be written; it is kept") from error

    monkeypatch.setitem(NAMES, "convert", full)
    for _ in range(2):
        with pytest.raises(headwise.CheckpointError, match="results = 'layers': could not be written"):
            climb(place, tmp_path / "out")
    assert tried == ["mla", "mla"]


def test_an_error_is_not_of_the_disk_for_what_came_before_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal of one target that was raised while some file was missing does not end the others."""
    tried = []

    def failing(*_: Any, to: str, **__: Any) -> Any:
        tried.append(to)
        try:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        except FileNotFoundError:
            raise headwise.CheckpointError("tensor", to, "does not fit in float16") from None

    monkeypatch.setitem(NAMES, "convert", failing)
    with pytest.raises(headwise.CheckpointError, match="does not fit"):
        climb(place, tmp_path / "out")
    assert len(tried) > 1


def test_another_process_is_kept_out(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []
    original = _own("evaluate_windows")

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        with pytest.raises(headwise.ArgumentError, match="is being written by process") as error:
            climb(place, tmp_path / "out")
        refused.append(error.value.field)
        return original(*args, **kwargs)

    monkeypatch.setitem(NAMES, "evaluate_windows", meanwhile)
    climb(place, tmp_path / "out", targets=["mqa"])
    assert refused == ["output"]


def test_all_windows_of_a_text(place: Path, tmp_path: Path) -> None:
    found = climb(place, tmp_path / "named", targets=["mqa"], windows=None)
    assert found.tokens == len(OTHER) // 48 * 47  # each character is a token
    rest = climb(place, tmp_path / "rest", targets=["mqa"], windows=None, evaluate=None)
    assert rest.texts == (f"{place / 'study.txt'} after 1,856 tokens",)
    assert rest.tokens == (len(TEXT) - 1856) // 48 * 47


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"calibrate": ()}, "calibrate = (): is required"),
        ({"calibrate": "nowhere.txt"}, "calibrate = 'nowhere.txt': could not be read"),
        ({"calibration_tokens": 1}, "calibration_tokens = 1: must be at least 2"),
        ({"evaluate": "nowhere.txt"}, "evaluate = 'nowhere.txt': could not be read"),
        ({"evaluate": []}, "evaluate = []: must be at least one file"),
        ({"evaluate": "copy.txt"}, "evaluate = 'copy.txt': is calibrated or trained on"),
        ({"evaluate": "short.txt"}, "must be at least one window of 48 tokens"),
        ({"targets": ["mla:2"]}, "target = 'mla:2': kv_budget must be a fraction above 0 and at most 1"),
        ({"targets": ["gqa:3"]}, "num_kv_heads = 3: must divide"),
        ({"targets": ["mqa", "mla:0.01"]}, "kv_budget = 0.01: leaves 0 of the 64 values"),
        ({"window": 1}, "window = 1: must be at least 2"),
        ({"window": 257}, "window = 257: must be at least 2 and at most 256, by the model's positions"),
        ({"windows": 0}, "windows = 0: must be at least 1"),
        ({"dtype": "int3"}, "dtype = 'int3'"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_any_work(
    change: dict[str, Any], line: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("copy.txt").write_text(TEXT)
    Path("short.txt").write_text("short")
    with pytest.raises(headwise.HeadwiseError) as error:
        climb(place, Path("out"), **change)
    assert line in str(error.value)
    assert not Path("out").exists()


def test_an_output_that_is_something_else_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(headwise.ArgumentError, match="is a file or a link"):
        climb(place, tmp_path / "file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/thesis.tex").write_text("")
    with pytest.raises(headwise.ArgumentError, match="holds something else"):
        climb(place, tmp_path / "folder")
    with pytest.raises(headwise.ArgumentError, match="holds something else"):
        climb(place, place / "source")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["thesis.tex"]


def test_an_output_that_holds_its_texts_is_refused(place: Path, tmp_path: Path) -> None:
    model = tmp_path / "out/models/mqa"
    model.mkdir(parents=True)
    (tmp_path / "out/results").mkdir()
    for name, text in (("study", TEXT), ("exam", OTHER)):
        (model / f"{name}.txt").write_text(text)
    for change in ({"calibrate": model / "study.txt"}, {"evaluate": [model / "exam.txt"]}):
        with pytest.raises(headwise.ArgumentError, match=f"must not be a text of {next(iter(change))}, or a folder"):
            climb(place, tmp_path / "out", keep=True, **change)
    assert sorted(path.name for path in model.iterdir()) == ["exam.txt", "study.txt"]


def test_a_model_that_predicts_no_text_is_refused(place: Path, tmp_path: Path) -> None:
    save_family(tmp_path / "bert", "bert")
    with pytest.raises(headwise.SpecError, match="is an encoder"):
        headwise.frontier(tmp_path / "bert", tmp_path / "out", calibrate=place / "study.txt", **SMALL)
    assert not (tmp_path / "out").exists()


def test_a_failure_before_the_first_result_leaves_nothing(place: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text("ab")
    with pytest.raises(headwise.ArgumentError, match="at least 4 tokens"):
        climb(place, tmp_path / "deep/out", calibrate=tmp_path / "tiny.txt")
    assert not (tmp_path / "deep").exists()


def test_an_exam_that_repeats_the_calibration_is_noted(place: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.txt").write_text(TEXT + "And so it ends.")
    repeated = climb(place, tmp_path / "out", targets=("mqa",), evaluate=tmp_path / "copy.txt")
    assert any("passages of 20 or more tokens that the calibration text has too" in note for note in repeated.notes)
    assert not climb(place, tmp_path / "other", targets=("mqa",)).notes
