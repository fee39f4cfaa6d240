"""Curvature of a network's log likelihood in its weights, and its log-determinants.

A structure (:class:`Full`, :class:`BlockDiagonal`, :class:`Kronecker`, :class:`Diagonal`,
:class:`FunctionSpace`, :class:`LowRank`, :class:`Subnetwork`) computes the curvature of a network
at points from columns of output curvature. Its ``log_det_ratio(precisions, scale)`` is cheap to
repeat when hyperparameters change.
"""

from gpclml.curvature.blocks import (
    BlockCurvature,
    BlockDiagonal,
    Diagonal,
    DiagonalCurvature,
    Full,
    FunctionSpace,
    FunctionSpaceCurvature,
    Kronecker,
    LowRank,
    LowRankCurvature,
    Subnetwork,
    SubnetworkCurvature,
)
from gpclml.curvature.layers import OuterProducts, output_gradients, sample_gradients
from gpclml.curvature.output_likelihoods import GaussianWeightPrior, OutputLikelihood
from gpclml.curvature.structure import Cotangents, Curvature, Structure

__all__ = [
    "BlockCurvature",
    "BlockDiagonal",
    "Cotangents",
    "Curvature",
    "Diagonal",
    "DiagonalCurvature",
    "Full",
    "FunctionSpace",
    "FunctionSpaceCurvature",
    "GaussianWeightPrior",
    "Kronecker",
    "LowRank",
    "LowRankCurvature",
    "OuterProducts",
    "OutputLikelihood",
    "Structure",
    "Subnetwork",
    "SubnetworkCurvature",
    "output_gradients",
    "sample_gradients",
]
