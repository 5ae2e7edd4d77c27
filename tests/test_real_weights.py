"""From conversion to evaluation on real weights: SmolLM2-135M (dequantised from Q4_1) and glassllm."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import headwise
from benchmarks import glassllm
from headwise.conversion import export_deepseek
from headwise.measure.timing import cache_nbytes
from headwise.models.checkpoints import tokenizer
from headwise.models.specs.sources import bundled_gguf
from headwise.runtime.hf import HeadwiseCache
from tests.closeness import assert_close
from tests.one_size import convert_to_one_size

PROMPT = "The capital of France is Paris, and the capital of Italy is"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def text(root: Path) -> Path:
    """Python's own language reference."""
    path = root / "reference.txt"
    path.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def smollm2(root: Path) -> Path:
    headwise.convert("smollm2-135m", root / "smollm2", to="gqa:3", evaluate=False)
    return root / "smollm2"


@pytest.fixture(scope="module")
def shallow(smollm2: Path) -> Path:
    """Its first six layers, for what is true at any depth; a fifth of the work."""
    folder = Path(shutil.copytree(smollm2, smollm2.parent / "shallow"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not re.search(r"layers\.([6-9]|\d\d)\.", name)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 49152, (1, 96), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def expected(shallow: Path, ids: torch.Tensor) -> torch.Tensor:
    return logits(shallow, ids)


@torch.inference_mode()
def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = headwise.load(folder)(ids).logits
    return out


def test_the_tokenizer_of_a_gguf_is_transformers_own_and_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundled_gguf()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    def reads_everything(*args: Any, **options: Any) -> Any:
        raise AssertionError("a string is made of every entry of the vocabulary")

    monkeypatch.setattr("transformers.modeling_gguf_pytorch_utils.load_gguf_checkpoint", reads_everything)
    tokenizer._read_gguf_tokenizer.cache_clear()
    ours = tokenizer.load_gguf_tokenizer(path)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map


@pytest.fixture(scope="module")
def mha(shallow: Path) -> Path:
    headwise.convert(shallow, shallow.parent / "mha", to="mha", evaluate=False)
    return shallow.parent / "mha"


def test_to_mha_differs_by_exactly_zero(mha: Path, ids: torch.Tensor, expected: torch.Tensor) -> None:
    assert headwise.inspect(mha).num_kv_heads == 9
    assert torch.equal(logits(mha, ids), expected)


def test_its_nine_heads_pooled_to_three_are_the_original(
    mha: Path, ids: torch.Tensor, expected: torch.Tensor
) -> None:
    headwise.convert(mha, mha.parent / "pooled", to="gqa:3", evaluate=False)
    assert float((logits(mha.parent / "pooled", ids) - expected).abs().max()) < 1e-4


def test_one_head_is_the_mean_of_three(shallow: Path, ids: torch.Tensor) -> None:
    out = shallow.parent / "mqa-mean"
    headwise.convert(shallow, out, to="mqa", method="mean", evaluate=False)
    before, after = (load_file(folder / "model.safetensors") for folder in (shallow, out))
    for name in ("k_proj", "v_proj"):
        path = f"model.layers.5.self_attn.{name}.weight"
        assert torch.allclose(after[path], before[path].unflatten(0, (3, 64)).mean(0), atol=1e-6)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_key_value_heads == 1
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, logits(out, ids), atol=1e-3)


def test_lossless_mla(smollm2: Path, text: Path, ids: torch.Tensor) -> None:
    out = smollm2.parent / "lossless"
    headwise.convert(smollm2, out, to="mla", kv_budget=1.0, evaluate=False)
    assert float((logits(out, ids) - logits(smollm2, ids)).abs().max()) < 1e-3
    evaluation = headwise.evaluate(out, against=smollm2, text=text, window=512, windows=1, context=64)
    assert evaluation.perplexity_ratio == pytest.approx(1, abs=1e-4)
    assert evaluation.kl == pytest.approx(0, abs=1e-5)
    assert evaluation.top1_agreement == pytest.approx(1, abs=0.005)
    assert evaluation.reference is not None
    assert evaluation.cache_bytes_per_token == evaluation.reference.cache_bytes_per_token == 30 * 384 * 4


def test_half_the_cache_in_a_fresh_process(smollm2: Path, text: Path) -> None:
    out = smollm2.parent / "half"
    done = headwise.convert(
        smollm2,
        out,
        to="mla",
        kv_budget=0.5,
        calibrate=text,
        calibration_tokens=1024,
        without=("spread", "refine"),
        evaluate=False,
    )
    assert done.label == "MLA 144 + 48"
    assert (done.kv_bytes_per_token_before, done.kv_bytes_per_token_after) == (30 * 384 * 4, 30 * 192 * 4)
    code = f"""
import json, sys
import headwise.hf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({str(out)!r})
tokenizer = AutoTokenizer.from_pretrained({str(out)!r})
ids = tokenizer({PROMPT!r}, return_tensors="pt")
made = model.generate(**ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
layers = made.past_key_values.layers
json.dump({{
    "text": tokenizer.decode(made.sequences[0, ids["input_ids"].shape[1]:]),
    "tokens": layers[0].keys.shape[2],
    "bytes": sum(t.nbytes for layer in layers for t in (layer.keys, layer.values)),
}}, sys.stdout)
"""
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert fresh.returncode == 0, fresh.stderr
    report = json.loads(fresh.stdout)
    assert report["text"].strip()
    assert report["bytes"] / report["tokens"] == 30 * 192 * 4
    # Half the cache on little calibration hurts on a text that it was not fitted to; nonsense would be thousands of
    # times the perplexity.
    other = out.with_name("end.txt")
    other.write_text(text.read_text(encoding="utf-8")[-10_000:], encoding="utf-8")
    evaluation = headwise.evaluate(out, against=smollm2, text=other, window=512, windows=1, context=64)
    assert evaluation.perplexity_ratio is not None
    assert 1 < evaluation.perplexity_ratio < 3


WITHOUT_HEADWISE = """
import sys
sys.modules["headwise"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ids = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = AutoTokenizer.from_pretrained(folder)("PROMPT", return_tensors="pt")
    torch.save({
        "kind": type(model).__name__,
        "logits": model(ids).logits.detach(),
        "prompt": prompt["input_ids"],
        "made": model.generate(**prompt, max_new_tokens=24, do_sample=False, eos_token_id=None),
    }, f"{folder}.said")
""".replace("PROMPT", PROMPT)


@pytest.fixture(scope="module")
def stock(root: Path, shallow: Path, text: Path, ids: torch.Tensor) -> headwise.Conversion:
    """Three folders as DeepSeek-V3, what one process without headwise says of each, and the report of the last."""
    headwise.convert(shallow, root / "lossless own", to="mla", kv_budget=1.0, evaluate=False)
    convert_to_one_size(shallow, root / "lossy own", kv_lora_rank=200, qk_rope_head_dim=128)
    for plan in ("lossless", "lossy"):
        export_deepseek(root / f"{plan} own", root / f"{plan} stock")
    converted = headwise.convert(
        shallow,
        root / "converted stock",
        to="mla",
        kv_budget=0.75,
        format="deepseek",
        calibrate=text,
        calibration_tokens=512,
        without=("sensitivity", "refine"),
        evaluate=False,
    )
    torch.save(ids, root / "ids")
    folders = [str(root / f"{plan} stock") for plan in ("lossless", "lossy", "converted")]
    command = [sys.executable, "-c", WITHOUT_HEADWISE, str(root / "ids"), *folders]
    fresh = subprocess.run(command, capture_output=True, text=True, check=False)
    assert fresh.returncode == 0, fresh.stderr
    return converted


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("plan", ["lossless", "lossy"])
def test_as_deepseek_v3_where_headwise_cannot_be_imported(plan: str, root: Path, ids: torch.Tensor) -> None:
    answers = torch.load(root / f"{plan} stock.said", weights_only=True)
    assert answers["kind"] == "DeepseekV3ForCausalLM"
    own, optimized = headwise.load(root / f"{plan} own"), headwise.optimize(headwise.load(root / f"{plan} stock"))
    with torch.inference_mode():
        assert answers["made"].shape[1] == answers["prompt"].shape[1] + 24
        for model in (own, optimized):
            assert float((answers["logits"] - model(ids).logits).abs().max()) < 1e-3
            tokens = model.generate(answers["prompt"], max_new_tokens=24, do_sample=False, eos_token_id=None)
            differ = (tokens != answers["made"])[0].nonzero()
            if len(differ):  # two tokens as good as each other, then
                before = tokens[:, : int(differ[0])]
                first, second = model(before).logits[0, -1].topk(2).values.tolist()
                assert first - second < 1e-3


def test_convert_ends_as_deepseek_v3(
    stock: headwise.Conversion, root: Path, shallow: Path, text: Path, ids: torch.Tensor
) -> None:
    assert stock.stock is not None
    assert stock.stock.logits_difference is not None
    assert stock.stock.logits_difference < 1e-3
    assert stock.stock.shared_plan_error is not None
    assert stock.stock.own_plan_error is not None
    answers = torch.load(root / "converted stock.said", weights_only=True)
    assert answers["kind"] == "DeepseekV3ForCausalLM"
    optimized = headwise.optimize(headwise.load(root / "converted stock"))
    with torch.inference_mode():
        assert float((answers["logits"] - optimized(ids).logits).abs().max()) < 1e-3
    evaluation = headwise.evaluate(
        root / "converted stock", against=shallow, text=text, window=512, windows=1, context=64
    )
    assert evaluation.kl is not None
    assert 0 < evaluation.kl < 0.2  # six layers alone predict nothing, so that perplexity would say little


def test_stock_cache_of_the_original_is_twice_as_large(shallow: Path, ids: torch.Tensor) -> None:
    with torch.inference_mode():
        cache = headwise.load(shallow)(ids, use_cache=True).past_key_values
    assert cache_nbytes(cache) / ids.shape[1] == 6 * 384 * 4


def test_glassllm_converts_with_no_change_to_the_code(tmp_path: Path) -> None:
    source = glassllm.save_weights(tmp_path / "glass")
    ids = torch.randint(0, 1024, (2, 100), generator=torch.Generator().manual_seed(1))
    expected = logits(source, ids)
    for name, options in (("mha", {"to": "mha"}), ("lossless", {"to": "mla", "kv_budget": 1.0})):
        headwise.convert(source, tmp_path / name, **options, evaluate=False)
        assert_close(logits(tmp_path / name, ids), expected, 1e-5)
    done = headwise.convert(source, tmp_path / "half", to="mla", kv_budget=0.5, evaluate=False)
    assert done.kv_bytes_per_token_after * 2 == done.kv_bytes_per_token_before
    assert logits(tmp_path / "half", ids).isfinite().all()


def test_the_glassllm_folder_is_the_packages_model(tmp_path: Path) -> None:
    """The oracle is the package's own numpy forward: a wrong map would make the test above mean nothing."""
    import importlib.util

    from glassllm.model import GlassLM

    package = importlib.util.find_spec("glassllm")
    assert package is not None
    assert package.origin is not None
    oracle = GlassLM.load(Path(package.origin).parent / "weights/en.npz")
    ids = torch.randint(0, 1024, (1, 60), generator=torch.Generator().manual_seed(2))
    expected = torch.from_numpy(oracle.forward(ids.numpy()).data)
    assert_close(logits(glassllm.save_weights(tmp_path / "glass"), ids), expected, 1e-4)


@pytest.mark.parametrize("cache_format", ["int4+hadamard", "kivi4"])
@torch.inference_mode()
def test_generating_from_a_quantised_cache_is_one_forward_of_what_is_stored(cache_format: str, shallow: Path) -> None:
    """In float64, so that no number falls to the other side of a code's edge for its rounding."""
    model = headwise.load(shallow, dtype="float64")
    ids = torch.randint(3, 49152, (2, 70), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        past_key_values=HeadwiseCache(model, quantize=cache_format),
        return_dict_in_generate=True,
        output_logits=True,
    )
    mask = torch.cat((mask, torch.ones(2, out.sequences.shape[1] - 70, dtype=torch.long)), 1)
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    inputs = {"attention_mask": mask, "position_ids": places}
    # No block of 64 fills after the prompt, so that kivi's codes are those of one forward too.
    once = model(out.sequences, past_key_values=HeadwiseCache(model, quantize=cache_format), **inputs).logits
    error = (torch.stack(out.logits, 1) - once[:, 69:-1]).abs().max()
    effect = (model(out.sequences, **inputs).logits - once)[:, 69:-1].abs().max()
    assert error < 1e-4
    assert effect > 0.1
