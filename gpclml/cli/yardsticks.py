"""What else predicts the test rows: the stack of GPs, a tree ensemble and the mean."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml.cli.report.predictions import PREDICTED_SHARE, PredictionScores, scores_of
from gpclml.cli.terminal import error_text
from gpclml.estimators import StackedGP
from gpclml.evaluation import paired_difference

__all__ = ["YARDSTICKS", "yardsticks"]

YARDSTICKS = {
    "stack": "a calibrated mixture of GPs (gpclml.StackedGP).",
    "trees": "a tree ensemble (HistGradientBoostingRegressor of scikit-learn).",
    "mean": "the mean of the training rows.",
}
"""What beside the models predicts the test rows."""

_MOST_ROWS = 2000  # of the stack, which fits seven models
_CLEAR = 2.0  # standard errors


def yardsticks(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], seed: int
) -> tuple[dict[str, PredictionScores], list[str]]:
    """How well the stack, a tree ensemble and the mean predict the test rows.

    Args:
        train: Inputs ``(n, d)`` and targets ``(n,)``.
        test: The same of the test rows.
        seed: Seed of the stack and the trees.

    Returns:
        Scores of ``"stack"``, ``"trees"`` and ``"mean"``, the last two without densities; and
        sentences on what failed, where the trees are clearly better than the stack, and where the
        stack is no better than the mean.
    """
    x, y = test
    errors: dict[str, Tensor] = {}
    scores: dict[str, PredictionScores] = {}
    said: list[str] = []
    if len(train[1]) <= _MOST_ROWS:
        try:
            prediction = StackedGP(seed=seed).fit(*train, progress=False).predict(x)
            errors["stack"] = (y - prediction.mean).square()
            lower, upper = prediction.interval(PREDICTED_SHARE)
            inside = ((lower <= y) & (y <= upper)).to(y)
            scores["stack"] = scores_of(errors["stack"], prediction.log_density(y), inside)
        except Exception as error:
            said.append(f"The mixture of GPs failed ({error_text(error)}).")
    try:
        errors["trees"] = (y - _of_trees(train, x, seed)).square()
        scores["trees"] = scores_of(errors["trees"])
    except Exception as error:
        said.append(f"The tree ensemble failed ({error_text(error)}).")
    errors["mean"] = (y - train[1].mean()).square()
    scores["mean"] = scores_of(errors["mean"])
    return scores, [*said, *_comparisons(errors)]


def _of_trees(train: tuple[Tensor, Tensor], x: Tensor, seed: int) -> Tensor:
    from sklearn.ensemble import HistGradientBoostingRegressor

    trees = HistGradientBoostingRegressor(random_state=seed % 2**32)
    trees.fit(train[0].numpy(), train[1].numpy())
    return torch.as_tensor(trees.predict(x.numpy())).to(x)


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
