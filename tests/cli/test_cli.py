"""The command line: JSON, help, interruption, a full disk."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import rich.progress
import typer

import headwise
from headwise.base.progress import TimedProgress, TrainingProgress
from headwise.cli.app import ORDER, app, progress_bar
from headwise.cli.main import register_commands
from headwise.cli.printable import PrintableConsole
from tests import warm
from tests.cli.conftest import Result
from tests.tiny_families import save_family

COMMANDS = tuple(name for name in ORDER if name != "bench")  # which has commands of its own
MLA = ("--to", "mla", "--kv-budget", "0.5")
SMALL = ("--window", "16", "--windows", "2", "--context", "8")

INSPECT = {
    "model_type",
    "num_layers",
    "mechanism",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_bytes_per_token",
    "attention_parameters_per_layer",
    "layers",
}
ROW = {
    "mechanism",
    "label",
    "attention_parameters_per_layer",
    "prefill_flops",
    "decode_flops",
    "kv_bytes_per_token",
    "kv_bytes",
    "decode_intensity",
}
CONVERT = {
    "source",
    "output",
    "mechanism",
    "kv_bytes_per_token_before",
    "kv_bytes_per_token_after",
    "parameters_before",
    "parameters_after",
    "seconds",
    "peak_rss_bytes",
    "evaluation",
    "plain",
    "stock",
}
MEASURED = {"seconds", "peak_rss_bytes", "evaluation", "plain"}
EVALUATE = {
    "tokens",
    "perplexity",
    "reference_perplexity",
    "perplexity_ratio",
    "kl",
    "kl_999",
    "top1_agreement",
    "top1_changed",
    "cache_bytes_per_token",
    "reference_cache_bytes_per_token",
    "context",
    "decode_ms",
    "reference_decode_ms",
}


def run(*arguments: str, code: str = "from headwise.cli import main; main()", **options: Any) -> Any:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
        **options,
    )


NO_TORCH = """
import sys
from headwise.cli import main
try:
    main()
except SystemExit as stopped:
    heavy = {"torch", "transformers", "numpy"} & set(sys.modules)
    assert not heavy, heavy
    sys.exit(stopped.code)
"""


def test_a_question_about_a_config_imports_no_torch(tiny_llama: Path) -> None:
    for arguments in (["inspect", str(tiny_llama / "config.json"), "--json"], ["compare", str(tiny_llama)]):
        result = run(*arguments, code=NO_TORCH)
        assert (result.returncode, result.stderr) == (0, "")
    result = run("inspect", "nowhere", code=NO_TORCH)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


HELP_WITHOUT_TORCH = """
import sys
from headwise.cli import main
for command in sys.argv[1:]:
    try:
        main([*command.split(), "--help"])
    except SystemExit as stopped:
        heavy = {"torch", "transformers", "numpy"} & set(sys.modules)
        assert not heavy, (command, heavy)
        assert not stopped.code, command
