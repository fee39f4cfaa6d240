"""Curvature of a network's log likelihood in its weights, and its log-determinants.

A structure (:class:`Full`, :class:`BlockDiagonal`, :class:`Kronecker`, :class:`Diagonal`,
:class:`FunctionSpace`) makes of a network, points and columns of output curvature what answers
``log_det_ratio(precisions, scale)``, as often as hyperparameters change.
"""

from gpclml import explain_moved
from gpclml.curvature._sample_gradients import Cotangents, sample_gradients
from gpclml.curvature.dense import BlockDiagonal, DenseCurvature, Full
from gpclml.curvature.diagonal import Diagonal, DiagonalCurvature
from gpclml.curvature.invariances import AffineAugmentation, AveragedNetwork
from gpclml.curvature.kernel import FunctionSpace, FunctionSpaceCurvature
from gpclml.curvature.kronecker import Kronecker, KroneckerCurvature
from gpclml.curvature.output_likelihoods import OutputLikelihood
from gpclml.curvature.structure import Curvature, Structure
from gpclml.curvature.weight_prior import GaussianWeightPrior

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
    "OutputLikelihood",
    "Structure",
    "sample_gradients",
]

explain_moved(__name__)
