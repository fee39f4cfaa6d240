"""``GPRegression`` from arrays and data frames, and as BoTorch's models are asked."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.posteriors import GPyTorchPosterior

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.models import GPRegression

NAMES = ["age", "sex", "bmi"]


@pytest.fixture(scope="module")
def frame(diabetes):
    return pd.DataFrame(diabetes[0][:30, :3].numpy(), columns=NAMES, index=range(5, 35))


@pytest.fixture(scope="module")
def targets(diabetes):
    return pd.Series(diabetes[1][:30].numpy(), index=range(5, 35), name="progression")


def tensors(frame, targets):
    return torch.tensor(frame.to_numpy()), torch.tensor(targets.to_numpy())


def same(model, other):
    x, y = model.train_inputs[0], model.train_targets
    return torch.equal(x, other.train_inputs[0]) and torch.equal(y, other.train_targets)


def test_arrays_and_data_frames_are_the_tensors(frame, targets):
    expected = GPRegression(*tensors(frame, targets))
    new = frame.iloc[:4] + 0.5
    prediction = expected.predict(torch.tensor(new.to_numpy())).mean
    for x, y in (
        (frame, targets),
        (frame, targets.to_frame()),
        (frame.to_numpy(), targets.to_numpy()),
        (np.asfortranarray(frame.to_numpy())[::1], targets.to_numpy()[::-1][::-1]),
        (frame, torch.tensor(targets.to_numpy())),
        (frame.convert_dtypes(), targets.convert_dtypes()),
    ):
        model = GPRegression(x, y)
        assert same(model, expected)
        for points in (new, new.to_numpy(), torch.tensor(new.to_numpy())):
            torch.testing.assert_close(model.predict(points).mean, prediction)
    x = frame.to_numpy().copy()
    model = GPRegression(x, targets.to_numpy())
    x += 1  # which was copied
    assert same(model, expected)
    column = GPRegression(frame["bmi"], targets)
    assert column.train_inputs[0].shape == (30, 1)
    assert column.predict(frame["bmi"]).mean.shape == (30,)
    with pytest.raises(ArgumentError, match="columns age, expected columns bmi"):
        column.predict(frame["age"])


def test_types(frame, targets):
    x, y = tensors(frame, targets)
    whole = y.round().long()
    for given in (whole, whole.numpy(), whole.int(), whole.numpy().astype("uint16")):
        model = GPRegression(x, given)
        assert torch.equal(model.train_targets, GPRegression(x, whole.double()).train_targets)
        assert "train_y was given as" in repr(model)
    assert "train_y was given as int64" in repr(GPRegression(x, whole))
    assert "given" not in repr(GPRegression(x, y))
    single = GPRegression(x.float(), targets)  # takes the type of the tensor it comes with
    assert single.train_targets.dtype == torch.float32
    assert "float32; train_y was given as a series of float64" in repr(single)
    assert single.predict(frame).mean.dtype == torch.float32
    assert GPRegression(x.float(), whole).train_targets.dtype == torch.float32
    arrays = GPRegression(x.float().numpy(), y.float().numpy())
    assert arrays.train_targets.dtype == torch.float64
    assert "train_x was given as an array of float32" in repr(arrays)
    assert GPRegression(x > 0, y).train_inputs[0].dtype == torch.float64


def test_integers_that_lose_digits_are_said_to():
    x, y = torch.arange(6.0, dtype=torch.float64), torch.arange(6) + 2**53
    for given in (y, y.numpy(), pd.Series(y.numpy())):
        with pytest.warns(UserWarning, match=f"train_y: integers beyond {2**53} were"):
            GPRegression(x, given)
    with pytest.warns(UserWarning, match="float32"):
        GPRegression(x.float(), torch.arange(6) + 2**24)
    mixed = pd.DataFrame({"a": y.numpy(), "b": x.numpy()})
    with pytest.warns(UserWarning, match="train_x: integers beyond"):
        GPRegression(mixed, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GPRegression(x.float(), torch.arange(6) + 2**20)


def test_missing_values_of_pandas(frame, targets):
    missing = targets.copy()
    missing.iloc[3] = np.nan
    whole = missing.round().astype("Int64")
    model, other = GPRegression(frame, missing.round()), GPRegression(frame, whole)
    assert bool(other.train_targets[3].isnan())
    torch.testing.assert_close(model.train_targets, other.train_targets, equal_nan=True)
    bad = frame.copy()
    bad.iloc[0, 0] = np.nan
    with pytest.raises(NonFiniteError, match="train_x"):
        GPRegression(bad, targets)


def test_columns_are_kept_and_checked(frame, targets, tmp_path):
    model = GPRegression(frame, targets)
    model.save(tmp_path / "a.pt")
    for other in (model, model.with_kernel("rq"), GPRegression.load(tmp_path / "a.pt")):
        for wrong in (frame[["sex", "age", "bmi"]], frame.rename(columns={"bmi": "bp"})):
            with pytest.raises(ArgumentError, match=r"x\[\[\.\.\.\]\]"):
                other.predict(wrong)
            with pytest.raises(ArgumentError, match="X: got columns"):
                other.posterior(wrong)
        other.predict(frame.to_numpy())
    GPRegression(frame.to_numpy(), targets.to_numpy()).predict(frame)  # nothing to compare with
    with pytest.raises(ShapeError):
        model.predict(frame.to_numpy()[:, :2])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x, y: (x.assign(sex="f"), y), r"not numbers: sex"),
        (lambda x, y: (x, y.astype(str)), "not numbers: progression"),
        (lambda x, y: (x, y.sort_index(ascending=False)), r"train_y.loc\[train_x.index\]"),
        (lambda x, y: (x, y.reset_index(drop=True)), "another index"),
        (lambda x, y: (x.to_numpy().astype(complex), y), "real numbers"),
        (lambda x, y: (x.to_numpy().astype(str), y), "real numbers"),
        (lambda x, y: (x, y.iloc[:-1]), "train_y"),
        (lambda x, y: (x.iloc[:0], y.iloc[:0]), "train_x"),
        (lambda x, y: (x, y.tolist()), "a numpy array or a pandas object"),
        (lambda x, y: (x.assign(age=pd.Timestamp(0)), y), "not numbers: age"),
    ],
)
def test_bad_arrays(frame, targets, change, match):
    with pytest.raises(ArgumentError, match=match):
        GPRegression(*change(frame, targets))


def single_task(model, x, y):
    """BoTorch's model of the same hyperparameters."""
    offset, scale = model.input_standardizer.offset, model.input_standardizer.scale
    bounds = torch.cat([offset, offset + scale])
    other = SingleTaskGP(
        x, y.unsqueeze(-1), likelihood=model.likelihood, covar_module=model.covar_module,
        mean_module=model.mean_module, outcome_transform=Standardize(1),
        input_transform=Normalize(x.shape[-1], bounds=bounds),
    )  # fmt: skip
    return other.eval()


