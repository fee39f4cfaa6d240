"""Trained models in files: the same predictions bit for bit, and refusals by name."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from gpclml.conditioning import LastPoints
from gpclml.errors import ArgumentError, DataError
from gpclml.kernels.networks import MLP
from gpclml.meta import KERNELS, DeepKernelTransfer, PeriodicTasks, train_on_tasks
from gpclml.mlls import ConditionalMarginalLogLikelihood


def network(dtype=torch.float32, seed=0, width=6):
    generator = torch.Generator().manual_seed(seed)
    layers = MLP([1, 8, width], torch.nn.Tanh, generator=generator), torch.nn.BatchNorm1d(width)
    return torch.nn.Sequential(*layers).to(dtype)


def trained(kernel="rbf", dtype=torch.float32, **options):
    model = DeepKernelTransfer(network(dtype), kernel, 6, **options).to(dtype)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=5))
    train_on_tasks(model, mll, PeriodicTasks(5, 6), steps=3, lr=0.01, progress=False)
    return model


def assert_same(model, other, dtype=torch.float32):
    episodes = PeriodicTasks(5, 6, seed=3).draw(range(3)).to(dtype)
    ours, theirs = model.predict(episodes), other.predict(episodes)
    assert torch.equal(ours.mean, theirs.mean)
    assert torch.equal(ours.stddev, theirs.stddev)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_saved_model_predicts_the_same(tmp_path, kernel, dtype):
    model, path = trained(kernel, dtype), tmp_path / "model.pt"
    model.save(path)
    backbone = network(seed=1)
    read = DeepKernelTransfer.load(path, backbone)
    assert not read.training
    assert read.backbone is backbone
    assert_same(model, read, dtype)
    read.save(path)
    assert_same(model, DeepKernelTransfer.load(str(path), network(seed=3)), dtype)


def test_kernels_of_ones_own_and_targets_as_they_are(tmp_path):
    for standardize in (True, "task"):
        model, path = trained(standardize=standardize), tmp_path / "model.pt"
        model.save(path)
        assert_same(model, DeepKernelTransfer.load(path, network(seed=1)))
    model, path = trained(ScaleKernel(RBFKernel()), standardize=False), tmp_path / "model.pt"
    model.save(path)
    read = DeepKernelTransfer.load(path, network(seed=1), ScaleKernel(RBFKernel()))
    assert_same(model, read)
    mll = ConditionalMarginalLogLikelihood(read.likelihood, read, LastPoints(m=5))
    train_on_tasks(read, mll, PeriodicTasks(5, 6), steps=2, progress=False)
    assert (read.targets.mean, read.targets.deviation) == (0.0, 1.0)
    with pytest.raises(ArgumentError, match="kernel: got none, expected the kernel object"):
        DeepKernelTransfer.load(path, network())
    trained().save(path)
    with pytest.raises(ArgumentError, match=r"kernel: got RBFKernel, .* none for 'rbf'"):
        DeepKernelTransfer.load(path, network(), RBFKernel())


def test_weights_that_are_shared_stay_shared(tmp_path):
    def tied():
        layer = torch.nn.Linear(1, 1)
        return torch.nn.Sequential(layer, torch.nn.Tanh(), layer)

    model, path = DeepKernelTransfer(tied(), "rbf").double(), tmp_path / "model.pt"
    model.save(path)
    read = DeepKernelTransfer.load(path, tied())
    assert read.backbone[0].weight is read.backbone[2].weight
    assert_same(model, read, torch.float64)


def test_files_that_do_not_fit(tmp_path):
    path = tmp_path / "model.pt"
    with pytest.raises(DataError, match="there is no file"):
        DeepKernelTransfer.load(path, network())
    model = trained()
    model.save(path)
    with pytest.raises(DataError, match="another architecture"):
        DeepKernelTransfer.load(path, network(width=5))
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=5))
    with pytest.raises(DataError, match="nothing for 'state'"):
        train_on_tasks(model, mll, PeriodicTasks(5, 6), steps=3, checkpoint=path, progress=False)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 255
    path.write_bytes(raw)
    with pytest.raises(DataError, match="damaged"):
        DeepKernelTransfer.load(path, network())
    training = tmp_path / "training.pt"
    train_on_tasks(model, mll, PeriodicTasks(5, 6), steps=3, checkpoint=training, progress=False)
    with pytest.raises(DataError, match="nothing for 'config'"):
        DeepKernelTransfer.load(training, network())
    with pytest.raises(DataError, match="cannot write"):
        model.save(tmp_path / "no folder" / "model.pt")
