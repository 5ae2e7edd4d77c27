"""GGUF files: read one tensor at a time, and written."""

from headwise.checkpoints.gguf.reader import GgufCheckpoint
from headwise.checkpoints.gguf.tokenizer_fields import TokenizerField, tokenizer_fields
from headwise.checkpoints.gguf.writer import GGUF_TYPES, GgufFile

__all__ = ["GGUF_TYPES", "GgufCheckpoint", "GgufFile", "TokenizerField", "tokenizer_fields"]
