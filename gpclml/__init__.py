"""Kernel learning on GPyTorch: conditional marginal likelihoods and others as objectives.

The names that most programs use are offered here and imported when they are first asked for, so
that ``import gpclml`` itself imports nothing. Everything else is in the packages:

- ``mlls``: objectives ``mll(output, target)``; ``conditioning``: which points they hold out
- ``models``, ``kernels``: models, kernels, means and feature maps
- ``tables``: estimators for tables and the command; ``laplace``: Laplace posteriors of networks
- ``fit``: fits; ``evaluation``: scores and comparisons of models
- ``inference``: posteriors of exact GPs; ``linalg``: densities of tensors
- ``curvature``, ``evidence``, ``meta``: networks, evidence by other roads, few-shot tasks
- ``datasets``, ``errors``
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from gpclml.conditioning import (
        HeldOut,
        KFold,
        LastPoints,
        LeaveOneOut,
        RandomHoldout,
        RandomOrderings,
    )  # fmt: skip
    from gpclml.curvature import GaussianWeightPrior
    from gpclml.datasets import load
    from gpclml.evaluation import (
        Comparison,
        compare,
        conditional_log_marginal_likelihood,
        joint_log_predictive,
        learning_curve,
        leave_one_out,
        log_marginal_likelihood,
        marginal_log_predictive,
        plot_compare,
        score_models,
        stacking_weights,
    )  # fmt: skip
    from gpclml.evidence import psis_loo, waic
    from gpclml.fit import FitWarning, fit_batch, fit_map, fit_mll, fit_networks, fit_online
    from gpclml.inference import IterativePosterior
    from gpclml.kernels import MLP, DeepKernel, NetworkMean
    from gpclml.laplace import Laplace
    from gpclml.linalg import ConjugateGradients
    from gpclml.meta import DeepKernelTransfer
    from gpclml.mlls import (
        ConditionalMarginalLogLikelihood,
        LaplaceMarginalLogLikelihood,
        LinearEvidenceLowerBound,
        SumMarginalLogLikelihood,
    )  # fmt: skip
    from gpclml.models import BayesianLinearModel, GPRegression, LinearizedNetwork
    from gpclml.tables import Regressor, StackedGP

__version__ = "0.1.0"

__all__ = [
    "MLP",
    "BayesianLinearModel",
    "Comparison",
    "ConditionalMarginalLogLikelihood",
    "ConjugateGradients",
    "DeepKernel",
    "DeepKernelTransfer",
    "FitWarning",
    "GPRegression",
    "GaussianWeightPrior",
    "HeldOut",
    "IterativePosterior",
    "KFold",
    "Laplace",
    "LaplaceMarginalLogLikelihood",
    "LastPoints",
    "LeaveOneOut",
    "LinearEvidenceLowerBound",
    "LinearizedNetwork",
    "NetworkMean",
    "RandomHoldout",
    "RandomOrderings",
    "Regressor",
    "StackedGP",
    "SumMarginalLogLikelihood",
    "compare",
    "conditional_log_marginal_likelihood",
    "fit_batch",
    "fit_map",
    "fit_mll",
    "fit_networks",
    "fit_online",
    "joint_log_predictive",
    "learning_curve",
    "leave_one_out",
    "load",
    "log_marginal_likelihood",
    "marginal_log_predictive",
    "plot_compare",
    "psis_loo",
    "score_models",
    "stacking_weights",
    "waic",
]

# In the order in which a name is looked for: those that take least to import come first.
_ROOMS = (
    "errors", "datasets", "conditioning", "mlls", "models", "evaluation", "fit", "kernels",
    "inference", "linalg", "curvature", "evidence", "laplace", "tables", "meta",
)  # fmt: skip

# What the modules and names of releases before 0.1.0 are called now; for one release. A package
# with names in it has the line ``explain_moved(__name__)``.
_MOVED = {
    "bounds": "evidence.bounds", "botorch": "models.botorch", "calibration": "evaluation",
    "criteria": "evidence", "distributed": "fit.distributed",
    "features": "kernels", "gaussians": "linalg.gaussians",
    "held_out_densities": "inference", "invariances": "curvature",
    "means": "kernels", "missing": "inference.observations", "networks": "kernels.networks",
    "observations": "inference.observations",
    "observed_covariance": "inference.covariances",
    "orderings": "conditioning",
    "output_likelihoods": "curvature.output_likelihoods", "partitions": "conditioning",
    "posterior": "inference", "predictive": "inference",
    "sampling": "evidence.sampling", "scores": "evaluation", "solvers": "inference.covariances",
    "training_speed": "evidence.training_speed",
    "units": "inference.units",
    "conditioning.orderings": "conditioning", "conditioning.partitions": "conditioning",
    "conditioning.class_partition": "conditioning.partition_by_class",
    "conditioning.random_partition": "conditioning.partition_at_random",
    "curvature.Kernel": "curvature.FunctionSpace",
    "curvature.KernelCurvature": "curvature.FunctionSpaceCurvature",
    "datasets.Split": "datasets.TrainTestSplit",
    "datasets.emnist": "datasets.load_emnist", "datasets.omniglot": "datasets.load_omniglot",
    "datasets.published_split": "datasets.load_published_split",
    "datasets.published_splits": "datasets.load_published_splits",
    "evaluation.ComparisonWarning": "evaluation.Finding",
    "evaluation.WarningName": "evaluation.FindingName",
    "evidence.sampling.EvidenceBound": "evidence.sampling.Estimate",
    "evidence.sampling.conditional_log_density":
        "evidence.sampling.estimate_conditional_log_density",
    "fit.LinearBoundFit": "fit.FitResult", "fit.OnlineFit": "fit.OnlineFitResult",
    "fit.StoppingResult": "fit.NetworksFitResult", "fit.batch_size": "fit.suggest_batch_size",
    "meta.Training": "meta.TasksFitResult", "models.networks_of": "models.find_networks",
}  # fmt: skip


def explain_moved(package: str) -> None:
    """Makes a package raise an ``AttributeError`` that says where a moved name is now.

    Args:
        package: Its ``__name__``, while it is imported.
    """

    def explain(name: str) -> NoReturn:
        now = _MOVED.get(f"{package}.{name}".removeprefix("gpclml."))
        if now is not None:
            raise AttributeError(f"{package}.{name} is now gpclml.{now}.")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    # Set here, since type checkers take any name for known in a module that defines it.
    vars(sys.modules[package])["__getattr__"] = explain


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"gpclml.{name}")
    if name in __all__:
        for room in _ROOMS:
            module = importlib.import_module(f"gpclml.{room}")
            if name in module.__all__:
                return getattr(module, name)
    if name in _MOVED:
        raise AttributeError(f"gpclml.{name} is now gpclml.{_MOVED[name]}.")
    message = f"module 'gpclml' has no attribute {name!r}"
    raise AttributeError(message, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])
