"""Curvature of a network's log likelihood in its weights, and its log-determinants.

A structure (:class:`Full`, :class:`BlockDiagonal`, :class:`Kronecker`, :class:`Diagonal`,
:class:`FunctionSpace`) computes the curvature of a network at points from columns of output
curvature. Its ``log_det_ratio(precisions, scale)`` is cheap to repeat when hyperparameters change.
"""

from gpclml.curvature.dense import (
    BlockDiagonal,
    DenseCurvature,
    Diagonal,
    DiagonalCurvature,
    Full,
    FunctionSpace,
    FunctionSpaceCurvature,
)
from gpclml.curvature.gradients import output_gradients, sample_gradients
from gpclml.curvature.invariances import AffineAugmentation, AveragedNetwork
from gpclml.curvature.kronecker import Kronecker, KroneckerCurvature
from gpclml.curvature.layers import OuterProducts
from gpclml.curvature.output_likelihoods import GaussianWeightPrior, OutputLikelihood
from gpclml.curvature.structure import Cotangents, Curvature, Structure

__all__ = [
    "AffineAugmentation",
    "AveragedNetwork",
    "BlockDiagonal",
    "Cotangents",
    "Curvature",
    "DenseCurvature",
    "Diagonal",
    "DiagonalCurvature",
    "Full",
    "FunctionSpace",
    "FunctionSpaceCurvature",
    "GaussianWeightPrior",
    "Kronecker",
    "KroneckerCurvature",
    "OuterProducts",
    "OutputLikelihood",
    "Structure",
    "output_gradients",
    "sample_gradients",
]
