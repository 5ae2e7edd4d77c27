"""What the pages show is run: every command must succeed, every Python block too, and print what the page says.

One process runs the blocks of a page, in their order and in one folder, so that a block finds what an earlier one
wrote. What a page takes for granted (a model, a text) is put in place. The tables say what is changed, and why.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
PAGES = [
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "docs/*.md", "docs/how-to/*.md", "docs/why/*.md", "docs/mechanisms/*.md")
    for path in sorted(ROOT.glob(pattern))
]

BUNDLED = "smollm2-135m"
"""The pages' model. Converting its 135M parameters takes minutes, so that this name means a GGUF file of a tiny
random llama, except in commands of `CONFIG_ALONE`."""

WRITES = {"convert", "calibrate", "heal", "migrate", "export", "prepare"}
"""Commands whose second argument is what they write."""

CONFIG_ALONE = {"inspect", "compare", "complexity", "predict", "advise", "design", "guide"}
"""Commands that read a config alone take no time: they run on the real model, and print what the page shows."""

PUT_IN_PLACE = {
    # Models of the reader's: the tiny llama as a folder.
    "my-model": "model",
    "source": "model",
    "MODEL": "model",
    # A file with heads that blocks of 32 channels divide.
    "model.gguf": "heads.gguf",
    # What some pages take as converted already: the same folder.
    "half": "model",
    "mla": "model",
    # An encoder and what it was converted to.
    "minilm": "encoder",
    "minilm-gqa": "encoder",
    # Texts of the reader's. Some are calibrated on and others evaluated on, so they are not the same.
    "text.txt": "text 0",
    "study.txt": "text 0",
    "demo/study.txt": "text 0",
    "other.txt": "text 2",
    "exam.txt": "text 1",
    "wiki.txt": "text 1",
    "brown.txt": "text 2",
    # Tasks.
    "piqa.jsonl": "choices",
    "boolq.jsonl": "retrieval",
}
"""Names of files that a page's reader has, and what stands there, where a block names them and none wrote them
before."""

REDUCED = {
    "--calibration-tokens": 512,
    "--tokens": 512,
    "--heal-tokens": 512,
    "--windows": 1,
    "--evaluation-windows": 1,
    "--planted": 160,
    "--max-new-tokens": 4,
    "--measurements": 2,
    "--continuations": 1,
    "--batch": 1,
}
"""The largest numbers for options that only say how much is read or made, in commands that read weights."""

ADDED = {
    "frontier": ("--target", ("int8", "mla:0.5"), "tries a ladder of more than twenty sizes"),
    "heal": ("--tokens", ("512",), "reads a million tokens"),
    "migrate": ("--target", ("mla:0.75",), "makes six conversions, or as many as it takes"),
}
"""An option that a command gets if it does not have it, its values, and what it would do otherwise."""

WRITTEN_TWICE = {
    ("README.md", "smollm2-small"): "the Python block makes in another way what the command made",
}
"""Folders that are removed before a Python block of a page writes them again."""

REPLACED = {"--max-quality-loss": ("9", "the loss of a random model means nothing")}
"""Options with another value in commands that read weights, and why."""

SHORTENED = {
    "--target mla:0.5 --target mqa --calibrate": (
        "--target mqa --calibrate",
        "makes twenty conversions, by all methods",
    ),
}
"""Parts of commands, what stands in their place, and why."""

LEFT_OUT = {"--device": "no GPU is needed to test a page"}
"""Options that are left out, with their values."""

NOT_RUN = {
    "make demo": "builds an environment, and converts",
    "make test": "runs this test",
    "llama-server -m half/model.gguf": "another program, and a server",
    "python -m benchmarks.frontier --output build/frontier": "reads the results that a clone of the repository keeps",
    "headwise audit --quick --html audit.html": "takes ten minutes",
    "headwise profile --check --places 12": "measures the machine: minutes",
    "headwise predict smollm2-135m --hardware this-machine --hardware-file headwise-machine.toml": "reads its file",
    "headwise bench mechanisms --plot mechanisms.svg": "measures speed: minutes",
    "headwise bench decode --quick": "measures speed: minutes",
    "headwise bench prefill --quick": "measures speed: minutes",
    "headwise bench module --quick": "measures speed: minutes",
    "headwise bench generate smollm2-135m": "measures speed: minutes",
    "headwise doctor": "measures speed: a minute",
    "headwise evaluate model.gguf --engine llama.cpp --cache q4_0 --text wiki.txt --windows 2": "asks for llama.cpp",
    "headwise evaluate model.gguf --engine llama.cpp --cache q8_0 --cache q4_0 --text wiki.txt": "too",
    "headwise evaluate prepared.gguf --against model.gguf --engine llama.cpp --cache q4_0 --text wiki.txt": "too",
    "headwise prepare model.gguf out.gguf --for llama.cpp:q4_0 --evaluate wiki.txt --engine-python ENV/bin/python": (
        "asks for llama.cpp"
    ),
    "headwise evaluate my-model --engine mlx-lm --cache 4 --text wiki.txt --engine-python ENV/bin/python": "MLX-LM",
    "llama-server -m gguf/model.gguf": "another program, and a server",
    "llama-server -m mqa.gguf": "another program, and a server",
    "llama-server -m prepared.gguf -fa on -ctk q4_0 -ctv q4_0": "another program, and a server",
    "vllm serve ./mla": "another program, and a server",
    "headwise serve ./half --port 8000": "a server",
    "vllm serve ./coded": "another program, and a server",
    "python -m vllm.entrypoints.openai.api_server --model ./coded --port 8000": "another program, and a server",
}
"""Commands that are not run, as a page has them but for what stands behind them as a comment, and why."""

OTHER_PROGRAMS = {"pip": "installs", "torchrun": "starts processes", "curl": "asks a server"}
"""Programs that no page's test starts, whatever their arguments."""

