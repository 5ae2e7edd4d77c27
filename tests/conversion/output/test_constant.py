"""The function of a layer's inputs that stands for a constant, where engines load no biases."""

from __future__ import annotations

from dataclasses import replace

import torch

from headwise.conversion.output.without_biases import constant_of_inputs
from headwise.conversion.solvers.statistics import Statistics


def test_it_is_near_1_at_the_first_tokens_of_texts_too() -> None:
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(512, 32, generator=generator, dtype=torch.float64) / 8
    starts = torch.randn(64, 32, generator=generator, dtype=torch.float64) / 8
    text[:, 0] += 1
    starts[:, 1] += 1  # which no token inside of a text has
    wide = torch.cat((text, torch.ones(512, 1, dtype=torch.float64)), 1)
    moments = wide.mT @ wide / 512
    statistics = replace(Statistics.nothing(32, 2, 16), inputs=moments, keys=moments)

    alone = constant_of_inputs(statistics)
    assert (text @ alone - 1).square().mean() < 0.1
    assert (starts @ alone).square().mean() < 0.1
    both = constant_of_inputs(statistics, starts.float())
    for inputs in (text, starts):
        assert (inputs @ both - 1).square().mean() < 0.1
    torch.testing.assert_close((2 * text.mean(0) + starts.mean(0)) @ both / 3, torch.tensor(1.0, dtype=torch.float64))
