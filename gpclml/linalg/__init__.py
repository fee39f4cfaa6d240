"""Gaussian log densities, dense, of low rank or by conjugate gradients: tensors in and out."""

from gpclml.linalg._checks import refuse_double_backward
from gpclml.linalg._products import symmetric_product
from gpclml.linalg.block import block_conditional_log_densities
from gpclml.linalg.cholesky import DOUBLE_UP_TO, factorization_dtype, safe_cholesky
from gpclml.linalg.conjugate_gradients import ConjugateGradients, NotConvergedWarning
from gpclml.linalg.covariance_products import (
    CovarianceProducts,
    NoisyCovariance,
    OperatorProducts,
    RowProducts,
)
from gpclml.linalg.covariance_solver import CovarianceSolver
from gpclml.linalg.iterative import IterativeReport, iterative_conditional_log_density
from gpclml.linalg.iterative_conditioning import IterativeConditioning
from gpclml.linalg.leave_one_out import leave_one_out_moments
from gpclml.linalg.low_rank import LowRankPlusDiagonal
from gpclml.linalg.permutations import permute, take, take_rows
from gpclml.linalg.predictions import sequential_predictions
from gpclml.linalg.sequential import conditional_log_density, sequential_log_densities

__all__ = [
    "DOUBLE_UP_TO",
    "ConjugateGradients",
    "CovarianceProducts",
    "CovarianceSolver",
    "IterativeConditioning",
    "IterativeReport",
    "LowRankPlusDiagonal",
    "NoisyCovariance",
    "NotConvergedWarning",
    "OperatorProducts",
    "RowProducts",
    "block_conditional_log_densities",
    "conditional_log_density",
    "factorization_dtype",
    "iterative_conditional_log_density",
    "leave_one_out_moments",
    "permute",
    "refuse_double_backward",
    "safe_cholesky",
    "sequential_log_densities",
    "sequential_predictions",
    "symmetric_product",
    "take",
    "take_rows",
]
