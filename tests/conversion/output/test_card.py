"""The card: the conversion and its measurements, metadata that the hub reads, and nothing of the user's machine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwise.conversion.output.card import CardFacts, base_model_of, model_card, source_license
from headwise.costs.formulas import model as cost
from headwise.measure.evaluation.results import Evaluation, PositionScore, TextScore
from headwise.models.specs import GroupedSpec, LatentSpec, ModelSpec

E, H, K, D = 64, 8, 4, 8


def grouped(kv_heads: int, **options: Any) -> GroupedSpec:
    return GroupedSpec(hidden_size=E, num_heads=H, num_kv_heads=kv_heads, head_dim=D, **options)


def latent(rank: int, rope: int = 8) -> LatentSpec:
    widths = {"qk_nope_head_dim": D, "qk_rope_head_dim": rope, "v_head_dim": D}
    return LatentSpec(hidden_size=E, num_heads=H, kv_lora_rank=rank, **widths)


def model(*layers: GroupedSpec | LatentSpec, **options: Any) -> ModelSpec:
    return ModelSpec(**{"model_type": "llama", "hidden_size": E, "layers": layers, **options})


BEFORE = model(*[grouped(K)] * 4)
FACTS = CardFacts(
    name="small-mla",
    source="/home/somebody/models/small",
    before=BEFORE,
    after=model(*[latent(24)] * 4),
    dtype="bfloat16",
    layout="headwise",
    method="joint latent",
)


def score(text: str, **values: Any) -> dict[str, Any]:
    return {
        "text": text,
        "windows": 6,
        "tokens": 12_282,
        "perplexity": 28.3456,
        "reference_perplexity": 22.9012,
        "perplexity_ratio": 1.23773,
        "kl": 0.21234,
        "kl_999": 2.53449,
        "top1_agreement": 0.7512,
        "top1_changed": 3056,
        **values,
    }


def evaluation(*texts: dict[str, Any], **values: Any) -> dict[str, Any]:
    """An evaluation as `evaluate` reports it, so that the card's names are tested against that class."""
    buckets = (PositionScore(start=1, stop=256, nll=3.0),)
    return paired(
        Evaluation,
        {
            **score(", ".join(text["text"] for text in texts)),
            "texts": tuple(paired(TextScore, {**text, "by_position": buckets}) for text in texts),
            "model": "/home/somebody/out",
            "against": "/home/somebody/models/small",
            "window": 2048,
            "cache_bytes_per_token": 256.0,
            "context": 512,
            "decode_ms": 11.128,
            "reference_decode_ms": 10.25,
            "dtype": "float32",
            "device": "cpu",
            "threads": 2,
            **values,
        },
    ).to_dict()


def paired(kind: type[Any], values: dict[str, Any]) -> Any:
    """A result from the values of its JSON, the reference's included."""
    model_values = {name: value for name, value in values.items() if not name.startswith("reference_")}
    others = {name.removeprefix("reference_"): value for name, value in values.items() if name not in model_values}
    is_alone = all(value is None for value in others.values())
    return kind(**model_values, reference=None if is_alone else kind(**{**model_values, **others}))


def metadata(card: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?\n)---\n\n# ", card, re.DOTALL)
    assert match
    loaded = yaml.safe_load(match[1])
    assert isinstance(loaded, dict)
    return loaded


def section(card: str, title: str) -> str:
    return card.split(f"## {title}\n\n")[1].split("\n\n## ", maxsplit=1)[0].strip()


def test_metadata() -> None:
    assert metadata(model_card(FACTS)) == {"library_name": "transformers", "tags": ["headwise", "mla", "kv-cache"]}
    published = replace(
        FACTS,
        base_model="owner/small",
        license={"license": "other", "license_name": "theirs", "license_link": "LICENSE", "tags": "evil"},
        layout="deepseek",
    )
    assert metadata(model_card(published)) == {
        "library_name": "transformers",
        "tags": ["headwise", "mla", "kv-cache", "deepseek_v3"],
        "base_model": "owner/small",
        "license": "other",
        "license_name": "theirs",
        "license_link": "LICENSE",
    }
    assert "[owner/small](https://huggingface.co/owner/small) with its attention converted from GQA to MLA by" in (
        model_card(published)
    )


