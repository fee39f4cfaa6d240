"""Networks of the papers are trained on a GPU as on the CPU."""

import pytest
import torch
from pretended_gpu import GPU, pretended_gpu

from benchmarks.evidence.training import Recipe, evidence_of_all, network, objective, train

RECIPE = Recipe(0.01, batch_size=4, crops=True, every=1, steps=2)


def trained_on(device, num_points=None):
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    y = torch.arange(8).to(device)
    model = network("resnet-8-4", 3, 32, 10, 0).to(device)
    mll = objective(model, 8, 1.0, "layer")
    train(mll, x, y, RECIPE, 1, 0, num_points)
    values = [evidence_of_all(mll, x, y)(), mll.model.prior.log_precision, model[-1].weight]
    return [value.detach().cpu() for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("num_points", [None, 4])
def test_a_network_is_trained_by_a_recipe(num_points):
    expected = trained_on("cpu", num_points)
    with pretended_gpu():
        made = trained_on(GPU, num_points)
    for value, reference in zip(made, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-3, atol=1e-4)
