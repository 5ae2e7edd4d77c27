"""A rank curriculum: latents begin wider than they will be, and their least important channels fade out in training.

Shapes: R a layer's latent rank, r the rank that is left, P rotary dims, W tokens in a window, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from headwise.base.processes import barrier, process_index
from headwise.base.progress import Progress, silent
from headwise.conversion.calibration.windows import CalibrationWindows
from headwise.conversion.storage import LOST, LayerFiles
from headwise.errors import ArgumentError, CheckpointError
from headwise.models.checkpoints import Checkpoint, TensorInfo
from headwise.runtime.attention.latent import MultiHeadLatentAttention
from headwise.runtime.quantization.transform_code import FILE as CODES

FADED = 0.5
"""The part of the steps after which the channels that are not left are gone."""

ORDERING = "ordering channels"
"""The name of the stage, for progress."""

WINDOWS = 8
"""The most windows that channels are ordered by."""

_RIDGE = 1e-7
"""Added to the latents' covariance, as a share of its largest eigenvalue."""

_DOWN, _UP = ".kv_a_proj_with_mqa.", ".kv_b_proj.weight"


@dataclass(frozen=True)
class RankCurriculum:
    """How many channels of each latent of a folder are left.

    For example ``RankCurriculum(open_checkpoint("./half"), 0.6).result.config`` has latents of 60 % of the channels.

    Attributes:
        checkpoint: of the converted model.
        part: of the channels of each latent that are left.

    Raises:
        ArgumentError: the folder has no latents whose channels could be left out.
    """

    checkpoint: Checkpoint
    part: float

    def __post_init__(self) -> None:
        layers = self.checkpoint.config.get("headwise", {}).get("attention", [])
        latents = [layer for layer in layers if layer["kind"] == "latent"]
        rule = None
        if not latents:
            rule = "needs MLA in headwise's own format, which convert writes without a format"
        elif any(layer["latent_norm"] for layer in latents):
            rule = "needs latents without a norm, which is taken over all of their channels"
        elif (self.checkpoint.path / CODES).is_file():
            rule = "needs a cache without codes, which were fitted to its channels"
        elif all(self.left(layer["kv_lora_rank"]) == layer["kv_lora_rank"] for layer in latents):
            rule = "leaves out no channel of any latent"
        if rule is not None:
            raise ArgumentError("rank_curriculum", self.part, rule)

    def left(self, rank: int) -> int:
        """The channels that are left of a latent of ``rank``: at least one."""
        return max(round(self.part * rank), 1)

    @property
    def work_bytes(self) -> int:
        """The disk that the bases of all latents take while the model is trained."""
        latents = [layer for layer in self.checkpoint.config["headwise"]["attention"] if layer["kind"] == "latent"]
        return sum(len(layer["layers"]) * 2 * 8 * int(layer["kv_lora_rank"]) ** 2 for layer in latents)

    @property
    def turned(self) -> frozenset[str]:
        """The names of the stored tensors that compute or decode a latent, which have another basis in training."""
        return frozenset(name for name in self.checkpoint.tensors if self._rank(name) is not None)

    @property
    def config(self) -> dict[str, Any]:
        """The config of the result."""
        config = copy.deepcopy(dict(self.checkpoint.config))
        for layer in config["headwise"]["attention"]:
            if layer["kind"] == "latent":
                layer["kv_lora_rank"] = self.left(layer["kv_lora_rank"])
        return config

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor of the result."""
        tensors = dict(self.checkpoint.tensors)
        for name, info in tensors.items():
            rank = self._rank(name)
            if rank is not None:
                gone, side = rank - self.left(rank), 1 if name.endswith(_UP) else 0
                shape = tuple(size - gone * (axis == side) for axis, size in enumerate(info.shape))
                tensors[name] = TensorInfo(shape, info.dtype)
        return tensors

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the trained model as the result has it."""
        rank = self._rank(name)
        if rank is None:
            return tensor
        if name.endswith(_UP):
            return tensor[:, : self.left(rank)].contiguous()
        return torch.cat((tensor[: self.left(rank)], tensor[rank:]))

    def _rank(self, name: str) -> int | None:
        """R of the latent that a stored tensor computes or decodes."""
        layer = name.removesuffix(_UP) if name.endswith(_UP) else name.rpartition(_DOWN)[0]
        up = self.checkpoint.tensors.get(layer + _UP) if layer else None
        return None if up is None else up.shape[1]