def test_layers_of_one_size_are_one_row() -> None:
    attention = section(model_card(FACTS), "Attention")
    rows = attention.split("\n\n")[0].splitlines()[2:]
    assert rows == [f"| 0–3 | {grouped(K).label} | MLA 24 + 8 | 64 → 32 |"]
    old, new = (cost.cache_bytes_per_token(spec, "bfloat16") for spec in (FACTS.before, FACTS.after))
    assert (old, new) == (4 * 64 * 2, 4 * 32 * 2)
    assert "- cache a token, all layers: 512 → 256 bytes in bfloat16 (50.0%)" in attention
    assert "parameters" not in attention
    assert "- parameters: 1,000 → 1,200" in model_card(replace(FACTS, parameters=(1000, 1200)))


def test_layers_of_several_sizes_are_a_table() -> None:
    after = model(latent(24), latent(24), latent(40, rope=0), latent(24))
    rows = section(model_card(replace(FACTS, after=after)), "Attention").split("\n\n")[0].splitlines()[2:]
    old = grouped(K).label
    assert rows == [
        f"| 0–1 | {old} | MLA 24 + 8 | 64 → 32 |",
        f"| 2 | {old} | MLA 40 | 64 → 40 |",
        f"| 3 | {old} | MLA 24 + 8 | 64 → 32 |",
    ]


def test_windows_encoders_and_cross_attention() -> None:
    windowed = model(grouped(K, sliding_window=16), grouped(K))
    rows = section(model_card(replace(FACTS, before=windowed, after=windowed)), "Attention")
    assert "| 0 | GQA" in rows
    assert rows.count(", window 16 |") == 2
    encoder = model(grouped(H, is_causal=False))
    assert "- cache: none (an encoder has none)" in model_card(replace(FACTS, before=encoder, after=encoder))
    crossed = model(grouped(H), cross_layers=(grouped(H, is_causal=False),))
    smaller = model(grouped(K), cross_layers=(grouped(K, is_causal=False),))
    card = model_card(replace(FACTS, before=crossed, after=smaller))
    assert f"| cross 0 | {grouped(H).label} | {grouped(K).label} | 128 → 64 |" in card
    assert "- cache of each encoder output: 256 → 128 bytes in bfloat16 (50.0%)" in card


def test_what_was_measured() -> None:
    assert section(model_card(FACTS), "Measured") == "Not measured."
    one = section(model_card(replace(FACTS, evaluation=evaluation(score("/data/wiki.txt")))), "Measured")
    assert one.splitlines()[2:] == [
        "| `wiki.txt` | 12,282 | 22.901 | 28.346 | 1.238 | 0.2123 | 2.5345 | 75.1% | 3,056 |",
        "",
        "- windows of 2048 tokens, in float32",
        "- decoding a token with 512 tokens in the cache: 10.25 → 11.13 ms (cpu, 2 threads)",
    ]
    two = evaluation(score("/data/wiki.txt", perplexity=float("inf")), score("/data/brown|.txt", kl=0.5))
    rows = section(model_card(replace(FACTS, evaluation=two)), "Measured").splitlines()[2:5]
    assert rows == [
        "| `wiki.txt` | 12,282 | 22.901 | inf | 1.238 | 0.2123 | 2.5345 | 75.1% | 3,056 |",
        "| `brown\\|.txt` | 12,282 | 22.901 | 28.346 | 1.238 | 0.5000 | 2.5345 | 75.1% | 3,056 |",
        "| `all` | 12,282 | 22.901 | 28.346 | 1.238 | 0.2123 | 2.5345 | 75.1% | 3,056 |",
    ]


def test_without_a_reference_what_is_not_known_is_a_dash() -> None:
    compared = ("perplexity_ratio", "kl", "kl_999", "top1_agreement", "top1_changed")
    missing = dict.fromkeys(("reference_perplexity", *compared))
    alone = evaluation(score("wiki.txt", **missing), **missing, reference_decode_ms=None)
    text = section(model_card(replace(FACTS, evaluation=alone)), "Measured")
    assert "| `wiki.txt` | 12,282 | – | 28.346 | – | – | – | – | – |" in text
    assert ": – → 11.13 ms" in text


