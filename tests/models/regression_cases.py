"""Kernels of ``GPRegression``, and steps on it, for its tests."""

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood

KERNELS = ["rbf", "rq", "matern", "spectral_mixture", "deep", "deep_bottleneck"]


def lml(model):
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    return mll(model(*model.train_inputs), model.train_targets)


def steps(model, count=5):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(count):
        optimizer.zero_grad()
        loss = -lml(model).sum()
        loss.backward()
        optimizer.step()
    return loss