class FadingChannels:
    """The latents of a model whose last channels fade out, one after another in each layer.

    Attributes:
        factors: what each layer's latent and rotary key ``[R + P]`` are multiplied by, by its path; from `set`.

    Args:
        model: a transformers model with headwise's MLA, its channels in order; see `order_channels`.
        curriculum: how many are left.
    """

    def __init__(self, model: nn.Module, curriculum: RankCurriculum) -> None:
        self._layers = _latent_layers(model)
        self._curriculum = curriculum
        self.factors: dict[str, Tensor] = {}
        for path, layer in self._layers.items():
            layer.kv_a_proj_with_mqa.register_forward_hook(partial(self._fade, path))

    def set(self, done: float) -> None:
        """Fade channels as far as is due.

        Args:
            done: the part of the steps that is done.
        """
        for path, layer in self._layers.items():
            rank = layer.spec.kv_lora_rank
            gone = (rank - self._curriculum.left(rank)) * min(done / FADED, 1.0)
            device = next(layer.parameters()).device
            channels = torch.arange(rank, dtype=torch.float32, device=device)
            rotary = torch.ones(layer.spec.qk_rope_head_dim, device=device)
            self.factors[path] = torch.cat(((rank - gone - channels).clamp(0, 1), rotary))

    def _fade(self, path: str, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.factors[path].to(output.dtype)


def order_channels(
    model: Any,
    windows: CalibrationWindows,
    folder: Path,
    logits_of: Callable[[CalibrationWindows], Tensor],
    progress: Progress = silent,
) -> None:
    """Turn every latent of a model into uncorrelated channels, the most important first. The model computes the same.

    The cost of an error of a latent is what it does to the model's own next-token distribution, to second order: the
    mean outer product of gradients of the log-probability of tokens that are drawn from it, the Fisher information.
    Of all ways to leave out so many channels, leaving out the last ones then costs least.

    Args:
        model: a transformers model with headwise's MLA, whole in every process, whose parameters take no gradients.
        windows: of text.
        folder: where the bases are kept, so that all processes and later runs have the same.
        logits_of: the model's logits ``[B, W, V]`` on some windows.
        progress: told of each window.

    Raises:
        CheckpointError: the bases are lost.
    """
    files, layers = LayerFiles(folder), _latent_layers(model)
    if process_index() == 0 and not files.file(len(layers) - 1).exists():  # the last one to be saved
        for index, (into, back) in enumerate(_bases(layers, windows, logits_of, progress)):
            files.save(index, {"into": into, "back": back}, {})
    barrier()
    for index, layer in enumerate(layers.values()):
        saved = files.load(index)
        if saved is None:
            raise CheckpointError("channels", str(files.file(index)), LOST)
        _turn(layer, **saved[0])


def _latent_layers(model: nn.Module) -> dict[str, MultiHeadLatentAttention]:
    return {path: module for path, module in model.named_modules() if isinstance(module, MultiHeadLatentAttention)}


class _Watched:
    """A layer's latents in one forward pass, with zeros added to them, whose gradient is theirs."""

    latents: Tensor
    zeros: Tensor

    def __init__(self, layer: MultiHeadLatentAttention) -> None:
        self._rank = layer.spec.kv_lora_rank
        self.hook = layer.kv_a_proj_with_mqa.register_forward_hook(self)

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        self.latents = output.detach()
        self.zeros = torch.zeros_like(output, requires_grad=True)
        return output + self.zeros

    def rows(self, tensor: Tensor) -> Tensor:
        """The latents' part ``[W, R]`` of the output or its gradient, float64."""
        return tensor.flatten(0, -2)[:, : self._rank].double()


def _bases(
    layers: Mapping[str, MultiHeadLatentAttention],
    windows: CalibrationWindows,
    logits_of: Callable[[CalibrationWindows], Tensor],
    progress: Progress,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The matrices of each layer's change of basis, ``[R, R]`` into the new channels and back, float64."""
    covariances: dict[str, Tensor] = {}
    costs: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for number in range(len(windows)):
        progress(ORDERING, number, len(windows))
        watched = {path: _Watched(layer) for path, layer in layers.items()}
        logits = logits_of(windows[number : number + 1])[0].float()
        for each in watched.values():
            each.hook.remove()
        drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
        loss = cross_entropy(logits, drawn.to(logits.device), reduction="sum")
        gradients = torch.autograd.grad(loss, [each.zeros for each in watched.values()])
        for (path, each), gradient in zip(watched.items(), gradients, strict=True):
            for sums, rows in ((covariances, each.rows(each.latents)), (costs, each.rows(gradient))):
                sums[path] = sums.get(path, 0) + (rows.mT @ rows).cpu()  # of all layers they may not fit a device
    progress(ORDERING, len(windows), len(windows))
    for path in layers:
        yield _basis(covariances.pop(path), costs.pop(path))


def _basis(covariance: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices of one layer's change of basis: new channels are as large as the old ones' mean."""
    values, vectors = torch.linalg.eigh(covariance)
    scale = (values + _RIDGE * values[-1]).sqrt()
    own = scale[:, None] * (vectors.mT @ cost @ vectors) * scale  # the cost of errors of white channels
    order = torch.linalg.eigh(own)[1].flip(1)
    size = scale.square().mean().sqrt()
    return size * order.mT @ (vectors / scale).mT, (vectors * scale) @ order / size


@torch.no_grad()
def _turn(layer: MultiHeadLatentAttention, into: Tensor, back: Tensor) -> None:
    """Change the basis of a layer's latent."""
    down, up, rank = layer.kv_a_proj_with_mqa, layer.kv_b_proj.weight, layer.spec.kv_lora_rank
    for tensor in (down.weight, down.bias):
        if tensor is not None:
            tensor[:rank] = (into.to(tensor.device) @ tensor[:rank].double()).to(tensor.dtype)
    up.copy_((up.double() @ back.to(up.device)).to(up.dtype))
