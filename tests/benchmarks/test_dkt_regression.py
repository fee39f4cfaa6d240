"""Settings of the regression comparison: what each of them changes, and its table."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.dkt.regression import SETTINGS, _train, measure_setting
from gpclml.errors import UnknownNameError


def test_a_row_an_objective():
    table = measure_setting("short tasks", steps=3, seeds=2, test_tasks=3)
    assert list(table["objective"]) == ["lml", "clml", "clml-half"]
    assert table["mse less LML"][0] == "+0.000 ± 0.000"
    assert table["nll less LML"][1] != "+0.000 ± 0.000"
    with pytest.raises(UnknownNameError, match="setting"):
        measure_setting("study's")


def test_the_published_start_and_the_mean():
    def trained(setting, objective, steps):
        return _train(SETTINGS[setting], "rbf", objective, steps, 2)[1]

    model = trained("and no mean", "clml", 1)
    near = pytest.approx(math.log(2), abs=2e-3)  # a step of Adam moves by its rate
    assert float(model.likelihood.noise.detach()) == near
    assert float(model.covar_module.outputscale.detach()) == near
    assert float(model.covar_module.base_kernel.lengthscale.detach()) == near
    assert float(model.mean_module.constant.detach()) == 0
    assert float(trained("and no mean", "lml", 1).mean_module.constant.detach()) != 0
    ours = trained("study", "lml", 1)
    assert float(ours.likelihood.noise.detach()) == pytest.approx(0.1, abs=1e-3)
    one, other = (trained("study", "lml", steps).backbone.parameters() for steps in (1, 2))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
