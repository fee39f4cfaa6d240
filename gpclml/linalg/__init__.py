"""Gaussian log densities with closed-form gradients: tensors in, tensors out."""

from gpclml.linalg._checks import refuse_double_backward
from gpclml.linalg._products import symmetric_product
from gpclml.linalg.block import block_conditional_log_densities
from gpclml.linalg.cholesky import DOUBLE_UP_TO, factorization_dtype, safe_cholesky
from gpclml.linalg.leave_one_out import leave_one_out_moments
from gpclml.linalg.low_rank import LowRankPlusDiagonal
from gpclml.linalg.permutations import permute, take, take_rows
from gpclml.linalg.predictions import sequential_predictions
from gpclml.linalg.sequential import conditional_log_density, sequential_log_densities

__all__ = [
    "DOUBLE_UP_TO",
    "LowRankPlusDiagonal",
    "block_conditional_log_densities",
    "conditional_log_density",
    "factorization_dtype",
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
