"""Examples of densities and Gaussians, of bounds and criteria, and of strategies."""

from __future__ import annotations

from typing import Any

import torch
from linear_operator import to_linear_operator

import gpclml.conditioning
from benchmarks.robustness.fuzz.building_blocks import (
    covariance,
    generator,
    normal,
    positive,
    targets,
)
from benchmarks.robustness.fuzz.examples import example, same_for
from gpclml.conditioning import RandomHoldout
from gpclml.linalg import ConjugateGradients, LowRankPlusDiagonal, NoisyCovariance, OperatorProducts
from gpclml.linalg.gaussians import DiagonalFamily, DiagonalGaussian

_RANGE = (0.0, 1.0)


@example("evidence.bounds.catoni_bound")
def _() -> dict[str, Any]:
    return {
        "empirical_risk": positive(3) / 4,
        "kl": positive(3),
        "num_data": 50,
        "loss_range": _RANGE,
    }


@example("evidence.bounds.mcallester_bound")
def _() -> dict[str, Any]:
    return {
        "empirical_risk": positive(3) / 4,
        "kl": positive(3),
        "num_data": 50,
        "loss_range": _RANGE,
    }


@example("evidence.bounds.conditional_evidence_bound")
def _() -> dict[str, Any]:
    return {
        "conditional_log_evidence": -positive(3), "num_data": 50, "m": 10, "loss_range": (-1.0, 4.0)
    }  # fmt: skip


@example("evidence.bounds.evidence_bound")
def _() -> dict[str, Any]:
    return {"log_evidence": -positive(3), "num_data": 50, "loss_range": (-1.0, 4.0)}


@example("conditioning.HeldOut", call=lambda blocks: gpclml.conditioning.HeldOut(*blocks))
def _() -> dict[str, Any]:
    return {"blocks": (torch.tensor([0, 2]), torch.tensor([5]))}


@example("conditioning.KFold", sizes=["folds"])
def _() -> dict[str, Any]:
    return {"folds": 3, "seed": 0}


@example("conditioning.LastPoints")
def _() -> dict[str, Any]:
    return {"m": 2}


@example("conditioning.LeaveOneOut")
def _() -> dict[str, Any]:
    return {}


@example("conditioning.RandomHoldout")
def _() -> dict[str, Any]:
    return {"fraction": 0.2, "seed": 0, "condition_on": 3}


@example("conditioning.RandomOrderings", sizes=["k"])
def _() -> dict[str, Any]:
    return {"k": 2, "m": 3, "seed": 0}


@example("conditioning.RandomHoldout.split", sizes=["num_data"])
def _() -> dict[str, Any]:
    return {"self": RandomHoldout(0.2), "num_data": 8, "generator": generator(), "observed": None}


@example("evidence.criteria.aic")
def _() -> dict[str, Any]:
    return {"log_likelihood": normal(3), "num_parameters": 4}


@example("evidence.criteria.bic")
def _() -> dict[str, Any]:
    return {"log_likelihood": normal(3), "num_parameters": 4, "num_data": 50}


@same_for("evidence.criteria.psis_loo", "evidence.criteria.waic")
def _() -> dict[str, Any]:
    return {"log_likelihoods": normal(40, 5)}


@example("linalg.gaussians.DiagonalGaussian")
def _() -> dict[str, Any]:
    return {"mean": normal(3), "variances": positive(3)}


@example("linalg.gaussians.FullGaussian")
def _() -> dict[str, Any]:
    return {"mean": normal(3), "root": covariance(3)}


@example("linalg.gaussians.LowRankGaussian")
def _() -> dict[str, Any]:
    return {"mean": normal(3), "factor": normal(3, 1), "epsilon": 0.1}


@example("linalg.gaussians.LowRankFamily")
def _() -> dict[str, Any]:
    return {}


@example("linalg.gaussians.TrainableGaussian")
def _() -> dict[str, Any]:
    return {"family": DiagonalFamily(), "prior_variance": positive(3)}


@example("linalg.gaussians.expected_square")
def _() -> dict[str, Any]:
    q = DiagonalGaussian(normal(3), positive(3))
    return {"q": q, "features": normal(8, 3), "residual": normal(8)}


