"""What is to be beaten: predictions from a task's own points, on raw pixels or inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml.conditioning import LastPoints
from gpclml.fit import fit_mll
from gpclml.meta import Episodes
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = ["nearest_neighbour_accuracy", "plain_gp_scores"]


def nearest_neighbour_accuracy(episodes: Episodes) -> Tensor:
    """The share of query points whose nearest support point, pixel by pixel, is of their class.

    Args:
        episodes: Classification tasks.

    Returns:
        One a task, ``(tasks,)``.
    """
    support, query = episodes.support_x.flatten(2).double(), episodes.query_x.flatten(2).double()
    nearest = torch.cdist(query, support).argmin(-1)
    guess = episodes.support_y.gather(-1, nearest)
    return (guess == episodes.query_y).double().mean(-1)


def plain_gp_scores(episodes: Episodes) -> tuple[Tensor, Tensor]:
    """Scores of a GP with an RBF kernel of one lengthscale, fitted to each task alone by the LML.

    Args:
        episodes: Regression tasks.

    Returns:
        Mean squared errors and negative log densities, ``(tasks,)`` each.
    """
    errors, nlls = [], []
    for task in range(episodes.num_tasks):
        x, y = episodes.support_x[task].flatten(1).double(), episodes.support_y[task].double()
        model = GPRegression(x, y, "rbf", ard=False)
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
        fit_mll(mll, progress=False)
        truth = episodes.query_y[task].double()
        with torch.no_grad():
            normal = model.predict(episodes.query_x[task].flatten(1).double(), marginal=True)
            predictive = torch.distributions.Normal(normal.mean, normal.variance.sqrt())
            errors.append((normal.mean - truth).square().mean())
            nlls.append(-predictive.log_prob(truth).mean())
    return torch.stack(errors), torch.stack(nlls)