"""


def test_help_imports_no_torch() -> None:
    """Of all commands in one process, as what one imports stays there for the next to be asked about."""
    result = run("", *COMMANDS, code=HELP_WITHOUT_TORCH)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("Usage: ") == 1 + len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(cli: Callable[..., Result], command: str) -> None:
    result = cli(command, "--help")
    assert result.status == 0
    assert f"Example: headwise {command}" in result.out


PANELS = {
    "Decide": ("inspect", "compare", "complexity", "predict", "advise", "design", "guide", "report"),
    "Change": ("prepare", "convert", "heal", "frontier", "migrate", "calibrate", "sample"),
    "Measure": ("evaluate", "verify", "generate", "profile", "doctor"),
    "Serve": ("engines", "export", "serve"),
    "Study": ("audit", "bench", "count", "demo"),
}


def test_help_lists_the_commands_in_panels(cli: Callable[..., Result]) -> None:
    register_commands()
    group: Any = typer.main.get_command(app)
    assert sorted(group.commands) == sorted(ORDER), "headwise.cli.app.ORDER has each command once"
    shown: dict[str, list[str]] = {}
    for line in cli("--help").out.splitlines():
        if title := re.match(r"╭─ (\w+) ─", line):
            shown[title[1]] = []
        elif command := re.match(r"│ ([a-z]+) ", line):
            [*shown.values()][-1].append(command[1])
    assert {name: tuple(found) for name, found in shown.items() if name != "Options"} == PANELS
    assert [*shown] == ["Options", *PANELS]


def test_version_and_catalog(cli: Callable[..., Result]) -> None:
    assert cli("--version") == Result(0, f"headwise {headwise.__version__}\n", "")
    assert "llama-3-8b" in cli("inspect", "--list").out
    assert "llama-3-8b" in json.loads(cli("inspect", "--list", "--json").out)["catalog"]


def document(result: Result) -> Any:
    assert (result.status, result.err) == (0, "")

    def no_such_thing(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(result.out, parse_constant=no_such_thing)


def test_every_command_speaks_json(cli: Callable[..., Result], here: Path, tiny_llama: Path) -> None:
    inspected = document(cli("inspect", "tiny", "--json"))
    assert inspected.keys() >= INSPECT
    assert (inspected["model_type"], inspected["num_layers"], inspected["mechanism"]) == ("llama", 2, "gqa")
    assert inspected["kv_lora_rank"] is None

    compared = document(cli("compare", "tiny", "--context", "16", "--json"))
    assert all(row.keys() >= ROW and "decode_ms" not in row for row in compared["rows"])
    timed = document(cli("compare", "tiny", "--context", "16", "--measure", "--json"))
    assert all(row.keys() >= ROW | {"decode_ms", "prefill_ms"} for row in timed["rows"])

    planned = document(cli("convert", "tiny", "out", *MLA, "--dry-run", "--json"))
    assert planned.keys() >= CONVERT
    assert planned["dry_run"]
    assert not (here / "out").exists()
    done = document(cli("convert", "tiny", "out", *MLA, "--calibrate", "text.txt", "--without", "spread", "--json"))
    assert done.keys() >= CONVERT
    assert done["kv_bytes_per_token_before"] == 2 * done["kv_bytes_per_token_after"]
    assert {key: planned[key] for key in CONVERT - MEASURED} == {key: done[key] for key in CONVERT - MEASURED}
    assert planned["evaluation"] is None
    assert done["evaluation"].keys() >= EVALUATE
    assert done["evaluation"]["against"] == "tiny"
    assert (document(cli("inspect", "out", "--json"))["mechanism"]) == "mla"

    evaluated = document(cli("evaluate", "out", "--against", "tiny", "--text", "text.txt", *SMALL, "--json"))
    assert evaluated.keys() >= EVALUATE
    unsaid = [name for name, value in evaluated.items() if value is None]
    # Those of `--continuations`, `--cache` and `--engine`.
    assert unsaid == ["continuations", "cache", "cache_bytes", "reference_cache_bytes", "engine"]
    alone = document(cli("evaluate", "tiny", "--text", "text.txt", *SMALL, "--json"))
    assert alone.keys() >= EVALUATE
    assert alone["kl"] is None

    continuation = document(cli("generate", "out", "--prompt", "the quick", "--max-new-tokens", "3", "--json"))
    assert continuation["prompt"] == "the quick"
    assert isinstance(continuation["text"], str)


def test_a_conversion_prints_its_proof(cli: Callable[..., Result], here: Path, tiny_llama: Path) -> None:
    result = cli("convert", "tiny", "out", *MLA, "--evaluate", "text.txt", "--evaluation-windows", "3")
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    (about,) = [at for at, line in enumerate(lines) if line.startswith("381 tokens of text.txt, windows of 128;")]
    assert lines[about + 1].split() == ["converted", "original"]
    proof, plain = lines[about + 3 : about + 8], " ".join(line.strip() for line in lines[about + 8 :])
    assert [line.split()[0] for line in proof] == ["perplexity", "cache", "decode", "perplexity", "KL"]
    assert plain.startswith("this conversion has perplexity ×")
    assert "; of the source's plain formats, " in plain
    assert "top-1 agreement" in proof[-2]
    assert "top-1 changed at" in proof[-1]
    assert "tokens of" not in cli("convert", "tiny", "out", *MLA, "--overwrite", "--no-evaluate").out
    result = cli("convert", "tiny", "out", *MLA, "--overwrite", "--format", "deepseek", "--no-evaluate")
    assert "transformers loads it as deepseek_v3" in result.out
    assert "note: float32 logits differ by at most" in result.out
    assert document(cli("inspect", "out", "--json"))["model_type"] == "deepseek_v3"


def test_a_number_json_has_no_word_for(capsys: pytest.CaptureFixture[str]) -> None:
    from headwise.cli.app import emit

    emit({"perplexity": float("inf"), "rows": [{"kl": float("nan")}]})
    assert json.loads(capsys.readouterr().out) == {"perplexity": None, "rows": [{"kl": None}]}


def test_a_terminal_without_unicode(here: Path, tiny_llama: Path) -> None:
    plain = {"PYTHONIOENCODING": "ascii"}
    result = run("compare", "tiny", "--json", env=plain)
    assert (result.returncode, result.stderr) == (0, "")
    assert "×" in json.loads(result.stdout)["rows"][0]["label"]
    assert run("compare", "tiny", env=plain).returncode == 0
    tiny_llama.rename(os.fsdecode(bytes(here) + b"/\xff"))
    result = run("inspect", os.fsdecode(b"\xff"), "--json")
    assert json.loads(result.stdout)["source"] == "\udcff"


def test_the_console_script_and_a_real_exit(here: Path, tiny_llama: Path) -> None:
    script = Path(sys.executable).with_name("headwise")
    result = subprocess.run(
        [script, "convert", "tiny", "out", "--to", "nonsense"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        result.stderr
        == "headwise: --to = 'nonsense': must be mha, gqa:K, mqa, mla or same, K the number of key–value heads\n"
    )


# --- interruption --------------------------------------------------------------------------------------------


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_ctrl_c_in_the_middle_leaves_nothing(here: Path, tiny_llama: Path, overwrite: bool) -> None:
    """No layer is solved in this conversion; a solved layer would be kept."""
    if overwrite:
        headwise.convert(tiny_llama, here / "out", to="mqa")
        config = (here / "out" / "config.json").read_bytes()
    before = left(here)

    def impatient(stage: str, done: int, total: int) -> None:
        assert (here / ".out.headwise-partial").is_dir()
        if (stage, done) == ("converting", 1):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            headwise.convert(tiny_llama, here / "out", to="mha", overwrite=overwrite, progress=impatient)
        assert left(here) == before
    if overwrite:
        assert (here / "out" / "config.json").read_bytes() == config
    headwise.convert(tiny_llama, here / "out", to="mha", overwrite=overwrite)
    assert left(here) == ["out", "text.txt", "tiny"]
    assert headwise.inspect(here / "out").mechanism == "mha"


SLOWLY = """
import time
from headwise.models.checkpoints import FolderWriter
from headwise.cli import main

