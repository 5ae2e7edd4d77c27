"""headwise's models in transformers: importing this registers their classes.

For example ``import headwise.hf``, and ``AutoModelForCausalLM.from_pretrained("./half")`` loads a converted folder.
"""

from headwise.runtime import hf
from headwise.runtime.hf import *  # noqa: F403

__all__ = hf.__all__
