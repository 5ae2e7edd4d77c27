"""Block diagrams of the mechanisms, each of a layer with four query heads; what a token caches is computed."""

from __future__ import annotations

from docs.drawings.blocks import Box, Diagram, Placed

from headwise import ExpertLatentSpec, GroupedSpec, LatentSpaceSpec, LatentSpec
from headwise.costs.formulas import cache_values
from headwise.models.specs import AttentionSpec

E, H, D = 256, 4, 64
"""The hidden size, the query heads and their width."""
LEFT = 22
"""Room on the left for the line from the hidden state to the queries."""
SUBSCRIPTS = "₁₂₃₄"

SPECS: dict[str, AttentionSpec] = {
    "mha": GroupedSpec(hidden_size=E, num_heads=H, num_kv_heads=4, head_dim=D),
    "gqa": GroupedSpec(hidden_size=E, num_heads=H, num_kv_heads=2, head_dim=D),
    "mqa": GroupedSpec(hidden_size=E, num_heads=H, num_kv_heads=1, head_dim=D),
    "mla": LatentSpec(
        hidden_size=E, num_heads=H, kv_lora_rank=96, qk_nope_head_dim=D, qk_rope_head_dim=32, v_head_dim=D
    ),
    "latent-space": LatentSpaceSpec(hidden_size=E, num_heads=H, head_dim=D, latent_dim=128),
    "expert-decoded": ExpertLatentSpec(hidden_size=E, num_heads=H, head_dim=D, latent_kv_heads=2, kv_dim=32),
}
"""The layer of each diagram."""

NAMES = {
    "mha": "Multi-head attention (MHA)",
    "gqa": "Grouped-query attention (GQA)",
    "mqa": "Multi-query attention (MQA)",
    "mla": "MLA, keys and values decoded",
    "mla-absorbed": "MLA, decoders absorbed",
    "latent-space": "Latent-space attention",
    "expert-decoded": "Expert-decoded latent attention",
}


def cached(name: str) -> int:
    """The numbers that a token caches in the layer of a diagram."""
    return cache_values(SPECS[name])


def draw() -> dict[str, str]:
    """The diagrams by file."""
    drawn = {name: _grouped(name) for name in ("mha", "gqa", "mqa")}
    drawn |= {"mla": _mla(), "mla-absorbed": _absorbed()}
    drawn |= {"latent-space": _latent_space(), "expert-decoded": _expert_decoded()}
    return {f"{name}.svg": diagram.svg() for name, diagram in drawn.items()}


def _begin(name: str) -> tuple[Diagram, Placed]:
    diagram = Diagram(NAMES[name])
    diagram.note(NAMES[name])
    diagram.space(2)
    (state,) = diagram.row(Box(f"hidden state of a token, E = {E}"))
    return diagram, state


def _heads(diagram: Diagram, state: Placed, texts: list[str], into: float = 0.14) -> list[Placed]:
    """A row of heads, each with its query from the hidden state by the dashed line."""
    heads = diagram.row(*(Box(text, "head") for text in texts), left=LEFT)
    top = heads[0].y
    diagram.rail((MARGIN_LINE, state.bottom), top - 12, [head.x + head.width * into for head in heads], top)
    return heads


MARGIN_LINE = 10
"""Where the line from the hidden state to the queries goes down."""


def _end(diagram: Diagram, above: list[Placed], name: str, text: str = "output projection, back to E") -> Diagram:
    diagram.space(18)
    (output,) = diagram.row(Box(text), left=LEFT)
    for each in above:
        diagram.arrow((each.middle, each.bottom), (each.middle, output.y - 1))
    kinds = (("cached", f"cached: {cached(name)} numbers a token"), ("head", "heads"))
    diagram.key(*kinds)
    diagram.note("dashed: from the hidden state to the queries")
    return diagram


