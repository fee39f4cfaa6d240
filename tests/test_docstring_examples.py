"""Examples in docstrings run, and give what they show."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
from types import ModuleType

import botorch
import gpytorch
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP

import gpclml
from gpclml.curvature import GaussianWeightPrior
from gpclml.evaluation import (
    compare,
    learning_curve,
    log_marginal_likelihood,
    plot_compare,
    score_models,
)
from gpclml.kernels.networks import MLP
from gpclml.meta import ImageTasks
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import BayesianLinearModel, GPRegression, LinearizedNetwork
from gpclml.models.botorch import DeepKernelGP

PACKAGES = [
    "conditioning", "curvature", "evaluation", "evidence.bounds", "evidence.sampling",
    "evidence.training_speed", "fit", "kernels", "kernels.networks",
    "laplace", "linalg.gaussians", "meta", "mlls", "models", "tables",
]  # fmt: skip


def public_names() -> dict:
    names: dict = {"torch": torch, "gpytorch": gpytorch, "botorch": botorch}
    for package in PACKAGES:
        module = importlib.import_module(f"gpclml.{package}")
        names |= {name: getattr(module, name) for name in module.__all__}
    return names


def regression() -> dict:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(100, 3, generator=generator, dtype=torch.float64)
    y = x.sum(-1).sin()
    model = GPRegression(x, y)
    return {
        "x": x, "y": y, "train_x": x, "train_y": model.train_targets, "x_new": x[:3],
        "model": model, "likelihood": model.likelihood,
    }  # fmt: skip


def linear() -> dict:
    names = regression()
    model = BayesianLinearModel(names["x"], names["y"])
    return names | {"model": model, "likelihood": model.likelihood}


def of_one_column() -> dict:
    return {"x": torch.linspace(0, 1, 40), "y": torch.linspace(0, 1, 40).sin()}


def of_a_network() -> dict:
    names = {name: part.float() for name, part in regression().items() if name in ("x", "y")}
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = LinearizedNetwork(network, GaussianWeightPrior(network))
    return names | {
        "network": network, "likelihood": likelihood, "model": model,
        "train_x": names["x"], "train_y": names["y"], "batch_x": names["x"][:9],
        "batch_y": names["y"][:9],
        "mll": LaplaceMarginalLogLikelihood(likelihood, model, num_data=100),
    }  # fmt: skip


def of_images() -> dict:
    return {
        "images": torch.randint(256, (120, 1, 28, 28), dtype=torch.uint8),
        "labels": torch.arange(120) % 6,
    }


def few_shot() -> dict:
    images = of_images()
    tasks = ImageTasks(images["images"], images["labels"], ways=5, shots=1, queries=2)
    return {"episodes": tasks.draw(range(2))}


def comparison() -> dict:
    names = regression()
    return {
        "rbf": names["model"], "deep": GPRegression(names["x"], names["y"], kernel="rq"),
        "compare": compare, "score_models": score_models, "plot_compare": plot_compare,
    }  # fmt: skip


def training() -> dict:
    names = of_a_network()
    return names | {
        "loader": [(names["x"], names["y"])],
        "criterion": lambda output, target: (output.squeeze(-1) - target).square().mean(),
    }


def of_botorch() -> dict:
    x = torch.rand(10, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    names = {"train_X": x, "train_Y": x.sum(-1, keepdim=True), "X": x[:3]}
    names |= {"x": names["train_X"], "y": names["train_Y"]}
    return names | {
        "DeepKernelGP": DeepKernelGP, "ModelListGP": ModelListGP, "SingleTaskGP": SingleTaskGP,
        "fit_gpytorch_mll": fit_gpytorch_mll,
    }  # fmt: skip


SETUPS = {
    "gpclml.models.botorch": of_botorch,
    "gpclml.evaluation.comparison": comparison,
    "gpclml.curvature.output_likelihoods": of_a_network,
    "gpclml.laplace.laplace": of_a_network,
    "gpclml.fit.laplace": of_a_network,
    "gpclml.linalg.gaussians": linear,
    "gpclml.curvature.invariances": of_a_network,
    "gpclml.kernels.deep.NeuralTangentKernel": of_a_network,
    "gpclml.meta.tasks": of_images,
    "gpclml.meta.deep_kernel_transfer": few_shot,
    "gpclml.mlls.laplace_marginal_log_likelihood": of_a_network,
    "gpclml.mlls.linear_evidence_lower_bound": linear,
    "gpclml.mlls.sum_marginal_log_likelihood": of_botorch,
    "gpclml.models.linear": of_a_network,
    "gpclml.models.linear.BayesianLinearModel": of_one_column,
    "gpclml.evidence.training_speed": training,
}


def modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(gpclml.__path__, "gpclml.")
    names = [one.name for one in found if not one.name.endswith("__main__")]
    return [importlib.import_module(name) for name in names]


EXAMPLES = [
    test
    for module in modules()
    for test in doctest.DocTestFinder(exclude_empty=True).find(module)
    if test.examples
]


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_an_example_runs(test, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = test.globs["__name__"]
    names = public_names() | {
        "MLP": MLP, "log_marginal_likelihood": log_marginal_likelihood,
        "learning_curve": learning_curve,
    } | SETUPS.get(test.name, SETUPS.get(module, regression))()  # fmt: skip
    for example in test.examples:
        tree = ast.parse(example.source)
        if isinstance(tree.body[0], ast.Expr) and example.want:
            assert repr(eval(example.source.strip(), names)) == example.want.strip()
        else:
            exec(example.source, names)


def test_there_are_examples():
    assert len(EXAMPLES) > 20


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_an_example_is_in_a_section_that_the_documentation_renders_as_code(test):
    """Of Google's sections only "Examples:" is code; anything else makes quotations of prompts."""
    lines = [line.strip() for line in test.docstring.splitlines()]
    before = lines[: next(i for i, line in enumerate(lines) if line.startswith(">>>"))]
    headings = [line for line in before if re.fullmatch(r"[A-Z][a-z]+:", line)]
    assert headings[-1] == "Examples:", "Name the section 'Examples:'."
