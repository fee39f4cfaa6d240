"""Examples of data sets, tables, predictions and draws."""

from __future__ import annotations

from typing import Any

import pandas
import torch

from benchmarks.robustness.fuzz.building_blocks import (
    classes,
    generator,
    inputs,
    labels,
    normal,
    positive,
    targets,
)
from benchmarks.robustness.fuzz.examples import example, same_for
from gpclml.datasets import RegressionData
from gpclml.evidence.training_speed import ModelPredictions

_RANGE = (0.0, 1.0)


@example("evaluation.calibration.expected_calibration_error")
def _() -> dict[str, Any]:
    return {"probabilities": normal(8, 3).softmax(-1), "labels": labels()}


@example("evaluation.calibration.fit_temperature")
def _() -> dict[str, Any]:
    return {"outputs": normal(2, 8, 3), "labels": labels()}


@example("evaluation.calibration.out_of_distribution_auroc")
def _() -> dict[str, Any]:
    return {"inside": normal(8, 3).softmax(-1), "outside": normal(5, 3, seed=1).softmax(-1)}


@example("evaluation.paired_difference")
def _() -> dict[str, Any]:
    return {"terms": normal(8), "reference": normal(8, seed=1)}


@example("evaluation.stacking_weights")
def _() -> dict[str, Any]:
    return {"log_densities": normal(8, 3)}


@example("datasets.LabelledImages")
def _() -> dict[str, Any]:
    images = torch.zeros(4, 1, 3, 3, dtype=torch.uint8)
    return {"name": "x", "images": images, "labels": labels(4, 2), "class_names": ("a", "b")}


@example("datasets.RegressionData")
def _() -> dict[str, Any]:
    return {"name": "x", "inputs": inputs(), "targets": targets()}


@example("datasets.load")
def _() -> dict[str, Any]:
    return {"name": "diabetes"}


@example("datasets.split", sizes=["data_or_n"])
def _() -> dict[str, Any]:
    return {"data_or_n": RegressionData("x", inputs(), targets()), "seed": 0}


@example("datasets.subset")
def _() -> dict[str, Any]:
    return {"train": torch.arange(8), "n": 3, "seed": 0}


@example("datasets.uci_source")
def _() -> dict[str, Any]:
    return {"name": "boston"}


@example("meta.class_probabilities")
def _() -> dict[str, Any]:
    return {"predictive": torch.distributions.Normal(normal(2, 3, 4), positive(2, 3, 4))}


@example("conditioning.partitions.partition_by_class")
def _() -> dict[str, Any]:
    return {"labels": labels(), "batch_size": 2, "generator": generator()}


@example("conditioning.partitions.partition_at_random", sizes=["num_data"])
def _() -> dict[str, Any]:
    return {"num_data": 8, "batch_size": 3, "generator": generator()}


@example("cli.report.prediction_scores")
def _() -> dict[str, Any]:
    return {"targets": normal(8), "mean": normal(8, seed=1), "deviation": positive(8)}


