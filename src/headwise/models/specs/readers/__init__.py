"""Readers of each family's ``config.json``: one module for each group of families, found by `READERS`."""

from headwise.models.specs.readers import compressed, deepseek, gpt, linear, llama, mamba, step, uneven, whisper
from headwise.models.specs.readers.fields import Reader

READERS: dict[str, Reader] = {
    **llama.READERS,
    **gpt.READERS,
    **deepseek.READERS,
    **compressed.READERS,
    **mamba.READERS,
    **linear.READERS,
    **step.READERS,
    **uneven.READERS,
    **whisper.READERS,
}
"""``model_type`` → its reader."""
