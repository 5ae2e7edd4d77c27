"""``headwise evaluate``'s tasks from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwise.measure.texts import language_reference
from tests.cli.conftest import Result
from tests.measure.evaluation.test_retrieval import save_bert

SMALL = ("--window", "16", "--windows", "2", "--context", "8")


@pytest.fixture
def tasks(here: Path, tiny_llama: Path) -> Path:
    choices = [{"question": "where", "choices": ["here", "there, or not"], "answer": index % 2} for index in range(4)]
    passages = [{"question": word, "passage": f"{word} and more"} for word in ("one", "two", "three")]
    for name, rows in (("choices", choices), ("passages", passages)):
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "second.txt").write_text("pack my box with five dozen jugs. " * 10)
    return here


def document(result: Result) -> Any:
    assert result.status == 0, result.err
    return json.loads(result.out)


def test_everything_of_a_decoder_in_one_run(cli: Callable[..., Result], tasks: Path) -> None:
    arguments = ("evaluate", "tiny", "--against", "tiny", "--text", "text.txt", "--text", "second.txt", *SMALL)
    arguments = (*arguments, "--choices", "choices.jsonl", "--limit", "3", "--planted", "128", "--by-position")
    report = document(cli(*arguments, "--json"))
    assert report["model"] == report["against"] == "tiny"
    assert [text["text"] for text in report["texts"]] == ["text.txt", "second.txt"]
    assert report["texts"][0]["by_position"][0].keys() == {"start", "stop", "nll", "reference_nll"}
    assert report["choices"]["items"] == 3
    assert report["choices"]["accuracy"]["difference"] == 0
    assert report["planted"]["context"] == 128
    assert len(report["planted"]["depths"]) == 5
    assert "retrieval" not in report
    shown = cli(*arguments)
    assert shown.status == 0
    for said in ("perplexity of second.txt", "1–15", "accuracy by length", "at depth 50%", "likeliest of the codes"):
        assert said in shown.out


def test_random_strings_in_place_of_facts(cli: Callable[..., Result], tasks: Path) -> None:
    arguments = (
        "evaluate",
        "tiny",
        "--text",
        "text.txt",
        *SMALL,
        "--planted",
        "128",
        "--strings",
        "8",
        "--keys",
        "2",
    )
    report = document(cli(*arguments, "--json"))
    assert (report["planted"]["strings"], report["planted"]["keys"]) == (8, 2)
    assert "2 random strings of 8 tokens planted in 128 tokens" in " ".join(cli(*arguments).out.split())


def test_ruler_beside_the_reference(
    cli: Callable[..., Result], refused: Callable[..., str], tasks: Path, edit_config: Callable[..., None]
) -> None:
    edit_config(max_position_embeddings=4096)
    (tasks / "long.txt").write_text(language_reference(slice(20)))
    arguments = ("evaluate", "tiny", "--against", "tiny", "--text", "long.txt", *SMALL, "--ruler", "2600")
    arguments = (*arguments, "--ruler-samples", "2", "--ruler-task", "vt", "--ruler-task", "fwe")
    report = document(cli(*arguments, "--cache", "int8", "--json"))["ruler"]
    assert (report["length"], report["samples"], report["text"], report["cache"]) == (2600, 2, "long.txt", "int8")
    assert [(task["task"], task["answers"]) for task in report["tasks"]] == [("vt", 5), ("fwe", 3)]
    assert report["score"] == sum(task["score"] for task in report["tasks"]) / 2
    assert report.keys() >= {"reference_score"}
    for task in report["tasks"]:
        assert task.keys() == {"task", "answers", "score", "reference_score", "complete"}
        assert task["complete"]["items"] == 2
    shown = " ".join(cli(*arguments).out.split())
    assert "RULER's tasks in 2,600 tokens, 2 samples of each, from long.txt" in shown
    for said in ("share of answers found", "all of fwe", "mean"):
        assert said in shown
    for wrong, line in (
        (("--ruler-task", "qa_1"), "'qa_1': must be one of niah_single_1"),
        (("--ruler", "5000"), "ruler = 5000: must be at most 4096"),
        (("--ruler-samples", "0"), "samples = 0: must be at least 1"),
        (("--ruler-chat",), "chat = True: needs a tokenizer with a chat template"),
    ):
        assert line in refused(*arguments, *wrong)


def test_choices_alone(cli: Callable[..., Result], tasks: Path) -> None:
    report = document(cli("evaluate", "tiny", "--choices", "choices.jsonl", "--json"))
    assert report.keys() == {"model", "against", "choices", "made_with"}
    assert report["choices"]["accuracy"]["reference_rate"] is None
    assert cli("evaluate", "tiny", "--choices", "choices.jsonl", "--device", "cpu").out.startswith(
        "4 items of choices"
    )


def test_an_encoder(cli: Callable[..., Result], tasks: Path) -> None:
    save_bert(tasks / "bert")
    arguments = ("evaluate", "bert", "--against", "bert", "--retrieval", "passages.jsonl")
    report = document(cli(*arguments, "--json"))
    assert report["retrieval"]["passages"] == 3
    assert report["retrieval"]["recall_at_1"]["p_value"] == 1
    shown = cli(*arguments)
    assert "R@10" in shown.out
    assert "MRR" in shown.out


def test_a_quantised_cache_in_every_task(cli: Callable[..., Result], tasks: Path) -> None:
    arguments = ("evaluate", "tiny", "--against", "tiny", "--cache", "int2", "--text", "text.txt", *SMALL)
    arguments = (*arguments, "--choices", "choices.jsonl", "--planted", "128")
    report = document(cli(*arguments, "--json"))
    assert report["cache"] == report["choices"]["cache"] == report["planted"]["cache"] == "int2"
    assert report["perplexity_ratio"] != 1
    assert report["cache_bytes_per_token"] < report["reference_cache_bytes_per_token"]
    depth = report["planted"]["depths"][0]
    assert depth["nll"] != depth["reference_nll"]
    shown = cli(*arguments)
    assert "the model's cache in int2" in shown.out.replace("\n", " ")


def test_continuations_beside_the_reference(cli: Callable[..., Result], tasks: Path) -> None:
    arguments = ("evaluate", "tiny", "--against", "tiny", "--cache", "int2", "--text", "text.txt", *SMALL)
    found = document(cli(*arguments, "--continuations", "2", "--json"))["continuations"]
    assert (found["prompts"], len(found["each"])) == (2, 2)
    assert found["equal"] < 2
    shown = " ".join(cli(*arguments, "--continuations", "2").out.split())
    assert found["line"] in shown
    assert document(cli(*arguments, "--json"))["continuations"] is None


def test_several_caches_are_measured_one_after_the_other(
    cli: Callable[..., Result], refused: Callable[..., str], tasks: Path
) -> None:
    arguments = ("evaluate", "tiny", "--against", "tiny", "--text", "text.txt", *SMALL, "--choices", "choices.jsonl")
    both = (*arguments, "--cache", "int8", "--cache", "int2")
    found = document(cli(*both, "--json"))["caches"]
    for name, one in zip(("int8", "int2"), found, strict=True):
        alone = document(cli(*arguments, "--cache", name, "--json"))
        assert one["cache"] == one["choices"]["cache"] == name
        assert (one["kl"], one["choices"]) == (alone["kl"], alone["choices"])
    shown = cli(*both).out.replace("\n", " ")
    assert 0 < shown.index("the model's cache in int8") < shown.index("the model's cache in int2")
    assert "--cache = 'int9': must be" in refused(*both, "--cache", "int9")  # before the others are measured


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), "text = None: is required, unless --choices or --retrieval is given"),
        (("--planted", "64"), "text = None: is required"),
        (("--choices", "choices.jsonl", "--planted", "64"), "planted = 64: needs --text"),
        (("--choices", "choices.jsonl", "--ruler", "4096"), "ruler = 4096: needs --text, to cut haystacks from"),
        (("--choices", "nowhere.jsonl"), "choices = 'nowhere.jsonl': could not be read"),
        (("--choices", "passages.jsonl"), "choices = 'passages.jsonl, item 1': must have question, choices"),
        (("--choices", "choices.jsonl", "--limit", "0"), "limit = 0: must be at least 1"),
        (("--retrieval", "choices.jsonl"), "retrieval = 'choices.jsonl, item 1': must have the texts"),
        (("--retrieval", "text.txt"), "retrieval = 'text.txt, line 1': must be a JSON object"),
        (("--text", "text.txt", *SMALL, "--planted", "129"), "planted = 129: must be at most 128"),
        (("--text", "text.txt", *SMALL, "--planted", "40"), "planted = 40: must be at least"),
        (("--text", "text.txt", *SMALL, "--planted", "0"), "planted = 0: must be at least 2 tokens"),
        (("--text", "text.txt", *SMALL, "--device", "nowhere"), "device = 'nowhere': must be a device"),
        (("--text", "text.txt", *SMALL, "--cache", "int9"), "cache = 'int9': must be int8, int4, int3 or int2, fp8"),
        (("--text", "text.txt", *SMALL, "--cache", "kivi8"), "cache = 'kivi8': must be int8, int4, int3 or int2"),
        (("--retrieval", "passages.jsonl", "--cache", "int4"), "cache = 'int4': needs --text or --choices"),
        (("--choices", "choices.jsonl", "--device", "cuda:77"), "device = 'cuda:77': must be a device"),
        (("--choices", "choices.jsonl", "--continuations", "1"), "continuations = 1: needs --text, to cut prompts"),
        (("--text", "text.txt", *SMALL, "--continuations", "1"), "continuations = 1: needs a reference"),
        (
            ("--text", "text.txt", "--engine", "llama.cpp", "--continuations", "1"),
            "continuations = 1: must be left out with --engine",
        ),
    ],
    ids=str,
)
def test_bad_input(refused: Callable[..., str], tasks: Path, options: tuple[str, ...], line: str) -> None:
    assert line in refused("evaluate", "tiny", *options)
