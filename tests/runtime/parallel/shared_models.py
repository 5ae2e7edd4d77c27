"""The program that `test_models` runs on two ranks, with a folder of models; it prints one line at its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import headwise
from headwise.errors import ArgumentError
from headwise.runtime.parallel import share_model
from tests.closeness import assert_close


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    refused = {"coarse": "num_key_value_heads = 1", "odd": "num_attention_heads = 3"}  # in transformers' own classes
    for name, rule in refused.items():
        with pytest.raises(ArgumentError, match=f"must divide {rule}"):
            share_model(headwise.load(folder / name))
    for name in ("source", "mla"):
        whole = headwise.load(folder / name, dtype="float64")
        shared = share_model(headwise.load(folder / name, dtype="float64"))
        logits = []
        gradients = []
        for model in (whole, shared):
            out = model(ids, labels=ids, use_cache=False)
            out.loss.backward()
            logits.append(out.logits.detach())
            gradients.append(model.get_input_embeddings().weight.grad)
        assert_close(logits[1], logits[0], 1e-9)
        assert_close(gradients[1], gradients[0], 1e-8)
        with torch.no_grad():
            one, other = (
                model.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
                for model in (whole, shared)
            )
        assert torch.equal(one, other)
    if dist.get_rank() == 0:
        print("every model agrees")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
