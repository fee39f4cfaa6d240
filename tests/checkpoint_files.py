"""Checkpoints of every kind that the library writes, small."""

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
    options, likelihood = {"curvature": Kronecker()} | options, GaussianLikelihood().double()
    return LaplaceMarginalLogLikelihood(likelihood, LinearizedNetwork(network), n, **options)


def train_online(path, mll=None, x=None, y=None, **options):
    mll = laplace() if mll is None else mll
    defaults = dict(epochs=3, burn_in=1, hyper_steps=2, batch_size=10, progress=False)
    drawn = data()
    x, y = drawn[0] if x is None else x, drawn[1] if y is None else y
    fit_online(mll, x, y, checkpoint=path, **defaults | options)
    return mll


def transfer():
    network = MLP([1, 5, 3], torch.nn.Tanh, generator=torch.Generator().manual_seed(0))
    model = DeepKernelTransfer(network, "rbf", 3)
    return ConditionalMarginalLogLikelihood(model.likelihood, model, RandomHoldout(0.3))


def train_tasks(path, mll=None, tasks=None, **options):
    mll = transfer() if mll is None else mll
    tasks = PeriodicTasks(5, 6, seed=0) if tasks is None else tasks
    defaults = dict(steps=3, look_every=2, validation_tasks=2, progress=False)
    defaults["validation"] = PeriodicTasks(5, 6, seed=1)
    train_on_tasks(mll.model, mll, tasks, checkpoint=path, **defaults | options)
    return mll


WRITERS = {
    "gpclml.GPRegression": save_model,
    "gpclml.OnlineFit": train_online,
    "gpclml.DeepKernelTransfer": train_tasks,
}
