"""Claims about the KV cache: C5 to C8, C11 and C21."""

from __future__ import annotations

from headwise import cost
from headwise.models.specs import layer_spec, read_spec
from headwise.study.audit.claim import Check, Claim, Number, at_least, at_most, exact_number, rounded_number
from headwise.study.audit.layers import layer_by_name

MB = 1e6
GUIDE_SIZES = {"hidden_size": 512, "num_heads": 8}


def layer_cache_bytes(
    name: str, tokens: int, dtype: str, hidden_size: int = 512, num_heads: int = 8, batch: int = 1
) -> int:
    """Bytes of a layer's cache. For example ``layer_cache_bytes("MQA", 1, "float32")`` is 512."""
    return cost.cache_bytes(layer_by_name(name, hidden_size, num_heads), tokens, batch=batch, dtype=dtype)


def layer_cache_values(name: str, tokens: int, batch: int = 1, hidden_size: int = 512, num_heads: int = 8) -> int:
    """Numbers in a layer's cache. For example ``layer_cache_values("MQA", 128)`` is 16,384."""
    return layer_cache_bytes(name, tokens, "int8", hidden_size, num_heads, batch)


def percent_smaller(name: str, hidden_size: int = 512, num_heads: int = 8) -> float:
    """The percentage by which a cache is smaller than MHA's. For example ``percent_smaller("MQA")`` is 87.5."""
    return 100 - 100 * layer_cache_values(name, 1, 1, hidden_size, num_heads) / layer_cache_values(
        "MHA", 1, 1, hidden_size, num_heads
    )


def bytes_over_width(dtype: str, tokens: int, hidden_size: int, num_heads: int) -> float:
    """Bytes of MHA's cache over n times the width."""
    return layer_cache_bytes("MHA", tokens, dtype, hidden_size, num_heads) / (tokens * hidden_size)


def relative_cache(source: str, beside: str) -> float:
    """The cache of one layer and token of a catalog model over that of MHA, or of another model.

    For example ``relative_cache("deepseek-v3", "its own MHA")``.
    """
    spec = layer_spec(source)
    heads: int = spec.num_heads  # type: ignore[attr-defined]
    width = getattr(spec, "qk_nope_head_dim", 0) + getattr(spec, "v_head_dim", 0)
    other = heads * width if beside == "its own MHA" else cost.cache_values(layer_spec(beside))
    return cost.cache_values(spec) / other


def longest_context(source: str) -> int:
    """The longest context of a catalog model."""
    return read_spec(source).max_position_embeddings or 0


def _size(name: str, tokens: int, digits: str, unit: float, suffix: str) -> Check:
    return Check(
        states=f"{name}'s cache at {tokens:,} tokens",
        printed=rounded_number(digits, unit, suffix),
        measure=layer_cache_bytes,
        inputs={"name": name, "tokens": tokens, "dtype": "float32", **GUIDE_SIZES},
        unit="bytes",
    )


def _percent(name: str, printed: str) -> Check:
    number: Number = rounded_number(printed, suffix=" %")
    return Check(
        states=f"{name}'s −{printed} %",
        printed=number,
        measure=percent_smaller,
        inputs={"name": name, **GUIDE_SIZES},
        unit="%",
    )


_LENGTHS = (128, 256, 512, 1024, 2048)
_PRINTED = {
    "MHA": (".13", ".26", ".52", "1.04", "2.09"),
    "MQA": (".02", ".03", ".07", ".13", ".26"),
    "GQA-4": (".07", ".13", ".26", ".52", "1.04"),
    "latent-256": (".07", ".13", ".26", ".52", "1.04"),
}