BEFORE = {
    "docs/speed.md": """\
from transformers import AutoTokenizer
inputs = AutoTokenizer.from_pretrained("my-model")("a", return_tensors="pt")
""",
}
"""Definitions that the Python blocks of a page leave to the reader."""

LANGUAGES = {"python", "console", "text", "toml", "json", ""}
"""Of fenced blocks: one in another language would silently not be run."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first line, and its text."""

    language: str
    line: int
    text: str

    @property
    def end(self) -> int:
        """The number of the line that ends it."""
        return self.line + self.text.count("\n")


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = (ROOT / page).read_text(encoding="utf-8").split("\n")
    start: int | None = None
    for number, line in enumerate(lines):
        fence = re.match(r"( *)```(\S*)", line)
        if fence is None:
            continue
        if start is None:
            start, indent, language = number + 1, len(fence[1]), fence[2]
        else:
            yield Block(language, start + 1, "\n".join(line[indent:] for line in lines[start:number]) + "\n")
            start = None


def commands(block: Block) -> Iterator[tuple[int, str, str]]:
    """The commands of a block, each with its line and what the page shows of its output."""
    lines = iter(enumerate(block.text.split("\n"), block.line))
    found: list[tuple[int, str, list[str]]] = []
    for number, line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command = command[:-1] + next(lines)[1]
            found.append((number, " ".join(command.split()), []))
        elif found:
            found[-1][2].append(line)
    for number, command, shown in found:
        yield number, command, "\n".join(shown)


def written(command: str) -> str:
    """A command without the comment behind it."""
    return re.sub(r"\s+# .*", "", command)


def not_run(command: str) -> bool:
    """Whether a table says so."""
    return written(command) in NOT_RUN or command.split(maxsplit=1)[0] in OTHER_PROGRAMS


RUN = [page for page in PAGES if any(block.language == "python" or "$ " in block.text for block in blocks(page))]


