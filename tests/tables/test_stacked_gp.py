"""Stacks of GPs: leave-one-out by deleting rows, weights, files, failures and refusals."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.kernels import ScaleKernel

from gpclml import StackedGP
from gpclml.errors import (
    ArgumentError,
    DataError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from gpclml.evaluation import stacking_weights
from gpclml.fit import FitWarning
from gpclml.tables import CANDIDATES, DEFAULT_CANDIDATES, candidates, fit_calibration
from gpclml.tables.candidates import leave_one_out_predictions


def table(n=30, d=2, seed=0, noise=0.2):
    generator = torch.Generator().manual_seed(seed)
    x = 5 * torch.rand(n, d, generator=generator, dtype=torch.float64)
    y = 100 + 10 * x[:, 0].sin() + 3 * x.sum(-1)
    return x, y + noise * torch.randn(n, generator=generator, dtype=torch.float64)


def leave_one_out_residuals(model):
    """In standardized units."""
    mean, deviation = leave_one_out_predictions(model)
    targets = model.target_standardizer.inverse(model.train_targets)
    return (targets - mean) / model.target_scale, deviation / model.target_scale


@pytest.fixture(scope="module")
def fitted() -> StackedGP:
    return StackedGP().fit(*table())


@pytest.mark.slow
def test_leave_one_out_residuals_by_deleting_each_row(fitted):
    x = table()[0]
    for component in fitted.components:
        error, deviation = leave_one_out_residuals(component.model)
        model = component.model.eval()
        with torch.no_grad():
            prior = model.forward(x)
            noise = float(model.likelihood.noise)
            covariance = prior.covariance_matrix + noise * torch.eye(len(x), dtype=torch.float64)
            residual = model.train_targets - prior.mean
        for row in (0, 29):
            others = [i for i in range(len(x)) if i != row]
            inverse = torch.linalg.inv(covariance[others][:, others])
            cross = covariance[row, others]
            mean = cross @ inverse @ residual[others]
            variance = covariance[row, row] - cross @ inverse @ cross
            assert float(error[row]) == pytest.approx(float(residual[row] - mean), abs=1e-6)
            assert float(deviation[row]) == pytest.approx(float(variance.sqrt()), rel=1e-5)


def test_weights_scales_and_scores_are_those_of_the_residuals(fitted):
    logs = []
    for component in fitted.components:
        error, deviation = leave_one_out_residuals(component.model)
        residuals = error / deviation
        count = (
            2
            if component.name == "linear"
            else 5 + ("matern_" in component.name) + (component.name == "rq")
        )
        locations = table()[1] - error * component.model.target_scale
        calibration = fit_calibration(residuals, locations, hyperparameters=count)
        expected = dataclasses.astuple(component.calibration)
        assert dataclasses.astuple(calibration) == pytest.approx(expected, rel=1e-5)
        unit = deviation * component.model.target_scale
        row = calibration.log_density(residuals, locations) - unit.log()
        logs.append(row)
        assert component.loo == pytest.approx(float(row.mean()), rel=1e-5)
    weights = stacking_weights(torch.stack(logs), pseudo_counts=3.0)
    assert weights.tolist() == pytest.approx(
        [component.weight for component in fitted.components], abs=1e-6
    )
    fitted_weights = [component.weight for component in fitted.components]
    assert fitted_weights == sorted(fitted_weights, reverse=True)


def test_predictions_are_the_mixture_of_the_models(fitted):
    x = table(7, seed=1)[0]
    prediction = fitted.predict(x)
    for k, component in enumerate(fitted.components):
        normal = component.model.predict(x, marginal=True)
        torch.testing.assert_close(prediction.locations[k], normal.mean)
        scales = component.calibration.scales(normal.mean) * normal.stddev
        torch.testing.assert_close(prediction.scales[k], scales)
    assert not prediction.mean.requires_grad


@pytest.mark.slow
def test_units_and_the_order_of_rows_do_not_matter():
    x, y = table()
    names = ["linear", "matern"]
    new = table(6, seed=3)[0]
    first = StackedGP(names).fit(x, y).predict(new)
    other = StackedGP(names).fit(1e3 * x + 7, 1e-6 * y).predict(1e3 * new + 7)
    torch.testing.assert_close(other.mean, 1e-6 * first.mean, rtol=1e-3, atol=0)
    torch.testing.assert_close(other.std, 1e-6 * first.std, rtol=2e-2, atol=0)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    mixed = StackedGP(names).fit(x[order], y[order]).predict(new)
    torch.testing.assert_close(mixed.mean, first.mean, rtol=1e-3, atol=0)


def test_a_file_gives_the_same_predictions_bit_for_bit(fitted, tmp_path):
    fitted.save(tmp_path / "stack.pt")
    loaded = StackedGP.load(tmp_path / "stack.pt")
    new = table(6, seed=3)[0]
    first, second = fitted.predict(new), loaded.predict(new)
    for name in ("mean", "std"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert torch.equal(first.quantile([0.05, 0.95]), second.quantile([0.05, 0.95]))
    assert torch.equal(first.sample(3, seed=1), second.sample(3, seed=1))
    pd.testing.assert_frame_equal(fitted.summary(), loaded.summary())
    assert loaded.candidates == fitted.candidates
    torch.load(tmp_path / "stack.pt", weights_only=True)


def test_damaged_and_foreign_files(fitted, tmp_path):
    path = tmp_path / "stack.pt"
    fitted.save(path)
    content = torch.load(path, weights_only=True)
    with pytest.raises(DataError, match="no file"):
        StackedGP.load(tmp_path / "none.pt")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="damaged"):
        StackedGP.load(path)
    fitted.components[0].model.save(tmp_path / "model.pt")
    with pytest.raises(DataError, match=r"not a gpclml.StackedGP"):
        StackedGP.load(tmp_path / "model.pt")
    from gpclml._utils.files import write_checkpoint

    for change in ({"name": "xyz"}, {"model": {}}, {"warp": 0.5}, {"degrees": 3.0}):
        first, *others = content["components"]
        changed = {**content, "components": [{**first, **change}, *others]}
        write_checkpoint(path, "gpclml.StackedGP", changed)
        with pytest.raises(DataError, match=f"path: {path} cannot be restored"):
            StackedGP.load(path)


def test_a_candidate_that_fails_is_left_out_and_named(monkeypatch, tmp_path):
    def fails(x, y, seed, groups):
        raise RuntimeError("no such luck")

    known = {**CANDIDATES, "matern": candidates.Candidate("fails", fails)}
    monkeypatch.setattr(candidates, "CANDIDATES", known)
    x, y = table()
    with pytest.warns(FitWarning, match=r"Left out of the stack: matern \(RuntimeError: no such"):
        stack = StackedGP(["linear", "matern", "matern_linear"]).fit(x, y)
    assert {component.name for component in stack.components} == {"linear", "matern_linear"}
    assert stack.failures == {"matern": "RuntimeError: no such luck"}
    assert sum(component.weight for component in stack.components) == pytest.approx(1)
    summary = stack.summary()
    assert summary.loc["matern", "weight"] == 0
    assert "no such luck" in summary.loc["matern", "note"]
    stack.save(tmp_path / "stack.pt")
    assert StackedGP.load(tmp_path / "stack.pt").failures == stack.failures
    with pytest.raises(UnsupportedError, match=r"none that could be fitted .*no such luck"):
        StackedGP(["matern"]).fit(x, y)


def test_residuals_that_are_no_numbers_leave_a_candidate_out(monkeypatch):
    actual = candidates.leave_one_out_predictions

    def without_numbers(model):
        if not isinstance(model.covar_module, ScaleKernel):
            raise NonFiniteError("residuals", "3 of 30 values not finite", "finite values")
        return actual(model)

    monkeypatch.setattr(candidates, "leave_one_out_predictions", without_numbers)
    with pytest.warns(FitWarning, match="linear"):
        stack = StackedGP(["linear", "matern"]).fit(*table())
    assert [component.name for component in stack.components] == ["matern"]


@pytest.mark.slow
def test_a_spent_time_budget_keeps_the_fastest_candidate():
    with pytest.warns(FitWarning, match="time budget of 0 seconds"):
        stack = StackedGP().fit(*table(), time_budget=0.0)
    assert [component.name for component in stack.components] == ["linear"]
    assert set(stack.failures) == set(DEFAULT_CANDIDATES) - {"linear"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(StackedGP().fit(*table(), time_budget=1e6).components) == 6


@pytest.mark.slow
def test_hyperparameters_of_some_rows_and_predictions_from_all():
    x, y = table(60)
    names = ["matern", "matern_linear"]
    stack = StackedGP(names, fit_rows=25, seed=3).fit(x, y)
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(3))[:25].sort().values
    for component in stack.components:
        assert component.model.train_targets.shape == (60,)
    whole = StackedGP(names).fit(x, y)
    some = StackedGP(names).fit(x[rows], y[rows])
    new_x, new_y = table(200, seed=5)
    errors = [
        float((each.predict(new_x).mean - new_y).square().mean()) for each in (whole, stack, some)
    ]
    assert errors[1] < errors[2]


@pytest.mark.slow
def test_types_arrays_and_data_frames(fitted):
    x, y = table()
    new = table(4, seed=1)[0]
    names = ["linear", "matern"]
    expected = StackedGP(names).fit(x, y).predict(new)
    frame = pd.DataFrame(x.numpy(), columns=["a", "b"])
    stack = StackedGP(names).fit(frame, pd.Series(y.numpy()))
    got = stack.predict(pd.DataFrame(new.numpy(), columns=["a", "b"]))
    assert torch.equal(got.mean, expected.mean)
    with pytest.raises(ArgumentError, match="columns b, a"):
        stack.predict(pd.DataFrame(new.numpy(), columns=["b", "a"]))
    single = StackedGP(names).fit(x.float(), y.float())
    assert single.predict(new.float()).mean.dtype == torch.float32
    torch.testing.assert_close(
        single.predict(new.float()).mean.double(), expected.mean, rtol=1e-2, atol=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_column = StackedGP(names).fit(x[:, 0].numpy(), y.numpy())
        assert one_column.predict(np.array([1.0, 2.0])).mean.shape == (2,)


def test_a_fit_that_is_refused_changes_nothing():
    x, y = table()
    frame = pd.DataFrame(x.numpy(), columns=["a", "b"])
    stack = StackedGP(["linear"]).fit(frame, y)
    before = stack.predict(frame).mean
    for bad in ({"time_budget": -1.0}, {"time_budget": math.nan}, {"categories": [[7]]}):
        with pytest.raises(ArgumentError):
            stack.fit(frame.rename(columns={"a": "c"}), y, **bad)
    with pytest.raises(ArgumentError, match="missing"):
        stack.fit(
            frame.rename(columns={"a": "c"}), y.clone().index_fill_(0, torch.tensor(3), math.nan)
        )
    assert torch.equal(stack.predict(frame).mean, before)


def test_points_far_outside_are_moved_to_the_edge_of_what_is_known():
    x, y = table()
    x[:, 1] = 3.0
    names = ["linear", "matern"]
    stack = StackedGP(names).fit(x, y)
    least, most = x[:, 0].min(), x[:, 0].max()
    edge = torch.tensor([[float(most + 2 * (most - least)), 3.0]], dtype=torch.float64)
    far = torch.tensor([[1e9, -7.0]], dtype=torch.float64)
    assert torch.equal(stack.predict(far).mean, stack.predict(edge).mean)
    near = torch.tensor([[float(most + 1), 3.0]], dtype=torch.float64)
    free = StackedGP(names, extrapolation=math.inf).fit(x, y)
    torch.testing.assert_close(stack.predict(near).mean, free.predict(near).mean)
    assert abs(float(free.predict(far).mean)) > 1e6
    with pytest.raises(NonFiniteError):
        stack.predict(torch.tensor([[math.inf, 3.0]], dtype=torch.float64))


def skewed(n=60, seed=0):
    x, y = table(n, seed=seed, noise=1.0)
    return x, ((y - 100) / 8).exp()


@pytest.mark.slow
def test_skewed_targets_are_transformed_and_densities_are_of_the_targets(tmp_path):
    x, y = skewed()
    names = ["linear", "matern", "matern_warped"]
    stack = StackedGP(names).fit(x, y)
    warped = {component.name: component for component in stack.components}["matern_warped"]
    assert warped.warp is not None
    assert warped.warp.power < 1
    assert warped.weight > 0.5
    assert math.isinf(warped.calibration.degrees)
    new_x, new_y = skewed(200, seed=7)
    density = stack.predict(new_x).log_density(new_y).mean()
    plain = StackedGP(names[:2]).fit(x, y).predict(new_x).log_density(new_y).mean()
    assert float(density) > float(plain) + 0.1
    stack.save(tmp_path / "stack.pt")
    loaded = StackedGP.load(tmp_path / "stack.pt")
    assert torch.equal(loaded.predict(x).std, stack.predict(x).std)
    # LOO of the targets themselves: the density of the transform times its slope.
    error, deviation = leave_one_out_residuals(warped.model)
    locations = torch.from_numpy(warped.warp.forward(y.numpy())) - error * warped.model.target_scale
    logs = warped.calibration.log_density(error / deviation, locations)
    logs = logs - (deviation * warped.model.target_scale).log()
    logs = logs + torch.from_numpy(warped.warp.log_slope(y.numpy()))
    assert warped.loo == pytest.approx(float(logs.mean()))
    assert "matern_warped" in stack.summary().index


BAD = {
    "a name": ({"candidates": ["matrn"]}, {}, UnknownNameError, "Did you mean 'matern'"),
    "no name": ({"candidates": []}, {}, ArgumentError, "candidates: got none"),
    "extrapolation": ({"extrapolation": -1.0}, {}, ArgumentError, r"extrapolation: got -1\.0"),
    "fit_rows": ({"fit_rows": 2}, {}, ArgumentError, "fit_rows: got 2"),
    "rows": ({}, {"n": 4}, ArgumentError, r"n_samples = 4.*at least 5 rows"),
    "target": ({}, {"y": math.nan}, ArgumentError, "y: got 1 missing"),
    "input": ({}, {"x": math.inf}, NonFiniteError, "train_x"),
    "batch": ({}, {"batch": 2}, UnsupportedError, "one table"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    arguments, data, error, message = BAD[case]
    x, y = table(data.get("n", 30))
    x[3, 0], y[3] = data.get("x", 1.0), data.get("y", 1.0)
    if "batch" in data:
        x, y = x.expand(2, -1, -1), y.expand(2, -1)
    with pytest.raises(error, match=message):
        StackedGP(**arguments).fit(x, y)


def test_points_that_are_refused(fitted):
    x = table()[0]
    for call in (StackedGP().predict, lambda x: StackedGP().save("nowhere.pt")):
        with pytest.raises(ArgumentError, match="Call fit"):
            call(x)
    with pytest.raises(ShapeError, match="x"):
        fitted.predict(x[:, :1])
    with pytest.raises(ArgumentError, match="meta"):
        fitted.predict(torch.empty(3, 2, device="meta"))


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setattr(candidates, "_MANY_STEPS", 40)


@pytest.mark.slow
def test_many_rows_are_predicted_from_their_neighbours(few_steps, tmp_path):
    x, y = table(400)
    stack = StackedGP(["matern"], exact_rows=300, seed=1).fit(x, y)
    assert stack.components[0].neighbors in (32, 64, 128, 256)
    assert len(stack.components[0].log_densities) == 20  # rows held out
    new, truth = table(300, seed=1)
    prediction = stack.predict(new)
    assert float((prediction.mean - truth).square().mean().sqrt()) < 0.4  # noise has 0.2
    lower, upper = prediction.interval(0.9)
    assert float(((truth > lower) & (truth < upper)).double().mean()) > 0.85
    assert float((upper - lower).mean()) < 2.0  # of noise alone 0.66
    stack.save(tmp_path / "stack.pt")
    again = StackedGP.load(tmp_path / "stack.pt").predict(new)
    torch.testing.assert_close(again.mean, prediction.mean, rtol=0, atol=0)
    torch.testing.assert_close(again.std, prediction.std, rtol=0, atol=0)
    other_units = StackedGP(["matern"], exact_rows=300, seed=1).fit(1e3 * x + 7, 1e-6 * y)
    scaled = other_units.predict(1e3 * new + 7)
    torch.testing.assert_close(1e6 * scaled.mean, prediction.mean, rtol=1e-3, atol=0)


@pytest.mark.slow
def test_tails_of_many_rows_are_those_of_rows_held_out(few_steps):
    x, y = table(400)
    y[torch.randperm(400, generator=torch.Generator().manual_seed(5))[:20]] += 20.0
    calibration = StackedGP(["matern"], exact_rows=300).fit(x, y).components[0].calibration
    assert calibration.degrees < 30


@pytest.mark.slow
def test_what_many_rows_are_not_fitted_by(few_steps):
    x, y = table(60)
    with pytest.warns(FitWarning, match=r"matern_warped \(ArgumentError: candidates: got"):
        stack = StackedGP(["matern", "matern_warped"], exact_rows=50).fit(x, y)
    assert [component.name for component in stack.components] == ["matern"]


@pytest.mark.slow
def test_deep_kernels_of_many_rows_learn_a_function_of_one_direction():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 6, generator=generator, dtype=torch.float64)
    y = (3 * (x @ torch.full((6,), 6**-0.5, dtype=torch.float64))).sin()
    y = y + 0.1 * torch.randn(1200, generator=generator, dtype=torch.float64)
    stack = StackedGP(["matern", "deep_joint"], exact_rows=800).fit(x[:900], y[:900])
    error = (stack.predict(x[900:]).mean - y[900:]).square().mean().sqrt()
    plain = next(c for c in stack.components if c.name == "matern").predict(x[900:])[0]
    assert float(error) < 0.5 * float((plain - y[900:]).square().mean().sqrt())
