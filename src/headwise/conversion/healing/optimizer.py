"""What moves the trained parameters, and the state of a run on disk, from which a killed run goes on exactly.

Muon moves matrices, and AdamW embeddings, the output head and vectors. Healing has few tokens. With so few, AdamW on
matrices first raises the held-out loss, while Muon lowers it from the first measurement on.

Of several processes each has a share of all parameters, gradients and moments, by torch's FSDP2. A matrix is gathered
for its step, because Muon turns it as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from headwise.base.options.heal import Optimizer
from headwise.base.processes import WAIT, on_main_process, process_count, process_index
from headwise.base.threads import map_in_threads
from headwise.conversion.storage import LOST, LayerFiles
from headwise.errors import CheckpointError


def shard(model: Any) -> None:
    """Give every process its share of each of a model's tensors; a single process keeps all of them.

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


def reshard(model: Any) -> None:
    """Share out again what a forward pass without a backward pass has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_alone_on_cpu(device: torch.device) -> bool:
    """Whether threads may work side by side: one of them keeps a GPU busy, and processes gather tensors in turn."""
    return device.type == "cpu" and process_count() == 1


def gathered_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor that may be shared out; all processes have to call this."""
    gathered: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A tensor that all processes know, shared out as a parameter is, on the parameter's device."""
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


BETAS = (0.9, 0.95)
"""The decay rates of AdamW's two moments."""

MOMENTUM = 0.95
"""The share of a step's moving mean that Muon keeps."""

_ITERATIONS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients of the quintic iteration, chosen by Jordan et al. so that small singular values rise fastest."""

_SIZE = 0.2
"""The root mean square of a step at rate 1, which is about AdamW's (Liu et al., 2025), so that both share a rate."""


def optimizer_of(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    kind: Optimizer,
    *,
    rate: float = 0.0,
    dtype: torch.dtype,
) -> torch.optim.AdamW:
    """The optimizer of a run.

    Args:
        model: the model, whose embeddings and output head are told from its other matrices.
        parameters: the parameters that are trained, by name.
        kind: the kind of optimizer: ``muon``, or ``adamw`` for all parameters.
        rate: the learning rate; a `Loop` sets it anew before each step.
        dtype: the dtype of Muon's matrix products.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if output is not None:
        embeddings.add(id(output.weight))
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters.values():
        is_matrix = parameter.ndim in (2, 3) and id(parameter) not in embeddings  # 3: those of experts, stacked
        groups[kind == "muon" and is_matrix].append(parameter)
    return Muon(groups[True], groups[False], rate=rate, dtype=dtype)


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) for matrices, AdamW for the others.

    A matrix moves along the semi-orthogonal matrix nearest to the moving mean of its gradients: nearly all its
    directions move equally far, and not those of the largest gradients alone. torch has Muon from 2.9 on, for single
    matrices in bfloat16; this one also moves stacks of experts' matrices, shared-out ones, and in float32.

    Args:
        matrices: the parameters that Muon moves, ``[out, in]`` each, or stacks of them ``[N, out, in]``.
        others: the parameters that AdamW moves, of any shape.
        rate: the learning rate.
        dtype: the dtype of the products that make a mean semi-orthogonal.
    """

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], *, rate: float, dtype: torch.dtype
    ) -> None:
        groups = [{"params": matrices, "is_matrix": True}, {"params": others, "is_matrix": False}]
        groups = [group for group in groups if group["params"]]
        super().__init__(groups, lr=rate, betas=BETAS, weight_decay=0.0, fused=True)
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move every parameter by its gradient; those of matrices are taken away."""
        assert closure is None
        for group in self.param_groups:
            matrices = [one for one in group["params"] if group["is_matrix"] and one.grad is not None]
            for matrix in matrices:
                if "momentum_buffer" not in self.state[matrix]:
                    self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
            each = map_in_threads if all(is_alone_on_cpu(matrix.device) for matrix in matrices) else map
            for _ in each(partial(self._turn, rate=group["lr"]), matrices):
                pass
        super().step()

    def _turn(self, matrix: nn.Parameter, *, rate: float) -> None:
        assert matrix.grad is not None
        mean = self.state[matrix]["momentum_buffer"]
        mean.lerp_(matrix.grad, 1 - MOMENTUM)
        direction = semi_orthogonal(gathered_tensor(matrix.grad.lerp(mean, MOMENTUM).to(self._dtype)))  # Nesterov's
        scale = _SIZE * max(matrix.shape[-2:]) ** 0.5
        matrix.add_(sharded_like(direction.to(matrix.dtype), matrix), alpha=-rate * scale)
        matrix.grad = None  # AdamW's step, which follows, is for the others


def semi_orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest semi-orthogonal matrix: the same singular vectors, and singular values of about 0.7 to 1.2.

    Singular values that were below a five-hundredth of the matrix's norm stay smaller. The result is computed by a
    Newton–Schulz iteration, which needs products alone. For example ``semi_orthogonal(torch.randn(64, 32))``.

    Args:
        matrix: the matrix ``[out, in]``, or a stack of them; a zero matrix stays zero.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    turned: Tensor = matrix.mT.contiguous() if is_tall else matrix  # products of transposed ones are slower
    turned = turned / turned.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    a, b, c = _COEFFICIENTS
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    for _ in range(_ITERATIONS):
        square = turned @ turned.mT
        factor = add_product(square, square, square, beta=b, alpha=c)
        turned = add_product(turned, factor, turned, beta=a)
    return turned.mT if is_tall else turned


_BEST = 2, 3
"""The numbers of the files with the best parameters."""

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""The names that torch gives AdamW's and Muon's moments."""


