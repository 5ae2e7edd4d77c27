"""A model run one layer at a time is the model."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import headwise
from headwise.errors import ArgumentError, CheckpointError, SpecError
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import GroupedSpec
from headwise.runtime.hf.layerwise import LayerwiseModel
from tests.closeness import assert_close
from tests.models.checkpoints.tiny_gguf import write_tiny_gguf
from tests.real_models import save_tiny

LLAMA = ("model.layers.{layer}", "self_attn")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
GPT2 = {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 64}
WINDOW = {"sliding_window": 5}
LOCAL = {**WINDOW, "num_hidden_layers": 7, "head_dim": 12, "query_pre_attn_scalar": 20}
# The model type, what is not usual in its config, where its layers and in them the attention are.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "llama": ("llama", {}, LLAMA),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, LLAMA),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}, LLAMA),
    "mistral": ("mistral", WINDOW, LLAMA),
    "qwen2": ("qwen2", {}, LLAMA),
    "qwen2, some layers local": ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}, LLAMA),
    "qwen3": ("qwen3", {"head_dim": 8}, LLAMA),
    "gemma3": ("gemma3_text", LOCAL, LLAMA),
    "gemma2": ("gemma2", {**WINDOW, "head_dim": 12}, LLAMA),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}, LLAMA),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}, ("gpt_neox.layers.{layer}", "attention")),
    "gpt2": ("gpt2", {}, ("transformer.h.{layer}", "attn")),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 24}, ("model.decoder.layers.{layer}", "self_attn")),
    "bert": ("bert", {}, ("encoder.layer.{layer}", "attention")),
}
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}
TOKENS = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def save_random(folder: Path, model_type: str, overrides: dict[str, Any], dtype: torch.dtype) -> None:
    config = CONFIG_MAPPING[model_type](**{**(GPT2 if model_type == "gpt2" else SIZES), **TOKENS, **overrides})
    builder = AutoModel if model_type == "bert" else AutoModelForCausalLM
    model = builder.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.4)
    model.to(dtype).save_pretrained(folder)


@pytest.fixture(params=list(MODELS))
def named(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def both(folder: Path, named: str, dtype: torch.dtype) -> tuple[Any, LayerwiseModel]:
    """The model as transformers loads it, and layer by layer."""
    model_type, overrides, (layer, attention) = MODELS[named]
    save_random(folder, model_type, overrides, dtype)
    builder = AutoModel if model_type == "bert" else AutoModelForCausalLM
    whole = builder.from_pretrained(folder, dtype=dtype).eval()
    return whole, LayerwiseModel(open_checkpoint(folder), dtype, layer=layer, attention=f"{layer}.{attention}")


def random_ids(batch: int = 2, window: int = 16) -> torch.Tensor:
    return torch.randint(3, 97, (batch, window))


def run_layers(model: LayerwiseModel, hidden: torch.Tensor) -> torch.Tensor:
    for index in range(model.num_layers):
        hidden = model.run(index, model.module(index), hidden)
    return hidden


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_by_layer_is_the_whole_model_to_the_last_bit(tmp_path: Path, named: str, dtype: torch.dtype) -> None:
    whole, model = both(tmp_path, named, dtype)
    for window in (16, 9):  # a second shape of window is recorded anew
        ids = random_ids(window=window)
        expected = whole(ids, use_cache=False, output_hidden_states=True)
        hidden = model.begin(ids)
        for index in range(model.num_layers):
            assert torch.equal(hidden, expected.hidden_states[index])
            hidden = model.run(index, model.module(index), hidden)
        final = expected.last_hidden_state if named == "bert" else expected.logits
        assert model.num_layers == len(expected.hidden_states) - 1
        assert torch.equal(model.finish(hidden), final)
        pieces = torch.cat(list(model.finish_in_pieces(hidden, positions=5)), dim=1)
        assert_close(pieces, final, 1e-5 if dtype is torch.float32 else 2e-2)


@torch.no_grad()
def test_batches_of_other_sizes_go_through_the_same_layers(tmp_path: Path, named: str) -> None:
    """Masks and tables are recorded once, for whatever number of windows comes later."""
    whole, model = both(tmp_path, named, torch.float32)
    model.begin(random_ids(3))
    for batch in (1, 4):
        ids = random_ids(batch)
        expected = whole(ids, use_cache=False)
        final = expected.last_hidden_state if named == "bert" else expected.logits
        assert torch.equal(model.finish(run_layers(model, model.begin(ids))), final)


@torch.no_grad()
def test_windows_may_stand_at_other_positions(tmp_path: Path, named: str) -> None:
    """As in the whole model with these position ids; layers with a sliding window see no gaps."""
    whole, model = both(tmp_path, named, torch.float32)
    ids = random_ids()
    positions = torch.arange(16)
    positions[8:] += 30
    hidden = model.begin(ids)
    assert model.at(torch.arange(16)) is model
    layers = model.checkpoint.spec.layers
    if any(isinstance(layer, GroupedSpec) and layer.rope for layer in layers):
        expected = whole(
            ids, position_ids=positions[None], attention_mask=torch.ones_like(ids), use_cache=False
        ).logits
        if all(layer.sliding_window is None for layer in layers):
            assert torch.equal(model.finish(run_layers(model.at(positions), hidden)), expected)
        for index, layer in enumerate(layers):
            module = model.module(index)
            has_moved = not torch.equal(*(m.run(index, module, hidden) for m in (model, model.at(positions))))
            assert has_moved == (layer.sliding_window is None)
    model.begin(random_ids(window=9))
    with pytest.raises(ArgumentError, match=r"positions = \(16,\): must be of windows of 9 tokens"):
        model.at(positions)


@torch.no_grad()
def test_a_traced_layer_tells_how_its_attention_was_called(tmp_path: Path, named: str) -> None:
    _, model = both(tmp_path, named, torch.float64)
    hidden = model.begin(random_ids())
    for index in range(model.num_layers):
        module = model.module(index)
        call, output = model.trace(index, module, hidden)
        assert torch.equal(output, model.run(index, module, hidden))
        attention = model.attention_of(module)
        assert torch.equal(call.repeat(attention), call.output)
        assert torch.equal(model.run(index, module, hidden, attention_output=call.output), output)
        # Both the inputs and the attention's output are what they are taken for.
        other = torch.randn_like(call.inputs)
        assert not torch.allclose(call.repeat(attention, other), call.output)
        assert not torch.allclose(model.run(index, module, hidden, attention_output=call.output + 1), output)
        hidden = output


@torch.no_grad()
def test_hooks_of_a_layer_are_called_once_and_stay(tmp_path: Path) -> None:
    _, model = both(tmp_path, "llama", torch.float32)
    hidden = model.begin(random_ids())
    module: Any = model.module(0)
    called: list[str] = []

    def doubled(module: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
        called.append("projection")
        return 2 * result

    module.self_attn.o_proj.register_forward_hook(doubled)
    module.self_attn.register_forward_hook(lambda *_: called.append("attention"))
    output = model.run(0, module, hidden)
    _, traced = model.trace(0, module, hidden)
    assert called == ["projection", "attention"] * 2
    assert torch.equal(traced, output)
    assert "forward" not in vars(module.self_attn) | vars(module.self_attn.o_proj)


@torch.no_grad()
def test_what_an_attention_is_given_is_normed(tmp_path: Path) -> None:
    _, model = both(tmp_path, "llama", torch.float32)
    hidden = model.begin(random_ids())
    module: Any = model.module(0)
    call, output = model.trace(0, module, hidden)
    assert torch.equal(call.inputs, module.input_layernorm(hidden))
    after = hidden + call.output
    assert torch.equal(output, after + module.mlp(module.post_attention_layernorm(after)))


def test_an_attention_output_can_be_learned_through(tmp_path: Path) -> None:
    """Nothing was made in inference mode: gradients go from a layer's output to its attention's."""
    _, model = both(tmp_path, "llama", torch.float32)
    hidden = model.begin(random_ids())
    module = model.module(0)
    call, _ = model.trace(0, module, hidden)
    for parameter in model.attention_of(module).parameters():
        parameter.requires_grad_(True)
    attended = call.repeat(model.attention_of(module))
    model.run(0, module, hidden, attention_output=attended).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.attention_of(module).parameters())


@torch.no_grad()
def test_a_gguf(tiny_llama_folder: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tiny_llama_folder, tmp_path / "tiny.gguf", "Q8_0")
    model = LayerwiseModel(open_checkpoint(tmp_path / "tiny.gguf"))
    ids = torch.randint(0, 64, (2, 20))
    expected = headwise.load(tmp_path / "tiny.gguf")(ids, use_cache=False).logits
    assert torch.equal(model.finish(run_layers(model, model.begin(ids))), expected)


@torch.no_grad()
def test_a_converted_folder(tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", "qwen2")
    headwise.convert(tmp_path / "source", tmp_path / "out", to="mla", kv_budget=0.5, evaluate=False)
    model = LayerwiseModel(open_checkpoint(tmp_path / "out"))
    ids = random_ids(window=30)
    expected = headwise.load(tmp_path / "out")(ids, use_cache=False).logits
    assert torch.equal(model.finish(run_layers(model, model.begin(ids))), expected)


@torch.no_grad()
def test_tensors_stored_without_the_models_prefix(tmp_path: Path) -> None:
    """The gpt2 folder of the hub is such a folder."""
    whole, model = both(tmp_path, "gpt2", torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = LayerwiseModel(
        open_checkpoint(tmp_path), layer="transformer.h.{layer}", attention="transformer.h.{layer}.attn"
    )
    ids = random_ids()
    assert torch.equal(model.finish(run_layers(model, model.begin(ids))), whole(ids).logits)


@torch.no_grad()
def test_weights_are_there_only_while_they_are_needed(tmp_path: Path) -> None:
    whole, model = both(tmp_path, "llama", torch.float32)

    def held() -> set[str]:
        return {name for name, parameter in model.model.named_parameters() if not parameter.is_meta}

    ids = random_ids()
    assert held() == set()
    hidden = model.begin(ids)
    assert held() == {"model.embed_tokens.weight"}
    hidden = run_layers(model, hidden)
    assert held() == {"model.embed_tokens.weight"}
    model.release()
    assert held() == set()
    model.finish(hidden)
    assert held() == {"model.norm.weight", "lm_head.weight"}
    model.release()
    assert torch.equal(model.finish(run_layers(model, model.begin(ids))), whole(ids).logits)


@torch.no_grad()
def test_a_layer_is_the_callers_alone(tmp_path: Path) -> None:
    _, model = both(tmp_path, "llama", torch.float32)
    hidden = model.begin(random_ids())
    changed, kept = model.module(1), model.module(1)
    for parameter in changed.parameters():
        parameter.zero_()
    assert torch.equal(model.run(1, changed, hidden), hidden)  # nothing is left but the residual stream
    assert torch.equal(model.run(1, kept, hidden), model.run(1, model.module(1), hidden))
    weight = weakref.ref(next(changed.parameters()))
    del changed, parameter
    gc.collect()
    assert weight() is None


def test_windows_of_another_length_are_refused(tmp_path: Path) -> None:
    _, model = both(tmp_path, "mistral", torch.float32)
    hidden = model.begin(random_ids(window=16))
    with pytest.raises(ArgumentError, match=r"^hidden = \(2, 15, 48\): must be of windows of 16 tokens"):
        model.run(0, model.module(0), hidden[:, :15])


def test_tensors_that_do_not_fit_are_refused_when_they_are_read(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    stored = load_file(tmp_path / "model.safetensors")
    missing, cut = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    stored[cut] = stored[cut][:-1].clone()
    del stored[missing]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = LayerwiseModel(open_checkpoint(tmp_path))
    model.begin(random_ids())
    with pytest.raises(CheckpointError, match=rf"^tensor = '{missing}': is missing"):
        model.module(0)
    with pytest.raises(CheckpointError, match=rf"^{cut} shape = \(63, 48\): must be \(64, 48\) by the config"):
        model.module(1)


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    with pytest.raises(SpecError, match=r"^layer = 'model.blocks.\{layer\}': is nowhere in a LlamaForCausalLM"):
        LayerwiseModel(open_checkpoint(tmp_path), attention="model.blocks.{layer}.attn")
    with pytest.raises(ArgumentError, match=r"^attention = 'attn': must be inside a layer"):
        LayerwiseModel(open_checkpoint(tmp_path), layer="model.layers.{layer}", attention="attn")


PROGRAM = """
import sys
import weakref
from pathlib import Path
import torch
from headwise.models.checkpoints import open_checkpoint
from headwise.runtime.hf.layerwise import LayerwiseModel

def resident(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

torch.set_grad_enabled(False)
model = LayerwiseModel(open_checkpoint(Path(sys.argv[1])))
hidden = model.begin(torch.arange(16)[None])
hidden = model.run(0, model.module(0), hidden)  # the first one also starts the libraries up
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = resident("VmRSS")
for index in range(model.num_layers):
    hidden = model.run(index, model.module(index), hidden)
model.release()
model.finish(hidden)
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_one_layers(tmp_path: Path) -> None:
    """Eight layers of 40 MB: the most ever held beyond the first layer's run is less than three of them."""
    E, inner, layers = 1024, 1984, 8
    sizes = {"hidden_size": E, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 8}
    config = CONFIG_MAPPING["llama"](**sizes, vocab_size=64, dtype="float32")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    weights = {name: torch.rand(p.shape) * 0.01 for name, p in model.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    layer = 4 * sum(t.numel() for name, t in weights.items() if name.startswith("model.layers.0."))
    assert layer > 40e6
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False)
    (tmp_path / "model.safetensors").unlink()
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 3 * layer, f"{int(run.stdout) / layer:.2f} layers"
