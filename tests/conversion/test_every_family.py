"""Every family through every target: exact where exact is possible, refused by name where it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import headwise
from headwise.conversion import convert_spec, parse_target
from headwise.conversion.methods.repeat import head_tensors
from headwise.measure.timing import cache_nbytes
from headwise.models.checkpoints import family_of, open_checkpoint
from headwise.models.checkpoints.folder import FolderCheckpoint
from headwise.models.specs import GroupedSpec, read_config
from tests.closeness import assert_close
from tests.conversion.test_resumed import TEXT
from tests.tiny_families import FAMILIES, MERGES, NORMED, STOCK, answer, noise, save_family

OWN = [name for name in FAMILIES if name not in STOCK]
"""Families whose own class has one number of heads: headwise's GQA layers replace theirs."""
DECODERS = [name for name in FAMILIES if name not in ("bert", "whisper")]
CONVERTED = [
    *((name, "mla") for name in FAMILIES if name != "bert"),
    *((name, "gqa:2") for name in FAMILIES if name not in ("bert", *STOCK)),
    *((name, "gqa:1") for name in STOCK),
]

Folders = Callable[..., Path]


def convert(source: Path, out: Path, to: str, budget: float = 0.5, **options: Any) -> Any:
    if to == "mla":
        options["kv_budget"] = budget
    elif to in ("mqa", "gqa:1", "gqa:3") and (name := open_checkpoint(source).config["model_type"]) in MERGES:
        options["method"] = MERGES[name]
    return headwise.convert(source, out, to=to, **options, evaluate=False)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a family's model, made once; not to be changed."""
    place = tmp_path_factory.mktemp("families")
    return cache(lambda name: save_family(place / name, name))


