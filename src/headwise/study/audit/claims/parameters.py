"""Claims about parameters: C1 to C4, C22, and the figures of section 2."""

from __future__ import annotations

from headwise import cost
from headwise.models.specs import AttentionSpec
from headwise.study.audit.claim import Check, Claim, at_most, exact_number, printed_range, rounded_number
from headwise.study.audit.layers import grouped_layer, latent_layer, layer_by_name

E, H = 512, 8
"""The width and the query heads of the second guide's examples."""


def layer_parameters(name: str, hidden_size: int = E, num_heads: int = H) -> int:
    """Weights of a layer by the guide's name. For example ``layer_parameters("MQA")`` is 589,824."""
    return cost.parameters(layer_by_name(name, hidden_size, num_heads))


def percent_of(name: str, of: str = "MHA", hidden_size: int = E, num_heads: int = H) -> float:
    """A layer's weights as a percentage of another's. For example ``percent_of("MQA")`` is 56.25."""
    return 100 * layer_parameters(name, hidden_size, num_heads) / layer_parameters(of, hidden_size, num_heads)


def percent_fewer(name: str, hidden_size: int = E, num_heads: int = H) -> float:
    """The percentage by which a layer has fewer weights than MHA. For example ``percent_fewer("MQA")`` is 43.75."""
    return 100 - percent_of(name, "MHA", hidden_size, num_heads)


def printed_mqa(hidden_size: int, num_heads: int) -> bool:
    """Whether E² + 2E²/h² is within a percent of MQA's weights, counted without the output projection."""
    printed = hidden_size**2 * (1 + 2 / num_heads**2)
    return abs(printed / without_output("MQA", hidden_size, num_heads) - 1) < 0.01


def without_output(name: str, hidden_size: int, num_heads: int) -> int:
    """Weights of a layer but for its output projection. For example ``without_output("MHA", 4, 2)`` is 48."""
    return layer_parameters(name, hidden_size, num_heads) - hidden_size**2


