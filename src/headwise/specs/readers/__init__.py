"""How each family writes what it is in its ``config.json``: one module a group of families, found by `READERS`."""

from headwise.specs.readers import deepseek, gpt, linear, llama, mamba, uneven, whisper
from headwise.specs.readers.fields import Reader

READERS: dict[str, Reader] = {
    **llama.READERS,
    **gpt.READERS,
    **deepseek.READERS,
    **mamba.READERS,
    **linear.READERS,
    **uneven.READERS,
    **whisper.READERS,
}
"""``model_type`` → its reader."""
