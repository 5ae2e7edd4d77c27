"""GGUF files: read one tensor at a time, and written."""

from headwise.models.checkpoints.gguf.reader import GgufCheckpoint
from headwise.models.checkpoints.gguf.tokenizer_fields import TokenizerField, tokenizer_fields
from headwise.models.checkpoints.gguf.writer import GGUF_TYPES, GgufFile

__all__ = ["GGUF_TYPES", "GgufCheckpoint", "GgufFile", "TokenizerField", "tokenizer_fields"]
