"""Networks with a softmax, trained to their mode, and what they predict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from gpytorch.likelihoods import SoftmaxLikelihood
from torch import Tensor

from gpclml.curvature import GaussianWeightPrior, Kronecker
from gpclml.evaluation.calibration import expected_calibration_error
from gpclml.evidence.sampling import marginal_log_densities
from gpclml.fit import fit_map
from gpclml.mlls import LaplaceEvidence, LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

__all__ = ["CLASSES", "evidence_of_all", "objective", "outputs_at", "predictive_scores", "trained"]

CLASSES = 10
_AT_ONCE = 500


def objective(
    network: torch.nn.Module,
    num_data: int,
    precision: float,
    by: Literal["network", "layer", "parameter"] = "network",
    curvature: Any = None,
    augmentation: torch.nn.Module | None = None,
    **options: Any,
) -> LaplaceMarginalLogLikelihood:
    """The Laplace evidence of a classifier of ten classes.

    Args:
        network: The network.
        num_data: Number of points that it is trained on.
        precision: Prior precision of all weights.
        by: Groups of weights with a precision each.
        curvature: The structure; Kronecker, diagonal for parameters of other layers, if None.
        augmentation: Of the model.
        **options: Of the objective.
    """
    device = next(network.parameters()).device
    prior = GaussianWeightPrior(network, by, precision)
    model = LinearizedNetwork(network, prior, augmentation)
    likelihood = SoftmaxLikelihood(num_classes=CLASSES, mixing_weights=False).to(device)
    structure = Kronecker(others="diagonal") if curvature is None else curvature
    return LaplaceMarginalLogLikelihood(likelihood, model, num_data, structure, **options)


def trained(
    network: torch.nn.Module,
    x: Tensor,
    y: Tensor,
    precision: float,
    epochs: int,
    seed: int,
    lr: float = 3e-3,
) -> LaplaceMarginalLogLikelihood:
    """A network at its mode under a prior; in eval mode.

    Args:
        network: The network, trained in place.
        x: Points.
        y: Classes.
        precision: Prior precision of all weights.
        epochs: Passes over the points, in batches of 100.
        seed: Seed of their order.
        lr: Learning rate, which falls to a hundredth.
    """
    mll = objective(network, len(x), precision)
    fit_map(
        mll, x, y, epochs=epochs, batch_size=100, lr=lr, final_lr=lr / 100, seed=seed,
        progress=False,
    )  # fmt: skip
    network.eval()
    return mll


def evidence_of_all(mll: LaplaceMarginalLogLikelihood, x: Tensor, y: Tensor) -> LaplaceEvidence:
    """The evidence with the curvature of all points, added up over batches."""
    batches = torch.arange(len(x)).split(_AT_ONCE)
    parts = [mll.evidence_of(x[rows], y[rows]) for rows in batches]
    return sum(parts[1:], parts[0])


@torch.no_grad()
def outputs_at(network: torch.nn.Module, x: Tensor) -> Tensor:
    """Of the network, ``(N, C)``."""
    return torch.cat([network(part) for part in x.split(_AT_ONCE)])


def predictive_scores(
    mll: LaplaceMarginalLogLikelihood, outputs: Tensor, y: Tensor, label: str
) -> Mapping[str, float]:
    """Accuracy, log density and calibration error of the mean over draws.

    Args:
        mll: Whose likelihood is asked.
        outputs: ``(S, N, C)``.
        y: Classes.
        label: What the names of the scores end in.
    """
    probabilities = outputs.softmax(-1).mean(0)
    densities = marginal_log_densities(cast(Any, mll.likelihood), outputs, y)
    return {
        f"accuracy_{label}": float((probabilities.argmax(-1) == y).double().mean()),
        f"log_density_{label}": float(densities.mean()),
        f"calibration_error_{label}": expected_calibration_error(probabilities, y),
    }
