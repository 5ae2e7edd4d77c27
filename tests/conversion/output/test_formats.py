"""``format="deepseek"``: one size and one list of channels for all layers, a stock folder, and its reported loss."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.base.progress import silent
from headwise.conversion import parse_target
from headwise.conversion.budget import spread as shared_channels
from headwise.conversion.budget.spread import choose_shared_channels, rotary_losses
from headwise.conversion.calibration.candidates import NOTHING_KNOWN
from headwise.conversion.output import formats
from headwise.conversion.output.formats import logits_difference
from headwise.conversion.output.layout import OutputLayout
from headwise.conversion.plan import ConversionPlan, Place, make_plan, read_layer
from headwise.conversion.solvers.rope_channels import keep_rotation
from headwise.conversion.solvers.statistics import Statistics
from headwise.conversion.storage import Activations, LayerFiles, LayerStore
from headwise.conversion.write_folder import convert_layer
from headwise.models.checkpoints import FolderWriter, open_checkpoint
from headwise.models.specs import GroupedSpec, LatentSpec
from headwise.serving.exports import deepseek
from tests.conversion.test_resumed import StoppedError, stop_at
from tests.real_models import save_tiny
from tests.tiny_families import save_family

TEXT = "".join(f"{index:04d} the quick brown fox jumps over the lazy dog. " for index in range(60))
STOCK: dict[str, Any] = {"to": "mla", "kv_budget": 0.5, "format": "deepseek-longrope", "evaluate": False}
FORMS: list[dict[str, Any]] = [
    {"format": "deepseek-longrope"},
    {"format": "deepseek"},
    {"format": "deepseek", "bias_free": True},
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = headwise.load(folder, dtype="float32")(ids).logits
    return out


WITHOUT_HEADWISE = """
import json, sys
sys.modules["headwise"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

for line in sys.stdin:
    folder, ids, said = json.loads(line)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(ids)
    made = model.generate(ids, max_new_tokens=16, do_sample=False)
    torch.save([type(model).__name__, model(ids).logits.detach(), made], said)
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def without_headwise(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process in which headwise cannot be imported, which loads one folder after another."""
    log = tmp_path_factory.mktemp("without") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_HEADWISE, str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
        ) as process,
    ):
        yield process
        process.kill()


SHORT: dict[str, Any] = {**STOCK, "calibration_tokens": 512, "without": ("refine",)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> headwise.Conversion:
    """Such a conversion that ran to its end; not to be changed."""
    place = tmp_path_factory.mktemp("whole")
    (place / "text.txt").write_text(TEXT)
    return headwise.convert(save_tiny(place / "source"), place / "out", **SHORT, calibrate=place / "text.txt")


def plan_of(source: Path, budget: float = 0.5) -> ConversionPlan:
    return make_plan(open_checkpoint(source), parse_target("mla", kv_budget=budget))


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("calibrated", "form"), [(False, FORMS[0]), (False, FORMS[1]), *((True, form) for form in FORMS)], ids=str
)
def test_it_loads_where_headwise_cannot_be_imported(
    model_type: str,
    calibrated: bool,
    form: dict[str, Any],
    text: Path,
    tmp_path: Path,
    ids: torch.Tensor,
    without_headwise: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = save_tiny(tmp_path / "source", model_type)
    outputs: list[torch.Tensor] = []
    add = deepseek.add_deepseek

    def looking(writer: FolderWriter, checkpoint: Any, *args: Any) -> None:
        outputs.append(logits(checkpoint.path, ids))  # the folder in headwise's own format, which is removed
        add(writer, checkpoint, *args)

    monkeypatch.setattr(formats, "add_deepseek", looking)
    options = {**SHORT, "calibrate": text} if calibrated else STOCK
    done = headwise.convert(source, tmp_path / "out", **options | form)
    label = "MLA 19 + 6" if form["format"] == "deepseek-longrope" else "MLA 18 + 6"
    assert (done.model_type, done.label) == ("deepseek_v3", label)
    assert without_headwise.stdin is not None
    assert without_headwise.stdout is not None
    print(json.dumps([str(tmp_path / "out"), ids.tolist(), str(tmp_path / "said.pt")]), file=without_headwise.stdin)
    assert without_headwise.stdout.readline() == "done\n", Path(without_headwise.args[-1]).read_text()
    name, said, tokens = torch.load(tmp_path / "said.pt", weights_only=True)
    assert name == "DeepseekV3ForCausalLM"
    assert tokens.shape == (2, 56)
    assert float((said - outputs[0]).abs().max()) < 1e-3
    assert float((said - logits(source, ids)).abs().max()) > 0.1  # and the conversion is lossy
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "said.pt", "source", "text.txt"]


def test_the_report_is_what_can_be_measured_again(text: Path, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "qwen2", num_hidden_layers=3)
    done = headwise.convert(
        source, tmp_path / "out", **{**STOCK, "evaluate": True}, calibrate=text, calibration_tokens=512
    )
    evaluation, stock = done.evaluation, done.stock
    assert evaluation is not None
    assert stock is not None
    found_spec = headwise.inspect(tmp_path / "out", dtype="float64")
    assert found_spec.kv_bytes_per_token == done.kv_bytes_per_token_after == evaluation.cache_bytes_per_token
    assert found_spec.weights is not None
    assert found_spec.weights["total"] == done.parameters_after
    assert (stock.text, stock.tokens) == (f"{text} after 1,376 tokens", 256)
    assert stock.logits_difference is not None
    assert 0 < stock.logits_difference < 1e-3
    assert stock.shared_plan_error is not None
    assert stock.own_plan_error is not None
    card = (tmp_path / "out/README.md").read_text()
    constant = "each deepseek_v3 latent has one channel more than requested, a constant that its norm needs"
    for note in (constant, *stock.notes()):
        assert note in done.notes
        assert f"- {note}\n" in card
    assert "A stock `deepseek_v3` model: transformers loads it without headwise, and caches the latent." in card
    assert str(tmp_path) not in card


def test_the_difference_of_logits_is_the_models_own(tmp_path: Path, ids: torch.Tensor) -> None:
    for seed, name in enumerate(("one", "other")):
        save_tiny(tmp_path / name, seed=seed)
    one, other = (logits(tmp_path / name, ids) for name in ("one", "other"))
    difference = logits_difference(open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "other"), ids)
    assert difference == pytest.approx(float((one - other).abs().max()), rel=1e-4)


def test_sharing_channels_does_not_change_a_single_layer(text: Path, tmp_path: Path) -> None:
    """So sharing channels costs nothing."""
    source = save_tiny(tmp_path / "source", num_hidden_layers=1)
    done = headwise.convert(source, tmp_path / "out", **STOCK, calibrate=text, calibration_tokens=512)
    assert done.stock is not None
    assert done.stock.shared_plan_error == pytest.approx(done.stock.own_plan_error, rel=1e-5)
    plan = plan_of(source)
    spec, target = plan.before.layers[0], plan.after.layers[0]
    assert isinstance(spec, GroupedSpec)
    assert isinstance(target, LatentSpec)
    state = read_layer(plan.checkpoint, Place(0)).state
    energy, lost = rotary_losses(state, spec, target, Statistics.nothing(48, 6, 256))
    chosen = keep_rotation(energy, lost, target.qk_rope_head_dim // 2)
    assert torch.equal(choose_shared_channels(plan, NOTHING_KNOWN, silent), chosen)
    layer = convert_layer(OutputLayout(plan), NOTHING_KNOWN, LayerStore(None), Place(0))
    assert layer.channels == chosen.nonzero()[:, 0].tolist()


def test_shared_channels_are_chosen_by_what_all_layers_lose_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer loses most without channel 0, one without 1, and both nearly as much without 2."""
    plan = plan_of(save_tiny(tmp_path / "source"))
    layers = tuple(replace(layer, qk_rope_head_dim=2) for layer in plan.after.layers)  # type: ignore[type-var]
    plan = replace(plan, after=replace(plan.after, layers=layers))
    losses = iter(([[5.0, 0.0], [0.0, 0.0], [4.0, 1.0]], [[0.0, 0.0], [5.0, 0.0], [4.0, 1.0]]))

    def known(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        lost = torch.tensor(next(losses), dtype=torch.float64)
        return torch.full_like(lost, 1 / lost.numel()), lost

    monkeypatch.setattr(shared_channels, "rotary_losses", known)
    assert choose_shared_channels(plan, NOTHING_KNOWN, silent).nonzero().tolist() == [[2, 0]]


def test_every_layer_keeps_the_same(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny(tmp_path / "source", num_hidden_layers=3)
    calls: list[Any] = []
    monkeypatch.setattr(
        formats,
        "deepseek_config",
        lambda config, **options: calls.append(config) or deepseek.deepseek_config(config, **options),
    )
    headwise.convert(source, tmp_path / "out", **SHORT, calibrate=text)
    first, *others = calls[-1]["headwise"]["rope_channels"]
    assert len(first) == 3
    assert all(other == first for other in others)
    # Chosen layer by layer, the lists differ.
    headwise.convert(source, tmp_path / "own", **{**SHORT, "format": "headwise"}, calibrate=text)
    own = json.loads((tmp_path / "own/config.json").read_text())["headwise"]["rope_channels"]
    assert any(channels != own[0] for channels in own)


@pytest.mark.parametrize("bias_free", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_engines_get_plain_rope_and_names_that_they_read(
    model_type: str, bias_free: bool, text: Path, tmp_path: Path
) -> None:
    source = save_tiny(tmp_path / "source", model_type, tie_word_embeddings=bias_free)
    options = {"to": "mla", "kv_lora_rank": 20, "qk_rope_head_dim": 4, "bias_free": bias_free, "without": ["refine"]}
    done = headwise.convert(
        source,
        tmp_path / "out",
        **options,
        format="deepseek",
        calibrate=text,
        calibration_tokens=512,
        evaluate=False,
    )
    assert done.label == "MLA 20 + 4"  # with the constant
    config = json.loads((tmp_path / "out/config.json").read_text())
    rope = config["rope_parameters"]
    assert rope["rope_type"] == "default"
    assert config["rope_theta"] == rope["rope_theta"]
    assert rope["rope_theta"] in (10_000.0, 10_000.0 ** (1 / 2))  # every second frequency of four, or the first two
    assert config["rope_scaling"] is None
    assert config["rope_interleave"]
    assert not config["tie_word_embeddings"]
    checkpoint = open_checkpoint(tmp_path / "out")
    tensors = checkpoint.tensors
    assert "lm_head.weight" in tensors
    is_tied = torch.equal(checkpoint.read("lm_head.weight"), checkpoint.read("model.embed_tokens.weight"))
    assert is_tied is bias_free
    assert config["attention_bias"] is not bias_free
    has_biases = any(name.endswith("bias") for name in tensors)
    assert has_biases is not bias_free
    assert (config["q_lora_rank"] is None) is (bias_free or model_type == "llama")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"bias_free": True}, "bias_free = True: goes with mla in format deepseek or gguf"),
        ({"bias_free": True, "format": "deepseek", "calibrate": None}, "bias_free = True: needs a text to calibrate"),
        ({"format": "deepseek", "qk_rope_head_dim": 10}, "qk_rope_head_dim = 10: must be at most 8 for deepseek"),
        ({"format": "deepseek", "kv_lora_rank": 1}, "kv_lora_rank = 1: must be at least 2"),
    ],
)
def test_what_engines_cannot_have_is_refused(changes: dict[str, Any], line: str, text: Path, tmp_path: Path) -> None:
    options = {"to": "mla", "kv_lora_rank": 20, "qk_rope_head_dim": 4, "calibrate": text, "evaluate": False}
    with pytest.raises(headwise.ArgumentError, match=line):
        headwise.convert(save_tiny(tmp_path / "source"), tmp_path / "out", **{**options, **changes})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "text.txt"]