@pytest.mark.parametrize(("shape", "noise"), [((4, 3), False), ((5, 2, 1, 3), True)])
def test_posterior_is_botorchs(frame, targets, shape, noise):
    x, y = tensors(frame, targets)
    model = GPRegression(x, y)
    generator = torch.Generator().manual_seed(0)
    X = x.mean(0) + x.std(0) * torch.randn(*shape, generator=generator, dtype=torch.float64)
    options = {"observation_noise": True} if noise else {}  # left out by default
    ours, theirs = (each.posterior(X, **options) for each in (model, single_task(model, x, y)))
    assert type(ours) is GPyTorchPosterior
    assert ours.mean.shape == theirs.mean.shape == (*shape[:-1], 1)
    torch.testing.assert_close(ours.mean, theirs.mean)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-6, atol=1e-6)
    assert ours.rsample(torch.Size([6])).shape == (6, *shape[:-1], 1)
    covariance = ours.distribution.covariance_matrix
    torch.testing.assert_close(
        covariance, model.predict(X, observation_noise=noise).covariance_matrix
    )
    assert model.training
    assert torch.equal(model.posterior(X).mean, model.posterior(X.numpy()).mean)


def test_posterior_takes_variances_of_the_noise(frame, targets):
    x, y = tensors(frame, targets)
    model = GPRegression(x, y)
    noise = model.likelihood.noise.detach().reshape(1, 1).expand(4, 1)
    given = model.posterior(x[:4], observation_noise=noise).variance
    torch.testing.assert_close(given, model.posterior(x[:4], observation_noise=True).variance)
    with pytest.raises(ShapeError, match="observation_noise"):
        model.posterior(x[:4], observation_noise=noise[:3])


def test_posterior_of_a_batch_and_transformed(diabetes):
    x, y = diabetes[0][:40].reshape(2, 20, 10), diabetes[1][:40].reshape(2, 20)
    model = GPRegression(x, y)
    assert model.batch_shape == (2,)
    assert model.num_outputs == 1
    together = model.posterior(x[0, :3])
    assert together.mean.shape == (2, 3, 1)
    for i in range(2):
        alone = GPRegression(x[i], y[i]).posterior(x[0, :3])
        torch.testing.assert_close(together.mean[i], alone.mean)
        torch.testing.assert_close(together.variance[i], alone.variance)
    transform = ScalarizedPosteriorTransform(torch.tensor([2.0], dtype=torch.float64), offset=1.0)
    doubled = model.posterior(x[0, :3], posterior_transform=transform)
    torch.testing.assert_close(doubled.mean, 2 * together.mean + 1)
    assert torch.equal(model.posterior(x[0, :3], [0]).mean, together.mean)
    with pytest.raises(ArgumentError, match="output_indices"):
        model.posterior(x[0, :3], output_indices=[1])
