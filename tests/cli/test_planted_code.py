"""Code that is planted in every place from which a program could run it: no command runs any of it."""

from __future__ import annotations

import html
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2
import pytest
import torch
import yaml

import headwise
from headwise.errors import CheckpointError
from headwise.models.checkpoints import chat_text, load_tokenizer
from tests.cli.conftest import Result
from tests.models.checkpoints.tiny_gguf import write_tiny_gguf

Run = Callable[..., Result]

ESCAPE = "{{ cycler.__init__.__globals__.os.mkdir('%s') }}"
"""A chat template that makes a folder wherever it is rendered outside a sandbox."""
PICKLES = (
    *("pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt", "adapter_model.bin"),
    *("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"),
    *("vocab.pkl", "tokenizer.pkl", "vocab.bin", "statistics.pt"),
)
MODULES = (
    *("modeling_evil", "configuration_evil", "tokenization_evil", "processing_evil", "tiny", "handler", "setup"),
    *("custom_generate/generate", "sitecustomize", "kernels", "flash_attn", "texts/texts", "__init__"),
)
EVALUATED = ("--window", "16", "--windows", "2", "--context", "8")
CALIBRATED = ("--calibrate", "tiny/texts", "--calibration-tokens", "256")


class _Bomb:
    """Its pickle makes a folder where it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The folder that planted code would make."""
    return tmp_path / "ran"


@pytest.fixture
def mined(tiny_llama: Path, here: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder that loads as it is, with code in each place beside the weights."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # who is asked whether to run code says yes
    for name in PICKLES:
        torch.save({"weight": _Bomb(marker)}, tiny_llama / name)
    for folder in ("custom_generate", "texts", "additional_chat_templates", "1_Evil"):
        (tiny_llama / folder).mkdir()
    for name in MODULES:
        (tiny_llama / f"{name}.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Evil: pass\n")
    (tiny_llama / "custom_generate/requirements.txt").write_text("evil @ file:///evil\n")
    (tiny_llama / "texts/README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: ../vocab.pkl\n---\n"
    )
    words = {"text": "the quick brown fox jumps over the lazy dog. " * 20}
    (tiny_llama / "texts/a.jsonl").write_text(json.dumps(words) + "\n")
    _edit(
        tiny_llama / "config.json",
        auto_map={f"Auto{name}": "modeling_evil.Evil" for name in ("Config", "Model", "ModelForCausalLM")},
        custom_generate="./custom_generate",
        custom_pipelines={"text-generation": {"impl": "modeling_evil.Evil", "pt": ["AutoModel"]}},
    )
    _edit(
        tiny_llama / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]},
        processor_class="Evil",
        chat_template=ESCAPE % marker,
        vocab_file="vocab.pkl",
    )
    _edit(
        tiny_llama / "generation_config.json", custom_generate="./custom_generate", auto_map={"generate": "tiny.Evil"}
    )
    for name in ("preprocessor_config", "processor_config", "video_preprocessor_config", "feature_extractor"):
        _edit(tiny_llama / f"{name}.json", auto_map={"AutoProcessor": "processing_evil.Evil"}, processor_class="Evil")
    (tiny_llama / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "1_Evil", "type": "modeling_evil.Evil"}]'
    )
    (tiny_llama / "sentence_bert_config.json").write_text('{"model_args": {"trust_remote_code": true}}')
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (tiny_llama / name).write_text(ESCAPE % marker)
    call = f"!!python/object/apply:os.mkdir ['{marker}']"
    (tiny_llama / "README.md").write_text(f"---\nlicense: {call}\n---\n")
    return tiny_llama


def _edit(file: Path, **changes: Any) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | changes))


def test_what_is_planted_would_run(mined: Path, marker: Path) -> None:
    """Elsewhere: the other tests would find nothing if it did not."""
    for run in (
        lambda: torch.load(mined / "pytorch_model.bin", weights_only=False),
        lambda: exec((mined / "modeling_evil.py").read_text(), {}),
        lambda: jinja2.Template((mined / "chat_template.jinja").read_text()).render(),
        lambda: yaml.unsafe_load((mined / "README.md").read_text().split("---")[1]),
    ):
        run()
        marker.rmdir()