@dataclass
class Progressed:
    """The progress of a run.

    Attributes:
        step: the number of finished steps.
        rate: the factor of the learning rate, halved whenever a loss is not finite.
        rollbacks: the number of times that this happened.
        seconds: the seconds spent on training, in all runs together.
        losses: the loss of every finished step, by the objective.
        held_out: the step and the loss of every measurement on held-out windows.
        stopped: whether the run ended early, as the held-out loss fell no more.
    """

    step: int = 0
    rate: float = 1.0
    rollbacks: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    stopped: bool = False

    @property
    def best_step(self) -> int:
        """The step of the lowest measurement, the first of equal ones; 0 while there is none."""
        return min(self.held_out, key=lambda measured: measured[1], default=(0, 0.0))[0]


class TrainingState:
    """Parameters, the optimizer's moments and what has been done, saved and loaded together.

    Two files are written in turn, each completely or not at all, so that one is always there to go on from. The
    parameters of the lowest held-out loss are in one of two others. It stays until a save that names the next one is
    on disk, because a run that is killed between the two may find another loss when it goes on.

    Args:
        folder: the folder of the files.
        parameters: the parameters that are trained, by name.
        optimizer: the optimizer of these parameters.
    """

    def __init__(
        self, folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self._files = LayerFiles(folder)
        self._parameters, self._optimizer = parameters, optimizer

    def save(self, progressed: Progressed) -> None:
        """Save everything; when this returns, it is on disk.

        Raises:
            StorageError: the disk is full, or the file cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            own = self._optimizer.state.get(parameter, {})
            for kind in ("parameter", *(moment for moment in _MOMENTS if moment in own)):
                # One at a time, and kept by the first process alone: together they may not fit a device.
                tensor = gathered_tensor(parameter.detach() if kind == "parameter" else own[kind])
                if process_index() == 0:
                    tensors[f"{kind} {name}"] = tensor.cpu()
        on_main_process(partial(self._write, tensors, progressed))

    def _write(self, tensors: Mapping[str, Tensor], progressed: Progressed) -> None:
        about = asdict(progressed)
        if progressed.held_out and progressed.best_step == progressed.step:  # before the save that says so
            parameters = {name: tensor for name, tensor in tensors.items() if name.startswith("parameter ")}
            before = replace(progressed, held_out=progressed.held_out[:-1]).best_step
            slot = _BEST[1] if self._step_of(_BEST[0]) == before else _BEST[0]
            self._files.file(slot).unlink(missing_ok=True)  # no three of them at a time
            self._files.save(slot, parameters, about)
        newest = self._newest()
        self._files.save(0 if newest is None or newest[0] else 1, tensors, about)

    @torch.no_grad()
    def load_best(self, progressed: Progressed) -> None:
        """Set the parameters to those of the lowest held-out loss.

        Raises:
            CheckpointError: the best parameters are lost.
        """
        if progressed.best_step == progressed.step:
            return
        slots = (slot for slot in _BEST if self._step_of(slot) == progressed.best_step)
        saved = next(filter(None, map(self._files.load, slots)), None)
        if saved is None:
            raise CheckpointError("step", progressed.best_step, LOST)
        for name, parameter in self._parameters.items():
            parameter.copy_(sharded_like(saved[0][f"parameter {name}"], parameter))

    def load(self) -> Progressed | None:
        """Return to the newest save; None if there is none, and nothing is changed."""
        for slot in self._by_age():
            if (loaded := self._files.load(slot)) is not None:
                tensors, about = loaded
                self._set(tensors, about["step"])
                about["held_out"] = [tuple(pair) for pair in about["held_out"]]
                return Progressed(**about)
        return None

    @torch.no_grad()
    def _set(self, tensors: Mapping[str, Tensor], step: int) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(sharded_like(tensors[f"parameter {name}"], parameter))
            moments = {moment: tensors.get(f"{moment} {name}") for moment in _MOMENTS}
            own: dict[str, Any] = {
                moment: sharded_like(tensor, parameter) for moment, tensor in moments.items() if tensor is not None
            }
            if own:
                own["step"] = torch.tensor(float(step), device=parameter.device)
            self._optimizer.state[parameter] = own

    def _newest(self) -> tuple[int, int] | None:
        """The number of the newest file and its step."""
        steps = {slot: step for slot in (0, 1) if (step := self._step_of(slot)) is not None}
        return max(steps.items(), key=lambda item: item[1]) if steps else None

    def _step_of(self, slot: int) -> int | None:
        """The step of a file; None if there is none, or it is damaged."""
        about = self._files.about(slot)
        return None if about is None else int(about["step"])

    def _by_age(self) -> list[int]:
        newest = self._newest()
        return [] if newest is None else [newest[0], 1 - newest[0]]
