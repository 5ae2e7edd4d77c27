"""A process of several that share a layer's heads, and count what they say to each other."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.models.specs import AttentionSpec
from headwise.runtime.attention import build
from headwise.runtime.parallel import share_heads


def share_and_count(rank: int, ranks: int, port: int, spec: AttentionSpec, queue: Any) -> None:
    """Run a layer as one of several ranks; the first puts the number of sums before and after ``o_proj`` begins.

    Args:
        rank: of this process.
        ranks: of all.
        port: at which they meet.
        spec: the layer.
        queue: gets a pair of numbers.
    """
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        torch.manual_seed(0)
        layer = share_heads(build(spec).eval())
        counts, reduce, is_behind = [0, 0], dist.all_reduce, False

        def counting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
            counts[is_behind] += 1
            return reduce(tensor, op, group)

        def begins(*_: Any) -> None:
            nonlocal is_behind
            is_behind = True

        layer.get_submodule("o_proj").register_forward_pre_hook(begins)
        dist.all_reduce = counting  # type: ignore[assignment]
        with torch.inference_mode():
            layer(torch.randn(2, 5, layer.spec.hidden_size), is_causal=True)
        dist.all_reduce = reduce
        if rank == 0:
            queue.put(tuple(counts))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
