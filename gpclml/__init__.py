"""Kernel learning on GPyTorch: marginal likelihoods and their neighbours as objectives.

The marginal likelihood, the conditional marginal likelihood and their neighbours replace one
another in one line.

The names that most programs use are offered here and imported when they are first asked for, so
that ``import gpclml`` itself imports nothing. Everything else is in the packages:

- ``mlls``: objectives ``mll(output, target)``; ``conditioning``: which points they hold out
- ``models``, ``kernels``: models, kernels, means and feature maps
- ``likelihoods``: likelihoods that are not Gaussian
- ``tables``: estimators for tables and the command; ``laplace``: Laplace posteriors of networks
- ``fit``: fits; ``evaluation``: scores and comparisons of models
- ``inference``: posteriors of exact GPs; ``linalg``: densities of tensors
- ``curvature``, ``evidence``, ``meta``: networks, evidence by other roads, few-shot tasks
- ``tables``, ``laplace``, ``errors``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpclml._utils.lazy import lazy_names

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
    from gpclml.evaluation import (
        Comparison,
        Decomposition,
        compare,
        conditional_log_marginal_likelihood,
        decompose,
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
        ExactMarginalLogLikelihood,
        LaplaceMarginalLogLikelihood,
        LeaveOneOutPseudoLikelihood,
        LinearEvidenceLowerBound,
        SumMarginalLogLikelihood,
    )  # fmt: skip
    from gpclml.models import (
        BayesianLinearModel,
        GPClassification,
        GPCounts,
        GPRegression,
        LinearizedNetwork,
    )  # fmt: skip
    from gpclml.tables import Classifier, Regressor, StackedGP

__version__ = "0.1.0"

__all__ = [
    "MLP",
    "BayesianLinearModel",
    "Classifier",
    "Comparison",
    "ConditionalMarginalLogLikelihood",
    "ConjugateGradients",
    "Decomposition",
    "DeepKernel",
    "DeepKernelTransfer",
    "ExactMarginalLogLikelihood",
    "FitWarning",
    "GPClassification",
    "GPCounts",
    "GPRegression",
    "GaussianWeightPrior",
    "HeldOut",
    "IterativePosterior",
    "KFold",
    "Laplace",
    "LaplaceMarginalLogLikelihood",
    "LastPoints",
    "LeaveOneOut",
    "LeaveOneOutPseudoLikelihood",
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
    "decompose",
    "fit_batch",
    "fit_map",
    "fit_mll",
    "fit_networks",
    "fit_online",
    "joint_log_predictive",
    "learning_curve",
    "leave_one_out",
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
    "errors", "conditioning", "mlls", "models", "evaluation", "fit", "kernels",
    "inference", "linalg", "curvature", "evidence", "laplace", "tables", "meta", "likelihoods",
)  # fmt: skip


__getattr__ = lazy_names(__name__, __all__, _ROOMS)


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])
