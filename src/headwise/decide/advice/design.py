"""A model that does not exist yet, of the sizes that a user names, or of a number of parameters."""

from __future__ import annotations

from headwise.costs.formulas.model import weights
from headwise.errors import ArgumentError
from headwise.models.specs import ModelSpec, read_config

MOST_PARAMETERS = 10**13
_WIDTH_PER_LAYER = 128
"""Hidden size over layers: llama-2-7b has 4096 / 32, llama-2-70b 8192 / 80."""

_LEAST_LAYERS = 2


def design(
    *,
    parameters: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    num_layers: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int = 32_000,
) -> ModelSpec:
    """A llama of these sizes; what is left out is as usual for the rest.

    For example ``design(hidden_size=4096, num_heads=32).layers[0].label`` is ``"MHA 32/32 × 128"``.

    Args:
        parameters: about how many parameters the model is to have; in the place of ``hidden_size``.
        hidden_size: the model's width E; 128 for each layer when it is left out for ``parameters``.
        num_heads: query heads; as many as fill the hidden size when None.
        num_kv_heads: key–value heads; as many as query heads when None.
        head_dim: the channels of a head, which need not divide the hidden size; 128 when None, 64 below a hidden size
            of 1,024, or what fills the hidden size with ``num_heads``.
        num_layers: the number of layers; one for each 128 of the hidden size when None.
        intermediate_size: the width of the feed-forward networks; 8/3 of the hidden size when None, in steps of 256.
        vocab_size: the number of tokens of the vocabulary.

    Raises:
        ArgumentError: neither or both of ``parameters`` and ``hidden_size`` are given, or a number is impossible.
        SpecError: the sizes do not fit each other.
    """
    if parameters is None and hidden_size is None:
        raise ArgumentError("hidden_size", None, "must be given, or parameters, from which it follows")
    if parameters is not None and hidden_size is not None:
        raise ArgumentError("parameters", parameters, "goes without hidden_size: one of them follows from the other")
    others = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "num_layers": num_layers,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
    }
    if hidden_size is not None:
        return _of_width(hidden_size, others)
    assert parameters is not None
    if not 10**6 <= parameters <= MOST_PARAMETERS:
        raise ArgumentError("parameters", parameters, f"must be from {10**6:,} to {MOST_PARAMETERS:,}")
    low, high = 1, 1 << 10  # hidden sizes, in heads of 128
    while high - low > 1:
        middle = (low + high) // 2
        if weights(_of_width(128 * middle, others)).total <= parameters:
            low = middle
        else:
            high = middle
    near = (_of_width(128 * each, others) for each in (low, high))
    return min(near, key=lambda model: abs(weights(model).total - parameters))


def _of_width(hidden_size: int, others: dict[str, int | None]) -> ModelSpec:
    heads, width = others["num_heads"], others["head_dim"]
    if width is None:
        width = hidden_size // heads if heads else 128 if hidden_size >= 1024 else 64
    if heads is None:
        heads = max(hidden_size // width, 1) if width else 1
    layers, network = others["num_layers"], others["intermediate_size"]
    return read_config(
        {
            "model_type": "llama",
            "hidden_size": hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": others["num_kv_heads"] or heads,
            "head_dim": width,
            "num_hidden_layers": max(hidden_size // _WIDTH_PER_LAYER, _LEAST_LAYERS) if layers is None else layers,
            "intermediate_size": -(-8 * hidden_size // 768) * 256 if network is None else network,
            "vocab_size": others["vocab_size"],
            "max_position_embeddings": 1 << 20,
            "tie_word_embeddings": False,
        }
    )
