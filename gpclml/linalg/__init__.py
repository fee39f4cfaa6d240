"""Covariances of observations behind one interface, and the Gaussian densities made of them.

A :class:`Covariance` is dense, of low rank plus a diagonal, or solved by conjugate gradients.
Tensors go in and tensors come out: nothing here knows of models.
"""

from gpclml.linalg.covariance import ConditionedBlock, Covariance, ExactCovariance, Predictor
from gpclml.linalg.dense import DenseCovariance, GramCovariance
from gpclml.linalg.iterative import (
    ConjugateGradients,
    IterativeCovariance,
    IterativeReport,
    NotConvergedWarning,
    RowProducts,
)
from gpclml.linalg.kronecker import KroneckerCovariance
from gpclml.linalg.low_rank import LowRankPlusDiagonal
from gpclml.linalg.matrices import permute, safe_cholesky, symmetric_product, take

__all__ = [
    "ConditionedBlock",
    "ConjugateGradients",
    "Covariance",
    "DenseCovariance",
    "ExactCovariance",
    "GramCovariance",
    "IterativeCovariance",
    "IterativeReport",
    "KroneckerCovariance",
    "LowRankPlusDiagonal",
    "NotConvergedWarning",
    "Predictor",
    "RowProducts",
    "permute",
    "safe_cholesky",
    "symmetric_product",
    "take",
]
