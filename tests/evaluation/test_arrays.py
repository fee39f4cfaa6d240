"""Scores take numpy arrays and pandas objects where they take tensors."""

import dataclasses

import pandas as pd
import pytest
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood

from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.evaluation import (
    compare,
    expected_calibration_error,
    fit_temperature,
    joint_log_predictive,
    learning_curve,
    marginal_log_predictive,
    paired_difference,
    score_models,
    stacking_weights,
)
from gpclml.evidence.training_speed import training_speed
from gpclml.inference import IterativePosterior
from gpclml.models import BayesianLinearModel, GPRegression


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y, NEW_X, NEW_Y = normal(12, 2), normal(12, seed=1), normal(4, 2, seed=2), normal(4, seed=3)
MODEL = GPRegression(X, Y)
ORDERS = torch.stack([torch.arange(12), torch.arange(12).flip(0)])
PROBABILITIES, LABELS = normal(20, 3).softmax(-1), torch.arange(20) % 3
SCORES = {
    "joint": (lambda x, y: joint_log_predictive(MODEL, x, y), (NEW_X, NEW_Y)),
    "marginal": (lambda x, y: marginal_log_predictive(MODEL, x, y), (NEW_X, NEW_Y)),
    "curve": (lambda orders: learning_curve(MODEL, orders), (ORDERS,)),
    "speed": (
        lambda orders: dataclasses.astuple(training_speed(MODEL, 3, orderings=orders)),
        (ORDERS,),
    ),
    "compare": (lambda orders: compare({"a": MODEL}, orderings=orders).lml, (ORDERS,)),
    "score_models": (
        lambda orders: score_models({"a": MODEL}, orderings=orders).scores["a"].clml,
        (ORDERS,),
    ),
    "weights": (stacking_weights, (normal(3, 9),)),
    "paired": (paired_difference, (NEW_Y, Y[:4])),
    "calibration": (expected_calibration_error, (PROBABILITIES, LABELS)),
    "temperature": (fit_temperature, (PROBABILITIES.log(), LABELS)),
    "iterative mean": (lambda x: IterativePosterior(MODEL).mean(x), (NEW_X,)),
    "iterative variance": (lambda x: IterativePosterior(MODEL).variance(x), (NEW_X,)),
    "iterative covariance": (lambda x: IterativePosterior(MODEL).covariance(x), (NEW_X,)),
    "iterative draws": (
        lambda x: IterativePosterior(MODEL).sample(x, generator=torch.Generator().manual_seed(0)),
        (NEW_X,),
    ),
    "linear": (lambda x: BayesianLinearModel(X, Y).predict(x).variance, (NEW_X,)),
    "linear features": (lambda x: BayesianLinearModel(X, Y).features(x), (NEW_X,)),
}


def to_pandas(values):
    return pd.Series(values.numpy()) if values.ndim == 1 else pd.DataFrame(values.numpy())


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, to_pandas], ids=["numpy", "pandas"])
@pytest.mark.parametrize("name", SCORES)
def test_arrays_give_what_tensors_give(name, convert):
    score, arguments = SCORES[name]
    expected, result = score(*arguments), score(*map(convert, arguments))
    if isinstance(expected, torch.Tensor):
        assert torch.equal(result, expected)
    else:
        assert str(result) == str(expected)


@pytest.mark.parametrize("score", [joint_log_predictive, marginal_log_predictive])
def test_data_become_what_the_model_has(score):
    """Single precision, integers, one column, and the noise of a fixed-noise likelihood."""
    single = GPRegression(X[:, 0].float(), Y.float())
    whole = torch.arange(4)
    expected = score(single, whole.float().unsqueeze(-1), NEW_Y.float())
    assert expected.dtype == torch.float32
    targets = pd.DataFrame({"y": NEW_Y.numpy()})
    for x in (pd.Series(whole.numpy()), whole.numpy(), whole.unsqueeze(-1)):
        assert torch.equal(score(single, x, targets), expected)
    noise = torch.full((12,), 0.3, dtype=torch.float64)
    likelihood = FixedNoiseGaussianLikelihood(noise)
    fixed = GPRegression(X, Y, likelihood=likelihood)
    expected = score(fixed, NEW_X, NEW_Y, noise=noise[:4])
    assert torch.equal(score(fixed, NEW_X.numpy(), NEW_Y, noise=noise[:4].numpy()), expected)


def frame(names, rows=4):
    return pd.DataFrame(X[:rows].numpy(), columns=names)


@pytest.mark.parametrize(
    ("x", "y", "error", "match"),
    [
        (frame(["b", "a"]), NEW_Y, ArgumentError, r"x: got columns b, a.*expected columns a, b"),
        (frame(["a", "b"]), pd.Series(NEW_Y.numpy(), [3, 2, 1, 0]), ArgumentError, "y: .*index"),
        (frame(["a", "b"]), pd.Series(["one"] * 4), ArgumentError, "y: .*not numbers"),
        (frame(["a", "b"], 3), NEW_Y, ShapeError, "y"),
        (frame(["a", "b"]).to_numpy().astype(complex), NEW_Y, ArgumentError, "x: .*real numbers"),
        (X[:4].tolist(), NEW_Y, ArgumentError, "x: got list"),
        (X[:4], "y", ArgumentError, "y: got str"),
    ],
)
def test_other_data_are_refused(x, y, error, match):
    model = GPRegression(frame(["a", "b"], 12), Y)
    for score in (joint_log_predictive, marginal_log_predictive):
        with pytest.raises(error, match=match):
            score(model, x, y)


def test_whole_numbers_stay_whole():
    with pytest.raises(ArgumentError, match="labels"):
        expected_calibration_error(PROBABILITIES, LABELS.double().numpy())
    with pytest.raises(ArgumentError, match="orderings"):
        learning_curve(MODEL, ORDERS.double().numpy())
    with pytest.raises(UnsupportedError, match="probabilities"):
        expected_calibration_error(PROBABILITIES.tolist(), LABELS)
