"""Read the sliding window of each layer, which families write in different ways.

A rule takes the config and the number of layers, and returns a window or None for each layer.
"""

from __future__ import annotations

from collections.abc import Callable

from headwise.errors import SpecError
from headwise.models.specs.readers.fields import Config, NotSaidError, count, flag, listed, optional_integer

Windows = list[int | None]
Rule = Callable[[Config, int], Windows]
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_TYPES = {FULL: FULL, SLIDING: SLIDING}


def no_window(config: Config, num_layers: int) -> Windows:
    """The rule of a family without windows, in which ``sliding_window`` must be null.

    Its attention would see every token, while a cache made from the config kept only some.
    """
    window = optional_integer(config, "sliding_window")
    if window is not None:
        raise SpecError("sliding_window", window, f"must be null: a {config['model_type']} model has none")
    return _by_type(config, num_layers, window, [FULL] * num_layers)


def every_layer(absent: int | None = None) -> Rule:
    """A rule for one window in all layers; ``absent`` is its default, and null means no window."""

    def rule(config: Config, num_layers: int) -> Windows:
        window = optional_integer(config, "sliding_window", absent=absent)
        return _by_type(config, num_layers, window, [FULL if window is None else SLIDING] * num_layers)

    return rule


def every_nth_full(period: int, *, field: str | None = None, may_be_null: bool = False) -> Rule:
    """A rule for windows in all layers but every ``period``-th, where the file does not list the layers' types.

    Args:
        period: of the family, or the default of a field.
        field: that the family's class reads the period from; None where it reads none.
        may_be_null: whether ``sliding_window`` may be null, for no window in any layer.
    """

    def rule(config: Config, num_layers: int) -> Windows:
        window = optional_integer(config, "sliding_window")
        if window is None and may_be_null and "sliding_window" in config:
            return [None] * num_layers
        is_listed = config.get("layer_types") is not None  # the field then says nothing, whatever it holds
        nth = period if field is None or is_listed else optional_integer(config, field) or period
        types = [FULL if (i + 1) % nth == 0 else SLIDING for i in range(num_layers)]
        return _by_type(config, num_layers, window, types)

    return rule


def switched(default: Callable[[Config, int], list[str]], *, absent: int | None = None) -> Rule:
    """Qwen's rule: windows only with ``use_sliding_window``; without, ``sliding_window`` may be any number, even 0.

    Args:
        default: the type of each layer where ``layer_types`` is absent.
        absent: the window where the file has the switch alone.
    """

    def rule(config: Config, num_layers: int) -> Windows:
        is_on = flag(config, "use_sliding_window", False)
        window = optional_integer(config, "sliding_window", absent=absent) if is_on else None
        types = (
            [FULL] * num_layers
            if window is None or config.get("layer_types") is not None
            else default(config, num_layers)
        )
        return _by_type(config, num_layers, window, types, off=not is_on)

    return rule


def upper_layers(config: Config, num_layers: int, absent: int | None = None) -> list[str]:
    """Layer types with windows from layer ``max_window_layers`` on, which is ``absent`` where the file has none."""
    if config.get("max_window_layers", absent) is None:
        raise NotSaidError("max_window_layers", None, "must be a whole number of at least 0")
    first = count({"max_window_layers": absent, **config}, "max_window_layers", 0)
    return [SLIDING if i >= first else FULL for i in range(num_layers)]


def all_layers(config: Config, num_layers: int) -> list[str]:
    """Layer types with a window in every layer."""
    return [SLIDING] * num_layers


def must_be_listed(config: Config, num_layers: int) -> list[str]:
    """Raise a `SpecError`: releases of transformers differ in the default, so the file must have ``layer_types``."""
    raise SpecError("layer_types", None, f"is required where {config['model_type']} has use_sliding_window")


def above_max_window_layers(config: Config, num_layers: int) -> Windows:
    """The rule of dots.llm1, which has no switch: a file without ``sliding_window`` has no windows."""
    window = optional_integer(config, "sliding_window")
    types = (
        [FULL] * num_layers
        if window is None or config.get("layer_types") is not None
        else upper_layers(config, num_layers)
    )
    return _by_type(config, num_layers, window, types)


def chunks(default: Callable[[Config, int], list[str]], *, absent: int) -> Rule:
    """A rule for layers that attend within chunks, of ``attention_chunk_size`` tokens.

    Args:
        default: the type of each layer where ``layer_types`` is absent.
        absent: the number of tokens where the file has none.
    """

    def rule(config: Config, num_layers: int) -> Windows:
        chunk = optional_integer(config, "attention_chunk_size", absent=absent)
        types = listed(config, "layer_types", num_layers, {FULL: FULL, CHUNKED: CHUNKED})
        return [chunk if name == CHUNKED else None for name in types or default(config, num_layers)]

    return rule


def _by_type(config: Config, num_layers: int, window: int | None, types: list[str], *, off: bool = False) -> Windows:
    types = listed(config, "layer_types", num_layers, _TYPES) or types
    if SLIDING in types and window is None and not off:
        raise SpecError("sliding_window", None, "is required where layer_types has sliding_attention")
    return [window if name == SLIDING else None for name in types]
