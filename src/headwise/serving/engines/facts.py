"""What decides whether an engine loads a model: its config, and which tensors it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headwise.models.checkpoints import Checkpoint, GgufCheckpoint, open_checkpoint
from headwise.models.specs import HOSTED_PREFIX, ModelSpec, RopeSpec, read_config


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """A model on disk as an engine sees it.

    Attributes:
        checkpoint: the model.
        source: it, as the user named it.
        tensor_parallel: devices that share out its heads.
    """

    checkpoint: Checkpoint
    source: str
    tensor_parallel: int = 1

    @classmethod
    def of(cls, source: str | Path, tensor_parallel: int = 1) -> ModelFacts:
        """Open a model.

        Raises:
            HeadwiseError: it cannot be read.
        """
        return cls(open_checkpoint(source), str(source), tensor_parallel)

    @property
    def path(self) -> Path:
        """The folder or the ``.gguf`` file."""
        return self.checkpoint.path

    @property
    def is_gguf(self) -> bool:
        """Whether it is a ``.gguf`` file."""
        return isinstance(self.checkpoint, GgufCheckpoint)

    @property
    def is_split(self) -> bool:
        """Whether it is split over several ``.gguf`` files."""
        return self.is_gguf and len(self.checkpoint.files) > 1

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of its ``config.json``, or what GGUF's metadata amount to."""
        return self.checkpoint.config

    @property
    def model_type(self) -> str:
        """transformers' name of the architecture."""
        return str(self.config.get("model_type"))

    @property
    def is_own(self) -> bool:
        """Whether it has headwise's layers."""
        return self.model_type.startswith(HOSTED_PREFIX)

    @property
    def is_deepseek(self) -> bool:
        """Whether it is MLA in DeepSeek's classes."""
        return self.model_type in ("deepseek_v2", "deepseek_v3")

    @cached_property
    def spec(self) -> ModelSpec:
        """Its layers."""
        return self.checkpoint.spec

    @cached_property
    def rope(self) -> RopeSpec | None:
        """RoPE of the original layers where all have the same; None otherwise."""
        original = {**self.config, "model_type": self.model_type.removeprefix(HOSTED_PREFIX)}
        ropes = {layer.rope for layer in read_config(original).layers}
        return ropes.pop() if len(ropes) == 1 else None

    @property
    def rope_type(self) -> str:
        """The kind of scaling of RoPE."""
        return "default" if self.rope is None else self.rope.rope_type

    @property
    def attention_biases(self) -> list[str]:
        """The projections of attention that have a bias in some layer."""
        names = {
            name.split(".")[-2]
            for name in self.checkpoint.tensors
            if name.endswith(".bias") and ("self_attn." in name or "attention." in name)
        }
        return sorted(names)

    @property
    def has_head(self) -> bool:
        """Whether the output head is a tensor of its own."""
        return "lm_head.weight" in self.checkpoint.tensors
