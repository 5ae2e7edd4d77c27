"""Parameters, gradients and moments shared out among processes, with torch's FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from headwise.base.processes import WAIT, process_count


def shard(model: Any) -> None:
    """Give every process its share of each of a model's tensors; a single process keeps them whole.

    Layers are gathered one at a time while they compute, and gradients are averaged over processes.

    Args:
        model: a transformers model, the same in all processes.
    """
    if process_count() == 1:
        return
    mesh = _mesh(model.device)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def settle(model: Any) -> None:
    """Share out again what a forward pass without a backward pass has left whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_alone_on_cpu(device: torch.device) -> bool:
    """Whether threads may work side by side: one of them keeps a GPU busy, and processes gather tensors in turn."""
    return device.type == "cpu" and process_count() == 1


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be shared out; all processes have to call this."""
    gathered: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, known to all processes, shared out as a parameter is, on its device."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _mesh(device: torch.device) -> DeviceMesh:
    if device.type == "cpu":
        return init_device_mesh("cpu", (process_count(),))
    torch.cuda.set_device(device)  # FSDP moves its share to the current device
    # The processes' own group is of CPUs. Others wait while the first writes gigabytes.
    return DeviceMesh.from_group(dist.new_group(backend="nccl", timeout=WAIT), device.type)
