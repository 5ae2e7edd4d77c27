"""Read a Hugging Face ``config.json`` into a `ModelSpec`, without torch and without running anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec, hides_tokens, spec_from_dict
from headwise.models.specs.model import BodySpec, ModelSpec, group_equal_layers
from headwise.models.specs.quantizers import read_stored
from headwise.models.specs.readers import READERS, deepseek
from headwise.models.specs.readers.fields import Config, MissingFieldError, Reader

HOSTED_PREFIX = "headwise_"
"""A converted model's ``model_type`` is this prefix and its family's type: ``headwise_llama``."""

_REFUSED = {
    "is an encoder–decoder, and the cache of its source is not counted": (
        "bart", "blenderbot", "longt5", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "t5gemma",
        "switch_transformers", "umt5",
    ),
    "has no attention": ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"),
    "has two attentions in a layer": ("longcat_flash",),
    "has attention and Mamba side by side in a layer": ("falcon_h1",),
}  # fmt: skip
"""Model types that are refused, by reason."""
_OUTER = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "compression_config", "headwise")
"""Fields that a multimodal model's config has outside that of its text part."""
_SHARED = "is not understood: layers that share keys and values are known in gemma3n_text alone"
_MLA = {*deepseek.LATENT_READERS, "kimi_linear"}
_INDEXED = {"deepseek_v32", "deepseek_v4", "glm_moe_dsa"}
_UNREAD: dict[str, tuple[set[str], str]] = {
    "kv_lora_rank": (_MLA, "belongs to MLA (a latent), and {} is not an MLA model headwise knows"),
    "use_cla": (set(), _SHARED),
    "num_kv_shared_layers": ({"gemma3n_text"}, _SHARED),
    "block_configs": ({"nemotron-nas"}, "is not understood: layers that differ so are known in nemotron-nas alone"),
    "attention_chunk_size": ({"llama4_text"}, "is not understood: attention within chunks is no window"),
    "index_topk": (_INDEXED, "is not understood: the cost of sparse attention is its indexer's"),
}
"""Fields that change a layer in any family, the families that read them, and the rule of the error in all others."""


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read the spec of the model that a ``config.json`` describes.

    Args:
        config: the parsed JSON of the file. A field that it leaves out has the family's default, where all models of
            the family agree on one; elsewhere its absence is an error. MLA is recognised by ``kv_lora_rank`` in the
            file, not by a default of transformers' class. Of a multimodal model only the text part is read.

    Raises:
        SpecError: a field is missing or impossible, or the architecture is not understood.

    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    >>> read_config({"model_type": "llama", **sizes}).layers[0].label
    'MHA 8/8 × 8'
    """
    if not isinstance(config, Mapping):
        raise SpecError("config.json", type(config).__name__, "must hold a JSON object")
    config = text_part(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise SpecError("model_type", model_type, "must be present: it names the architecture")
    config = Config(config)
    config.optional_number("rms_norm_eps")  # attention does not depend on it, but a NaN makes every output NaN
    reader = _reader(model_type, config)
    config = Config({**reader.absent, **config})
    longest = config.optional_integer(
        "max_position_embeddings",
        "max_position_embedding",
        "n_positions",
        "model_max_length",
        "max_context_length",
        "max_target_positions",
    )
    layers = tuple(_without_idle_window(layer, longest) for layer in reader.layers(config))
    body = _body(reader, config, len(layers))
    networks = [None] * len(layers) if body is None else body.feed_forward
    return ModelSpec(
        model_type=model_type,
        hidden_size=layers[0].hidden_size,
        layers=layers,
        vocab_size=config.optional_integer("vocab_size"),
        max_position_embeddings=longest,
        dtype=config.get("dtype", config.get("torch_dtype")),
        body=body,
        cross_layers=reader.cross(config) if reader.cross else (),
        stored=read_stored(config, model_type, layers, networks),
    )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a config that describe the text part of a multimodal model; all fields of any other model.

    For example ``text_part({"text_config": {"model_type": "gemma3_text"}})["model_type"]`` is ``"gemma3_text"``.

    Args:
        config: a parsed ``config.json``.
    """
    nested = config.get("text_config")
    if not isinstance(nested, Mapping) or "num_hidden_layers" in config:
        return config
    outer = {key: config[key] for key in _OUTER if key in config}
    part = {**outer, **nested}
    if outer.get("tie_word_embeddings"):  # the class of the whole ties them, whatever its text part says
        part["tie_word_embeddings"] = outer["tie_word_embeddings"]
    if str(config.get("model_type")).startswith(HOSTED_PREFIX):
        part["model_type"] = f"{HOSTED_PREFIX}{part.get('model_type')}"
    return part


