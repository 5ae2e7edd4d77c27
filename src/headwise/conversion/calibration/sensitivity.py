"""How much the loss depends on each layer's attention output: what an error there costs, in nats.

With g the derivative of the loss by a layer's attention output at one token, an error δ there costs about
``½ E[(gᵀ δ)²] = ½ δᵀ G δ`` nats a token, ``G = E[g gᵀ]`` being the Fisher information as the labels are drawn from
the model itself. It is one backward pass; no weight is trained.

Shapes: N windows, W tokens in each, E hidden size.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor

from headwise.checkpoints.disk import clearly
from headwise.conversion.solvers.bfloat16 import quick_products
from headwise.conversion.storage.layers import LOST, LayerFiles
from headwise.errors import CheckpointError
from headwise.hf import LayerwiseModel
from headwise.processes import all_sum, barrier, my_windows, process_index
from headwise.progress import Progress, silent

PIECE = 256

_ASIDE = "sensitivities-"


def output_sensitivities(
    model: LayerwiseModel, windows: Tensor, results: LayerFiles, *, progress: Progress = silent
) -> None:
    """Keep G of every layer, ``sensitivity`` ``[E, E]`` float32, unless an earlier run has.

    Layers are run one at a time, forward and then backward, each one's input waiting in a file beside the results.

    Args:
        model: the source.
        windows: ``[N, W]`` token ids.
        results: where they are kept.
        progress: told of each layer, twice.
    """
    if process_index() == 0:
        for left in results.folder.parent.glob(f"{_ASIDE}*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
    barrier()
    layers = model.num_layers
    if all(results.load(index) for index in range(layers)):
        return
    with ExitStack() as stack:
        with clearly("activations", results.folder.parent):
            folder = stack.enter_context(TemporaryDirectory(prefix=_ASIDE, dir=results.folder.parent))
        _weigh(model, windows, results, Path(folder), progress)
    barrier()


def _weigh(model: LayerwiseModel, windows: Tensor, results: LayerFiles, folder: Path, progress: Progress) -> None:
    count, layers = len(windows), model.num_layers
    mine = my_windows(count)
    files = [folder / f"{index}.activations" for index in range(layers)]
    with torch.no_grad(), quick_products():
        hidden = model.begin(windows[mine.start : mine.stop]) if len(mine) else model.begin(windows[:1])[:0]
        for index in range(layers):
            progress("weighing", index, 2 * layers)
            refuse_no_numbers(hidden, index)
            _put_aside(hidden, files[index])
            module = model.layer(index)
            hidden = torch.cat(
                [hidden[:0], *(model.run(index, module, one[None]).to(hidden.dtype) for one in hidden)]
            )
    refuse_no_numbers(hidden, layers)
    gradient = _loss_gradient(model, hidden, mine.start)
    for index in reversed(range(layers)):
        progress("weighing", 2 * layers - index - 1, 2 * layers)
        module = model.layer(index)
        with clearly("activations", files[index], "read"):
            inputs = load_file(files[index])["hidden"]
        gram = torch.zeros(inputs.shape[-1], inputs.shape[-1], dtype=torch.float64)
        for at in range(len(inputs)):
            one = inputs[at : at + 1].requires_grad_()
            with torch.enable_grad(), quick_products():
                call, output = model.trace(index, module, one)
            wanted = gradient[at : at + 1].to(output.dtype)
            at_input, at_output = torch.autograd.grad(output, (one, call.output), wanted)
            gradient[at] = at_input[0]
            wide = at_output[0].double()
            gram.addmm_(wide.mT, wide)
        files[index].unlink()
        total = all_sum(gram) / windows.numel()
        if process_index() == 0:
            results.save(index, {"sensitivity": total.float()}, {})
    progress("weighing", 2 * layers, 2 * layers)


def _put_aside(hidden: Tensor, file: Path) -> None:
    """Keep a layer's inputs until the way back comes to it.

    Raises:
        CheckpointError: the disk is full, or the file cannot be written.
    """
    with clearly("activations", file):
        file.write_bytes(save({"hidden": hidden.contiguous()}))


def kept_sensitivity(results: LayerFiles, index: int) -> Tensor:
    """A layer's, ``[E, E]`` float32, of those that `output_sensitivities` has kept.

    Raises:
        CheckpointError: it cannot be read.
    """
    found = results.load(index)
    if found is None:
        raise CheckpointError("layer", index, LOST)
    return found[0]["sensitivity"]


def refuse_no_numbers(states: Tensor, index: int) -> None:
    """Raise where a text leads to states that nothing can be learned from.

    Raises:
        CheckpointError: they are NaN or infinite.
    """
    if not bool(torch.isfinite(states).all()):
        rule = f"make the model compute NaN or infinite values before layer {index}"
        raise CheckpointError("calibrate", f"{states.shape[0] * states.shape[1]} tokens", rule)


def _loss_gradient(model: LayerwiseModel, hidden: Tensor, first: int) -> Tensor:
    """The loss's derivative by the last layer's output, of every token by itself.

    For a language model the loss is the negative log-likelihood of a label drawn from it; an encoder's is half the
    squared distance of its states, seen from one random direction for each token, which has the same mean. The
    windows, the first of which is number ``first``, each have draws of their own.
    """
    gradient = torch.empty_like(hidden)
    generator = torch.Generator()
    for at, window in enumerate(hidden):
        generator.manual_seed(first + at)
        for start in range(0, len(window), PIECE):
            piece = window[None, start : start + PIECE].detach().requires_grad_()
            with torch.enable_grad(), quick_products():
                made = model.finish(piece)[0].float()
                refuse_no_numbers(made.detach()[None], model.num_layers)
                if model.has_logits:
                    drawn = torch.multinomial(made.detach().softmax(-1), 1, generator=generator)[:, 0]
                    loss = F.cross_entropy(made, drawn, reduction="sum")
                else:
                    loss = (made * torch.randn(made.shape, generator=generator)).sum()
            gradient[at, start : start + PIECE] = torch.autograd.grad(loss, piece)[0][0]
    return gradient
