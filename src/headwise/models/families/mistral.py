"""Mistral 7B: Llama's layout. The sliding window of its first release is kept."""

from dataclasses import replace

from headwise.models.families import llama

FAMILY = replace(llama.FAMILY, model_type="mistral")
