"""Everything in a model folder that would run code, or be read unchecked, is refused before transformers sees it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import LlamaConfig

import headwise
import headwise.hf
from headwise.errors import CheckpointError
from headwise.measure.evaluation.retrieval import load_encoder
from headwise.models.checkpoints import FolderCheckpoint, load_tokenizer, refuse_unsafe
from headwise.runtime.hf import LayerwiseModel, stock_config

Edit = Callable[..., None]

KERNEL = "owner/kernel@main:function"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that transformers asked the hub for, on a machine that has its ``kernels`` package."""
    from transformers.integrations import hub_kernels

    requests: list[str] = []

    def fetch(name: str, *_: Any, **__: Any) -> None:
        requests.append(name)
        raise ValueError("no hub here")

    monkeypatch.setattr(hub_kernels, "get_kernel", fetch)
    for module in (hub_kernels, transformers.modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda *_, **__: True)
    return requests


KERNELS = [
    ("attn_implementation", {"attn_implementation": KERNEL}),
    ("_attn_implementation", {"_attn_implementation": KERNEL}),
    ("_attn_implementation_internal", {"_attn_implementation_internal": KERNEL}),
    ("_attn_implementation", {"_attn_implementation": f"paged|{KERNEL}"}),
    ("_attn_implementation", {"_attn_implementation": " owner/kernel "}),
    ("_attn_implementation", {"_attn_implementation": "owner/kernel\n"}),
    ("attn_implementation", {"attn_implementation": {"": KERNEL}}),
    ("attn_implementation", {"attn_implementation": {"text_config": {"": "owner/kernel"}}}),
    ("attn_implementation", {"attn_implementation": ["sdpa", KERNEL]}),
    ("experts_implementation", {"experts_implementation": KERNEL}),
    ("_experts_implementation", {"_experts_implementation": KERNEL}),
    ("_experts_implementation_internal", {"_experts_implementation_internal": KERNEL}),
    ("text_config._attn_implementation", {"text_config": {"_attn_implementation": KERNEL}}),
    ("per_layer_config.0._attn_implementation", {"per_layer_config": {"0": {"_attn_implementation": KERNEL}}}),
    ("per_layer_config.1.attn_implementation", {"per_layer_config": [{}, {"attn_implementation": KERNEL}]}),
    ("attribute_map", {"attribute_map": {"other": "_attn_implementation_internal"}, "other": KERNEL}),
    ("__dict__", {"__dict__": {"other": KERNEL}}),
]
"""The field that is named, and a config's changes; several of them reach transformers' own loading of kernels."""


@pytest.mark.parametrize(("field", "changes"), KERNELS, ids=str)
def test_no_kernel_is_fetched(
    tiny_llama: Path, tmp_path: Path, edit_config: Edit, fetched: list[str], field: str, changes: dict[str, Any]
) -> None:
    edit_config(**changes)
    for use in (
        lambda: headwise.load(tiny_llama),
        lambda: headwise.convert(tiny_llama, tmp_path / "out", to="mla", kv_budget=0.5),
        lambda: headwise.convert(tiny_llama, tmp_path / "out", to="mla", kv_budget=0.5, dry_run=True),
        lambda: headwise.evaluate(tiny_llama, text=__file__),
        lambda: headwise.generate(tiny_llama, "a"),
        lambda: LayerwiseModel(FolderCheckpoint(tiny_llama)),
        lambda: load_encoder(tiny_llama),
        lambda: stock_config(json.loads((tiny_llama / "config.json").read_text())),
    ):
        with pytest.raises(CheckpointError, match=f"^{field} = "):
            use()
    assert fetched == []
    assert headwise.inspect(tiny_llama).num_layers == 2  # reads numbers alone


def test_a_kernel_that_comes_into_a_config_by_another_way(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, fetched: list[str]
) -> None:
    """Such as a field that a later transformers understands."""

    def from_dict(values: dict[str, Any]) -> Any:
        config = LlamaConfig(**values)
        config._attn_implementation_internal = KERNEL
        return config

    monkeypatch.setattr(LlamaConfig, "from_dict", from_dict)
    with pytest.raises(CheckpointError, match=f"^_attn_implementation = '{KERNEL}': must be a plain name"):
        headwise.load(tiny_llama)
    assert fetched == []


@pytest.mark.parametrize("name", ["eager", "sdpa", "headwise", "flex_attention", None, {"": "eager"}])
def test_implementations_of_transformers_itself(
    tiny_llama: Path, edit_config: Edit, name: str | dict[str, str] | None
) -> None:
    edit_config(_attn_implementation=name)
    model = headwise.load(tiny_llama)
    assert model.config._attn_implementation == (name[""] if isinstance(name, dict) else name or "sdpa")


def test_flash_attention_is_left_to_transformers() -> None:
    refuse_unsafe({"_attn_implementation": "flash_attention_2", "experts_implementation": "grouped_mm"}, Path())


def test_another_file_is_no_config(tiny_llama: Path, edit_config: Edit, fetched: list[str]) -> None:
    """transformers reads the one for its version in the place of ``config.json``."""
    config = json.loads((tiny_llama / "config.json").read_text())
    (tiny_llama / "config.4.0.0.json").write_text(json.dumps(config | {"_attn_implementation": KERNEL}))
    edit_config(configuration_files=["config.4.0.0.json"])
    with pytest.raises(CheckpointError, match=r"^configuration_files = \['config.4.0.0.json'\]: transformers would"):
        headwise.load(tiny_llama)
    assert fetched == []


