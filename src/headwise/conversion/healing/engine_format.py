"""Training with the rounding of an engine's own cache in place.

A model's folder or file has no codes of such a cache: the engine rounds what it is given. So a model that is to be
served with one is trained on what is read back of it, while derivatives pass as if nothing was rounded.
"""

from __future__ import annotations

from typing import Any

from headwise.costs.prediction import SERVING_ENGINES
from headwise.errors import ArgumentError, SpecError, naming
from headwise.models.checkpoints import Checkpoint
from headwise.models.specs import HOSTED_PREFIX, GroupedSpec
from headwise.runtime.caches.cache import NAME
from headwise.runtime.hf.interface import TRAINED_FORMAT
from headwise.runtime.quantization.formats import EngineFormat, parse_engine_format
from headwise.runtime.quantization.transform_code import FILE as CODES


def trained_format(checkpoint: Checkpoint, cache: str) -> EngineFormat:
    """Read the format that a model is trained for.

    For example ``trained_format(open_checkpoint("./model"), "llama.cpp:q4_0")``.

    Args:
        checkpoint: the model that is trained.
        cache: the format as the user spells it, such as ``llama.cpp:q4_0``.

    Raises:
        ArgumentError: the name is no format of an engine, the format rounds nothing, or its blocks do not divide the
            model's heads; or the model's cache is in codes of its own.
        SpecError: a layer's cache is not one of keys and values of heads.
    """
    code = parse_engine_format(cache, name="cache")
    if not code.keys.rounds and not code.values.rounds:
        raise ArgumentError("cache", cache, "keeps keys and values as they are: leave it out")
    if (checkpoint.path / CODES).is_file():
        raise ArgumentError("cache", cache, "must be left out: the model's cache has codes of its own")
    for index, layer in enumerate(checkpoint.spec.layers):
        is_hosted = str(checkpoint.config.get("model_type")).startswith(HOSTED_PREFIX)
        if is_hosted or not isinstance(layer, GroupedSpec) or layer.shares_kv:
            rule = f"has no keys and values of its own that an engine would store as {cache}"
            raise SpecError(f"layer {index}", layer.label, rule)
        with naming(quantize="cache"):
            code.keys.token_bytes(layer.head_dim)
            code.values.token_bytes(layer.value_dim)
    return code.interleaved() if checkpoint.family.gguf_interleaved else code


def check_file_cache(cache: str | None) -> None:
    """Refuse to train a ``.gguf`` for no cache, or for that of an engine that loads none.

    For example ``check_file_cache("llama.cpp:q4_0")``.

    Args:
        cache: the format as the user spells it, such as ``llama.cpp:q4_0``.

    Raises:
        ArgumentError: the format is None, no format of an engine, or of an engine that loads no ``.gguf``.
    """
    if cache is None:
        rule = "is required for a .gguf, whose few plain numbers can make up for no more: such as llama.cpp:q4_0"
        raise ArgumentError("cache", None, rule)
    if not SERVING_ENGINES[engine := parse_engine_format(cache, name="cache").engine].reads_gguf:
        rule = f"is a cache of {engine}, which loads no .gguf: train the folder that it was made of"
        raise ArgumentError("cache", cache, rule)


def round_in_training(model: Any, checkpoint: Checkpoint, code: EngineFormat) -> None:
    """Let a model attend to keys and values as an engine's cache would give them back, in calls without a cache.

    For example ``round_in_training(load("./model"), checkpoint, trained_format(checkpoint, "llama.cpp:q4_0"))``.

    Args:
        model: the transformers model.
        checkpoint: the checkpoint that the model was loaded from.
        code: the format that `trained_format` returned.
    """
    model.set_attn_implementation(NAME)
    place, count = checkpoint.family.bare().place, checkpoint.spec.num_layers
    for index in range(count):
        if not code.is_unquantised(index, count):
            setattr(model.base_model.get_submodule(place(index)), TRAINED_FORMAT, code)
