"""Examples of what takes or makes Gaussian processes and linear models."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch

import gpclml.mlls
from benchmarks.robustness.fuzz.building_blocks import (
    generator,
    gp,
    inputs,
    linear_model,
    normal,
    objective,
    positive,
    targets,
    train,
)
from benchmarks.robustness.fuzz.examples import example
from gpclml.conditioning import KFold, RandomHoldout
from gpclml.inference import IterativePosterior
from gpclml.inference.observations import training_observations
from gpclml.linalg import ConjugateGradients
from gpclml.models import Standardizer


@example("models.botorch.DeepKernelGP", sizes=["num_features"])
def _() -> dict[str, Any]:
    unit = torch.sigmoid(inputs())
    y = targets().unsqueeze(-1)
    return {"train_X": unit, "train_Y": y, "train_Yvar": 0.01 * y.square() + 0.01, "hidden": (3,)}


@example("models.GPRegression", sizes=["num_features", "num_mixtures"])
def _() -> dict[str, Any]:
    return train(hidden=(3,), warm_start=False)


@example("models.GPRegression.predict")
def _() -> dict[str, Any]:
    return {"self": gp(), "x": inputs(3), "solver": ConjugateGradients()}


@example("models.GPRegression.check_targets")
def _() -> dict[str, Any]:
    model = gp()
    return {"self": model, "target": model.train_targets.clone()}


@example("models.GPRegression.with_kernel")
def _() -> dict[str, Any]:
    return {"self": gp(), "kernel": "matern"}


@example("models.GPRegression.load")
def _() -> dict[str, Any]:
    return {"path": "no such model.pt"}


@example("models.BayesianLinearModel")
def _() -> dict[str, Any]:
    return train(prior_variance=positive(2), noise=0.1)


@example("models.BayesianLinearModel.predict")
def _() -> dict[str, Any]:
    return {"self": linear_model(), "x": inputs(3)}


@example("models.Standardizer")
def _() -> dict[str, Any]:
    return {"offset": normal(1, 2), "scale": positive(1, 2)}


@example("models.Standardizer.fit")
def _() -> dict[str, Any]:
    return {"values": inputs(), "dim": -2}


@example("models.Standardizer.transform")
def _() -> dict[str, Any]:
    return {"self": Standardizer(normal(1, 2), positive(1, 2)), "values": inputs()}


@example("mlls.ConditionalMarginalLogLikelihood")
def _() -> dict[str, Any]:
    model = gp()
    return {
        "likelihood": model.likelihood, "model": model, "conditioning": RandomHoldout(0.2),
        "factor_dtype": torch.float64,
    }  # fmt: skip


@example("mlls.ConditionalMarginalLogLikelihood.forward")
def _() -> dict[str, Any]:
    mll = objective()
    model = mll.model
    return {"self": mll, "function_dist": model(inputs()), "target": model.train_targets}


@example("mlls.LinearEvidenceLowerBound")
def _() -> dict[str, Any]:
    model = linear_model()
    return {"likelihood": model.likelihood, "model": model}


@example("mlls.SumMarginalLogLikelihood")
def _() -> dict[str, Any]:
    model = gpytorch.models.IndependentModelList(gp(), gp())
    return {
        "likelihood": gpytorch.likelihoods.LikelihoodList(*[m.likelihood for m in model.models]),
        "model": model, "mll_cls": gpclml.mlls.ConditionalMarginalLogLikelihood,
    }  # fmt: skip


@example("inference.held_out_densities.held_out_densities")
def _() -> dict[str, Any]:
    return {"data": training_observations(gp()), "blocks": [torch.tensor([[0, 1]])]}


@example("inference.solvers.choose_solver")
def _() -> dict[str, Any]:
    data, blocks = training_observations(gp()), [torch.tensor([[0, 1]])]
    return {"solver": "auto", "data": data, "blocks": blocks}


@example("inference.observations.likelihood_parameters")
def _() -> dict[str, Any]:
    model = gp()
    return {"model": model, "likelihood": model.likelihood}


@example("inference.observations.observations")
def _() -> dict[str, Any]:
    model = gp()
    return {
        "likelihood": model.likelihood, "function_dist": model(inputs()),
        "target": model.train_targets,
    }  # fmt: skip


@example("inference.observations.training_observations")
def _() -> dict[str, Any]:
    model = gp()
    return {"model": model, "likelihood": model.likelihood}


@example("inference.observed_covariance.observed_covariance")
def _() -> dict[str, Any]:
    model = gp()
    return {"likelihood": model.likelihood, "prior": model(inputs())}


@example("inference.IterativePosterior")
def _() -> dict[str, Any]:
    return {"model": gp(), "solver": ConjugateGradients(), "points_at_once": 4}


@example("inference.IterativePosterior.mean")
def _() -> dict[str, Any]:
    return {"self": IterativePosterior(gp()), "x": inputs(3)}


@example("inference.IterativePosterior.sample", sizes=["num_samples"])
def _() -> dict[str, Any]:
    return {"self": IterativePosterior(gp()), "x": inputs(3), "generator": generator()}


@example("inference.exact_posterior")
def _() -> dict[str, Any]:
    return {"model": gp().eval(), "x": inputs(3), "marginal": False}


def _new(**others: Any) -> dict[str, Any]:
    return {"model": gp(), "x": inputs(3), "y": targets()[:3]} | others


for _name in (
    "inference.predictive.marginal_predictive", "inference.predictive.predictive_observations",
    "evaluation.joint_log_predictive", "evaluation.marginal_log_predictive",
):  # fmt: skip
    example(_name)(_new)


@example("cli.report.predicted")
def _() -> dict[str, Any]:
    return {"model": gp(), "x": inputs(3)}


@example("cli.report.Recipe", sizes=["steps", "restarts"])
def _() -> dict[str, Any]:
    return {"model": "rbf", "steps": 2}


@example("cli.report.best_on_test")
def _() -> dict[str, Any]:
    from gpclml.cli.report import prediction_scores

    return {"predictions": {"a": prediction_scores(normal(8), normal(8, seed=1), positive(8))}}


@example("cli.report.script_of")
def _() -> dict[str, Any]:
    from pathlib import Path

    from gpclml.cli.report import Recipe

    return {
        "recipe": Recipe("rbf"), "data": Path("a.csv"), "most_rows": 100, "split_seed": 0,
        "version": "0.1.0", "one_thread": True,
    }  # fmt: skip


def _scored(**others: Any) -> dict[str, Any]:
    return {"model": gp()} | others


example("evaluation.log_marginal_likelihood")(_scored)
example("evaluation.leave_one_out")(_scored)


@example("evaluation.conditional_log_marginal_likelihood")
def _() -> dict[str, Any]:
    return _scored(conditioning=KFold(2))


def _orders() -> torch.Tensor:
    return torch.stack([torch.arange(8), torch.arange(8).flip(0)])


@example("evaluation.learning_curve")
def _() -> dict[str, Any]:
    return _scored(orderings=_orders())


@example("evidence.training_speed.posterior_divergences")
def _() -> dict[str, Any]:
    return _scored(orderings=_orders())


@example("evidence.training_speed.training_speed", sizes=["num_samples", "repeats"])
def _() -> dict[str, Any]:
    return _scored(orderings=_orders(), repeats=1, num_samples=2)


@example("evidence.training_speed.model_predictions")
def _() -> dict[str, Any]:
    return {"models": [gp(), gp()], "scheme": "posterior", "order": torch.arange(8)}


def _compared() -> dict[str, Any]:
    return {"models": {"a": gp(), "b": gp("matern")}, "m": 4, "orderings": _orders()}


for _name in ("evaluation.compare", "evaluation.score_models"):
    example(_name, sizes=["curves"])(_compared)


def _scored_models() -> dict[str, Any]:
    from gpclml.evaluation import score_models

    return {"comparison": score_models(**_compared())}


for _kind in ("calibration", "compare", "fit", "learning_curves"):
    example(f"evaluation.plot_{_kind}")(_scored_models)


@example("inference.units.log_target_scale")
def _() -> dict[str, Any]:
    return _scored(units="original")


@example("inference.units.units_of_targets")
def _() -> dict[str, Any]:
    return _scored(units="original")


@example("inference.units.term_offset")
def _() -> dict[str, Any]:
    model = gp()
    return {"model": model, "data": training_observations(model), "units": "original"}


@example("inference.units.to_training_units")
def _() -> dict[str, Any]:
    return _scored(target=targets())
