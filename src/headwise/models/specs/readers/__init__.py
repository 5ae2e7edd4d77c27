"""Readers of each family's ``config.json``: one module for each group of families, found by `READERS`."""

from headwise.models.specs.readers import deepseek, gpt, hybrid, llama, uneven
from headwise.models.specs.readers.fields import Reader

READERS: dict[str, Reader] = {**llama.READERS, **gpt.READERS, **deepseek.READERS, **hybrid.READERS, **uneven.READERS}
"""``model_type`` → its reader."""