@pytest.fixture(scope="session")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is put in place: tiny models, texts and tasks."""
    import torch
    from transformers import BertConfig, BertModel

    import headwise
    from headwise.conversion import export_gguf
    from headwise.measure.texts import language_reference
    from tests.byte_level import save_byte_level
    from tests.real_models import save_character_tokenizer, tiny_model

    folder = tmp_path_factory.mktemp("given")
    sizes = {"vocab_size": 324, "max_position_embeddings": 256, "num_attention_heads": 9, "hidden_size": 72}
    sizes |= {"num_hidden_layers": 1}
    wide = {**sizes, "num_attention_heads": 4, "hidden_size": 128}
    for name, kv_heads, its in (("model", 3, sizes), ("heads", 2, wide)):
        tiny_model("llama", num_key_value_heads=kv_heads, **its).float().save_pretrained(folder / name)
        save_byte_level(folder / name, 320, "smollm")
        for part in ("tokenizer.json", "tokenizer_config.json"):
            file = folder / name / part
            file.write_text(file.read_text().replace("</s>", "<|endoftext|>"))  # as SmolLM2 calls it
    headwise.convert(folder / "model", folder / "gguf", to="gqa:3", format="gguf", evaluate=False)
    export_gguf(folder / "heads", folder / "heads.gguf", outtype="q8_0")
    torch.manual_seed(0)
    bert = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=98, max_position_embeddings=40, **bert)).save_pretrained(folder / "encoder")
    save_character_tokenizer(folder / "encoder", 98)
    for index in range(3):
        text = language_reference(slice(index, None, 3))
        (folder / f"text {index}").write_text(text[:900], encoding="utf-8")
    choices = [{"question": f"{n} + 1?", "choices": [str(n), str(n + 1)], "answer": 1} for n in range(3)]
    retrieval = [{"question": f"what of {word}", "passage": f"it is {word}"} for word in ("a", "b", "c")]
    for name, rows in {"choices": choices, "retrieval": retrieval}.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page: str, given: Path, tmp_path: Path) -> None:
    process = warm.context().Process(target=run_page, args=(page, given, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0, (tmp_path / "log").read_text(encoding="utf-8", errors="replace")


def test_every_block_that_is_listed_is_there() -> None:
    there = {written(command) for page in PAGES for block in blocks(page) for _, command, _ in commands(block)}
    assert set(NOT_RUN) <= there
    assert all(any(part in command for command in there) for part in SHORTENED)
    assert set(BEFORE) <= set(PAGES)


def test_no_block_is_overlooked_for_its_language() -> None:
    assert {block.language for page in PAGES for block in blocks(page)} <= LANGUAGES


def test_what_a_page_shows_is_compared_with_what_is_printed() -> None:
    printed = "a    1.002 ms\n\nb  3 heads\nc 12,345 of 2e-17\n"
    for shown in (printed, "a 1.001 ms\n…\nc 12,345 of 3e-16", "3 heads"):
        assert same(shown, printed)
    for shown in ("a 1.102 ms", "b 4 heads", "3 heads\n…\na", "12,346", "3 heads 12,345"):
        assert not same(shown, printed), shown


def run_page(page: str, given: Path, folder: Path) -> None:
    """Run the blocks of a page in a folder and in this process, which exists for nothing else, and keep a log."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ |= {"MPLBACKEND": "agg", "COLUMNS": "120"}
    os.chdir(folder)
    Page(page, given).run()