def test_a_lossless_one_is_the_source(tmp_path: Path, ids: torch.Tensor) -> None:
    source = save_tiny(tmp_path / "source", "qwen2")
    done = headwise.convert(source, tmp_path / "out", **{**STOCK, "kv_budget": 1.0})
    assert done.stock is not None
    assert done.stock.shared_plan_error is None
    assert float((logits(tmp_path / "out", ids) - logits(source, ids)).abs().max()) < 1e-3


def test_what_it_would_take(text: Path, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    options = {**STOCK, "calibrate": text, "calibration_tokens": 512}
    dry = headwise.convert(source, tmp_path / "out", **options, dry_run=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "text.txt"]
    wet = headwise.convert(source, tmp_path / "out", **options)
    for name in ("model_type", "label", "kv_bytes_per_token_after", "parameters_after", "disk_bytes"):
        assert getattr(dry, name) == getattr(wet, name)


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Activations, "commit", 2),
        (LayerFiles, "save", 3),  # saving the channels
        (LayerFiles, "save", 5),  # saving a layer with its losses
        (LayerFiles, "save", 6),  # saving the summary
        (FolderWriter, "_move_into_place", 1),  # moving the folder in headwise's own format
        (FolderWriter, "add", 30),  # writing a stock tensor
        (FolderWriter, "_move_into_place", 2),
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_it_goes_on(
    owner: type[Any],
    name: str,
    call: int,
    after: bool,
    whole: headwise.Conversion,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = save_tiny(tmp_path / "source")
    options = {**SHORT, "calibrate": Path(whole.output).parent / "text.txt"}
    with monkeypatch.context() as patch:
        stop_at(patch, owner, name, call, after=after)
        with pytest.raises(StoppedError):
            headwise.convert(source, tmp_path / "out", **options, overwrite=True)
    if (name, call, after) == ("_move_into_place", 2, True):
        assert (tmp_path / "out/config.json").is_file()  # stopped when all was done but removing the working folder
    done = headwise.convert(source, tmp_path / "out", **options, overwrite=True)
    assert done.stock == whole.stock
    assert done.calibration_tokens == 512
    for path in Path(whole.output).iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_run_whose_account_of_the_calibration_is_lost_begins_anew(
    whole: headwise.Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder in headwise's own format is whole; without that account it says nothing of its tokens and losses."""
    source = save_tiny(tmp_path / "source")
    options = {**SHORT, "calibrate": Path(whole.output).parent / "text.txt"}
    with monkeypatch.context() as patch:
        stop_at(patch, FolderWriter, "_move_into_place", 1, after=True)
        with pytest.raises(StoppedError):
            headwise.convert(source, tmp_path / "out", **options)
    (tmp_path / ".out.headwise-partial/work/results/calibrated.safetensors").unlink()
    done = headwise.convert(source, tmp_path / "out", **options)
    assert done.calibration_tokens == 512
    assert done.stock == whole.stock
    for path in Path(whole.output).iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_room_for_both_folders_is_needed_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny(tmp_path / "source")
    own, stock = (
        headwise.convert(source, tmp_path / name, **{**STOCK, "format": name}).disk_bytes
        for name in ("headwise", "deepseek-longrope")
    )

    def leave(free: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": free}))

    leave(64 * 1024**2 + own + stock - 1)
    with pytest.raises(headwise.StorageError, match=r"needs 0\.07 GB of disk and 0\.07 GB are free"):
        headwise.convert(source, tmp_path / "out", **STOCK)
    leave(64 * 1024**2 + own + stock)
    with monkeypatch.context() as patch:
        stop_at(patch, formats, "add_deepseek", 1, after=False)
        with pytest.raises(StoppedError):
            headwise.convert(source, tmp_path / "out", **STOCK)
    leave(64 * 1024**2 + stock)  # the folder in headwise's own format is there
    headwise.convert(source, tmp_path / "out", **STOCK)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("family", "options", "rule"),
    [
        ("llama", {"to": "gqa:1"}, "format = 'deepseek-longrope': goes with mla; mqa results are stock already"),
        ("llama", {"to": "mha"}, "format = 'deepseek-longrope': goes with mla; mha results are stock already"),
        ("llama", {"format": "onnx"}, "format = 'onnx': must be headwise or deepseek"),
        ("gpt2", {}, "model_type = 'gpt2': has other blocks than deepseek_v3's; can: llama, mistral, qwen2"),
        ("mistral", {}, "sliding_window = 7: deepseek_v3 has none"),
    ],
)
def test_what_it_is_not_for_is_refused_before_any_work(
    family: str, options: dict[str, Any], rule: str, dry_run: bool, tmp_path: Path
) -> None:
    source = save_family(tmp_path / "source", family)
    options = {**STOCK, **options}
    if options["to"] != "mla":
        del options["kv_budget"]
    with pytest.raises(headwise.HeadwiseError, match=rule):
        headwise.convert(source, tmp_path / "out", **options, dry_run=dry_run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("size", "sizes", "note"),
    [
        ({"kv_budget": 0.5}, (64, 32), r"64 \+ 32 values a token, multiples of 32: llama.cpp takes its quantised"),
        ({"kv_budget": 0.45}, (32, 32), r"32 \+ 32 values a token, multiples of 32"),
        ({"kv_budget": 0.3}, (41, 16), r"latent of 41 and a rotary key of 16: llama.cpp refuses its quantised"),
        ({"kv_lora_rank": 72, "qk_rope_head_dim": 32}, (72, 32), r"latent of 72 .* unless both are multiples of 32"),
    ],
)
def test_gguf_has_sizes_that_quantised_caches_take(
    size: dict[str, Any], sizes: tuple[int, int], note: str, tmp_path: Path
) -> None:
    source = save_tiny(tmp_path / "source", head_dim=32)  # caches 192 values
    gguf = formats.output_format("gguf")
    target = replace(parse_target("mla", **size), has_constant=gguf.has_constant, block=gguf.block)
    plan = make_plan(open_checkpoint(source), target, bias_free=True)
    layer = plan.after.layers[0]
    assert isinstance(layer, LatentSpec)
    assert (layer.kv_lora_rank, layer.qk_rope_head_dim) == sizes
    assert re.search(note, gguf.notes(plan)[-1])
