"""Qwen2 and Qwen2.5: Llama's layout with biases on the query, key and value projections."""

from dataclasses import replace

from headwise.models.families import llama

FAMILY = replace(llama.FAMILY, model_type="qwen2", gguf_interleaved=False)
