from __future__ import annotations

import gpytorch
import pytest
import torch
from botorch.models import KroneckerMultiTaskGP, SingleTaskGP
from botorch.models.transforms import Log
from gpytorch.distributions import MultivariateNormal

from gpclml.errors import (
    ArgumentError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from gpclml.evaluation import compare
from gpclml.models import BayesianLinearModel, GPRegression

pytestmark = pytest.mark.filterwarnings("ignore:.*scaled|.*unit cube|.*standard|Sparse invariant")


class BatchOfKernels(gpytorch.models.ExactGP):
    """One set of targets under two kernels."""

    def __init__(self, x, y):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean = gpytorch.means.ZeroMean()
        self.kernel = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([2]))
        self.to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean(x), self.kernel(x))


def test_what_are_no_models(data):
    x, y = data()
    with pytest.raises(ArgumentError, match="models: got none"):
        compare({})
    with pytest.raises(UnsupportedError, match="models: got list"):
        compare([GPRegression(x, y)])
    with pytest.raises(UnsupportedError, match=r"models\['a'\]: got Linear"):
        compare({"a": torch.nn.Linear(1, 1)})
    with pytest.raises(ArgumentError, match="models, a name in it: got"):
        compare({1: GPRegression(x, y)})


def test_models_of_other_data_are_named(data):
    x, y = data()
    model = GPRegression(x, y)
    with pytest.raises(ShapeError, match=r"models\['b'\]: got 9 training points, expected the 25"):
        compare({"a": model, "b": GPRegression(x[:9], y[:9])})
    order = torch.arange(25)
    order[[3, 8]] = order[[8, 3]]
    with pytest.raises(ArgumentError, match=r"models\['b'\]: got target .* in row [38]"):
        compare({"a": model, "b": GPRegression(x, y[order])})
    with pytest.raises(ArgumentError, match="same order"):
        compare({"a": model, "b": GPRegression(x, y + 1e-3)})
    other = y.clone()
    other[4] = float("nan")
    with (
        gpytorch.settings.observation_nan_policy("mask"),
        pytest.raises(ArgumentError, match=r"models\['b'\]: got row 4 missing"),
    ):
        compare({"a": model, "b": GPRegression(x, other)})


def test_rounding_is_no_other_data(data):
    x, y = data()
    y = y + 1e4
    raw = GPRegression(x.float(), y.float(), standardize=False)
    assert len(compare({"a": GPRegression(x, y), "b": GPRegression(x.float(), y.float())})) == 2
    assert len(compare({"a": GPRegression(x, y), "b": raw})) == 2


def test_several_outputs_and_batches_are_named(data):
    x, y = data()
    several = torch.stack([y, y.sin()], -1)
    batch = GPRegression(torch.stack([x, x]), torch.stack([y, y]))
    for model in (SingleTaskGP(x, several), KroneckerMultiTaskGP(x, several), batch):
        with pytest.raises(ShapeError, match=r"models\['b'\]: got targets of shape"):
            compare({"a": GPRegression(x, y), "b": model})
    with pytest.raises(ShapeError, match=r"models\['b'\]: got a covariance of shape \(2, 25, 25\)"):
        compare({"a": GPRegression(x, y, standardize=False), "b": BatchOfKernels(x, y)})


def test_units(data):
    x, y = data()
    standardized, raw = GPRegression(x, y), GPRegression(x, y, standardize=False)
    with pytest.raises(ArgumentError, match="compare in units='original'"):
        compare({"a": standardized, "b": raw}, units="training")
    assert len(compare({"a": standardized, "b": raw})) == 2
    with pytest.raises(ArgumentError, match="units: got 'orginal'"):
        compare({"a": standardized}, units="orginal")
    logarithm = SingleTaskGP(x, (y - y.min() + 1).unsqueeze(-1), outcome_transform=Log())
    with pytest.raises(UnsupportedError, match=r"models\['a'\]: got an outcome transform Log"):
        compare({"a": logarithm})
    assert len(compare({"a": logarithm, "b": logarithm}, units="training")) == 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"m": 25}, "m: got 25, expected an integer from 0 to 24"),
        ({"m": -1}, "m: got -1"),
        ({"m": 2.5}, "m: got 2.5"),
        ({"m": True}, "m: got True"),
        ({"orderings": 0}, "orderings: got 0"),
        ({"orderings": torch.zeros(2, 25, dtype=torch.long)}, "no permutations"),
        ({"orderings": torch.arange(24).unsqueeze(0)}, "no permutations"),
        ({"orderings": torch.arange(25)}, "orderings"),
        ({"orderings": 3, "curves": 4}, "curves: got 4"),
        ({"curves": 0}, "curves: got 0"),
    ],
)
def test_numbers_out_of_range(data, options, match):
    with pytest.raises(ArgumentError, match=match):
        compare({"a": GPRegression(*data())}, **options)


def test_unknown_criterion(data):
    with pytest.raises(UnknownNameError, match="clml, lml, loo"):
        compare({"a": GPRegression(*data())}, rank_by="loss")


@pytest.mark.filterwarnings("ignore:A not p.d.")
@pytest.mark.filterwarnings("ignore:A covariance of shape")
def test_scores_that_are_not_finite_name_the_model():
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([1.0, 2.0, 2.5], dtype=torch.float64)
    # Nothing but its own target says what the first weight is, and the prior says nothing.
    model = BayesianLinearModel(x, y, prior_variance=1e20, noise=1e-3)
    with pytest.raises(NonFiniteError, match=r"models\['a'\]: .* add noise"):
        compare({"a": model})