def first_guides_total(name: str, hidden_size: int, num_heads: int) -> bool:
    """Whether the first guide's formula is the number of weights without the output projection."""
    kv_heads = cost_heads(name, num_heads)
    printed = hidden_size**2 + 2 * hidden_size * (hidden_size // num_heads) * kv_heads
    return printed == without_output(name, hidden_size, num_heads)


def cost_heads(name: str, num_heads: int) -> int:
    """The number of key–value heads that the formulas E² + 2E²/g (g heads a group), E² + 2E·d and 3E² imply."""
    return {"MHA": num_heads, "MQA": 1}.get(name) or int(name.removeprefix("GQA-"))


def section_layer(mechanism: str, hidden_size: int, num_heads: int) -> AttentionSpec:
    """One of section 2's layers, with biases: k = h/2, latents E/4, heads' width E/2, 26 rotary dims."""
    if mechanism == "MLA":
        return latent_layer(hidden_size, num_heads, hidden_size // 4, hidden_size // 2, 26, bias=True)
    heads = {"MHA": num_heads, "MQA": 1, "GQA": num_heads // 2}[mechanism]
    return grouped_layer(hidden_size, num_heads, heads, bias=True)


def mla_by_formula(hidden_size: int, rank: int, up: int, rope: int) -> int:
    """The first guide's total of MLA, 3(E·c + c·U) + 2(E·r)."""
    return 3 * (hidden_size * rank + rank * up) + 2 * hidden_size * rope


def formula_share(hidden_size: int, rank: int, up: int, rope: int, heads: int) -> float:
    """The formula's total as a percentage of the layer's parameters."""
    layer = cost.parameters(latent_layer(hidden_size, heads, rank, up, rope, bias=True))
    return 100 * mla_by_formula(hidden_size, rank, up, rope) / layer


def flops_share(length: int, hidden_size: int, num_heads: int, rank: int, up: int, rope: int) -> float:
    """MLA's FLOPs of reading a prompt over those of MHA of the same hidden size."""
    mla, mha = latent_layer(hidden_size, num_heads, rank, up, rope), grouped_layer(hidden_size, num_heads, num_heads)
    return cost.forward_flops(mla, length) / cost.forward_flops(mha, length)


def kv_weight_ratio(hidden_size: int, num_heads: int) -> float:
    """The weights of K and V in MHA over those in MQA."""
    parts = [without_output(name, hidden_size, num_heads) - hidden_size**2 for name in ("MHA", "MQA")]
    return parts[0] / parts[1]


WIDE = {"hidden_size": E, "num_heads": H}
SECTION = {"hidden_size": 256, "num_heads": 8}
EXAMPLE = {"hidden_size": 256, "rank": 64, "up": 128, "rope": 26}

CLAIMS = (
    Claim(
        id="C1",
        guide="G2",
        says="MHA has about 2.1M parameters and MQA 0.4M, 81 % fewer; elsewhere 1,048,576 and 589,824",
        how="weights of the layers at E = 512, h = 8",
        checks=(
            Check(
                states="MHA's parameters",
                printed=rounded_number("2.1", 1e6, "M"),
                measure=layer_parameters,
                inputs={"name": "MHA"},
            ),
            Check(
                states="MQA's parameters",
                printed=rounded_number("0.4", 1e6, "M"),
                measure=layer_parameters,
                inputs={"name": "MQA"},
            ),
            Check(
                states="MQA's saving",
                printed=rounded_number("81", suffix=" %"),
                measure=percent_fewer,
                inputs={"name": "MQA"},
                unit="%",
            ),
            Check(
                states="MHA's 1,048,576",
                printed=exact_number(1_048_576),
                measure=layer_parameters,
                inputs={"name": "MHA", **WIDE},
            ),
            Check(
                states="MQA's 589,824",
                printed=exact_number(589_824),
                measure=layer_parameters,
                inputs={"name": "MQA", **WIDE},
            ),
            Check(
                states="MQA's −44 %",
                printed=rounded_number("44", suffix=" %"),
                measure=percent_fewer,
                inputs={"name": "MQA"},
                unit="%",
            ),
            *(
                Check(
                    states=f"the share of {name}",
                    printed=rounded_number(printed, suffix=" %"),
                    measure=percent_of,
                    inputs={"name": name, **WIDE},
                    unit="%",
                )
                for name, printed in (("MQA", "20"), ("GQA-2", "40"), ("GQA-4", "67"), ("latent-256", "85"))
            ),
        ),
    ),
    Claim(
        id="C2",
        guide="G1, G2",
        says="MQA has E² + 2E²/h² (G2); without the output projection MHA 3E², MQA E² + 2E·d, GQA E² + 2E²/g (G1)",
        how="weights by closed form",
        checks=(
            Check(states="G2's total of MQA", printed=True, measure=printed_mqa, inputs=WIDE),
            *(
                Check(
                    states=f"G1's total of {name}",
                    printed=True,
                    measure=first_guides_total,
                    inputs={"name": name, **WIDE},
                )
                for name in ("MHA", "MQA", "GQA-2")
            ),
        ),
    ),
    Claim(
        id="C3",
        guide="G2",
        says="with 8, 4, 2 and 1 key–value heads there are 0, 33, 60 and 80 % fewer parameters; elsewhere GQA-4 25 %",
        how="weights of the layers at E = 512, h = 8",
        checks=(
            *(
                Check(
                    states=f"{name}'s saving",
                    printed=rounded_number(printed, suffix=" %"),
                    measure=percent_fewer,
                    inputs={"name": name, **WIDE},
                    unit="%",
                )
                for name, printed in (("GQA-8", "0"), ("GQA-4", "33"), ("GQA-2", "60"), ("MQA", "80"))
            ),
            Check(
                states="GQA-4's saving of 25 %",
                printed=rounded_number("25", suffix=" %"),
                measure=percent_fewer,
                inputs={"name": "GQA-4", **WIDE},
                unit="%",
            ),
            Check(
                states="MQA's ~20 %",
                printed=rounded_number("20"),
                measure=percent_of,
                inputs={"name": "MQA", **WIDE},
                unit="%",
            ),
            Check(
                states="GQA's 30 to 100 %",
                printed=printed_range("30", "100", suffix=" %"),
                measure=percent_of,
                inputs={"name": "GQA-2", **WIDE},
                unit="%",
            ),
            Check(
                states="80 to 100 % of latent attention",
                printed=printed_range("80", "100", suffix=" %"),
                measure=percent_of,
                inputs={"name": "latent-256", **WIDE},
                unit="%",
            ),
        ),
    ),
    Claim(
        id="C4",
        guide="G1",
        says="MLA has 3(E·c + c·U) + 2(E·r) parameters, and computes less than MHA",
        how="the formula beside the layer's 111,082 parameters; FLOPs over prompts",
        checks=(
            Check(
                states="the formula's share of the layer's parameters",
                printed=rounded_number("100", suffix=" %"),
                measure=formula_share,
                inputs={**EXAMPLE, "heads": 8},
                unit="%",
            ),
            Check(
                states="MLA's FLOPs as a part of MHA's",
                when="ten tokens, the guide's sizes",
                printed=at_most(1),
                measure=flops_share,
                inputs={"length": 10, "num_heads": 8, **EXAMPLE},
            ),
            Check(
                states="MLA's FLOPs as a part of MHA's",
                when="DeepSeek-V3's ratios: latents of E/14, heads' width 16/7 of E",
                printed=at_most(1),
                measure=flops_share,
                inputs={"length": 4096, "num_heads": 128, "hidden_size": 7168, "rank": 512, "up": 16_384, "rope": 64},
            ),
        ),
    ),
    Claim(
        id="C22",
        guide="G1",
        says="sharing K and V cuts their parameters by a factor of h − 1",
        how="weights of K and V in MHA over those in MQA",
        checks=(
            Check(states="the factor at h = 8", printed=exact_number(7), measure=kv_weight_ratio, inputs=WIDE),
            Check(
                states="the factor at h = 32",
                printed=exact_number(31),
                measure=kv_weight_ratio,
                inputs={**WIDE, "num_heads": 32},
            ),
        ),
    ),
    Claim(
        id="section 2",
        guide="G1 – G5",
        says="the exact numbers of parameters, of thop's FLOPs and of weights of eight layers",
        how="closed forms, which tests hold to the layers themselves",
        checks=(
            *(
                Check(
                    states=f"{name}'s parameters",
                    printed=exact_number(parameters),
                    measure=lambda mechanism, hidden_size, num_heads: cost.parameters(
                        section_layer(mechanism, hidden_size, num_heads)
                    ),
                    inputs={"mechanism": name, **SECTION},
                )
                for name, parameters in (("MHA", 263_168), ("MQA", 148_032), ("GQA", 197_376), ("MLA", 111_082))
            ),
            *(
                Check(
                    states=f"{name}'s FLOPs as thop counts them",
                    printed=exact_number(flops),
                    measure=lambda mechanism, hidden_size, num_heads, length: cost.thop_count(
                        section_layer(mechanism, hidden_size, num_heads), length
                    ),
                    inputs={"mechanism": name, "length": 10, **SECTION},
                )
                for name, flops in (("MHA", 2_621_440), ("MQA", 1_474_560), ("GQA", 1_966_080), ("MLA", 1_100_800))
            ),
            *(
                Check(
                    states=f"{name}'s weights at E = 512",
                    printed=exact_number(weights),
                    measure=layer_parameters,
                    inputs={"name": name, **WIDE},
                )
                for name, weights in (
                    ("MHA", 1_048_576),
                    ("MQA", 589_824),
                    ("GQA-4", 786_432),
                    ("latent-256", 917_504),
                )
            ),
        ),
    ),
)
