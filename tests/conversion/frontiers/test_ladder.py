"""The targets and methods that a frontier tries."""

from __future__ import annotations

from pathlib import Path

import pytest

import headwise
from headwise.conversion import STAGES
from headwise.conversion.frontiers.candidate import Candidate, list_candidates, read_target
from headwise.costs.formulas.target import BYTES, PLAIN_FORMATS, plain_formats
from headwise.models.checkpoints import open_checkpoint
from tests.real_models import save_tiny
from tests.tiny_families import save_family


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("mla:0.50", "mla:0.5"),
        ("MLA: .3333333333", "mla:0.3333333333"),
        ("mla:1", "mla:1"),
        ("mla:18 + 06", "mla:18+6"),
        ("gqa:02", "gqa:2"),
        ("mqa", "mqa"),
        (" mha ", "mha"),
        ("MLA@ .250", "mla@0.25"),
        ("same@0.28", "same@0.28"),
        ("gqa:02@.1", "gqa:2@0.1"),
        ("int8/int8", "int8"),
        ("INT4 + hadamard / int4", "int4+hadamard/int4"),
        ("kivi4:64", "kivi4"),
    ],
)
def test_a_target_is_always_written_alike(written: str, meant: str) -> None:
    assert read_target(written) == read_target(meant) == meant


@pytest.mark.parametrize(
    "written",
    [
        *("", "mla", "mla:", "mla:0", "mla:1.01", "mla:nan", "mla:1+", "mla:+2", "gqa", "gqa:x", "mqa:1", "kqa"),
        *("mla@", "mla@2", "mla@x", "mla:@0.5", "mla:0.5@0.25", "mqa@", "same", "@0.5", "int9", "kivi4/int8"),
    ],
)
def test_what_is_no_target_is_refused(written: str) -> None:
    with pytest.raises(
        headwise.ArgumentError, match=r"target = .*: (must be a conversion, such as mla:0\.5|kv_b|to needs)"
    ):
        read_target(written)


def test_options_are_those_of_convert() -> None:
    assert Candidate("mla:0.5").options() == {"to": "mla", "kv_budget": 0.5, "method": None, "without": ()}
    assert Candidate("mla:18+6", without=("refit",)).options() == {
        "to": "mla",
        "kv_lora_rank": 18,
        "qk_rope_head_dim": 6,
        "method": None,
        "without": ("refit",),
    }
    assert Candidate("gqa:2", "mean").options() == {"to": "gqa:2", "method": "mean", "without": ()}
    assert Candidate("mla@0.25").options() == {"to": "mla", "kv_bytes": 0.25, "method": None, "without": ()}
    assert Candidate("same@0.25").options() == {"to": "same", "kv_bytes": 0.25, "method": None, "without": ()}


@pytest.mark.parametrize(
    ("target", "kind", "cache"),
    [
        ("mla:0.5", "converted", None),
        ("mqa", "converted", None),
        ("mla@0.25", "both", None),
        ("gqa:2@0.25", "both", None),
        ("same@0.25", "quantised", None),
        ("int8/int4", "quantised", "int8/int4"),
    ],
)
def test_a_target_is_a_conversion_a_format_or_both(target: str, kind: str, cache: str | None) -> None:
    assert (Candidate(target).kind, Candidate(target).cache) == (kind, cache)


def test_no_two_ways_share_a_file_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        save_tiny(tmp_path / "source", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    )
    candidates, notes = list_candidates(checkpoint, ["mla:0.5", "mla:0.50", "mla:0.25", "mqa"], methods=True)
    assert (
        len({candidate.slug for candidate in candidates})
        == len(candidates)
        == 2 * (len(STAGES) + 2 + 5) - 1 + len(STAGES) - 2 + 2 + 3
    )
    assert not notes
    assert candidates[0] == Candidate("mla:0.5")
    assert Candidate("mla:0.5", without=STAGES) in candidates
    assert Candidate("mla:0.25", "transmla:8") in candidates
    assert Candidate("mqa", "first_head") in candidates