def _grouped(name: str) -> Diagram:
    spec = SPECS[name]
    assert isinstance(spec, GroupedSpec)
    diagram, state = _begin(name)
    diagram.space(20)
    pairs = diagram.row(*(Box(f"k{_sub(i)} and v{_sub(i)}", "cached") for i in range(spec.num_kv_heads)), left=LEFT)
    for pair in pairs:
        diagram.arrow((pair.middle, state.bottom), (pair.middle, pair.y - 1))
    diagram.space(34)
    heads = _heads(diagram, state, [f"head {i + 1}\nq{_sub(i)}" for i in range(H)])
    for index, head in enumerate(heads):
        diagram.down(pairs[index // spec.group_size], head)
    return _end(diagram, heads, name)


def _mla() -> Diagram:
    spec = SPECS["mla"]
    assert isinstance(spec, LatentSpec)
    diagram, state = _begin("mla")
    diagram.space(20)
    latent, rotary = _latent_row(diagram, state, spec)
    diagram.space(24)
    decoded = diagram.row(*(Box(f"k{_sub(i)}\nv{_sub(i)}", "decoder") for i in range(H)), left=LEFT, right=16)
    for index, each in enumerate(decoded):
        diagram.down(latent, each, at=_share(latent, index, H))
    diagram.space(38)
    heads = _heads(diagram, state, [f"head {i + 1}\nq{_sub(i)}" for i in range(H)])
    for each, head in zip(decoded, heads, strict=True):
        diagram.down(each, head, to=each.middle)
    _share_rotary(diagram, rotary, heads)
    diagram = _end(diagram, heads, "mla")
    diagram.note("green: decoded from the latent, at each call")
    return diagram


def _absorbed() -> Diagram:
    spec = SPECS["mla"]
    assert isinstance(spec, LatentSpec)
    diagram, state = _begin("mla-absorbed")
    diagram.space(20)
    latent, rotary = _latent_row(diagram, state, spec)
    diagram.space(38)
    heads = _heads(diagram, state, [f"head {i + 1}\nU{_sub(i)}ᵀq{_sub(i)}" for i in range(H)])
    for index, head in enumerate(heads):
        diagram.down(latent, head, at=_share(latent, index, H))
    _share_rotary(diagram, rotary, heads)
    diagram.space(18)
    decoders = diagram.row(*(Box(f"decoder V{_sub(i)}", "decoder") for i in range(H)), left=LEFT)
    for head, decoder in zip(heads, decoders, strict=True):
        diagram.arrow((head.middle, head.bottom), (head.middle, decoder.y - 1))
    diagram = _end(diagram, decoders, "mla")
    diagram.note("green: value decoders, once for each new token")
    return diagram


def _latent_row(diagram: Diagram, state: Placed, spec: LatentSpec) -> tuple[Placed, Placed]:
    latent, rotary = diagram.row(
        Box(f"latent, R = {spec.kv_lora_rank}", "cached", 1.55),
        Box(f"rotary key, P = {spec.qk_rope_head_dim}", "cached", 1.2),
        left=LEFT,
    )
    for each in (latent, rotary):
        diagram.arrow((each.middle, state.bottom), (each.middle, each.y - 1))
    return latent, rotary


def _share_rotary(diagram: Diagram, rotary: Placed, heads: list[Placed]) -> None:
    """The line from the rotary key to every head."""
    top, x = heads[0].y, rotary.x + rotary.width - 6
    targets = [head.x + head.width * 0.85 for head in heads]
    diagram.arrow((x, rotary.bottom), (x, top - 22), (targets[0], top - 22), head=False)
    for target in targets:
        diagram.arrow((target, top - 22), (target, top - 1))


def _latent_space() -> Diagram:
    spec = SPECS["latent-space"]
    assert isinstance(spec, LatentSpaceSpec)
    diagram, state = _begin("latent-space")
    diagram.space(20)
    width = spec.latent_head_dim
    pairs = diagram.row(*(Box(f"k{_sub(i)}, v{_sub(i)}\n{width} wide", "cached") for i in range(H)), left=LEFT)
    for pair in pairs:
        diagram.arrow((pair.middle, state.bottom), (pair.middle, pair.y - 1))
    diagram.space(26)
    heads = _heads(diagram, state, [f"head {i + 1}\n{width} of {D}" for i in range(H)])
    for pair, head in zip(pairs, heads, strict=True):
        diagram.down(pair, head)
    diagram.space(18)
    (up,) = diagram.row(Box(f"projection of the mixed values, {spec.latent_dim} to {H * D}"), left=LEFT)
    for head in heads:
        diagram.arrow((head.middle, head.bottom), (head.middle, up.y - 1))
    return _end(diagram, [up], "latent-space")


def _expert_decoded() -> Diagram:
    spec = SPECS["expert-decoded"]
    assert isinstance(spec, ExpertLatentSpec)
    diagram, state = _begin("expert-decoded")
    diagram.space(20)
    latents = diagram.row(
        *(Box(f"latents {i + 1}, 2 × {spec.kv_dim}", "cached") for i in range(spec.latent_kv_heads)),
        left=LEFT,
    )
    for latent in latents:
        diagram.arrow((latent.middle, state.bottom), (latent.middle, latent.y - 1))
    diagram.space(20)
    group = H // spec.latent_kv_heads
    decoders = diagram.row(*(Box(f"Σ g·W{_sub(i)}", "decoder") for i in range(H)), left=LEFT)
    for index, decoder in enumerate(decoders):
        diagram.down(latents[index // group], decoder)
    diagram.space(26)
    heads = _heads(diagram, state, [f"head {i + 1}\nq{_sub(i)}, gate" for i in range(H)])
    for decoder, head in zip(decoders, heads, strict=True):
        diagram.down(decoder, head)
    diagram = _end(diagram, heads, "expert-decoded")
    diagram.note(
        f"green: {spec.num_experts} experts a head, of which the query's gate\nmixes {spec.top_k} into one decoder"
    )
    return diagram


def _share(shared: Placed, index: int, heads: int) -> float:
    """Where the line to one of several heads leaves the lower edge of what they share."""
    return shared.x + shared.width * (index + 0.5) / heads


def _sub(index: int) -> str:
    return SUBSCRIPTS[index]
