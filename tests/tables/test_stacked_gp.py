"""Stacks of GPs: leave-one-out by deleting rows, weights, files, failures and refusals."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.kernels import ScaleKernel
from torch.distributions import Normal

from gpclml import StackedGP
from gpclml.errors import (
    ArgumentError,
    DataError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from gpclml.evaluation import log_marginal_likelihood, stacking_weights
from gpclml.fit import FitWarning
from gpclml.tables import (
    CANDIDATES,
    DEFAULT_CANDIDATES,
    Calibration,
    candidates,
    fit_calibration,
)
from gpclml.tables.components import leave_one_out_residuals


def table(n=30, d=2, seed=0, noise=0.2):
    generator = torch.Generator().manual_seed(seed)
    x = 5 * torch.rand(n, d, generator=generator, dtype=torch.float64)
    y = 100 + 10 * x[:, 0].sin() + 3 * x.sum(-1)
    return x, y + noise * torch.randn(n, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def fitted() -> StackedGP:
    return StackedGP().fit(*table())


def test_leave_one_out_residuals_by_deleting_each_row(fitted):
    x = table()[0]
    for one in fitted.components:
        error, deviation = leave_one_out_residuals(one.model)
        model = one.model.eval()
        with torch.no_grad():
            prior = model.forward(x)
            noise = float(model.likelihood.noise)
            covariance = prior.covariance_matrix + noise * torch.eye(len(x), dtype=torch.float64)
            residual = model.train_targets - prior.mean
        for row in (0, 7, 29):
            others = [i for i in range(len(x)) if i != row]
            inverse = torch.linalg.inv(covariance[others][:, others])
            cross = covariance[row, others]
            mean = cross @ inverse @ residual[others]
            variance = covariance[row, row] - cross @ inverse @ cross
            assert float(error[row]) == pytest.approx(float(residual[row] - mean), abs=1e-6)
            assert float(deviation[row]) == pytest.approx(float(variance.sqrt()), rel=1e-5)


def test_weights_scales_and_scores_are_those_of_the_residuals(fitted):
    logs = []
    for one in fitted.components:
        error, deviation = leave_one_out_residuals(one.model)
        residuals = error / deviation
        count = 2 if one.name == "linear" else 5 + ("matern_" in one.name) + (one.name == "rq")
        locations = table()[1] - error * one.model.target_scale
        calibration = fit_calibration(residuals, locations, hyperparameters=count)
        assert calibration == one.calibration
        unit = deviation * one.model.target_scale
        row = calibration.log_density(residuals, locations) - unit.log()
        logs.append(row)
        assert one.loo == pytest.approx(float(row.mean()))
        plain = Normal(0.0, unit).log_prob(error * one.model.target_scale)
        assert one.loo_uncalibrated == pytest.approx(float(plain.mean()))
    weights = stacking_weights(torch.stack(logs), pseudo_counts=3.0)
    assert weights.tolist() == pytest.approx([one.weight for one in fitted.components], abs=1e-6)
    found = [one.weight for one in fitted.components]
    assert found == sorted(found, reverse=True)


def test_predictions_are_the_mixture_of_the_models(fitted):
    x = table(7, seed=1)[0]
    prediction = fitted.predict(x)
    for place, one in enumerate(fitted.components):
        normal = one.model.predict(x, marginal=True)
        torch.testing.assert_close(prediction.locations[place], normal.mean)
        scales = one.calibration.scales(normal.mean) * normal.stddev
        torch.testing.assert_close(prediction.scales[place], scales)
    assert not prediction.mean.requires_grad


def test_without_calibration_the_components_are_normal():
    x, y = table()
    plain = StackedGP(["linear", "matern"], calibrate=False, pseudo_counts=0.0).fit(x, y)
    for one in plain.components:
        assert one.calibration == Calibration()
        assert one.loo == one.loo_uncalibrated


def test_it_predicts_better_than_the_noise_of_the_mean():
    x, y = table(60)
    new_x, new_y = table(500, seed=9)
    prediction = StackedGP().fit(x, y).predict(new_x)
    assert float((prediction.mean - new_y).square().mean().sqrt()) < 0.5
    lower, upper = prediction.interval(0.9)
    assert 0.8 < float(((lower <= new_y) & (new_y <= upper)).double().mean()) < 0.98


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


def test_the_same_seed_gives_the_same_stack(fitted):
    again = StackedGP().fit(*table())
    for one, other in zip(fitted.components, again.components, strict=True):
        assert (one.name, one.weight) == (other.name, other.weight)


def test_what_contains_a_fitted_candidate_is_no_worse(fitted):
    by_name = {one.name: float(log_marginal_likelihood(one.model)) for one in fitted.components}
    assert by_name["rq"] >= by_name["rbf"] - 0.05
    assert by_name["matern_linear_free"] >= by_name["matern_linear"] - 0.05


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
    # What was loaded can be saved again.
    loaded.save(tmp_path / "again.pt")
    assert torch.equal(StackedGP.load(tmp_path / "again.pt").predict(new).mean, first.mean)


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
    assert {one.name for one in stack.components} == {"linear", "matern_linear"}
    assert stack.failures == {"matern": "RuntimeError: no such luck"}
    assert sum(one.weight for one in stack.components) == pytest.approx(1)
    summary = stack.summary()
    assert summary.loc["matern", "weight"] == 0
    assert "no such luck" in summary.loc["matern", "note"]
    stack.save(tmp_path / "stack.pt")
    assert StackedGP.load(tmp_path / "stack.pt").failures == stack.failures
    with pytest.raises(UnsupportedError, match=r"none that could be fitted .*no such luck"):
        StackedGP(["matern"]).fit(x, y)


def test_residuals_that_are_no_numbers_leave_a_candidate_out(monkeypatch):
    actual = candidates.calibrate

    def without_numbers(model, *options):
        if not isinstance(model.covar_module, ScaleKernel):
            raise NonFiniteError("residuals", "3 of 30 values not finite", "finite values")
        return actual(model, *options)

    monkeypatch.setattr(candidates, "calibrate", without_numbers)
    with pytest.warns(FitWarning, match="linear"):
        stack = StackedGP(["linear", "matern"]).fit(*table())
    assert [one.name for one in stack.components] == ["matern"]


def test_a_spent_time_budget_keeps_the_fastest_candidate():
    with pytest.warns(FitWarning, match="time budget of 0 seconds"):
        stack = StackedGP().fit(*table(), time_budget=0.0)
    assert [one.name for one in stack.components] == ["linear"]
    assert set(stack.failures) == set(DEFAULT_CANDIDATES) - {"linear"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(StackedGP().fit(*table(), time_budget=1e6).components) == 6


def test_hyperparameters_of_some_rows_and_predictions_from_all():
    x, y = table(60)
    names = ["matern", "matern_linear"]
    stack = StackedGP(names, fit_rows=25, seed=3).fit(x, y)
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(3))[:25].sort().values
    for one in stack.components:
        assert one.model.train_targets.shape == (60,)
    whole = StackedGP(names).fit(x, y)
    some = StackedGP(names).fit(x[rows], y[rows])
    new_x, new_y = table(200, seed=5)
    errors = [
        float((each.predict(new_x).mean - new_y).square().mean()) for each in (whole, stack, some)
    ]
    assert errors[1] < errors[2]


def test_the_posterior_of_botorch_has_the_moments_of_the_mixture(fitted):
    X = table(6, seed=3)[0]
    prediction = fitted.predict(X)
    posterior = fitted.posterior(X, observation_noise=True)
    assert posterior.mean.shape == (6, 1)
    torch.testing.assert_close(posterior.mean.squeeze(-1), prediction.mean)
    torch.testing.assert_close(posterior.variance.squeeze(-1), prediction.variance)
    # The joint distribution: moments by hand, of two points at a time in a batch.
    pairs = X.reshape(3, 2, 2)
    joint = fitted.posterior(pairs)
    for place in range(3):
        mean = sum(
            one.weight * one.model.predict(pairs[place], observation_noise=False).mean
            for one in fitted.components
        )
        second = sum(
            one.weight
            * (
                one.calibration.tail_variance
                * torch.outer(scales, scales)
                * normal.covariance_matrix
                + torch.outer(normal.mean, normal.mean)
            )
            for one in fitted.components
            for normal in [one.model.predict(pairs[place], observation_noise=False)]
            for scales in [one.calibration.scales(normal.mean)]
        )
        torch.testing.assert_close(joint.mean[place].squeeze(-1), mean)
        torch.testing.assert_close(
            joint.distribution.covariance_matrix[place], second - torch.outer(mean, mean),
            rtol=1e-4, atol=1e-7,
        )  # fmt: skip


def test_an_acquisition_function_is_optimized(fitted):
    from botorch.acquisition import LogExpectedImprovement
    from botorch.optim import optimize_acqf

    acquisition = LogExpectedImprovement(fitted, best_f=table()[1].max())
    bounds = torch.tensor([[0.0, 0.0], [5.0, 5.0]], dtype=torch.float64)
    torch.manual_seed(0)
    found, value = optimize_acqf(acquisition, bounds, q=1, num_restarts=2, raw_samples=8)
    assert found.shape == (1, 2)
    corner = acquisition(torch.zeros(1, 1, 2, dtype=torch.float64))
    assert value.item() > corner.item()


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


def test_skewed_targets_are_transformed_and_densities_are_of_the_targets():
    x, y = skewed()
    names = ["linear", "matern", "matern_warped"]
    stack = StackedGP(names).fit(x, y)
    warped = {one.name: one for one in stack.components}["matern_warped"]
    assert warped.warp is not None
    assert warped.warp.power < 1
    assert warped.weight > 0.5
    assert math.isinf(warped.calibration.degrees)
    new_x, new_y = skewed(200, seed=7)
    density = stack.predict(new_x).log_density(new_y).mean()
    plain = StackedGP(names[:2]).fit(x, y).predict(new_x).log_density(new_y).mean()
    assert float(density) > float(plain) + 0.1
    # LOO of the targets themselves: the density of the transform times its slope.
    error, deviation = leave_one_out_residuals(warped.model)
    locations = warped.warp.forward(y) - error * warped.model.target_scale
    logs = warped.calibration.log_density(error / deviation, locations)
    logs = logs - (deviation * warped.model.target_scale).log() + warped.warp.log_slope(y)
    assert warped.loo == pytest.approx(float(logs.mean()))
    assert "matern_warped" in stack.summary().index


def test_a_file_and_the_posterior_of_transformed_targets(tmp_path):
    x, y = skewed()
    stack = StackedGP(["matern_warped", "linear"]).fit(x, y)
    prediction = stack.predict(x[:4])
    posterior = stack.posterior(x[:4], observation_noise=True)
    torch.testing.assert_close(posterior.mean.squeeze(-1), prediction.mean)
    torch.testing.assert_close(posterior.variance.squeeze(-1), prediction.variance)
    points = x[:2].clone().requires_grad_()
    stack.posterior(points).mean.sum().backward()
    assert bool(points.grad.isfinite().all())
    stack.save(tmp_path / "stack.pt")
    loaded = StackedGP.load(tmp_path / "stack.pt")
    for name in ("mean", "std"):
        assert torch.equal(getattr(loaded.predict(x), name), getattr(stack.predict(x), name))


def test_more_columns_than_rows_and_a_constant_column():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 30, generator=generator, dtype=torch.float64)
    x[:, 3] = 5.0
    y = x[:, 0] + 0.1 * torch.randn(12, generator=generator, dtype=torch.float64)
    prediction = StackedGP().fit(x, y).predict(x)
    assert torch.isfinite(prediction.std).all()
    assert bool((prediction.std > 0).all())


def test_constant_targets_are_predicted_with_little_spread():
    x, _ = table(20)
    prediction = StackedGP().fit(x, torch.full((20,), 7.0, dtype=torch.float64)).predict(x[:3])
    assert prediction.mean.tolist() == pytest.approx([7.0] * 3)
    assert bool((prediction.std < 0.1).all())


def test_points_on_another_device_are_refused(fitted):
    with pytest.raises(ArgumentError, match="meta"):
        fitted.predict(
            torch.empty(3, fitted.components[0].model.train_inputs[0].shape[-1], device="meta")
        )


def test_bad_input(fitted):
    x, y = table()
    with pytest.raises(UnknownNameError, match=r"Did you mean 'matern'"):
        StackedGP(["matrn"])
    with pytest.raises(ArgumentError, match="candidates: got none"):
        StackedGP([])
    with pytest.raises(ArgumentError, match=r"pseudo_counts: got -1\.0"):
        StackedGP(pseudo_counts=-1.0)
    with pytest.raises(ArgumentError, match=r"extrapolation: got -1\.0"):
        StackedGP(extrapolation=-1.0)
    with pytest.raises(ArgumentError, match="fit_rows: got 2"):
        StackedGP(fit_rows=2)
    with pytest.raises(ArgumentError, match=r"n_samples = 4.*at least 5 rows"):
        StackedGP().fit(x[:4], y[:4])
    with pytest.raises(ArgumentError, match="y: got 1 missing"):
        StackedGP().fit(x, torch.where(torch.arange(30) == 3, math.nan, y))
    with pytest.raises(NonFiniteError, match="train_x"):
        StackedGP().fit(torch.full_like(x, math.inf), y)
    with pytest.raises(UnsupportedError, match="one table"):
        StackedGP().fit(x.expand(2, -1, -1), y.expand(2, -1))
    with pytest.raises(ArgumentError, match="Call fit"):
        StackedGP().predict(x)
    with pytest.raises(ArgumentError, match="Call fit"):
        StackedGP().save("nowhere.pt")
    with pytest.raises(ShapeError, match="x"):
        fitted.predict(x[:, :1])
    with pytest.raises(ArgumentError, match="output_indices"):
        fitted.posterior(x, output_indices=[1])
