"""Timings of the evidence of networks, and its error in single precision at their size."""

from __future__ import annotations

import pytest
import torch

from benchmarks.speed.evidence import BASE, NETWORKS, measure_evidence
from gpclml.curvature import FunctionSpace, GaussianWeightPrior, Kronecker
from gpclml.errors import UnknownNameError
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork


def test_a_row_for_each_estimate():
    table = measure_evidence("cnn", points=12, rounds=2, others=False).set_index("method")
    assert table.loc[BASE, "ratio"] == 1.0
    assert table.loc[BASE, "parameters"] == 13_100
    assert len(table) == 6
    assert bool((table["milliseconds"] > 0).all())
    deep = measure_evidence("resnet", points=12, rounds=1, others=False)
    assert set(deep["parameters"]) == {77_978}
    with pytest.raises(UnknownNameError, match="Did you mean 'cnn'"):
        measure_evidence("cn")


@pytest.mark.parametrize("structure", [Kronecker(), FunctionSpace()])
def test_single_precision_is_within_two_hundredths_of_a_nat(structure):
    from gpytorch.likelihoods import SoftmaxLikelihood

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, 28, 28, generator=generator)
    y = torch.randint(10, (60,), generator=generator)
    network = NETWORKS["cnn"]()
    totals = []
    for dtype in (torch.float64, torch.float32):
        model = LinearizedNetwork(network.to(dtype), GaussianWeightPrior(network, "parameter"))
        likelihood = SoftmaxLikelihood(num_classes=10, mixing_weights=False)
        mll = LaplaceMarginalLogLikelihood(likelihood, model, 60, structure)
        totals.append(60 * float(mll.evidence_of(x.to(dtype), y)().detach()))
    assert totals[0] == pytest.approx(totals[1], abs=0.02)