def _reader(model_type: str, config: Config) -> Reader:
    """The reader of a model type; raise a `SpecError` for a type or a field that is not understood."""
    if model_type.startswith(HOSTED_PREFIX):
        family = READERS.get(model_type.removeprefix(HOSTED_PREFIX))
        has_cross = family is not None and family.cross is not None
        return Reader(
            partial(_read_hosted_layers, name="attention"),
            family.body if family else None,
            cross=partial(_read_hosted_layers, name="cross_attention") if has_cross else None,
        )
    for reason, names in _REFUSED.items():
        if model_type in names:
            raise SpecError("model_type", model_type, reason)
    reader = READERS.get(model_type)
    if config.flag("is_encoder_decoder", False) and not (reader and reader.cross):
        raise SpecError("is_encoder_decoder", True, "is not understood: the cache of the source is not counted")
    for name, (families, rule) in _UNREAD.items():
        if config.get(name) not in (None, False, 0) and model_type not in families:
            raise SpecError(name, config[name], rule.format(model_type))
    if reader is None:
        raise SpecError("model_type", model_type, f"is not understood; known: {', '.join(sorted(READERS))}")
    return reader


def _without_idle_window(layer: AttentionSpec, longest: int | None) -> AttentionSpec:
    """A layer without a window as long as the model's positions, which hides nothing."""
    if layer.sliding_window is None or hides_tokens(layer.sliding_window, longest):
        return layer
    return replace(layer, sliding_window=None, chunked=False)


def _body(reader: Reader, config: Config, layers: int) -> BodySpec | None:
    """The body around the attention, or None where the file leaves part of it out; wrong values are errors."""
    if reader.body is None:
        return None
    try:
        return reader.body(config, layers)
    except MissingFieldError:
        return None


def hosted_attention(model: ModelSpec, *, cross: bool = False) -> list[dict[str, Any]]:
    """The field ``headwise.attention`` of a converted model's ``config.json``, which `read_config` reads back.

    For example ``hosted_attention(read_spec("llama-3-8b"))[0]["kind"]`` is ``"grouped"``.

    Args:
        model: the converted model.
        cross: return the field ``headwise.cross_attention`` instead, the attention to an encoder's output.
    """
    layers = model.cross_layers if cross else model.layers
    return [{"layers": list(indices), **spec.to_dict()} for spec, indices in group_equal_layers(layers)]


def _read_hosted_layers(config: Config, name: str) -> tuple[AttentionSpec, ...]:
    """Read the layers of a config that headwise wrote, which holds their specs."""
    block = config.get("headwise")
    if not isinstance(block, Mapping) or not isinstance(block.get(name), list):
        raise SpecError("headwise", block, "must hold the attention specs that headwise writes")
    layers: list[tuple[int, AttentionSpec]] = []
    for entry in block[name]:
        if not isinstance(entry, Mapping):
            raise SpecError(f"headwise.{name}", entry, "must be a JSON object with the spec of some layers")
        indices = entry.get("layers")
        if not isinstance(indices, list) or any(type(index) is not int for index in indices):
            raise SpecError(f"headwise.{name}.layers", indices, "must be a list of layer numbers")
        spec = spec_from_dict({key: value for key, value in entry.items() if key != "layers"})
        layers += [(index, spec) for index in indices]
    layers.sort(key=lambda layer: layer[0])
    covered = [index for index, _ in layers]
    # In a speech model num_hidden_layers counts its encoder's layers.
    if covered != list(range(config.num_layers("decoder_layers", "num_hidden_layers", "n_layer", "n_layers"))):
        raise SpecError(f"headwise.{name}", covered, "must cover every layer once")
    return tuple(spec for _, spec in layers)