def test_no_command_runs_what_is_planted(cli: Run, mined: Path, marker: Path) -> None:
    """Each command that reads a model, on one that has code wherever it can be."""
    to_mla = ("--to", "mla", "--kv-budget", "0.5", "--without", "refine", "--without", "refit")
    healed = ("--tokens", "256", "--window", "32", "--batch", "2", "--no-evaluate", "--optimizer", "adamw")
    for command in (
        ("inspect", "tiny"),
        ("compare", "tiny"),
        ("complexity", "tiny"),
        ("predict", "tiny", "--hardware", "h100"),
        ("advise", "tiny", "--hardware", "h100"),
        ("count", "tiny"),
        ("engines", "tiny"),
        ("convert", "tiny", "mla", *to_mla, *CALIBRATED, "--no-evaluate"),
        ("engines", "mla"),
        ("evaluate", "mla", "--against", "tiny", "--text", "text.txt", *EVALUATED),
        ("generate", "tiny", "--prompt", "a", "--max-new-tokens", "2"),
        ("heal", "mla", "healed", "--teacher", "tiny", "--text", "tiny/texts", *healed),
        ("calibrate", "tiny", "statistics", *CALIBRATED),
        ("prepare", "tiny", "prepared", "--for", "vllm:fp8", *CALIBRATED),
        ("frontier", "tiny", "--quick", *CALIBRATED, "--output", "quick", "--target", "int4"),
    ):
        done = cli(*command)
        assert not marker.exists(), command
        assert done.status == 0, (command, done)


def test_an_encoder_is_read_without_its_code(mined: Path, marker: Path) -> None:
    from headwise.measure.evaluation.retrieval import load_encoder

    with pytest.raises(CheckpointError, match=r"^modules.json = 'Evil': must be Transformer, Pooling or Normalize"):
        load_encoder(mined)
    (mined / "modules.json").unlink()
    load_encoder(mined)
    assert not marker.exists()