class Page:
    """A page that is run, in a process and a folder of its own."""

    def __init__(self, page: str, given: Path) -> None:
        self.page, self.given = page, given
        self.namespace: dict[str, Any] = {"__name__": "__main__"}

    def run(self) -> None:
        """Run every block that can be run."""
        if self.page in BEFORE:
            self._python(Block("python", 1, BEFORE[self.page]))
        printed, end = None, 0
        for block in blocks(self.page):
            if block.language == "python":
                printed, end = self._python(block), block.end
            elif block.language == "console" or block.text.startswith("$ "):
                for line, command, shown in commands(block):
                    if not not_run(command):
                        self._command(line, command, shown)
            elif block.language == "text" and printed is not None and block.line == end + 3:
                assert same(block.text, printed), f"{self.page}:{block.line}: prints\n{printed}"

    def _python(self, block: Block) -> str | None:
        """Run a block, and return what it printed if that is the page's own."""
        for page, name in WRITTEN_TWICE:
            if page == self.page:
                shutil.rmtree(name)
        is_real = not self._put_in_place(quoted(block.text)) and BUNDLED not in block.text
        code = compile("\n" * (block.line - 1) + block.text, str(ROOT / self.page), "exec")
        with self._bundled(), contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, self.namespace)
        return printed.getvalue() if is_real else None

    def _command(self, line: int, command: str, shown: str) -> None:
        for part, (instead, _) in SHORTENED.items():
            command = command.replace(part, instead)
        words = shlex.split(command, comments=True)
        assert words[0] == "headwise", f"{self.page}:{line}: {command}: another program, and not listed"
        is_real = words[1] in CONFIG_ALONE
        if not is_real:
            words = reduced(words)
        outputs = {words[3]} if words[1] in WRITES else set()
        is_real &= not self._put_in_place(set(words) - outputs)
        start = time.perf_counter()
        with (
            contextlib.nullcontext() if is_real else self._bundled(),
            contextlib.redirect_stdout(io.StringIO()) as printed,
            contextlib.redirect_stderr(io.StringIO()) as complaints,
        ):
            status = status_of(words[1:])
        print(f"{time.perf_counter() - start:.1f} s: {shlex.join(words)}", flush=True)
        said = f"{self.page}:{line}: {shlex.join(words)}\n{printed.getvalue()}{complaints.getvalue()}"
        assert status == 0, said
        assert not is_real or same(shown, printed.getvalue()), said

    def _put_in_place(self, words: set[str]) -> bool:
        """Put in place what the tables name among these words; whether any word is now a file of this folder."""
        named = {word.removeprefix("./") for word in words}
        for name in named & set(PUT_IN_PLACE):
            there, path = self.given / PUT_IN_PLACE[name], Path(name)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                (shutil.copytree if there.is_dir() else shutil.copyfile)(there, path)
        return any(os.path.exists(name) for name in named)

    def _bundled(self) -> contextlib.AbstractContextManager[Any]:
        return mock.patch(
            "headwise.models.specs.sources.bundled_gguf", return_value=self.given / "gguf" / "model.gguf"
        )


def quoted(code: str) -> set[str]:
    """What stands in quotes."""
    return set(re.findall(r"[\"']([^\"'\n]+)[\"']", code))


def reduced(words: list[str]) -> list[str]:
    """A command of less work; see the tables."""
    words = list(words)
    for option in LEFT_OUT:
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    for index, word in enumerate(words[:-1]):
        if word in REPLACED:
            words[index + 1] = REPLACED[word][0]
        if word in REDUCED:
            words[index + 1] = str(min(REDUCED[word], int(words[index + 1])))
    if words[1] in ADDED:
        option, values, _ = ADDED[words[1]]
        values = values[:1] if "--quick" in words else values  # which predicts formats alone
        words += [] if option in words else [word for value in values for word in (option, value)]
    return words


def status_of(arguments: list[str]) -> Any:
    """Run the command line in this process."""
    from headwise.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return stopped.value.code


WORD = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?|[^\s\d]+")


def same(shown: str, printed: str) -> bool:
    """Whether what a page shows is what was printed, part by part where the page leaves out lines by ``…``.

    Spaces and ends of lines do not count. Numbers that are not whole may differ by rounding on another processor.
    """
    words = WORD.findall(printed)
    for part in re.split(r"^\s*…\s*$", shown, flags=re.MULTILINE):
        wanted = WORD.findall(part)
        starts = range(len(words) - len(wanted) + 1)
        found = next((start for start in starts if all(map(alike, wanted, words[start:]))), None)
        if found is None:
            return False
        words = words[found + len(wanted) :]
    return True


def alike(wanted: str, word: str) -> bool:
    """Whether two words are equal, or the same fraction but for rounding."""
    if wanted == word or not all("." in each or "e" in each for each in (wanted, word)):
        return wanted == word
    try:
        numbers = [float(each.replace(",", "")) for each in (wanted, word)]
    except ValueError:
        return False
    return max(map(abs, numbers)) < 1e-6 or numbers == pytest.approx(numbers[::-1], rel=0.02)
