"""A model in transformers, with headwise's classes where the folder needs them."""

from __future__ import annotations

import torch
import transformers
from benchmarks.engines.protocol import answer, request

import headwise
from headwise.runtime.hf.codes import has_codes


def own_log_probs(logits: torch.Tensor, ids: torch.Tensor) -> list[float]:
    """Of the text's own tokens after the first, ``[S - 1]``."""
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()


asked = request()
model = headwise.load(asked["model"], dtype=asked["dtype"])
ids = torch.tensor([asked["ids"]])
with torch.inference_mode():
    logits = model(ids).logits[0].float().numpy()
    made = model.generate(
        ids[:, : asked["prompt"]], max_new_tokens=asked["new"], min_new_tokens=asked["new"], do_sample=False,
        return_dict_in_generate=True, output_logits=True, eos_token_id=None,
    )  # fmt: skip
    cache = model(ids, use_cache=True).past_key_values
    # Codes are chosen among nearly equal ones, so that the last digit of a value decides: headwise itself computes
    # other log-probabilities in float64.
    exact = headwise.load(asked["model"], dtype="float64")(ids).logits[0] if has_codes(model) else None
held = sum(
    tensor.numel() * tensor.element_size()
    for layer in cache.layers
    for tensor in (layer.keys, layer.values)
    if tensor is not None
)
gaps = [float(torch.diff(step[0].float().log_softmax(-1).topk(2).values.flip(0))) for step in made.logits]
answer(
    logits,
    asked,
    greedy=made.sequences[0, asked["prompt"] :].tolist(),
    gaps=gaps,
    cache_bytes=held / len(asked["ids"]),
    in_float64=None if exact is None else own_log_probs(exact, ids[0]),
    version=f"transformers {transformers.__version__}",
)