@pytest.mark.parametrize("name", PICKLES[:5])
def test_a_pickle_in_the_place_of_the_weights(cli: Run, mined: Path, marker: Path, name: str) -> None:
    (mined / "model.safetensors").unlink()
    for other in {*PICKLES} - {name}:
        (mined / other).unlink()
    (mined / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    for command in (("convert", "tiny", "out", "--to", "mqa"), ("evaluate", "tiny", "--text", "text.txt")):
        assert f"weights = '{name}': is a pickle, which can run code" in cli(*command).err
    # By the name of another format, in the place that it has in an index, too.
    for file in ("model.safetensors", "model.gguf"):
        shutil.copy(mined / name, mined / file)
        source = "tiny" if file.endswith("safetensors") else "tiny/model.gguf"
        assert cli("convert", source, "out", "--to", "mqa").status == 2
        (mined / file).unlink()
    (mined / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert "is not a whole safetensors file" in cli("convert", "tiny", "out", "--to", "mqa").err
    assert not marker.exists()


def test_a_pickle_in_the_place_of_statistics_codes_and_results(cli: Run, mined: Path, marker: Path) -> None:
    for file in ("kv_cache.safetensors", "measured.json", "text.txt", "rows.jsonl", "rows.parquet", "hardware.toml"):
        with (mined / file).open("wb") as opened:
            pickle.dump(_Bomb(marker), opened)
    (mined.parent / "statistics").mkdir()
    shutil.copy(mined / "kv_cache.safetensors", mined.parent / "statistics/layer-00000.safetensors")
    for command in (
        ("generate", "tiny", "--prompt", "a"),
        ("advise", "tiny", "--hardware", "h100", "--measured", "tiny/measured.json"),
        ("predict", "tiny", "--hardware", "x", "--hardware-file", "tiny/hardware.toml"),
        ("convert", "tiny", "out", "--to", "mla", "--kv-budget", "0.5", "--statistics", "statistics"),
        *(("calibrate", "tiny", "out", "--calibrate", f"tiny/{name}") for name in ("rows.jsonl", "rows.parquet")),
    ):
        done = cli(*command)
        assert done.status == 2, (command, done)
        assert done.err.splitlines()[-1].startswith("headwise: "), (command, done)
        assert not marker.exists(), command


# --- names -----------------------------------------------------------------------------------------------------


MARKUP = "[red]</script><script>evil()</script>a|b\\|<img src=x>`![c](javascript:d)\u202e\x1b[31m"
"""A name that is markup to rich and to browsers, Markdown that leaves its cell, and control characters."""
RAW = re.compile("<script>evil|<img src=x|\x1b|\u202e")


def test_names_are_text_wherever_they_are_shown(cli: Run, here: Path, tiny_llama: Path) -> None:
    """On the terminal, on pages, in pictures and on cards."""
    pytest.importorskip("matplotlib")
    folder = here / MARKUP.replace("/", "")
    folder.mkdir()
    model, text, other, out = (folder / f"{MARKUP.replace('/', '')} {name}" for name in ("m", "t", "e", "o"))
    tiny_llama.rename(model)
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    other.write_text("pack my box with five dozen liquor jugs and more. " * 20)
    calibrated = ("--calibrate", text, "--calibration-tokens", "256", "--calibration-window", "32")
    for command in (
        ("inspect", model),
        ("compare", model, "--plot", folder / "c.svg"),
        ("evaluate", model, "--text", other, *EVALUATED, "--against", model, "--html", folder / "e.html"),
        ("convert", model, out, "--to", "mqa", *calibrated, "--evaluate", other, "--evaluation-windows", "2"),
    ):
        done = cli(*command)
        assert done.status == 0, (command, done)
        assert not re.search("[\x1b\u202e]", done.out), (command, done)
        assert not done.err, command
    for picture in folder.glob("*.svg"):
        ElementTree.parse(picture)
    page, card = (folder / "e.html").read_text(), (out / "README.md").read_text()
    assert not RAW.search(page)
    assert "evil()" in html.unescape(page)
    assert "<img src=x" in card
    for cell in _cells(card):
        left = re.sub(r"\\[\\<>\[\]|`*]|`[^`]*`", "", cell)  # without code, and what Markdown escapes
        assert not RAW.search(left), cell
        assert "](" not in left, cell


def _cells(markdown: str) -> list[str]:
    """Lines, and the cells of the tables' lines, in each of which code begins and ends."""
    lines = markdown.splitlines()
    cells = [re.split(r"(?<!\\)(?:\\\\)*\|", line) if line.startswith("|") else [line] for line in lines]
    return [cell for line in cells for cell in line]


# --- chat templates --------------------------------------------------------------------------------------------


ASKED = [{"role": "user", "content": "the cat"}]


@pytest.mark.parametrize(
    "template",
    [
        ESCAPE,
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{%% set file = '%s' %%}",
        "{{ self.__init__.__globals__.__builtins__.open('%s', 'w') }}",
        "{{ (lipsum | attr('__globals__'))['os'].mkdir('%s') }}",
        "{{ messages.append('%s') }}",
        "{%% include '%s' %%}",
        "{%% for a in range(10 ** 9) %%}%s{%% endfor %%}",
        "{{ raise_exception('\x1b[31m %s') }}",
        "{{ unknown.field }}%s",
        "{%% if %s",
    ],
)
def test_a_chat_template_stays_in_its_sandbox(tiny_llama: Path, marker: Path, template: str) -> None:
    (tiny_llama / "chat_template.jinja").write_text(template % marker)
    with pytest.raises(CheckpointError, match=r"^tokenizer = .* could not write a chat by its template: "):
        chat_text(load_tokenizer(tiny_llama), ASKED)
    assert not marker.exists()


def test_a_chat_template_in_a_gguf(tiny_llama_folder: Path, tmp_path: Path, marker: Path) -> None:
    from gguf import GGUFWriter

    file = tmp_path / "tiny.gguf"
    with pytest.MonkeyPatch.context() as patch:
        finish = GGUFWriter.write_header_to_file

        def write(self: Any, *args: Any, **named: Any) -> None:
            self.add_string("general.name", "\x1b[31m<script>")
            self.add_string("tokenizer.ggml.model", "gpt2")
            self.add_array("tokenizer.ggml.tokens", [f"{number}" for number in range(64)])
            self.add_array("tokenizer.ggml.merges", ["1 2"])
            self.add_chat_template(ESCAPE % marker)
            finish(self, *args, **named)

        patch.setattr(GGUFWriter, "write_header_to_file", write)
        write_tiny_gguf(tiny_llama_folder, file)
    tokenizer = load_tokenizer(file)
    assert "cycler" in tokenizer.chat_template
    with pytest.raises(CheckpointError, match="could not write a chat by its template"):
        chat_text(tokenizer, ASKED)
    assert headwise.inspect(file).num_layers == 2
    assert not marker.exists()
