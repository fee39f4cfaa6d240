"""The weights of a network at their mode."""

from __future__ import annotations

from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.fit._weight_training import WeightTraining, check_training
from gpclml.mlls import LaplaceMarginalLogLikelihood

__all__ = ["fit_map"]


@checked(train_x="(N, *event)", train_y="(N, *outputs)")
def fit_map(
    mll: LaplaceMarginalLogLikelihood,
    train_x: Tensor,
    train_y: Tensor,
    *,
    epochs: int = 100,
    batch_size: int | None = None,
    lr: float = 1e-3,
    final_lr: float | None = None,
    seed: int = 0,
    progress: bool = True,
) -> list[float]:
    """Trains the weights alone, by Adam, to the mode of their posterior.

    They climb :meth:`~gpclml.mlls.LaplaceMarginalLogLikelihood.log_joint` in the network's own
    mode; the hyperparameters stay as they are.

    Args:
        mll: The objective; ``num_data`` is the number of training points. Trained in place.
        train_x: Points, ``(N, *event)``.
        train_y: Their targets.
        epochs: Number of passes over the data.
        batch_size: Points of a batch; all if None.
        lr: Learning rate of the first epoch.
        final_lr: That of the last, by half a cosine; the first throughout if None.
        seed: Seed of the order of the points.
        progress: Whether to show a progress bar on standard error.

    Returns:
        Log joint density in nats per point at each epoch, the mean over its batches.

    Raises:
        ArgumentError: A number is out of range, or ``num_data`` is another.
        ShapeError: Points and targets are not as many.
        NonFiniteError: A log joint density is not finite.

    Examples:
        >>> fit_map(mll, train_x, train_y, epochs=50, batch_size=128, final_lr=1e-5)
        >>> evidence = mll(model(train_x), train_y).item()
    """
    check_training(
        mll, train_x, train_y, epochs=epochs, batch_size=batch_size, lr=lr, final_lr=final_lr
    )
    training = WeightTraining(
        mll, train_x, train_y, batch_size=batch_size, lr=lr, final_lr=final_lr, epochs=epochs,
        seed=seed,
    )  # fmt: skip
    from tqdm import trange

    return [training.epoch(done) for done in trange(epochs, desc="epochs", disable=not progress)]
