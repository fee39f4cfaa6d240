"""What else predicts the test rows: the stack of GPs, a tree ensemble, a line and the mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpclml.cli.report.predictions import PredictionScores, prediction_scores
from gpclml.cli.terminal import error_text
from gpclml.estimators import StackedGP

__all__ = ["YARDSTICKS", "Yardsticks", "yardsticks"]

YARDSTICKS = {
    "stack": "a calibrated mixture of several Gaussian processes",
    "trees": "a tree ensemble (HistGradientBoostingRegressor of scikit-learn)",
    "linear": "linear regression (RidgeCV of scikit-learn), which gives no intervals",
    "mean": "always the mean of the training rows; its typical error is the spread of the target",
}
"""What beside the models predicts the test rows."""

_MOST_ROWS = 2000  # of the stack, which fits seven models

Rows = tuple[Tensor, Tensor]


@dataclass
class Yardsticks:
    """Scores of the test rows, what predicts means at inputs, and sentences on what failed."""

    scores: dict[str, PredictionScores] = field(default_factory=dict)
    predictors: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def yardsticks(
    train: Rows,
    test: Rows,
    seed: int,
    with_line: bool = False,
    categories: Sequence[Sequence[int]] = (),
) -> Yardsticks:
    """How well the stack, a tree ensemble, a line (if asked) and the mean predict the test rows.

    ``categories`` has for each category the columns that are its levels.
    """
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = test
    found = Yardsticks()
    if len(train[1]) <= _MOST_ROWS:
        try:
            stack = StackedGP(seed=seed).fit(*train, categories=categories, progress=False)
            found.scores["stack"] = prediction_scores(y, stack.predict(x))
            found.predictors["stack"] = lambda x: stack.predict(x).mean
        except Exception as error:
            found.failures.append(f"stack failed ({error_text(error)}).")
    others: dict[str, Any] = {"trees": HistGradientBoostingRegressor(random_state=seed % 2**32)}
    if with_line:
        alphas = torch.logspace(-4, 4, 17).tolist()
        others["linear"] = make_pipeline(StandardScaler(), RidgeCV(alphas=alphas))
    for name, model in others.items():
        try:
            model.fit(train[0].numpy(), train[1].numpy())
            predict = _tensors_of(model.predict)
            found.scores[name] = prediction_scores(y, predict(x))
            found.predictors[name] = predict
        except Exception as error:
            found.failures.append(f"{name} failed ({error_text(error)}).")
    found.scores["mean"] = prediction_scores(y, train[1].mean().expand(len(y)))
    return found


def _tensors_of(predict: Callable) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.as_tensor(predict(x.numpy())).to(x)