def test_what_is_loaded_is_the_config_that_was_checked(
    tiny_llama: Path, edit_config: Edit, monkeypatch: pytest.MonkeyPatch, fetched: list[str]
) -> None:
    opened = FolderCheckpoint(tiny_llama)
    monkeypatch.setattr(sys.modules["headwise.runtime.hf.load"], "open_checkpoint", lambda _: opened)
    edit_config(_attn_implementation=KERNEL)  # after it was opened
    assert headwise.load(tiny_llama).config._attn_implementation == "sdpa"
    assert fetched == []


@pytest.mark.parametrize(
    ("field", "changes", "rule"),
    [
        ("auto_map", {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"}, "asks to run code from "),
        (
            "text_config.auto_map",
            {"text_config": {"auto_map": {"AutoModel": "evil.Model"}}},
            "asks to run code from ",
        ),
        ("quantization_config", {"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not read"),
        (
            "text_config.quantization_config",
            {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
            "quantised weights are not read",
        ),
    ],
)
def test_fields_of_configs_within(
    tiny_llama: Path, edit_config: Edit, field: str, changes: dict[str, Any], rule: str
) -> None:
    edit_config(**changes)
    with pytest.raises(CheckpointError, match=f"^{field} = .*: {rule}"):
        FolderCheckpoint(tiny_llama)


def test_no_code_is_run_where_transformers_has_the_class(
    tiny_llama: Path, tmp_path: Path, edit_config: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tiny_llama / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    autos = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    edit_config(auto_map=dict.fromkeys(autos, "evil.Evil"))
    opened = FolderCheckpoint(tiny_llama)
    assert "auto_map" not in opened.config
    assert opened.notes == ("config.json names code in auto_map, which is not run: transformers' own llama is used",)
    assert type(headwise.load(tiny_llama)) is transformers.LlamaForCausalLM
    assert load_encoder(tiny_llama).tokenizer("ab")["input_ids"] == [2, 3]
    LayerwiseModel(opened)
    edit_config(auto_map={"AutoModel": "owner/other--evil.Evil"})  # of another repository
    load_encoder(tiny_llama)
    assert not (tmp_path / "ran").exists()


def test_weights_that_transformers_would_read_instead(tiny_llama: Path, tmp_path: Path) -> None:
    weights = tiny_llama / "shard-00000-model-00001-of-00001.safetensors"
    weights.write_bytes((tiny_llama / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"shard-00000-model.*: is a part that several processes wrote"):
        headwise.load(tiny_llama)
    weights.unlink()
    (tiny_llama / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/other"}')
    with pytest.raises(CheckpointError, match=r"has an adapter_config.json: an adapter is not applied"):
        headwise.load(tiny_llama)
    headwise.convert(tiny_llama, tmp_path / "out", to="mla", kv_budget=0.5, evaluate=False)
    assert not (tmp_path / "out" / "adapter_config.json").exists()


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "AutoTokenizer", "RagTokenizer", "TrainingArguments"])
def test_a_tokenizer_is_made_by_a_tokenizers_class(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it was asked")

    for asked in ("LlamaForCausalLM", "RagTokenizer"):
        monkeypatch.setattr(getattr(transformers, asked), "from_pretrained", refuse)
    path = tiny_llama / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    with pytest.raises(CheckpointError, match=rf"^tokenizer_class = '{name}': in .*{file} is not the class of a tok"):
        load_tokenizer(tiny_llama)


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "NoSuchClass", 5, None])
def test_other_tokenizer_classes_are_left_to_transformers(tiny_llama: Path, name: Any) -> None:
    path = tiny_llama / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    if name == 5:
        with pytest.raises(CheckpointError, match=r"^tokenizer = "):
            load_tokenizer(tiny_llama)
    else:
        assert load_tokenizer(tiny_llama)("ab")["input_ids"] == [2, 3]


def test_nobody_is_asked_whether_to_run_the_code_beside_a_gguf(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.models.checkpoints.tiny_gguf import write_tiny_gguf

    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(tiny_llama_folder, path)
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    answers = []

    def from_pretrained(*_: Any, **options: Any) -> None:
        answers.append(options["trust_remote_code"])
        raise ValueError("enough")

    for loader in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerBase):
        monkeypatch.setattr(loader, "from_pretrained", from_pretrained)
    with pytest.raises(CheckpointError, match="enough"):
        load_tokenizer(path)
    assert answers == [False]


def test_a_config_has_some_kilobytes(tiny_llama: Path, edit_config: Edit) -> None:
    labels = {str(index): f"LABEL_{index}" for index in range(60_000)}
    edit_config(id2label=labels)
    for use in (headwise.inspect, headwise.load, load_encoder):
        with pytest.raises(CheckpointError, match=r"config.json': must have at most 1,048,576 bytes"):
            use(tiny_llama)


@pytest.mark.parametrize("depth", [100, 500, 900])
def test_deep_configs(tiny_llama: Path, depth: int) -> None:
    """The search of a config for kernels does not recurse."""
    deep: Any = KERNEL
    for _ in range(depth):
        deep = [deep]
    with pytest.raises(CheckpointError, match=r"^0\.deep\._attn_implementation = "):
        refuse_unsafe({"0": {"deep": {"_attn_implementation": deep}}}, tiny_llama)