def test_how_it_was_made() -> None:
    bare = section(model_card(FACTS), "How it was made")
    assert bare.splitlines() == [
        "- source: `small`",
        "- method: joint latent",
        "- not calibrated: converted by its weights alone",
    ]
    full = replace(
        FACTS,
        stages=("sensitivity", "refit"),
        calibration=(Path("/data/train.txt"), "hf-dataset://owner/texts"),
        calibration_tokens=65_536,
        calibration_window=1024,
        versions={"headwise": "0.1", "torch": "2.13.0"},
        notes=("the source is dequantised from Q4_1",),
    )
    assert section(model_card(full), "How it was made").splitlines() == [
        "- source: `small`",
        "- method: joint latent",
        "- steps: sensitivity, refit",
        "- calibrated on 65,536 tokens of `train.txt`, `hf-dataset://owner/texts`, in windows of 1024",
        "- versions: headwise 0.1, torch 2.13.0",
        "- the source is dequantised from Q4_1",
    ]


@pytest.mark.parametrize("layout", ["stock", "headwise", "deepseek"])
def test_how_to_load_it_is_python(layout: Any) -> None:
    card = model_card(replace(FACTS, layout=layout, auto_class="AutoModel"))
    code = section(card, "How to load it").split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert ("import headwise.hf" in code) == (layout == "headwise")
    assert "AutoModel.from_pretrained" in code
    assert ("`headwise engines folder`" in card) == (layout == "headwise")


def test_a_cache_in_codes_is_loaded_by_headwise() -> None:
    told = section(model_card(replace(FACTS, layout="headwise", code_bytes=64)), "How to load it")
    assert "model = headwise.load(folder)" in told
    assert "from_pretrained" not in told


def test_nothing_of_the_makers_machine_is_in_it() -> None:
    whole = replace(
        FACTS, evaluation=evaluation(score("/home/somebody/wiki.txt")), calibration=("/home/somebody/train.txt",)
    )
    assert "somebody" not in model_card(replace(whole, calibration_tokens=10))
    assert "somebody" not in model_card(replace(whole, source="C:\\somebody\\small"))


def test_names_cannot_write_the_card() -> None:
    evil = 'x\n---\n# injected <script> [a](b) `c`: "'
    card = model_card(
        replace(FACTS, name=evil, source=evil, method=evil, notes=(evil,), base_model=evil, license={"license": evil})
    )
    assert "\n# injected" not in card
    assert "<script>" not in re.sub(r"`[^`\n]*`", "", card.split("\n---\n\n# ")[1]).replace("\\<script\\>", "")
    assert metadata(card)["license"] == evil


def test_the_same_facts_make_the_same_card() -> None:
    assert model_card(FACTS) == model_card(replace(FACTS))
    assert model_card(FACTS).endswith(".\n")
    assert "\n\n\n" not in model_card(FACTS)


def test_the_sources_licence_and_nothing_else_is_read(tmp_path: Path) -> None:
    assert source_license(tmp_path) == {}
    readme = tmp_path / "README.md"
    for text, found in {
        "---\nlicense: apache-2.0\ntags: [x]\n---\n# Theirs\n": {"license": "apache-2.0"},
        "---\nlicense: other\nlicense_name: own\nlicense_link: https://x\n---\n": {
            "license": "other",
            "license_name": "own",
            "license_link": "https://x",
        },
        "---\nlicense: other\nlicense_link: LICENSE\n---\n": {"license": "other"},
        "---\nlicense: [mit, apache-2.0]\n---\n": {},
        "---\nlicense: {\n---\n": {},
        "---\n- a list\n---\n": {},
        "---\nlicense: !!python/object/apply:os.system ['exit 1']\n---\n": {},
        "# No metadata\nlicense: mit\n": {},
        "": {},
    }.items():
        readme.write_text(text)
        assert source_license(tmp_path) == found, text
    readme.write_bytes(b"---\nlicense: \xff\n---\n")
    assert source_license(tmp_path) == {}


def test_the_base_model_is_known_from_its_name() -> None:
    assert base_model_of("hf://owner/name") == "owner/name"
    assert base_model_of("hf://owner/name@main") == "owner/name"
    assert base_model_of("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert base_model_of("owner/name") is None
    assert base_model_of(Path("folder")) is None
