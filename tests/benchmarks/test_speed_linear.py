"""Timings of learning curves and memory of bounds: what is timed computes the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.speed import linear
from benchmarks.speed.linear import MODELS, measure_curves, measure_memory
from gpclml.errors import UnknownNameError
from gpclml.evaluation import learning_curve


@pytest.mark.parametrize("name", MODELS)
def test_refits_compute_the_learning_curve(name):
    model = MODELS[name](30)
    refits = linear._refits_of_weights if name == "18 features" else linear._refits_of_kernel
    order = torch.arange(30).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(refits(model)(), learning_curve(model, order).squeeze(0))


def test_a_row_for_each_model():
    row = measure_curves("18 features", 20, 3, 2).iloc[0]
    assert row["ratio"] > 0
    assert row["low"] <= row["ratio"] <= row["high"]
    with pytest.raises(UnknownNameError, match="model"):
        measure_curves("18", 20, 3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", linear.FAMILIES)
def test_a_bound_of_every_family_is_there_to_measure(family, dtype):
    linear._bound(family, 30, 20, dtype, True)


@pytest.mark.slow
def test_memory_of_a_bound():
    table = measure_memory(3000, 40, ["diagonal"], [torch.float64])
    assert len(table) == 1
    table = table.set_index(["family", "dtype"])
    features = 40 * 3000 * 8 / 2**30
    assert features < table.loc[("diagonal", "float64"), "value"] < 60 * features
    with pytest.raises(UnknownNameError, match="family"):
        linear.bound_memory("wide", 10, 5, torch.float64, False)
