import copy
import pickle

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood

from gpclml.errors import (
    ArgumentError,
    DataError,
)
from gpclml.models import GPRegression
from regression_cases import KERNELS, steps


def test_deepcopy_and_pickle_even_after_a_prediction(train, new_x):
    model = GPRegression(*train, kernel="deep")
    model.eval()
    model(new_x).mean.sum().backward()
    expected = model.predict(new_x).mean
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied.predict(new_x).mean, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_save_and_load_give_the_same_predictions(kernel, train, new_x, tmp_path):
    model = GPRegression(*train, kernel=kernel, mean="mlp", num_mixtures=3)
    steps(model, 2)
    path = tmp_path / "model.pt"
    model.save(path)
    loaded = GPRegression.load(path)
    one, two = model.predict(new_x), loaded.predict(new_x)
    assert torch.equal(one.mean, two.mean)
    assert torch.equal(one.covariance_matrix, two.covariance_matrix)
    assert torch.equal(model.train_targets, loaded.train_targets)
    assert list(tmp_path.iterdir()) == [path]
    assert torch.equal(steps(model, 1), steps(loaded, 1))


def test_save_and_load_with_missing_targets_batches_and_given_parts(diabetes, tmp_path):
    x, y = diabetes[0][:40].reshape(2, 20, 10), diabetes[1][:40].reshape(2, 20).clone()
    y[0, 3] = torch.nan
    path = tmp_path / "model.pt"

    def kernel():
        return ScaleKernel(RBFKernel())

    def noise():
        return GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-2))

    model = GPRegression(x, y, kernel=kernel(), likelihood=noise())
    model.covar_module.outputscale = 3.0
    model.save(path)
    with pytest.raises(ArgumentError, match=r"load\(path, kernel="):
        GPRegression.load(path)
    with pytest.raises(ArgumentError, match=r"load\(path, likelihood="):
        GPRegression.load(path, kernel=kernel())
    with pytest.raises(ArgumentError, match="same classes and sizes"):
        GPRegression.load(path, kernel=RBFKernel(), likelihood=noise())
    loaded = GPRegression.load(path, kernel=kernel(), likelihood=noise())
    new = diabetes[0][60:65]
    assert torch.equal(loaded.predict(new).mean, model.predict(new).mean)


def test_files_that_cannot_be_read_or_written(train, tmp_path):
    model = GPRegression(*train)
    with pytest.raises(DataError, match="cannot write"):
        model.save(tmp_path / "missing" / "model.pt")
    with pytest.raises(DataError, match="cannot write"):
        model.save(tmp_path)
    with pytest.raises(DataError, match="no file"):
        GPRegression.load(tmp_path / "model.pt")
    path = tmp_path / "model.pt"
    model.save(path)
    for content in [b"", b"nonsense", path.read_bytes()[:500]]:
        path.write_bytes(content)
        with pytest.raises(DataError, match="damaged"):
            GPRegression.load(path)
    torch.save({"format": "other"}, path)
    with pytest.raises(DataError, match=r"not a gpclml\.GPRegression checkpoint"):
        GPRegression.load(path)
    torch.save({"format": "gpclml.GPRegression", "version": 99}, path)
    with pytest.raises(DataError, match="version 99"):
        GPRegression.load(path)