@pytest.fixture(scope="module")
def converted(family: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder that a family's model becomes, to MLA with half of its cache or another part; not to be changed."""
    place = tmp_path_factory.mktemp("converted")

    def make(name: str, to: str, budget: float = 0.5) -> Path:
        folder = place / f"{name} {to} {budget}"
        convert(family(name), folder, to, budget)
        return folder

    return cache(make)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_repeating_heads_changes_not_a_bit(name: str, family: Folders, tmp_path: Path, ids: torch.Tensor) -> None:
    source = family(name)
    done = convert(source, tmp_path / "out", "mha")
    assert done.method == ("repeat" if name in STOCK else "copy")
    config = open_checkpoint(tmp_path / "out").config
    assert config["model_type"] == name
    # One norm over all heads is of as many more numbers as there are heads, whose squares are summed in float32.
    tolerance = 1e-5 if name == "olmo2" else 0
    assert_close(answer(headwise.load(tmp_path / "out"), ids), answer(headwise.load(source), ids), tolerance)


@pytest.mark.parametrize("name", [name for name in FAMILIES if family_of(name).joined])
def test_stock_folders_store_experts_as_published(name: str, family: Folders, tmp_path: Path) -> None:
    """One by one, as engines ask for them; the folders of headwise's own classes have them joined."""
    convert(family(name), tmp_path / "out", "mha")
    published, stock = (load_file(folder / "model.safetensors") for folder in (family(name), tmp_path / "out"))
    assert published.keys() == stock.keys()
    experts = [own for own in stock if ".experts.3." in own]
    assert experts
    assert all(torch.equal(stock[own], published[own]) for own in experts)
    convert(tmp_path / "out", tmp_path / "mla", "mla", 1.0)
    checkpoint = open_checkpoint(tmp_path / "mla")
    assert not checkpoint.joined
    assert [own for own in checkpoint.tensors if own.endswith("experts.gate_up_proj")]


def share_heads(source: Path, num_kv_heads: int) -> None:
    """Make neighbouring key and value heads of a folder equal, so that fewer heads are lossless."""
    checkpoint = open_checkpoint(source)
    assert isinstance(checkpoint, FolderCheckpoint)
    tensors = load_file(source / "model.safetensors")
    parts = (checkpoint.spec.layers, checkpoint.spec.cross_layers)
    for cross, index, spec in ((bool(c), i, s) for c, part in enumerate(parts) for i, s in enumerate(part)):
        assert isinstance(spec, GroupedSpec)
        state = checkpoint.family.read_attention(checkpoint.read, index, spec, cross=cross)
        for name, tensor in state.items():
            if name in head_tensors(state, spec):
                heads = tensor.unflatten(0, (num_kv_heads, spec.num_kv_heads // num_kv_heads, -1))
                state[name] = heads[:, :1].expand_as(heads).flatten(0, 2)
        written = checkpoint.family.write_attention(state, index, spec, cross=cross)
        tensors |= {checkpoint.place(name)[1]: tensor for name, tensor in written.items()}
    packed = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(packed, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("to", ["gqa:3", "mqa"])
def test_heads_that_were_equal_are_merged_without_loss(name: str, to: str, tmp_path: Path, ids: torch.Tensor) -> None:
    source = save_family(tmp_path / "source", name, **({"num_key_value_heads": 6} if name in STOCK else {}))
    share_heads(source, 1 if to == "mqa" else 3)
    done = convert(source, tmp_path / "out", to)
    assert done.method == MERGES.get(name, "aligned")
    config = open_checkpoint(tmp_path / "out").config
    assert config["model_type"] == (name if name in STOCK else f"headwise_{name}")
    expected = answer(headwise.load(source), ids)
    tolerance = 1e-5 if name == "olmo2" else 1e-12
    assert_close(answer(headwise.load(tmp_path / "out"), ids), expected, tolerance)
    # And back to the family's own class.
    convert(tmp_path / "out", tmp_path / "back", "mha")
    assert open_checkpoint(tmp_path / "back").config["model_type"] == name
    assert_close(answer(headwise.load(tmp_path / "back"), ids), expected, tolerance)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
def test_mla_with_everything_kept_is_the_model(
    name: str, dtype: str, tolerance: float, family: Folders, tmp_path: Path, ids: torch.Tensor
) -> None:
    source = family(name)
    done = convert(source, tmp_path / "out", "mla", 1.0, dtype=dtype)
    assert done.notes == ()
    assert done.kv_bytes_per_token_after == done.kv_bytes_per_token_before
    model = headwise.load(tmp_path / "out")
    assert type(model).__name__.startswith("Headwise")
    if name in NORMED:  # whose norms transformers computes in float32 whatever the model's dtype
        tolerance = max(tolerance, 1e-6)
    assert_close(answer(model, ids), answer(headwise.load(source), ids), tolerance)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows in every other layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "windows and norms": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "windows in every other layer, beside experts": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "windows in layers without RoPE": ("smollm3", {"use_sliding_window": True, "sliding_window": 5}),
    "llama 3.2": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "biases everywhere": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "partial longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5],
                "long_factor": [2.0, 4.0],
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "a quarter of each head rotates, scaled": (
        "gpt_neox",
        {
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            },
            "use_parallel_residual": False,
        },
    ),
    "whole heads rotate": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "no biases": ("gpt_neox", {"attention_bias": False}),
    "scores scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "scores not scaled": ("gpt2", {"scale_attn_weights": False}),
    "norms after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt without biases": ("opt", {"enable_bias": False}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("to", ["mla", "gqa:3"])
def test_variants_of_the_families(variant: str, to: str, tmp_path: Path, ids: torch.Tensor) -> None:
    name, overrides = VARIANTS[variant]
    source = save_family(tmp_path / "source", name, **overrides)
    if to != "mla" and name not in STOCK:
        share_heads(source, 3)
    convert(source, tmp_path / "out", to, 1.0)
    expected = answer(headwise.load(source), ids)
    assert_close(answer(headwise.load(tmp_path / "out"), ids), expected, 1e-6 if name in NORMED else 1e-8)


@pytest.mark.parametrize(("name", "to"), [("bert", "mla"), ("bert", "gqa:2"), *CONVERTED])
def test_it_trains(name: str, to: str, converted: Folders, ids: torch.Tensor) -> None:
    model = headwise.load(converted(name, to)).train()
    with torch.enable_grad():
        answer.__wrapped__(model, ids).square().mean().backward()
    for own, parameter in model.named_parameters():
        if parameter.requires_grad and not any(part in own for part in ("pooler", "vision_tower", "multi_modal")):
            assert parameter.grad is not None, own
            assert parameter.grad.isfinite().all(), own


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "to"), [("gpt2", "gqa:2"), ("gpt_neox", "gqa:2"), ("gpt_neox", "mla"), ("mistral", "mla")]
)
def test_a_static_cache_serves_too(name: str, to: str, converted: Folders, ids: torch.Tensor) -> None:
    model = headwise.load(converted(name, to))
    cache = StaticCache(config=model.config, max_cache_len=32)
    parts = [
        model(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in ((0, 12), (12, 13), (13, 24))
    ]
    assert_close(torch.cat(parts, 1), model(ids, use_cache=False).logits, 1e-9)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert", "whisper"])
def test_without_rope_half_the_cache_is_enough(name: str, family: Folders, tmp_path: Path, ids: torch.Tensor) -> None:
    """Keys and values of all heads are 2E numbers, linear in E inputs, and no bias needs another in the cache."""
    source = family(name)
    headwise.convert(source, tmp_path / "out", to="mla", kv_budget=0.5, evaluate=False)
    assert {layer.kv_lora_rank for layer in open_checkpoint(tmp_path / "out").spec.layers} == {48}
    assert_close(answer(headwise.load(tmp_path / "out"), ids), answer(headwise.load(source), ids), 1e-6)


@pytest.mark.parametrize(("name", "to"), CONVERTED)
@torch.inference_mode()
def test_cached_decoding_is_the_whole_forward(name: str, to: str, converted: Folders, ids: torch.Tensor) -> None:
    model = headwise.load(converted(name, to))
    whole = answer(model, ids, use_cache=False)
    cache: Any = DynamicCache(config=model.config)
    if name == "whisper":
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    parts = [
        answer(model, ids[:, a:b], past_key_values=cache, use_cache=True)
        for a, b in ((0, 9), (9, 10), (10, 19), (19, 24))
    ]
    assert_close(torch.cat(parts, 1), whole, 1e-9)


@pytest.mark.parametrize(("name", "to"), CONVERTED)
@torch.inference_mode()
def test_generate_is_what_repeated_forwards_give(name: str, to: str, converted: Folders, ids: torch.Tensor) -> None:
    model = headwise.load(converted(name, to))
    prompt = expected = ids[:1, :1] if name == "whisper" else ids[:1, :9]
    for _ in range(10):
        expected = torch.cat((expected, answer(model, expected, use_cache=False)[:, -1:].argmax(-1)), dim=1)
    options = {"max_new_tokens": 10, "do_sample": False}
    if name == "whisper":
        tokens = model.generate(noise(1).to(model.dtype), decoder_input_ids=prompt, **options)
        tokens = torch.cat((prompt, tokens), dim=1)
    else:
        tokens = model.generate(prompt, **options)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize(("name", "to"), [pair for pair in CONVERTED if pair[0] in DECODERS])
@torch.inference_mode()
def test_a_left_padded_batch_gives_what_each_prompt_gives_alone(
    name: str, to: str, converted: Folders, ids: torch.Tensor
) -> None:
    model = headwise.load(converted(name, to))
    batch, mask = ids[:, :12].clone(), torch.ones(2, 12, dtype=torch.long)
    batch[0, :5] = mask[0, :5] = 0
    tokens = model.generate(batch, attention_mask=mask, max_new_tokens=6, do_sample=False)
    alone = model.generate(batch[:1, 5:], max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens[0, 12:], alone[0, 7:])


@pytest.mark.parametrize("name", DECODERS)
@torch.inference_mode()
def test_the_cache_holds_what_the_spec_says(name: str, converted: Folders, ids: torch.Tensor) -> None:
    folder = converted(name, "gqa:1")
    spec = headwise.inspect(folder, dtype="float64")
    if any(group.sliding_window for group in spec.layers):
        ids = ids[:, :4]
    cache = headwise.load(folder)(ids, use_cache=True).past_key_values
    assert cache_nbytes(cache) == spec.kv_bytes_per_token * ids.numel()


@pytest.mark.parametrize(("name", "to"), [("bert", "mla"), ("bert", "gqa:2"), *CONVERTED])
@torch.inference_mode()
def test_auto_classes_save_and_load_it(
    name: str, to: str, converted: Folders, tmp_path: Path, ids: torch.Tensor
) -> None:
    folder = converted(name, to)
    auto = getattr(transformers, family_of(name).autos[0])
    model = auto.from_pretrained(folder, experts_implementation="eager")
    model.save_pretrained(tmp_path / "again")
    assert_close(answer(headwise.load(tmp_path / "again"), ids), answer(model, ids), 1e-12)
    assert headwise.inspect(tmp_path / "again").layers == headwise.inspect(folder).layers


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_attention_weights_are_the_sources(name: str, family: Folders, converted: Folders, ids: torch.Tensor) -> None:
    auto = getattr(transformers, family_of(name).autos[0])
    actual, expected = (
        attentions(auto.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager"), ids)
        for folder in (converted(name, "mla", 1.0), family(name))
    )
    assert (
        len(actual)
        == len(expected)
        == open_checkpoint(family(name)).spec.num_layers * (2 if name == "whisper" else 1)
    )
    for own, other in zip(actual, expected, strict=True):
        assert_close(own, other, 1e-6)


def attentions(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    if model.config.is_encoder_decoder:
        out = model(noise(2).to(model.dtype), decoder_input_ids=ids, output_attentions=True)
        return [*out.decoder_attentions, *out.cross_attentions]
    return list(model(ids, output_attentions=True).attentions)


@torch.inference_mode()
def test_an_encoder_ignores_padding(converted: Folders, ids: torch.Tensor) -> None:
    for to in ("mla", "gqa:2"):
        model = headwise.load(converted("bert", to))
        mask = torch.ones_like(ids)
        mask[1, 9:] = 0
        padded = model(ids, attention_mask=mask).last_hidden_state[1, :9]
        assert_close(padded, model(ids[1:, :9]).last_hidden_state[0], 1e-9)
        # Every token attends to every other: the last one changes the output of the first.
        assert (model(ids[1:, :8]).last_hidden_state[0, 0] - padded[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("llama", "qwen2", "whisper")])
def test_calibration_text_reaches_every_family(name: str, family: Folders, tmp_path: Path) -> None:
    source, text = family(name), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and then it does so again. " * 20)
    # Half of the values is lossless where no key rotates, and then no text is read.
    done = convert(source, tmp_path / "out", "mla", 0.4, calibrate=text, calibration_tokens=256)
    assert done.calibration_tokens == 256
    assert headwise.load(tmp_path / "out") is not None


@pytest.mark.parametrize(("name", "to"), [("mistral", "mla"), ("gpt_neox", "mla"), ("gpt2", "gqa:2"), ("opt", "mla")])
def test_quality_is_measured_on_every_kind(
    name: str, to: str, family: Folders, converted: Folders, tmp_path: Path
) -> None:
    source, folder, text = family(name), converted(name, to, 1.0), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and then it does so again. " * 20)
    evaluation = headwise.evaluate(folder, against=source, text=text, window=32, windows=3, context=16)
    spec = headwise.inspect(folder, dtype="float64")
    assert evaluation.reference is not None
    assert evaluation.kl is not None
    if to == "mla":
        assert evaluation.kl < 1e-9
        assert evaluation.top1_agreement == 1
    else:
        assert evaluation.kl > 1e-3
    if name != "mistral":  # whose window is shorter than the context
        assert evaluation.cache_bytes_per_token == spec.kv_bytes_per_token


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.inference_mode()
def test_a_layer_with_padding_alone_keeps_its_window(
    implementation: str, family: Folders, converted: Folders
) -> None:
    """Some attention implementations pass no mask in place of a full one; the window still applies."""
    model, stock = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation)
        for folder in (converted("mistral", "mla", 1.0), family("mistral"))
    )
    states = torch.randn(2, 20, 48, dtype=torch.float64)
    tables = stock.model.rotary_emb(states, torch.arange(20)[None])
    i, j = torch.arange(20)[:, None], torch.arange(20)[None]
    allowed = (j <= i) & (j > i - 7)
    added = torch.zeros(20, 20, dtype=torch.float64).masked_fill(~allowed, -1e300)[None, None]
    expected = stock.model.layers[0].self_attn(
        states, tables, added if implementation == "eager" else allowed[None, None]
    )[0]
    layer = model.model.layers[0].self_attn
    for mask in (None, torch.ones(2, 20, dtype=torch.bool), allowed[None, None]):
        assert_close(layer(states, tables, mask)[0], expected, 1e-6)  # stock eager's softmax is in float32


@pytest.mark.parametrize(
    ("name", "method"),
    [("olmo2", "headwise"), *((n, m) for n in ("gemma3_text", "qwen3") for m in ("headwise", "transmla", "mha2mla"))],
)
def test_mla_behind_norms_is_solved_by_every_method(
    name: str, method: str, family: Folders, tmp_path: Path, ids: torch.Tensor
) -> None:
    """A solver that took what norms make of queries and keys for something else would lose all of it."""
    source = family(name)
    (tmp_path / "text.txt").write_text(TEXT)
    calibrated = {"calibrate": tmp_path / "text.txt", "calibration_tokens": 256, "calibration_window": 32}
    lost = []
    for budget in (0.5, 0.9):
        convert(source, tmp_path / "out", "mla", budget, method=method, **calibrated, overwrite=True)
        expected = answer(headwise.load(source), ids)
        lost.append(float((answer(headwise.load(tmp_path / "out"), ids) - expected).norm() / expected.norm()))
    assert lost[1] < min(lost[0], 1)


def test_statistics_of_inputs_do_not_serve_mla_behind_norms(family: Folders, tmp_path: Path) -> None:
    source = family("qwen3")
    (tmp_path / "text.txt").write_text(TEXT)
    headwise.calibrate(source, tmp_path / "statistics", calibrate=tmp_path / "text.txt", calibration_tokens=256)
    convert(source, tmp_path / "mqa", "mqa", statistics=tmp_path / "statistics")
    with pytest.raises(headwise.ArgumentError, match="is of layers' inputs, and mla of a layer with qk_norm"):
        convert(source, tmp_path / "out", "mla", statistics=tmp_path / "statistics")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "value", "beside"),
    [
        ("qk_norm", "full", {"bias": ("k_proj",)}),
        ("qk_norm", "head", {"bias": ("q_proj", "k_proj", "v_proj")}),
        ("sinks", True, {}),
        ("softcap", 50.0, {}),
    ],
)
def test_what_mla_cannot_hold_is_refused_by_name(field: str, value: object, beside: dict[str, Any]) -> None:
    model = headwise.models.specs.read_spec("llama-3-8b")
    layers = (model.layers[0], replace(model.layers[0], **{field: value}, **beside), *model.layers[2:])
    with pytest.raises(
        headwise.SpecError, match=rf"^{field} = {value!r}: a layer with it cannot be converted to mla"
    ):
        convert_spec(replace(model, layers=layers), parse_target("mla", kv_budget=0.5))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("bert", {"is_decoder": True}, "is_decoder = True"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ],
)
def test_variants_that_are_not_understood(
    name: str, fields: dict[str, Any], message: str, family: Folders, tmp_path: Path
) -> None:
    source = family(name)
    config = {**open_checkpoint(source).config, **fields}
    with pytest.raises(headwise.SpecError, match=rf"^{message}"):
        read_config(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_converting_from_mla_is_refused(name: str, converted: Folders, tmp_path: Path) -> None:
    with pytest.raises(headwise.SpecError, match="converting from MLA is not supported"):
        convert(converted(name, "mla"), tmp_path / "out", "mqa")


def test_a_rotary_key_without_rotation_is_refused(family: Folders, tmp_path: Path) -> None:
    source = family("gpt2")
    with pytest.raises(headwise.ArgumentError, match=r"^qk_rope_head_dim = 4: must be 0: the layer has no rotary"):
        headwise.convert(source, tmp_path / "out", to="mla", kv_lora_rank=20, qk_rope_head_dim=4)


def test_speech_models_are_not_calibrated_on_text_nor_evaluated_on_it(family: Folders, tmp_path: Path) -> None:
    source, text = family("whisper"), tmp_path / "text.txt"
    text.write_text("hello " * 200)
    with pytest.raises(
        headwise.ArgumentError, match=r"calibrate = .*: is text, and a whisper model attends to an encoder"
    ):
        convert(source, tmp_path / "out", "mla", calibrate=text)
    with pytest.raises(headwise.SpecError, match=r"^model_type = 'whisper': attends to an encoder's output"):
        headwise.evaluate(source, text=text)
    with pytest.raises(headwise.SpecError, match=r"^model_type = 'whisper': attends to an encoder's output"):
        headwise.generate(source, "hello")


def test_sizes_of_a_conversion_are_plain_numbers() -> None:
    """Also where all is kept of a layer whose size costs remember the letters of: codes are made of plain ones."""
    model = headwise.models.specs.read_spec("gpt2")
    converted = convert_spec(model, parse_target("mla", kv_bytes=1.0))
    assert {type(layer.kv_lora_rank) for layer in converted.layers} == {int}
