"""What else predicts the test rows: the stack of GPs, a tree ensemble and the mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpclml.cli.terminal import error_text
from gpclml.estimators import StackedGP
from gpclml.evaluation import paired_difference

__all__ = ["yardstick_sentences"]

_MOST_ROWS = 2000  # of the stack, which fits seven models
_CLEAR = 2.0  # standard errors


def yardstick_sentences(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], seed: int
) -> list[str]:
    """Sentences on how well the stack, a tree ensemble and the mean predict the test rows.

    Args:
        train: Inputs ``(n, d)`` and targets ``(n,)``.
        test: The same of the test rows.
        seed: Seed of the stack and the trees.

    Returns:
        A sentence on each, and one where the trees predict clearly better than the stack, or the
        stack no better than the mean. What fails is said and ends nothing.
    """
    x, y = test
    said: list[str] = []
    errors: dict[str, Tensor] = {"mean": (y - train[1].mean()).square()}
    if len(train[1]) <= _MOST_ROWS:
        try:
            prediction = StackedGP(seed=seed).fit(*train, progress=False).predict(x)
            errors["stack"] = (y - prediction.mean).square()
            lower, upper = prediction.interval(0.9)
            inside = float(((lower <= y) & (y <= upper)).double().mean())
            nll = -float(prediction.log_density(y).mean())
            said.append(
                f"Yardstick on the test rows: a mixture of GPs (gpclml.StackedGP) has "
                f"{_figures(errors, 'stack')}, NLL {nll:.3f}, and {100 * inside:.0f} % of the "
                "targets in its 90 % intervals."
            )
        except Exception as error:
            said.append(f"Yardstick: gpclml.StackedGP failed ({error_text(error)}).")
    try:
        errors["trees"] = (y - _of_trees(train, x, seed)).square()
        said.append(
            "Yardstick on the test rows: a tree ensemble (HistGradientBoostingRegressor of "
            f"scikit-learn) has {_figures(errors, 'trees')}."
        )
    except Exception as error:
        said.append(f"Yardstick: the tree ensemble failed ({error_text(error)}).")
    return [*said, *_comparisons(errors)]


def _of_trees(train: tuple[Tensor, Tensor], x: Tensor, seed: int) -> Tensor:
    from sklearn.ensemble import HistGradientBoostingRegressor

    trees = HistGradientBoostingRegressor(random_state=seed % 2**32)
    trees.fit(train[0].numpy(), train[1].numpy())
    return torch.as_tensor(trees.predict(x.numpy())).to(x)


def _figures(errors: dict[str, Tensor], name: str) -> str:
    mean, of_mean = float(errors[name].mean()), float(errors["mean"].mean())
    explained = f", R² {1 - mean / of_mean:.3f}" if of_mean > 0 else ""
    return f"RMSE {math.sqrt(mean):.4g}{explained}"


def _comparisons(errors: dict[str, Tensor]) -> list[str]:
    said = []
    if "stack" in errors and "trees" in errors:
        # Of squared errors: positive where the stack's are larger.
        difference = paired_difference(errors["stack"], errors["trees"])
        if difference.value > _CLEAR * difference.standard_error:
            said.append(
                "The tree ensemble predicts the test rows clearly better than the mixture of GPs: "
                "for these data trees may be the better choice."
            )
    if "stack" in errors and float(errors["stack"].mean()) >= float(errors["mean"].mean()):
        said.append(
            "The mixture of GPs predicts the test rows no better than the mean of the training "
            "rows: the inputs may say nothing of the target."
        )
    return said