def _log_normal(parameters: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(0.0, 1.0).log_prob(parameters).sum(-1)


def _log_likelihood(parameters: torch.Tensor) -> torch.Tensor:
    return -(parameters - 0.5).square().sum(-1)


_SAMPLING_SIZES = ["temperatures", "leapfrog_steps"]


@example("evidence.sampling.annealed_importance_sampling", sizes=_SAMPLING_SIZES)
def _() -> dict[str, Any]:
    return {
        "log_prior": _log_normal, "log_likelihood": _log_likelihood, "prior_draws": normal(4, 2),
        "temperatures": 3, "step_size": 0.1, "scale": positive(2),
    }  # fmt: skip


@example("evidence.sampling.reverse_annealed_importance_sampling", sizes=_SAMPLING_SIZES)
def _() -> dict[str, Any]:
    return {
        "log_prior": _log_normal, "log_likelihood": _log_likelihood,
        "posterior_draws": normal(4, 2), "temperatures": 3, "step_size": 0.1,
    }  # fmt: skip


@example("evidence.sampling.bidirectional_evidence", sizes=_SAMPLING_SIZES)
def _() -> dict[str, Any]:
    return {
        "log_prior": _log_normal, "log_likelihood": _log_likelihood, "prior_draws": normal(4, 2),
        "posterior_draws": normal(4, 2, seed=1), "temperatures": 3, "step_size": 0.1,
    }  # fmt: skip


@example("evidence.sampling.conditional_split", sizes=["num_data"])
def _() -> dict[str, Any]:
    return {"num_data": 40}


@example("evidence.sampling.importance_sampling")
def _() -> dict[str, Any]:
    return {"log_joint": _log_likelihood, "draws": normal(8, 2), "log_proposal": _log_normal}


@same_for("evidence.sampling.joint_log_density", "evidence.sampling.marginal_log_densities")
def _() -> dict[str, Any]:
    return {"likelihood": classes(), "outputs": normal(4, 8, 3), "target": labels()}


@example("evidence.sampling.log_mean")
def _() -> dict[str, Any]:
    return {"log_values": normal(8)}


@example("evidence.sampling.power_schedule", sizes=["count"])
def _() -> dict[str, Any]:
    return {"count": 5}


@example("evidence.sampling.rescaled")
def _() -> dict[str, Any]:
    return {"weights": {"w": normal(4, 3)}, "scale": 0.5, "center": {"w": normal(3)}}


@example("evidence.sampling.simple_monte_carlo")
def _() -> dict[str, Any]:
    return {"log_likelihood": _log_likelihood, "prior_draws": normal(8, 2)}


@example("inference.solvers.check_solver")
def _() -> dict[str, Any]:
    return {"solver": "auto"}


def _table() -> pandas.DataFrame:
    return pandas.DataFrame({"a": [1.0, 2.0, 3.5] * 4, "b": list("xyz") * 4, "y": range(12)}).loc[
        [*range(12)] * 3
    ]


@same_for("cli.tables.check_columns", "cli.tables.fit_encoding")
def _() -> dict[str, Any]:
    return {"table": _table(), "target": "y", "drop": ("a",), "categories": ("b",)}


@example("cli.tables.read_targets")
def _() -> dict[str, Any]:
    return {"table": _table(), "target": "y"}


@example("cli.tables.read_table")
def _() -> dict[str, Any]:
    return {"path": "no such table.csv", "missing": ("-",)}


@example("cli.tables.num_test_rows")
def _() -> dict[str, Any]:
    return {"count": 30}


@same_for("cli.tables.split_rows", "cli.tables.subset_rows")
def _() -> dict[str, Any]:
    return {"targets": normal(30)}


def _predictions() -> ModelPredictions:
    return ModelPredictions(normal(8, 3), positive(8, 3), normal(8, seed=1))


@example("evidence.training_speed.ModelPredictions")
def _() -> dict[str, Any]:
    return {"means": normal(8, 3), "variances": positive(8, 3), "target": normal(8, seed=1)}


@same_for(
    "evidence.training_speed.expected_combination",
    "evidence.training_speed.optimal_combination",
    sizes=["passes"],
)
def _() -> dict[str, Any]:
    return {"predictions": _predictions()}


@example("evidence.training_speed.sampled_combination", sizes=["passes", "runs"])
def _() -> dict[str, Any]:
    return {"predictions": _predictions(), "start": torch.full((3,), 1 / 3, dtype=torch.float64)}


@example("evidence.training_speed.model_weights")
def _() -> dict[str, Any]:
    prior = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    return {"log_evidences": normal(3), "prior": prior}


def _linear() -> dict[str, Any]:
    return {
        "features": normal(5, 2), "target": normal(5, seed=1), "prior_variance": positive(2),
        "noise": positive(5), "num_samples": 2, "steps": 2,
    }  # fmt: skip


@example("evidence.training_speed.sample_then_optimize", sizes=["num_samples", "steps"])
def _() -> dict[str, Any]:
    return _linear()


@example(
    "evidence.training_speed.training_speed_by_descent", sizes=["num_samples", "steps", "repeats"]
)
def _() -> dict[str, Any]:
    return _linear() | {"repeats": 1}


@example("evidence.training_speed.SumOfTrainingLosses")
def _() -> dict[str, Any]:
    return {}
