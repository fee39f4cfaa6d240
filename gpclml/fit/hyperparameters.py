"""Hyperparameters of a network whose weights stay as they are."""

from __future__ import annotations

from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.fit._online_run import OnlineRun
from gpclml.fit._weight_training import check_training
from gpclml.mlls import LaplaceMarginalLogLikelihood

__all__ = ["fit_hyperparameters"]


@checked(train_x="(N, *event)", train_y="(N, *outputs)")
def fit_hyperparameters(
    mll: LaplaceMarginalLogLikelihood,
    train_x: Tensor,
    train_y: Tensor,
    *,
    steps: int = 100,
    batch_size: int | None = None,
    lr: float = 0.1,
    seed: int = 0,
) -> float:
    """Fits prior precisions, noise and the like to the evidence at the weights as they are.

    By Adam; what :func:`fit_online` does at each look. The curvature is computed once, where it
    adds up over batches.

    Args:
        mll: The objective; ``num_data`` is the number of training points. Trained in place.
        train_x: Points, ``(N, *event)``.
        train_y: Their targets.
        steps: Steps of Adam.
        batch_size: Points that curvature is computed of at a time; all if None.
        lr: Learning rate.
        seed: Seed of the order of the points.

    Returns:
        The evidence after it, nats per point.

    Raises:
        ArgumentError: A number is out of range, ``num_data`` is another, or no hyperparameter is
            trainable.
        ShapeError: Points and targets are not as many.
        NonFiniteError: The evidence is not finite.
    """
    check_training(mll, train_x, train_y, steps=steps, batch_size=batch_size, lr=lr)
    run = OnlineRun(
        mll, train_x, train_y, lr, batch_size=batch_size, lr=1.0, final_lr=None, epochs=1, seed=seed
    )
    run.train_hyperparameters(steps)
    return run.fit.evidences[-1]