add = FolderWriter.add
def slowly(self, name, tensor):
    add(self, name, tensor)
    print("added", flush=True)
    time.sleep(0.2)
FolderWriter.add = slowly
main()
"""


SLOWLY_ON_TEXT = """
import time
from headwise.cli import main
from headwise.conversion.storage import Activations

commit = Activations.commit
def slowly(self):
    commit(self)
    print("committed", flush=True)
    time.sleep(0.5)
Activations.commit = slowly
main()
"""


@pytest.mark.parametrize("more", [(), ("--format", "deepseek")], ids=["headwise", "deepseek"])
def test_stopping_it_says_that_finished_work_is_kept(
    here: Path, tiny_llama: Path, cli: Callable[..., Result], more: tuple[str, ...]
) -> None:
    command = ("convert", "tiny", "out", *MLA, "--calibrate", "text.txt", "--no-evaluate", *more)
    with warm.start("-c", SLOWLY_ON_TEXT, *command) as process:
        process.wait_for("committed\ncommitted\n")  # the embeddings', and a layer's
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    kept = "what is done is kept in .out.headwise-partial, and the same command continues from there"
    line = f"headwise: interrupted; {kept}\n"
    assert (process.returncode, stderr) == (130, line)
    assert left(here) == [".out.headwise-partial", "text.txt", "tiny"]
    result = cli(*command)
    assert (result.status, result.err) == (0, "")
    assert left(here) == ["out", "text.txt", "tiny"]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopping_it_leaves_nothing(
    here: Path, tiny_llama: Path, cli: Callable[..., Result], stop: signal.Signals
) -> None:
    """Ctrl-C, and what `timeout` and job schedulers send."""
    with warm.start("-c", SLOWLY, "convert", "tiny", "out", *MLA) as process:
        process.wait_for("added\n")
        assert left(here) == [".out.headwise-partial", "text.txt", "tiny"]
        process.send_signal(stop)
        _, stderr = process.communicate()
    assert (process.returncode, stderr) == (130, "headwise: interrupted\n")
    assert left(here) == ["text.txt", "tiny"]
    assert cli("convert", "tiny", "out", *MLA, "--no-evaluate").status == 0


def test_what_a_kill_leaves_the_next_run_clears(here: Path, tiny_llama: Path, cli: Callable[..., Result]) -> None:
    with warm.start("-c", SLOWLY, "convert", "tiny", "out", *MLA) as process:
        process.wait_for("added\n")
        process.send_signal(signal.SIGKILL)
    assert left(here) == [".out.headwise-partial", "text.txt", "tiny"]
    assert cli("convert", "tiny", "out", *MLA, "--no-evaluate").status == 0
    assert left(here) == ["out", "text.txt", "tiny"]


# --- a full disk ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 10_000])
def test_a_full_disk(refused: Callable[..., str], tiny_llama: Path, size: int) -> None:
    """At a companion file, and in the middle of a shard."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        line = refused("convert", "tiny", "new/out", *MLA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert line.startswith("headwise: output = 'new/out': could not be written: ")


def test_too_little_room_is_known_before_it_is_filled(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], tiny_llama: Path
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000}))
    line = refused("convert", "tiny", "out", *MLA)
    assert "output = 'out': needs 0.07 GB of disk and 0.00 GB are free" in line


