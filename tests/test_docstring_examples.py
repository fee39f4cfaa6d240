"""Examples in docstrings run, and give what they show."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
from typing import Any

import botorch
import gpytorch
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP

import gpclml
from gpclml.curvature import GaussianWeightPrior
from gpclml.meta import ImageTasks
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import BayesianLinearModel, GPRegression, LinearizedNetwork

MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(gpclml.__path__, "gpclml.")
    if not module.name.endswith("__main__")
]
EXAMPLES = [
    test
    for module in MODULES
    for test in doctest.DocTestFinder(exclude_empty=True).find(module)
    if test.examples
]


def public_names() -> dict[str, Any]:
    names = {"torch": torch, "gpytorch": gpytorch, "botorch": botorch}
    for module in MODULES:
        names |= {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return names


def regression() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(100, 3, generator=generator, dtype=torch.float64)
    y = x.sum(-1).sin()
    model = GPRegression(x, y)
    return {
        "x": x, "y": y, "train_x": x, "train_y": model.train_targets, "x_new": x[:3],
        "model": model, "likelihood": model.likelihood,
        "rbf": model, "deep": GPRegression(x, y, kernel="rq"),
    }  # fmt: skip


def linear() -> dict[str, Any]:
    names = regression()
    model = BayesianLinearModel(names["x"], names["y"])
    return names | {"model": model, "likelihood": model.likelihood}


def network() -> dict[str, Any]:
    x, y = (regression()[name].float() for name in ("x", "y"))
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = LinearizedNetwork(layers, GaussianWeightPrior(layers))
    return {
        "x": x, "y": y, "train_x": x, "train_y": y, "batch_x": x[:9], "batch_y": y[:9],
        "network": layers, "likelihood": likelihood, "model": model, "loader": [(x, y)],
        "mll": LaplaceMarginalLogLikelihood(likelihood, model, num_data=100),
        "criterion": lambda output, target: (output.squeeze(-1) - target).square().mean(),
    }  # fmt: skip


def few_shot() -> dict[str, Any]:
    images = torch.randint(256, (120, 1, 28, 28), dtype=torch.uint8)
    labels = torch.arange(120) % 6
    episodes = ImageTasks(images, labels, ways=5, shots=1, queries=2).draw(range(2))
    return {"images": images, "labels": labels, "episodes": episodes}


def botorch_models() -> dict[str, Any]:
    x = torch.rand(10, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x.sum(-1, keepdim=True)
    return {
        "train_X": x, "train_Y": y, "X": x[:3], "x": x, "y": y, "ModelListGP": ModelListGP,
        "SingleTaskGP": SingleTaskGP, "fit_gpytorch_mll": fit_gpytorch_mll,
    }  # fmt: skip


# By the beginning of an example's name; all others see a fitted regression.
SETUPS = {
    "gpclml.curvature": network,
    "gpclml.evidence.training_speed": network,
    "gpclml.fit.laplace": network,
    "gpclml.kernels.deep.NeuralTangentKernel": network,
    "gpclml.laplace": network,
    "gpclml.linalg.gaussians": linear,
    "gpclml.meta": few_shot,
    "gpclml.mlls.laplace_marginal_log_likelihood": network,
    "gpclml.mlls.linear_evidence_lower_bound": linear,
    "gpclml.mlls.sum_marginal_log_likelihood": botorch_models,
    "gpclml.models.botorch": botorch_models,
    "gpclml.models.linear.BayesianLinearModel": lambda: {
        "x": torch.linspace(0, 1, 40), "y": torch.linspace(0, 1, 40).sin(),
    },
    "gpclml.models.linear": network,
}  # fmt: skip


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_an_example_runs(test, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    setup = next((SETUPS[start] for start in SETUPS if test.name.startswith(start)), regression)
    names = public_names() | setup()
    for example in test.examples:
        tree = ast.parse(example.source)
        if isinstance(tree.body[0], ast.Expr) and example.want:
            assert repr(eval(example.source.strip(), names)) == example.want.strip()
        else:
            exec(example.source, names)


def test_there_are_examples():
    assert len(EXAMPLES) > 20