@example("linalg.gaussians.gaussian_kl")
def _() -> dict[str, Any]:
    return {"q": DiagonalGaussian(normal(3), positive(3)), "p": positive(3)}


@example("linalg.gaussians.linear_posterior")
def _() -> dict[str, Any]:
    return {
        "features": normal(8, 3), "residual": normal(8), "prior_variance": positive(3),
        "noise": positive(8),
    }  # fmt: skip


def _noisy() -> NoisyCovariance:
    return NoisyCovariance(OperatorProducts(to_linear_operator(covariance())), positive(8))


@example("linalg.ConjugateGradients")
def _() -> dict[str, Any]:
    return {}


@example("linalg.CovarianceSolver")
def _() -> dict[str, Any]:
    return {"covariance": _noisy(), "settings": ConjugateGradients()}


@example("linalg.IterativeConditioning")
def _() -> dict[str, Any]:
    return {"covariance": _noisy(), "residual": normal(8), "settings": ConjugateGradients()}


@example("linalg.LowRankPlusDiagonal")
def _() -> dict[str, Any]:
    return {"features": normal(8, 3), "noise": positive(8)}


@example("linalg.OperatorProducts")
def _() -> dict[str, Any]:
    return {"operator": to_linear_operator(covariance())}


@example("linalg.RowProducts")
def _() -> dict[str, Any]:
    K = covariance()
    return {
        "rows": lambda i, j, k: K[i:j, :k], "diagonal": K.diagonal(), "shape": K.shape,
        "kept_bytes": 0,
    }  # fmt: skip


@example("linalg.block_conditional_log_densities")
def _() -> dict[str, Any]:
    blocks = [torch.tensor([[0, 1], [2, 3]])]
    return {"covariance": covariance(), "residual": normal(8), "blocks": blocks}


@same_for("linalg.conditional_log_density", "linalg.leave_one_out_moments")
def _() -> dict[str, Any]:
    return {"covariance": covariance(), "residual": normal(8), "held_out": torch.tensor([1, 5])}


@same_for("linalg.conditional_log_density.low_rank", call=gpclml.linalg.conditional_log_density)
def _() -> dict[str, Any]:
    K = LowRankPlusDiagonal(normal(8, 3), positive(8))
    return {"covariance": K, "residual": normal(8), "held_out": torch.tensor([1, 5])}


@example("linalg.iterative_conditional_log_density")
def _() -> dict[str, Any]:
    return {"covariance": _noisy(), "residual": normal(8), "held_out": torch.tensor([1, 5])}


@same_for("linalg.factorization_dtype", "linalg.safe_cholesky")
def _() -> dict[str, Any]:
    return {"covariance": covariance(), "factor_dtype": torch.float64}


@example("linalg.permute")
def _() -> dict[str, Any]:
    return {"matrix": covariance(), "order": torch.arange(8).flip(0)}


@same_for("linalg.take", "linalg.take_rows")
def _() -> dict[str, Any]:
    return {"values": covariance(), "order": torch.tensor([1, 5])}


@example("linalg.sequential_log_densities")
def _() -> dict[str, Any]:
    return {"covariance": covariance(), "residual": normal(8), "order": torch.arange(8).flip(0)}


@example("linalg.sequential_predictions")
def _() -> dict[str, Any]:
    orders = torch.stack([torch.arange(8), torch.arange(8).flip(0)])
    return {"covariance": covariance(), "residual": normal(8), "orders": orders}


@example("linalg.symmetric_product")
def _() -> dict[str, Any]:
    return {"left": normal(8, 3), "right": normal(8, 3)}


@example("inference.missing.missing_targets")
def _() -> dict[str, Any]:
    return {"target": targets()}


@example("conditioning.orderings.as_orders")
def _() -> dict[str, Any]:
    orders = torch.stack([torch.arange(8), torch.arange(8).flip(0)])
    return {"orderings": orders, "n": 8, "generator": generator()}


@example("inference.PosteriorNormal")
def _() -> dict[str, Any]:
    return {"mean": normal(8), "covariance_matrix": covariance()}