# --- progress ------------------------------------------------------------------------------------------------


def test_progress_is_silent_until_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Result], here: Path, tiny_llama: Path
) -> None:
    assert cli("convert", "tiny", "out", *MLA).err == ""
    monkeypatch.setattr("headwise.cli.app._PATIENCE", 0.0)
    result = cli("convert", "tiny", "out", *MLA, "--overwrite", "--json")
    assert "converting" in result.err
    json.loads(result.out)


def test_a_terminal_is_shown_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.cli.app._PATIENCE", 0.0)
    terminal = PrintableConsole(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr("headwise.cli.app.err", terminal)
    with progress_bar() as progress:
        progress("measuring", 0, 4)
        assert isinstance(progress, TimedProgress)
        progress.expect({"measuring": 1, "converting": 7900})
        progress("measuring", 4, 4)
        progress("converting", 0, 4)
    shown = terminal.file.getvalue()
    assert "2 h left" in shown
    assert "measuring" in shown


def test_how_a_training_goes_is_shown_beside_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.cli.app._PATIENCE", 0.0)
    terminal = PrintableConsole(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr("headwise.cli.app.err", terminal)
    with progress_bar() as progress:
        assert isinstance(progress, TrainingProgress)
        progress("healing", 1, 2)
        progress.report_training("healing", loss=0.12345, tokens_per_second=1234.5, seconds_left=180)
    assert "loss 0.1235, 1,234 tokens/s, 3 min left" in terminal.file.getvalue()


def test_a_file_is_not() -> None:
    """The estimate takes time, and nobody watches."""
    with progress_bar() as progress:
        assert not isinstance(progress, TimedProgress)


def test_an_error_after_a_long_time_is_still_one_line(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], tiny_llama: Path, edit_weights: Any
) -> None:
    monkeypatch.setattr("headwise.cli.app._PATIENCE", 0.0)
    edit_weights(lambda tensors: tensors["model.norm.weight"][3].fill_(float("nan")) and None)
    assert "holds NaN" in refused("convert", "tiny", "out", *MLA)


@pytest.mark.parametrize("error", [None, KeyError("a bug")], ids=str)
def test_a_bar_that_is_about_to_appear_does_not_outlive_the_work(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    start, is_starting, bars = rich.progress.Progress.start, threading.Event(), []

    def start_slowly(bar: rich.progress.Progress) -> None:
        is_starting.set()
        time.sleep(0.2)
        start(bar)
        bars.append(bar)

    monkeypatch.setattr("headwise.cli.app._PATIENCE", 0.0)
    monkeypatch.setattr(rich.progress.Progress, "start", start_slowly)
    with suppress(KeyError), progress_bar():
        assert is_starting.wait(10)
        if error is not None:
            raise error
    assert [bar.live.is_started for bar in bars] == [False]


def test_inspect_answers_within_a_second(tiny_llama: Path) -> None:
    best = min(_processor_seconds(tiny_llama) for _ in range(3))
    assert best < 1.0


def _processor_seconds(folder: Path) -> float:
    """It waits for nothing, so this is how long it takes on a machine that does nothing else."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run("inspect", str(folder / "config.json")).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_an_encoder_is_converted_and_caches_nothing(cli: Callable[..., Result], here: Path) -> None:
    save_family(here / "encoder", "bert")
    result = cli("convert", "encoder", "out", "--to", "gqa:2")
    assert result.status == 0
    assert "cache a token" not in result.out
    assert "run it with headwise.load, or in transformers after import headwise.hf" in result.out
    assert "note: not evaluated: model_type = 'bert': is an encoder" in result.out
    assert "every token sees every other" in cli("inspect", "out").out
    assert "model_type = 'headwise_bert': is an encoder" in cli("generate", "out", "--prompt", "a").err


def test_the_share_of_codes_is_of_a_bfloat16_cache(cli: Callable[..., Result], here: Path, tiny_llama: Path) -> None:
    options = ("--to", "same", "--bits", "4", "--calibrate", "text.txt", "--dry-run")
    report = document(cli("convert", "tiny", "out", *options, "--json"))
    assert report["coded"]
    share = report["kv_bytes_per_token_after"] / (report["kv_bytes_per_token_before"] / 2)  # the model is float32
    assert f" B in codes ({share:.1%} of bfloat16)" in cli("convert", "tiny", "out", *options).out


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_that_wait_sleep_unless_the_user_says_otherwise(given: str | None) -> None:
    """OpenMP itself tells, when torch loads it, what it has read from the environment."""
    code = "import sys\nfrom headwise.cli import main\ntry: main(['--help'])\nexcept SystemExit: import torch"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "TRUE"} | ({} if given is None else {"OMP_WAIT_POLICY": given})
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert f"OMP_WAIT_POLICY = '{given or 'PASSIVE'}'" in process.stderr
