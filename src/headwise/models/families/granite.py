"""Granite 3: Llama's layout, with factors for scores, embeddings, logits and what layers add to the stream."""

from dataclasses import replace

from headwise.models.families import llama

FAMILY = replace(llama.FAMILY, model_type="granite", deepseek_blocks=False, adds=False, gguf_tensors={})