def test_each_stage_that_a_target_has_is_left_out_once(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny(tmp_path / "source"))
    choices = {}
    for target in ("mla:0.25", "mqa", "mla:1", "mha"):
        candidates, _ = list_candidates(checkpoint, [target], methods=True)
        choices[target] = [candidate.without for candidate in candidates if candidate.method is None]
    some = [("sequence",), ("refine",), ("refit",)]
    assert choices["mla:0.25"] == [
        (),
        ("recall",),
        ("starts",),
        ("sensitivity", "spread"),
        ("spread",),
        ("channels",),
        *some,
        STAGES,
    ]
    # MQA's heads all have one size, and turn as they did.
    merging = ("recall", "starts", "sensitivity", "sequence", "refine", "refit")
    assert choices["mqa"] == [(), ("recall",), ("starts",), ("sensitivity",), *some, merging]
    for target, stages in (("mla:0.25", STAGES), ("mqa", merging)):
        assert Candidate(target, without=stages).way == "headwise without any stage"
    assert choices["mla:1"] == choices["mha"] == [()]  # nothing is lost
    assert Candidate("mla:0.5", without=("sensitivity", "spread")).way == "headwise without sensitivity, spread"


@pytest.mark.parametrize(
    ("heads", "grouped"), [(12, ["gqa:6", "gqa:4", "gqa:3", "gqa:2", "mqa"]), (3, ["mqa"]), (1, [])]
)
def test_the_ladder(heads: int, grouped: list[str], tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", hidden_size=144, num_attention_heads=12, num_key_value_heads=heads)
    candidates, notes = list_candidates(open_checkpoint(source))
    coded = [f"mla@{share:g}" for share in BYTES]
    ladder = [*map(str, PLAIN_FORMATS), "mla:0.5", "mla:0.25", *grouped, *coded]
    # Heads of 12 channels cannot be rotated by a Hadamard matrix.
    assert [candidate.target for candidate in candidates] == [name for name in ladder if "hadamard" not in name]
    assert [note.partition(" (")[0] for note in notes] == ["not tried: int4+hadamard/int4"]


def test_formats_have_groups_that_divide_the_heads(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny(tmp_path / "source", head_dim=96))
    formats = [candidate.target for candidate in list_candidates(checkpoint)[0] if candidate.cache is not None]
    assert formats == [
        *("int8:128", "int8:128/int4:128", "kivi4:128", "kivi3:32", "kivi3:128", "kivi2:32", "kivi2:128")
    ]
    assert formats == list(plain_formats(checkpoint.spec))


def test_targets_that_a_family_cannot_have_are_left_out_and_noted(tmp_path: Path) -> None:
    source = save_family(tmp_path / "source", "qwen3", attention_bias=True)
    checkpoint = open_checkpoint(source)
    candidates, notes = list_candidates(checkpoint)
    formats = [name for name in map(str, PLAIN_FORMATS) if "hadamard" not in name]  # for heads of 14 channels
    assert [candidate.target for candidate in candidates] == [*formats, "mqa"]
    latent = ", ".join(("mla:0.5", "mla:0.25", *(f"mla@{share:g}" for share in BYTES)))
    assert [note.partition(" (")[0] for note in notes] == [
        "not tried: int4+hadamard/int4",
        f"not tried: {latent}",
    ]
    assert "cannot be converted to mla yet" in notes[1]
    with pytest.raises(headwise.SpecError, match="cannot be converted to mla yet"):
        list_candidates(checkpoint, ["mqa", "mla:0.5"])
    ways, _ = list_candidates(checkpoint, methods=True)
    assert {way.target for way in ways} == {"mqa"}
    others, _ = list_candidates(open_checkpoint(save_family(tmp_path / "without", "qwen3")))
    assert {"mla:0.5", "mla@0.25"} < {candidate.target for candidate in others}


def test_published_methods_that_have_no_step_for_a_model_are_left_out(tmp_path: Path) -> None:
    candidates, notes = list_candidates(
        open_checkpoint(save_family(tmp_path / "source", "gpt2")), ["mla:0.5"], methods=True
    )
    assert all(candidate.method is None for candidate in candidates)
    assert notes[0].startswith("not tried: mha2mla for mla:0.5 (method = 'mha2mla': needs rotary embeddings on all")


def test_a_format_has_no_methods_to_compare(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny(tmp_path / "source"))
    with pytest.raises(headwise.ArgumentError, match="target = 'kivi4': is no conversion"):
        list_candidates(checkpoint, ["mqa", "kivi4"], methods=True)
    coded, _ = list_candidates(checkpoint, ["mla@0.5"], methods=True)
    assert Candidate("mla@0.5", without=("refit",)) in coded


def test_a_format_that_does_not_suit_the_heads_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_family(tmp_path / "source", "qwen3"))
    with pytest.raises(headwise.ArgumentError, match="needs heads whose width is a power of two"):
        list_candidates(checkpoint, ["int4+hadamard"])


def test_a_size_the_source_does_not_have_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny(tmp_path / "source"))
    with pytest.raises(headwise.ArgumentError, match="num_kv_heads = 2: must divide"):
        list_candidates(checkpoint, ["mqa", "gqa:2"])
