"""Checkpoints of every kind that the library writes, small, and files that ask for much memory."""

from __future__ import annotations

import io
import zipfile

import torch
from gpytorch.likelihoods import GaussianLikelihood

from gpclml.conditioning import RandomHoldout
from gpclml.curvature import Kronecker
from gpclml.fit import fit_online
from gpclml.kernels.networks import MLP
from gpclml.meta import DeepKernelTransfer, PeriodicTasks, train_on_tasks
from gpclml.mlls import ConditionalMarginalLogLikelihood, LaplaceMarginalLogLikelihood
from gpclml.models import GPRegression, LinearizedNetwork


def data(n=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(-1)


def save_model(path, kernel="rbf", mean="mlp"):
    GPRegression(*data(), kernel=kernel, mean=mean, hidden=[5], warm_start=False).save(path)


def laplace(n=20, **options):
    network = MLP([2, 4, 1], torch.nn.Tanh, generator=torch.Generator().manual_seed(0)).double()
    options = {"curvature": Kronecker()} | options
    return LaplaceMarginalLogLikelihood(
        GaussianLikelihood().double(), LinearizedNetwork(network), n, **options
    )


def train_online(path, mll=None, x=None, y=None, **options):
    mll = laplace() if mll is None else mll
    x, y = (own if given is None else given for own, given in zip(data(), (x, y), strict=True))
    options = {
        "epochs": 3, "burn_in": 1, "hyper_steps": 2, "batch_size": 10, "progress": False,
    } | options  # fmt: skip
    fit_online(mll, x, y, checkpoint=path, **options)
    return mll


def transfer():
    network = MLP([1, 5, 3], torch.nn.Tanh, generator=torch.Generator().manual_seed(0))
    model = DeepKernelTransfer(network, "rbf", 3)
    return ConditionalMarginalLogLikelihood(model.likelihood, model, RandomHoldout(0.3))


def train_tasks(path, mll=None, tasks=None, **options):
    mll = transfer() if mll is None else mll
    tasks = PeriodicTasks(5, 6, seed=0) if tasks is None else tasks
    options = {
        "steps": 3, "look_every": 2, "validation": PeriodicTasks(5, 6, seed=1),
        "validation_tasks": 2, "progress": False,
    } | options  # fmt: skip
    train_on_tasks(mll.model, mll, tasks, checkpoint=path, **options)
    return mll


WRITERS = {
    "gpclml.GPRegression": save_model,
    "gpclml.OnlineFit": train_online,
    "gpclml.DeepKernelTransfer": train_tasks,
}


def saved(content, **options):
    """The bytes of ``torch.save``."""
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


class _Called:
    """What is pickled as the call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def _rewritten(raw, edit=lambda data: data, compression=zipfile.ZIP_STORED):
    """An archive with its pickle edited, or compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            record = old.read(name)
            new.writestr(name, edit(record) if name.endswith("data.pkl") else record)
    return out.getvalue()


def greedy_files(kind):
    """Files of kilobytes that ask for many megabytes or gigabytes, and why they are refused."""
    base = {"format": kind, "version": 2}
    small = saved({**base, "x": torch.arange(1000.0)})
    shape = b"M\xe8\x03\x85", b"J\x00\x00\x00\x7f\x85"  # 1000, in a tuple of one, in the pickle
    count = b"M\xe8\x03tq", b"J\x00\x00\x00\x7ftq"  # 1000, the last of the five about a storage
    assert small.count(shape[0]) == small.count(count[0]) == 1
    legacy = saved({**base, "x": torch.zeros(1 << 24)}, _use_new_zipfile_serialization=False)
    one = torch.zeros(1)
    return {
        "shape": (_rewritten(small, lambda data: data.replace(*shape)), "larger than its record"),
        "count": (_rewritten(small, lambda data: data.replace(*count)), "larger than its record"),
        "both": (
            _rewritten(small, lambda data: data.replace(*shape).replace(*count)),
            "larger than its record",
        ),
        "compressed": (
            _rewritten(saved({**base, "x": torch.zeros(1 << 24)}), compression=8),
            "compressed",
        ),
        "repeated": (
            saved({**base, "x": one.expand(1 << 16, 1 << 16)}),
            "larger than its record",
        ),
        "call": (saved({**base, "x": _Called(bytearray, 1 << 24)}), "bytearray"),
        "tensor": (saved({**base, "x": _Called(torch.FloatTensor, 1 << 24)}), "FloatTensor"),
        "older format": (legacy[:6000], "does not start"),
    }
