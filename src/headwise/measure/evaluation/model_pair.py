"""A model and its reference, opened together and loaded once for all evaluations."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch

from headwise.base.progress import Progress, silent
from headwise.errors import ArgumentError, naming
from headwise.models.checkpoints import Checkpoint, dtype_name, load_tokenizer, refuse_other_tokens
from headwise.runtime.hf import as_device, as_dtype, default_cache, load, open_decoder
from headwise.runtime.hf.linears import ManyTokensLinear, take_over_linears
from headwise.runtime.kernels.native import multiplies_bfloat16


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """A model and, where there is one, its reference, opened by `open_pair`.

    Configs are read by `open_pair`, weights at the first use of ``models``.

    Attributes:
        sources: the names that the user gave, under ``model`` and, where there is a reference, ``against``.
        checkpoints: the open checkpoints, under the same keys.
        dtype: the dtype to run both models in.
        device: the device to run both models on.
        progress: the callback that reports the loading of weights.
    """

    sources: dict[str, str]
    checkpoints: dict[str, Checkpoint]
    dtype: torch.dtype
    device: torch.device
    progress: Progress = silent

    @cached_property
    def models(self) -> dict[str, Any]:
        """The transformers models, by the keys of ``sources``."""
        loaded: dict[str, Any] = {}
        for step, (name, checkpoint) in enumerate(self.checkpoints.items()):
            self.progress("loading", step, len(self.sources))
            if loaded and self.is_itself:
                loaded[name] = _with_the_same_weights(loaded["model"])
                continue
            loaded[name] = load(checkpoint.path, dtype=self.dtype, device=str(self.device))
            if self.dtype == torch.bfloat16 and not multiplies_bfloat16():
                take_over_linears(loaded[name], ManyTokensLinear)
        self.progress("loading", len(self.sources), len(self.sources))
        return loaded

    @property
    def is_itself(self) -> bool:
        """Whether the reference is the model, which is then loaded once."""
        return len({checkpoint.path.resolve() for checkpoint in self.checkpoints.values()}) < len(self.checkpoints)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of all models that are loaded."""
        checkpoints = list(self.checkpoints.values())[: 1 if self.is_itself else None]
        numbers = sum(info.numel for checkpoint in checkpoints for info in checkpoint.tensors.values())
        return numbers * self.dtype.itemsize

    @cached_property
    def tokenizer(self) -> Any:
        """The reference's tokenizer, or without a reference the model's."""
        return load_tokenizer(self.checkpoints.get("against", self.checkpoints["model"]).path)

    @property
    def positions(self) -> int | None:
        """The longest sequence that both models support; None where no config states one."""
        counts = (checkpoint.spec.max_position_embeddings for checkpoint in self.checkpoints.values())
        return min((count for count in counts if count is not None), default=None)

    def of_the_reference(self) -> Pair:
        """The reference beside itself, with its weights in memory once: to run it with another cache."""
        names = ("model", "against")
        pair = replace(
            self,
            sources=dict.fromkeys(names, self.sources["against"]),
            checkpoints=dict.fromkeys(names, self.checkpoints["against"]),
        )
        reference = self.models["against"]
        vars(pair)["models"] = {"model": _with_the_same_weights(reference), "against": reference}
        return pair

    @contextmanager
    def caching(self, cache: str | None) -> Iterator[None]:
        """Run the model, and not its reference, with a quantised cache; see `headwise.hf.default_cache`.

        Args:
            cache: the format of the cache, such as ``int4``; the model's own cache when None.

        Raises:
            ArgumentError: there is no such format, or the model has no layer for it.
        """
        if cache is None:
            yield
            return
        with naming(quantize="cache"), default_cache(self.models["model"], cache):
            yield

    def describe(self, name: str = "model") -> dict[str, Any]:
        """Describe the models and the run, as fields of an evaluation.

        Args:
            name: ``model``, or ``against`` for the evaluation of the reference.
        """
        return {
            "model": self.sources[name],
            "against": self.sources.get("against") if name == "model" else None,
            "dtype": dtype_name(self.dtype),
            "device": str(self.device),
            "threads": torch.get_num_threads(),
        }


def _with_the_same_weights(model: Any) -> Any:
    """A second model object, which may have another cache, with the tensors of the first."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def open_pair(
    model: str | Path | Pair,
    *,
    against: str | Path | None = None,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress = silent,
) -> Pair:
    """Open a model and its reference; an open pair is returned unchanged.

    Several evaluations then load the models once: ``pair = open_pair("./mla", against="smollm2-135m")``, then
    ``evaluate(pair, text="text.txt")`` and ``evaluate_choices(pair, file="piqa.jsonl")``.

    Args:
        model: a model folder, ``.gguf`` or other source with weights; or an open pair, without other arguments.
        against: the reference, usually the model before its conversion.
        dtype: the dtype to run both models in; when None the wider of their stored dtypes, so that bytes and times
            differ only by the attention.
        device: the device to run both models on; the CPU when None.
        progress: the callback that reports the loading of weights.

    Raises:
        ArgumentError: there is no such source, dtype or device, or the models number tokens otherwise.
        SpecError: a source's config is not understood, or is an encoder's.
        CheckpointError: a source cannot be read.
    """
    if isinstance(model, Pair):
        for name, value in (("against", against), ("dtype", dtype), ("device", device)):
            if value is not None:
                raise ArgumentError(name, str(value), "must be left out: the open pair has its own")
        return model
    named_dtype = None if dtype is None else as_dtype(dtype)
    torch_device = as_device(device)
    sources = {"model": str(model)} if against is None else {"model": str(model), "against": str(against)}
    checkpoints = {}
    for name, source in sources.items():
        with naming(source=name):
            checkpoints[name] = open_decoder(source)
    if against is not None:
        refuse_other_tokens(*(one.path for one in checkpoints.values()), name="against", source=str(against))
    common = reduce(torch.promote_types, (checkpoint.dtype for checkpoint in checkpoints.values()))
    return Pair(
        sources=sources, checkpoints=checkpoints, dtype=named_dtype or common, device=torch_device, progress=progress
    )


def check_vocabulary(models: dict[str, Any], largest: int) -> None:
    """Refuse models whose vocabularies differ in size or do not have a text's tokens.

    For example ``check_vocabulary({"model": model}, 1000)``.

    Args:
        models: transformers models, under ``model`` and ``against``.
        largest: the largest token id of the text.

    Raises:
        ArgumentError: the vocabularies differ in size, or the token is outside them.
    """
    sizes = {name: int(m.get_input_embeddings().weight.shape[0]) for name, m in models.items()}
    if len(set(sizes.values())) > 1:
        raise ArgumentError("against", sizes["against"], f"has another vocabulary than the model's {sizes['model']}")
    if largest >= sizes["model"]:
        raise ArgumentError("token", largest, f"is outside the model's vocabulary of {sizes['model']}")
