"""HumanEval: programs are isolated and held to limits, and continuations in a batch are those of one at a time."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.humaneval import continue_all, exact_interval, program, until_stop
from benchmarks.isolated import Limits, NoIsolationError, refuse_no_isolation, run_isolated

from benchmarks import humaneval, isolated, ruler
from headwise import evaluate_ruler
from headwise.hf import HeadwiseCache, load
from headwise.measure.texts import language_reference
from headwise.models.checkpoints import load_tokenizer
from tests.real_models import save_tiny

try:
    refuse_no_isolation()
    can_isolate = True
except NoIsolationError:
    can_isolate = False
needs_isolation = pytest.mark.skipif(not can_isolate, reason="no namespaces on this machine")

FEW = Limits(seconds=2, wall_seconds=60.0, memory=256 << 20)


@needs_isolation
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("while True: pass", "^killed by SIG(XCPU|KILL)$"),
        ("x = bytearray(10 << 30)", "MemoryError"),
        ("import os\nos.fork()", "BlockingIOError"),
        ("import threading\nthreading.Thread(target=print).start()", "can't start new thread"),
        ("import subprocess\nsubprocess.run(['true'])", "BlockingIOError"),
        ("open('huge', 'wb').write(bytes(1 << 24))", "File too large"),
        ("for n in range(100): open(str(n), 'wb').write(bytes(1 << 20))", "No space left"),
        ("while True: print('garbage' * 1000)", "File too large"),
        ("import sys\nsys.exit(0)\nassert False", "ended early"),
        ("import os\nos._exit(0)\nassert False", "ended early"),
        ("print('passed')\nraise SystemExit", "ended early"),
        ("import sys\nsys.exit(3)", "failed"),
        ("assert 1 + 1 == 3", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import os\nos.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import ctypes\nctypes.string_at(0)", "killed by SIGSEGV"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (9, 9))", "not allowed to raise maximum limit"),
    ],
    ids=str,
)
def test_what_a_program_must_not_do_fails(source: str, why: str) -> None:
    outcome = run_isolated(source, FEW)
    assert not outcome.passed
    assert re.search(why, outcome.why), outcome.why


@needs_isolation
@pytest.mark.parametrize(
    "source",
    ["assert 1 + 1 == 2", "print('garbage\\x00', end='')", "open('x', 'w').write('y')\nassert open('x').read()"],
)
def test_a_program_that_reaches_its_end_passes(source: str) -> None:
    assert run_isolated(source, FEW) == isolated.Outcome(True, "passed")


@needs_isolation
def test_a_program_that_waits_is_killed_with_what_it_holds() -> None:
    start = time.perf_counter()
    outcome = run_isolated("import time\ntime.sleep(600)", Limits(wall_seconds=2.0))
    assert outcome == isolated.Outcome(False, "timed out")
    assert time.perf_counter() - start < 60


@needs_isolation
def test_no_socket_of_this_machine_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        asked = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)"
        subprocess.run([sys.executable, "-c", asked], check=True)  # as is reached from here
        assert "Network is unreachable" in run_isolated(asked, FEW).why


@needs_isolation
def test_nothing_is_written_outside_and_no_process_is_seen(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    written = run_isolated(f"open({str(tmp_path / 'x')!r}, 'w')", FEW)
    assert not written.passed
    assert not list(tmp_path.iterdir())
    others = "import os\nassert len([one for one in os.listdir('/proc') if one.isdigit()]) < 4"
    assert run_isolated(others, FEW).passed


def test_nothing_is_run_where_programs_cannot_be_isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_SETUP", "exit 1")
    with pytest.raises(NoIsolationError, match="cannot be isolated here, so none is run"):
        humaneval.main(["--json", str(tmp_path / "x.json")])
    assert not list(tmp_path.iterdir())


def test_a_continuation_ends_before_the_first_stop() -> None:
    for text, kept in (
        ("    return 1\n", "    return 1\n"),
        ("    return 1\n\ndef g():\n    pass", "    return 1\n"),
        ("    # why\n    return 1\nprint(f())\n# end", "    # why\n    return 1"),
        ("\nclass A: pass", ""),
        ("    if x:\n        return 1\nif __name__", "    if x:\n        return 1"),
        ("", ""),
    ):
        assert until_stop(text) == kept


def test_the_interval_is_the_exact_one() -> None:
    """The ends are the chances at which so few, or so many, are met with a probability of 2.5 %."""
    for right, items in ((0, 10), (3, 10), (68, 164), (164, 164)):
        low, high = exact_interval(right, items)
        tails = [
            sum(math.comb(items, k) * p**k * (1 - p) ** (items - k) for k in counts)
            for p, counts in ((low, range(right, items + 1)), (high, range(right + 1)))
        ]
        assert right == 0 or tails[0] == pytest.approx(0.025, rel=1e-9)
        assert right == items or tails[1] == pytest.approx(0.025, rel=1e-9)
    assert exact_interval(0, 10)[0] == 0
    assert exact_interval(0, 10)[1] == pytest.approx(0.3084971)  # as tables have it
    assert exact_interval(164, 164)[1] == 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("humaneval") / "tiny")


@pytest.mark.parametrize("cache", [None, "llama.cpp:q4_0", "int8"])
def test_a_batch_is_continued_as_each_prompt_alone(tiny: Path, cache: str | None) -> None:
    model, tokenizer = load(tiny, dtype="float64"), load_tokenizer(tiny)
    # Rows leave the batch at different places: an end-of-text token is one that some of them make.
    prompts = ["def f(x):", "a", "one, two and three", "import this"]
    if cache == "llama.cpp:q4_0":
        model = load(save_tiny(tiny.parent / "wide", head_dim=32), dtype="float64")

    def continued(some: list[str]) -> list[str]:
        return continue_all(model, tokenizer, some, HeadwiseCache(model, quantize=cache), tokens=24)

    free = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in continued(prompts)]
    model.generation_config.eos_token_id = free[1][4]
    together = continued(prompts)
    assert len({len(text) for text in together}) > 1
    assert together == [continued([prompt])[0] for prompt in prompts]
    assert torch.isfinite(model(torch.tensor([[3]])).logits).all()


@needs_isolation
def test_a_row_is_one_way_and_a_run_goes_on(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = [
        {
            "task_id": f"HumanEval/{n}",
            "prompt": prompt,
            "test": "def check(f):\n    assert f() is None",
            "entry_point": "f",
        }
        for n, prompt in enumerate(("def f():\n    pass\n#", "def f():\n    return 1\n#", "def f(:"))
    ]
    (tmp_path / "humaneval.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    command = [
        "own",
        "int8",
        "--source",
        str(tiny),
        "--tokens",
        "6",
        "--batch",
        "2",
        "--dtype",
        "float64",
        "--alone",
        "3",
    ]
    command += ["--json", str(tmp_path / "x.json"), "--cache", str(tmp_path), "--work", str(tmp_path / "w")]
    humaneval.main(command)
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    texts = json.loads((tmp_path / "w/own.json").read_text())["texts"]
    assert rows["own"]["alone"] == {"problems": 3, "same": 3, "other_but_alike": 0}
    for number, problem in enumerate(problems):
        ending = run_isolated(program(problem, texts[problem["task_id"]]))
        assert rows["own"]["outcomes"][f"HumanEval/{number}"] == ending.why
    assert rows["own"]["passed"] == sum(why == "passed" for why in rows["own"]["outcomes"].values())
    assert rows["int8"]["beside_own"]["items"] == 3
    capsys.readouterr()
    humaneval.main(command)
    assert "continued" not in capsys.readouterr().out


def test_a_way_names_a_model_and_a_cache(tmp_path: Path) -> None:
    """A prepared folder is run with the cache that it was prepared for."""
    folder = save_tiny(tmp_path / "llama.cpp:q4_0, prepared")
    assert humaneval.of_way("own", "source") == ("own", "source", None)
    assert humaneval.of_way("int8", "source") == ("int8", "source", "int8")
    assert humaneval.of_way(str(folder), "source") == (folder.name, str(folder), None)
    assert humaneval.of_way(f"int4={folder}", "source") == (folder.name, str(folder), "int4")


def test_needles_by_way(tmp_path: Path) -> None:
    """Each way's row has the score that `headwise.evaluate_ruler` gives."""
    source, file = save_tiny(tmp_path / "tiny", max_position_embeddings=2048), tmp_path / "ruler.json"
    text = tmp_path / "wikitext-2.test.txt"
    text.write_text(language_reference(slice(10)))
    given = ["--length", "1500", "--tasks", "vt", "fwe", "--samples", "1", "--dtype", "float32"]
    ruler.main(["own", "int8", "--source", str(source), "--json", str(file), "--cache", str(tmp_path), *given])
    rows = json.loads(file.read_text())["rows"]
    other = evaluate_ruler(
        source, text=text, length=1500, samples=1, tasks=["vt", "fwe"], dtype="float32", cache="int8"
    )
    assert rows["int8"]["score"] == other.score
    assert rows["own"]["tasks"].keys() == {task.task for task in other.tasks}