CLAIMS = (
    Claim(
        id="C5",
        guide="G2",
        says="a token's cache is 512×4×2 B in MHA (256 tokens 1.3 MB, 2048 10.4 MB) and 64×4×2 B in MQA (33 KB, "
        "256 KB), 97.5 or 87.5 % less; 2n × d_model bytes",
        how="bytes of one layer's cache at E = 512, h = 8, float32",
        checks=(
            _size("MHA", 1, "4096", 1, " B"),
            _size("MQA", 1, "512", 1, " B"),
            _size("MHA", 256, "1.3", MB, " MB"),
            _size("MHA", 2048, "10.4", MB, " MB"),
            _size("MQA", 256, "33", 1e3, " KB"),
            _size("MQA", 2048, "256", 1e3, " KB"),
            _percent("MQA", "97.5"),
            _percent("MQA", "87.5"),
            *(
                Check(
                    states="bytes of n tokens over n × d_model",
                    when=when,
                    printed=exact_number(2),
                    measure=bytes_over_width,
                    inputs={"dtype": dtype, "tokens": 100, **GUIDE_SIZES},
                )
                for dtype, when in (("float32", "float32"), ("int8", "values of one byte"))
            ),
        ),
    ),
    Claim(
        id="C6",
        guide="G2",
        says="at 2048 tokens the cache of MHA is 20.9 MB, of MQA 0.5 MB, of GQA-4 5.2 MB, of latent-256 4.2 MB",
        how="bytes of one layer's cache at E = 512, h = 8, float32",
        checks=(
            _size("MHA", 2048, "20.9", MB, " MB"),
            _size("MQA", 2048, "0.5", MB, " MB"),
            _size("GQA-4", 2048, "5.2", MB, " MB"),
            _size("latent-256", 2048, "4.2", MB, " MB"),
        ),
    ),
    Claim(
        id="C7",
        guide="G2",
        says="with 8 heads MQA's cache is 87.5 % smaller; those of GQA-2, GQA-4 and latent-256 50 %",
        how="numbers in the cache at E = 512, h = 8",
        checks=(
            _percent("MQA", "87.5"),
            Check(
                states="GQA-2's −50 %",
                when="two key–value heads",
                printed=rounded_number("50", suffix=" %"),
                measure=percent_smaller,
                inputs={"name": "GQA-2", **GUIDE_SIZES},
                unit="%",
            ),
            Check(
                states="GQA-2's −50 %",
                when="two query heads in a group",
                printed=rounded_number("50", suffix=" %"),
                measure=percent_smaller,
                inputs={"name": "GQA-4", **GUIDE_SIZES},
                unit="%",
            ),
            _percent("GQA-4", "50"),
            _percent("latent-256", "50"),
        ),
    ),
    Claim(
        id="C8",
        guide="G3",
        says="E = 4096, h = 32, d = 128, L = 2048: the cache is 2·32·2048·4096 = 16.8 M floats",
        how="numbers in the cache",
        checks=(
            Check(
                states="16.8 M floats",
                when="one layer",
                printed=rounded_number("16.8", 1e6, " M"),
                measure=layer_cache_values,
                inputs={"name": "MHA", "tokens": 2048, "batch": 1, "hidden_size": 4096, "num_heads": 32},
            ),
            Check(
                states="2·32·2048·4096",
                when="one layer",
                printed=exact_number(2 * 32 * 2048 * 4096),
                measure=layer_cache_values,
                inputs={"name": "MHA", "tokens": 2048, "batch": 1, "hidden_size": 4096, "num_heads": 32},
            ),
            Check(
                states="2·32·2048·4096",
                when="32 layers, or 32 sequences",
                printed=exact_number(2 * 32 * 2048 * 4096),
                measure=layer_cache_values,
                inputs={"name": "MHA", "tokens": 2048, "batch": 32, "hidden_size": 4096, "num_heads": 32},
            ),
        ),
    ),
    Claim(
        id="C11",
        guide="G2",
        says="memory at batch 4 from 128 to 2048 tokens: MHA 0.13 to 2.09 M, MQA 0.02 to 0.26 M, others half of "
        "MHA's",
        how="numbers in the cache at E = 512, h = 8",
        checks=tuple(
            Check(
                states=f"{name} at {length}",
                when=f"batch {batch}",
                printed=rounded_number(digits, 1e6, " M"),
                measure=layer_cache_values,
                inputs={"name": name, "tokens": length, "batch": batch, **GUIDE_SIZES},
            )
            for batch in (4, 1)
            for name, printed in _PRINTED.items()
            for length, digits in zip(_LENGTHS, printed, strict=True)
        ),
    ),
    Claim(
        id="C21",
        guide="G5",
        says="MLA's cache is a tenth of the usual one or less; it supports contexts of 128K",
        how="numbers that a layer of real models caches for a token, and their longest contexts",
        checks=(
            Check(
                states="the part of the usual cache",
                when="DeepSeek-V3 beside MHA of its own heads",
                printed=at_most(0.1),
                measure=relative_cache,
                inputs={"source": "deepseek-v3", "beside": "its own MHA"},
            ),
            Check(
                states="the part of the usual cache",
                when="DeepSeek-V3 beside a layer of Llama-3-70B (GQA of 8 heads)",
                printed=at_most(0.1),
                measure=relative_cache,
                inputs={"source": "deepseek-v3", "beside": "llama-3-70b"},
            ),
            Check(
                states="128K contexts",
                when="DeepSeek-V3",
                printed=at_least(131_072),
                measure=longest_context,
                inputs={"source": "deepseek-v3"},
                unit="positions",
            ),
            Check(
                states="128K contexts",
                when="Llama-3.1-70B, which has no MLA: RoPE's scaling decides",
                printed=at_least(131_072),
                measure=longest_context,
                inputs={"source": "llama-3.1-70b"},
                unit="positions",
            ),
        ),
    ),
)
