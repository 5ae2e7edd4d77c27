"""Convert layer after layer on a text: each one is solved for what the converted layers before it hand on.

Two streams go through the model side by side, the source's and the converted model's. A layer is solved from the
statistics of the converted stream, and refitted so that its output also makes up for what the streams differ by.

Shapes: N windows, W tokens in each, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headwise.conversion.activations import Activations, Spill
from headwise.conversion.heads import (
    Heads,
    Rotation,
    grouped_heads,
    latent_heads,
    mixed_values,
    project_output,
    rotation_tables,
    sample_rows,
)
from headwise.conversion.latent import convert_to_latent
from headwise.conversion.ranks import all_sum, barrier, my_windows
from headwise.conversion.refit import OutputRefit, Sample, refine
from headwise.conversion.sensitivity import output_sensitivities
from headwise.conversion.statistics import SAMPLES, Statistics, output_metric, root
from headwise.hf import LayerwiseModel
from headwise.progress import Progress, silent
from headwise.specs import AttentionSpec, GroupedSpec, LatentSpec

STAGES = ("sensitivity", "smoothing", "rotation", "search", "sequence", "refit", "refine")
"""Steps that can be left out by name."""

CHUNK = 256


@dataclass(frozen=True)
class Solution:
    """A converted layer.

    Attributes:
        spec: what it is.
        state: its tensors by its own names.
        channels: the model's frequency of each rotary pair (MLA).
        name: of the step that made it.
    """

    spec: AttentionSpec
    state: dict[str, Tensor]
    channels: list[int]
    name: str


class Sequential:
    """A conversion on its way through the layers.

    Args:
        model: the source.
        windows: ``[N, W]`` token ids; the last ``held`` are not calibrated on, and decide between solutions.
        held: how many.
        folder: for activations, from which a run that was killed goes on.
        stages: of `STAGES`, those that are done.
        steps: of the local descent, for each layer.
        run: what tells this run from another.
        adds: the attention's output is added to the stream as it is.
    """

    def __init__(
        self,
        model: LayerwiseModel,
        windows: Tensor,
        *,
        held: int,
        folder: Path,
        stages: Iterable[str] = STAGES,
        steps: int = 40,
        rate: float = 1e-3,
        run: str = "",
        adds: bool = True,
        progress: Progress = silent,
    ) -> None:
        self.model, self.windows, self.folder = model, windows, folder
        self.stages, self.steps, self.rate, self.adds = frozenset(stages), steps, rate, adds
        self.train = len(windows) - held
        self.log: list[dict[str, float | str]] = []
        self.sensitivities = output_sensitivities(
            model, windows[: min(4, self.train), :1024], folder, progress=progress
        )
        first = model.begin(windows[:1])
        shape = (len(windows), windows.shape[1], first.shape[-1])
        self.streams = Activations(folder, streams=("source", "converted"), shape=shape, run=run)
        if self.streams.layer is None:
            for at in my_windows(len(windows)):
                hidden = model.begin(windows[at : at + 1])
                for stream in self.streams.streams:
                    self.streams.write(stream, at, hidden)
            self.streams.commit()
        self.inputs = Spill(folder / "inputs.spill", shape)
        self.wanted = Spill(folder / "wanted.spill", shape)

    def layer(
        self, index: int, state: Mapping[str, Tensor], source: GroupedSpec, targets: list[AttentionSpec]
    ) -> Solution:
        """Convert one layer, the next in order, and move both streams past it."""
        model, streams = self.model, self.streams
        module = model.layer(index)
        state = {name: tensor.float() for name, tensor in state.items()}
        rotation = rotation_tables(source, self.windows.shape[1])
        sensitivity = self.sensitivities[index]
        metric = output_metric(state["o_proj.weight"], sensitivity, source.num_heads)
        sums = Statistics.zeros(source.hidden_size, source.num_heads, self.windows.shape[1])
        with torch.no_grad():
            for at in my_windows(len(self.windows)):
                own, converted = (streams.read(name, at, at + 1) for name in streams.streams)
                call, output = model.trace(index, module, own)
                streams.write("source", at, output)
                inputs = model.attention_inputs(index, module, converted)
                wanted = call.output + (own - converted) if self.adds else call.output
                self.inputs.write(at, inputs[0])
                self.wanted.write(at, wanted[0])
                if at < self.train:
                    sums.add(state, source, inputs[0], metric, rotation=rotation, window=at)
            barrier()
            statistics = sums.reduced().means()
            solution = self._solve(index, state, source, targets, statistics, rotation)
            final = solution.state
            for at in my_windows(len(self.windows)):
                made = self._output(solution, rotation, final, self.inputs.read(at))
                hidden = model.run(index, module, streams.read("converted", at, at + 1), attention_output=made[None])
                streams.write("converted", at, hidden)
        streams.commit()
        return solution

    def _solve(
        self,
        index: int,
        state: dict[str, Tensor],
        source: GroupedSpec,
        targets: list[AttentionSpec],
        statistics: Statistics,
        rotation: Rotation | None,
    ) -> Solution:
        sensitivity = self.sensitivities[index]
        scale = root(sensitivity).float()
        best: tuple[float, Solution] | None = None
        errors: dict[str, float] = {}
        for target in targets:
            assert isinstance(target, LatentSpec)
            for weight in (0.25, 0.5, 1.0) if "search" in self.stages and target is targets[0] else (0.5,):
                made, channels = convert_to_latent(
                    state, source, target, statistics=statistics, sensitivity=sensitivity, key_weight=weight
                )
                solution = Solution(target, {n: t.float() for n, t in made.items()}, channels, "solve")
                error = self._error(solution, rotation, scale)
                errors[f"{target.qk_rope_head_dim}/{weight}"] = error
                if best is None or error < best[0]:
                    best = (error, solution)
        assert best is not None
        if "refit" in self.stages:
            best = self._better(best, self._refitted(best[1], rotation), rotation, scale, errors)
        if "refine" in self.stages and self.steps:
            best = self._better(best, self._refined(best[1], rotation, scale), rotation, scale, errors)
            if "refit" in self.stages:
                best = self._better(best, self._refitted(best[1], rotation), rotation, scale, errors)
        self.log.append({"layer": index, **errors, "chosen": best[1].name, "error": best[0]})
        return best[1]

    def _better(self, best, other, rotation, scale, errors):
        error = self._error(other, rotation, scale)
        errors[other.name] = error
        return (error, other) if error < best[0] else best

    def _error(self, solution: Solution, rotation: Rotation | None, scale: Tensor) -> float:
        """Nats a token of the held-out windows."""
        total, count = 0.0, 0
        for at in range(self.train, len(self.windows)):
            rows = sample_rows(self.windows.shape[1], SAMPLES // solution.spec.num_heads, at)
            out = self._rows(solution, rotation, solution.state, self.inputs.read(at), rows)
            total += 0.5 * float(((out - self.wanted.read(at)[rows]) @ scale).square().sum())
            count += len(rows)
        return total / count

    def _refitted(self, solution: Solution, rotation: Rotation | None) -> Solution:
        refit = OutputRefit(solution.state["o_proj.weight"], solution.state.get("o_proj.bias"))
        for at in my_windows(self.train):
            inputs, wanted = self.inputs.read(at), self.wanted.read(at)
            for mixed, rows in self._mixed(solution, rotation, solution.state, inputs):
                refit.add(mixed, wanted[rows])
        all_sum(refit.moments)
        all_sum(refit.error)
        new = {name: tensor.float() for name, tensor in refit.solve().items()}
        return Solution(solution.spec, {**solution.state, **new}, solution.channels, "refit")

    def _refined(self, solution: Solution, rotation: Rotation | None, scale: Tensor) -> Solution:
        generator = torch.Generator().manual_seed(0)
        tokens = self.windows.shape[1]
        count = max(SAMPLES // solution.spec.num_heads, 8)
        order: list[int] = []

        def samples(step: int) -> Iterator[Sample]:
            if not order:
                order.extend(torch.randperm(self.train, generator=generator).tolist())
            at = order.pop()
            rows = torch.randperm(tokens, generator=generator)[:count].sort()[0]
            yield Sample(self.inputs.read(at), self.wanted.read(at)[rows], rows)

        def output(moved: Mapping[str, Tensor], inputs: Tensor, rows: Tensor) -> Tensor:
            return self._rows(solution, rotation, moved, inputs, rows)

        new = refine(solution.state, output, samples, scale, steps=self.steps, rate=self.rate)
        return Solution(solution.spec, new, solution.channels, "refine")

    def _rows(self, solution, rotation, state, inputs, rows):
        return project_output(
            state, mixed_values(self._heads(solution, rotation, state, inputs, rows), solution.spec, rows)
        )

    def _heads(self, solution, rotation, state, inputs, rows):
        if isinstance(solution.spec, LatentSpec):
            return latent_heads(state, solution.spec, inputs, rows, rotation, solution.channels)
        return grouped_heads(state, solution.spec, inputs, rows, rotation)

    def _mixed(self, solution, rotation, state, inputs):
        whole = self._heads(solution, rotation, state, inputs, torch.arange(len(inputs)))
        for rows in torch.arange(len(inputs)).split(CHUNK):
            seen = int(rows[-1]) + 1 if solution.spec.is_causal else len(inputs)
            heads = Heads(whole.query[:, rows], whole.key[:, :seen], whole.value[:, :seen])
            yield mixed_values(heads, solution.spec, rows), rows

    def _output(self, solution, rotation, state, inputs):
        return torch.cat(
            [project_output(state, mixed) for mixed, _ in self._mixed(solution, rotation, state, inputs)]
        )
