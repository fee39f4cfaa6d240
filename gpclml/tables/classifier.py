"""An average of Gaussian process classifiers as an estimator of scikit-learn, for tables."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import pandas
import torch
from scipy.optimize import minimize_scalar
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
)
from torch import Tensor

from gpclml._utils.arguments import check_counts
from gpclml._utils.files import read_checkpoint, write_checkpoint
from gpclml.errors import ArgumentError
from gpclml.inference import training_observations
from gpclml.inference.laplace import LatentCovariance
from gpclml.likelihoods import LogisticLikelihood, TargetPrediction
from gpclml.models import GPClassification
from gpclml.tables.averages import ModelAverage
from gpclml.tables.class_kernels import checked_kernels, class_kernel
from gpclml.tables.estimator import (
    STORED,
    Scored,
    TableEstimator,
    check_given,
    fit_encoding,
    warn_of_drawn_rows,
)
from gpclml.tables.missing import filled

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


_KIND = "gpclml.Classifier"
_POWER_DEVIATION = 0.3  # of its logarithm, around 0

assert issubclass(ClassifierMixin, Scored)


@dataclass(eq=False, repr=False)
class ClassModels(ModelAverage):
    """Models of two classes by kernel, or for more classes one for each against the others.

    Targets are numbers of classes, from 0 on. The models of a kernel are in the order of the
    classes; of two classes there is one model, of class 1.

    Attributes:
        power: Of the odds.
    """

    kind = "gpclml.ClassModels"
    power: float = 1.0

    def fit(self, names: Sequence[str], n_jobs: int | None, progress: bool | None) -> None:
        """Fits the models of these kernels; a warning says which are left out."""
        super().fit(names, n_jobs, progress)
        self._fit_power()

    def probabilities(self, x: Tensor) -> Tensor:
        """Of each class at points ``(m, d)``, NaN where missing: ``(classes, m)``."""
        return self.averaged(self._average, x)

    def targets_of_models(self) -> list[Tensor]:
        """For each model the class of each training row, 0 or 1."""
        count = int(self.targets.max()) + 1
        labels = range(count) if count > 2 else [1]
        return [(self.targets == label).to(self.x) for label in labels]

    @staticmethod
    def untrained(name: str, x: Tensor, y: Tensor) -> GPClassification:
        """A model of two classes with the kernel of that name."""
        return GPClassification(x, y, class_kernel(name, x), likelihood=LogisticLikelihood())

    def _average(self, x: Tensor) -> Tensor:
        predict = partial(GPClassification.predict, x=x, progress=False)
        return (self.power * self._log_odds(predict)).softmax(1).mean(0)

    def _log_odds(self, predict: Callable[[GPClassification], TargetPrediction]) -> Tensor:
        """Logarithms of numbers in proportion to probabilities, ``(kernels, classes, m)``."""

        def of_model(model: GPClassification) -> Tensor:
            prediction = predict(model)
            zeros = torch.zeros_like(prediction.latent_mean)
            # Both by quadrature: 1 - p of a probability p near 1 has no digits.
            return prediction.log_prob(zeros + 1) - prediction.log_prob(zeros)

        every = [torch.stack([*map(of_model, models)]) for models in self.models.values()]
        log_odds = torch.stack(every)
        # Of two classes each model says the odds of one to the other.
        return log_odds if log_odds.shape[1] > 1 else torch.cat([-log_odds, log_odds], 1) / 2

    def _fit_power(self) -> None:
        """The power under which each training row is predicted best from the others."""
        log_odds, rows = self._log_odds(_left_out), torch.arange(len(self.targets))

        def loss(log_power: float) -> float:
            logs = (math.exp(log_power) * log_odds).log_softmax(1).logsumexp(0)
            # Rows that are all predicted right would have it grow without end.
            return 0.5 * (log_power / _POWER_DEVIATION) ** 2 - float(logs[self.targets, rows].sum())

        optimum: Any = minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded")
        self.power = math.exp(optimum.x)


@torch.no_grad()
def _left_out(model: GPClassification) -> TargetPrediction:
    """Predictions of the training rows, each given the others: the cavities of the sites."""
    sites: Any = cast(LatentCovariance, training_observations(model).covariance).approximated
    return TargetPrediction(model.likelihood, sites.cavity_mean, sites.cavity_variance)


class Classifier(ClassifierMixin, TableEstimator):
    """A scikit-learn classifier for tables: an average of Gaussian processes of several kernels.

    It takes arrays and data frames as :class:`Regressor` does, with the same rules for categories,
    missing values, codes such as -999 and wild cells, and labels of any type. Probabilities are the
    average of those of three :class:`~gpclml.models.GPClassification` with logistic
    likelihoods: of a linear function, of a sum of functions of single columns, and of a rough
    function of all columns (Matern of 1/2). They are fitted by the Laplace approximation of their
    marginal likelihoods, with weak priors; lengthscales of a Matern or RBF kernel are shrunk
    towards a common one.

    The odds of each model are raised to a power, one for all, that predicts each training row best
    from the others, with a prior around 1: averages of probabilities are too cautious where classes
    are told apart well. With more than two classes there is a model of each against the others, and
    given that exactly one of them is right, classes have probabilities in proportion to their odds.

    Args:
        kernels: Names of the kernels, of "linear", "additive" (a sum of Matern kernels of 3/2, one
            for each column), "matern12", "matern32", "matern52" (Matern of 1/2, 3/2 and 5/2) and
            "rbf"; None for the first three.
        max_rows: Largest number of training rows. If there are more, so many are drawn at random,
            with the shares of the classes, and a warning. None for all.
        n_jobs: Number of processes that fit models, as joblib takes it; None for one.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.
        random_state: Seed of the drawn rows: an integer or a ``RandomState``. None is the same as
            0, so the same call gives the same fit.

    Attributes:
        classes_: The labels, sorted; columns of probabilities are in this order.
        models_: The fitted models, ``models_.models`` by kernel, and ``models_.failures``.
        encoding_: How columns become inputs.
        n_rows_: Number of rows that were fitted to.
        n_features_in_: Number of columns.
        feature_names_in_: Names of the columns, if X was a data frame whose names are strings.

    Raises:
        ArgumentError: In ``fit``: one class alone, missing labels, fewer rows than classes, two
            columns of one name, a column of both numbers and other texts, or no usable column.
        UnknownNameError: In ``fit``: there is no such kernel.
        ValueError: In ``fit`` and ``predict``: infinite values, columns that are not those of the
            fit, or anything that scikit-learn refuses for all classifiers.

    Note:
        An evaluation in a fit takes about five Cholesky factors of n x n, and a fit about 20
        evaluations; a prediction takes about thirty factors for each model.

    Examples:
        >>> from sklearn.datasets import load_breast_cancer
        >>> from gpclml import Classifier
        >>> x, y = load_breast_cancer(return_X_y=True, as_frame=True)
        >>> classifier = Classifier(["linear", "rbf"]).fit(x[:80], y[:80])
        >>> probabilities = classifier.predict_proba(x[80:])
    """

    classes_: NDArray[Any]
    models_: ClassModels

    def __init__(
        self,
        kernels: Sequence[str] | None = None,
        *,
        max_rows: int | None = 2000,
        n_jobs: int | None = None,
        progress: bool | None = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.kernels = kernels
        self.max_rows = max_rows
        self.n_jobs = n_jobs
        self.progress = progress
        self.random_state = random_state

    def fit(self, X: ArrayLike | pandas.DataFrame, y: ArrayLike) -> Self:
        """Fits the models to a table.

        Args:
            X: Rows, ``(n, columns)``: an array of numbers or a data frame.
            y: Labels, ``(n,)``, of any type that can be sorted.

        Returns:
            The estimator itself.

        Warns:
            UserWarning: Rows were drawn at random, or columns are not used as inputs.
            FitWarning: A kernel is left out because its fit failed.
        """
        names = checked_kernels("kernels", self.kernels)
        table = self._rows(X, fitting=True)
        classes, numbers = _classes(y, table)
        seed = self._seed()
        check_counts(len(classes), max_rows=self.max_rows)
        if self.max_rows is not None and len(table) > self.max_rows:
            rows = _drawn_rows(numbers, self.max_rows, seed)
            warn_of_drawn_rows(self.max_rows, len(table))
            table, numbers = table.iloc[rows], numbers[rows]
        # Decided on the drawn rows alone, so that the limit bounds all work.
        encoding = fit_encoding(table, isinstance(X, pandas.DataFrame))
        x = filled(torch.from_numpy(encoding.encode(table)), encoding.categories, seed)
        models = ClassModels(x, torch.from_numpy(numbers), encoding.categories, seed)
        models.fit(names, self.n_jobs, self.progress)
        self.classes_, self.models_, self.encoding_ = classes, models, encoding
        self.n_rows_ = len(table)
        return self

    def predict_proba(self, X: ArrayLike | pandas.DataFrame) -> NDArray[np.float64]:
        """Probabilities of the classes.

        Args:
            X: Rows with the columns of the fit.

        Returns:
            ``(m, classes)``, in the order of ``classes_``.

        Raises:
            ValueError: As in ``fit``, or the columns are not those of the fit.

        Warns:
            UserWarning: A value is missing, or a level unknown, where hardly any training row has
                that. Probabilities are averages over what it may be.
        """
        check_is_fitted(self)
        x = self._new_inputs(X, self.models_.unknown_inputs)
        return self.models_.probabilities(x).T.numpy()

    def predict(self, X: ArrayLike | pandas.DataFrame) -> NDArray[Any]:
        """The labels of the most probable classes, ``(m,)``.

        Args:
            X: Rows with the columns of the fit.

        Raises:
            ValueError: As :meth:`predict_proba`.
        """
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted estimator and its training rows to one file, without pickled objects.

        Args:
            path: File to write; replaced if it is there.

        Raises:
            DataError: The file cannot be written.
        """
        content = self._stored()
        labels = {"classes": self.classes_.tolist(), "dtype": str(self.classes_.dtype)}
        write_checkpoint(path, _KIND, content | labels | {"models": self.models_.__getstate__()})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Classifier:
        """Reads an estimator that :meth:`save` wrote; its predictions are the same bit for bit.

        Args:
            path: File to read.

        Raises:
            DataError: The file is missing, damaged or not such a checkpoint.
        """
        required = {**STORED, "models": dict, "classes": list, "dtype": str}
        content = read_checkpoint(path, _KIND, "cpu", required)
        made = cls._from_stored(content, path)
        made.classes_ = np.array(content["classes"], dtype=content["dtype"])
        made.models_ = ClassModels.restored(content["models"], path)
        return made


def _classes(y: Any, table: pandas.DataFrame) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The labels, sorted, and for each row the number of its label."""
    check_given(y)
    check: Any = check_array
    labels = column_or_1d(check(y, ensure_2d=False, dtype=None, input_name="y"), warn=True)
    missing = int(cast(Any, pandas.isna(labels)).sum())
    if missing:
        suggestion = "Leave out the rows without a label."
        raise ArgumentError("y", f"{missing} missing labels", "a label for each row", suggestion)
    if labels.dtype == object and not any(isinstance(label, str) for label in labels):
        labels = np.array(labels.tolist())  # numbers and booleans of a column of objects
    check_consistent_length(table, labels)
    check_classification_targets(labels)
    classes, numbers = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        got, suggestion = f"one class, {classes.tolist()[0]!r}", "Give rows of at least two."
        raise ArgumentError("y", got, "two classes or more", suggestion)
    return classes, numbers


def _drawn_rows(numbers: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Rows drawn at random with the shares of the classes, at least one row of each."""
    draws = np.random.default_rng(seed)
    places = np.empty(len(numbers))
    for label in range(numbers.max() + 1):
        rows = draws.permutation(np.flatnonzero(numbers == label))
        places[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
        places[rows[0]] = 0.0
    return np.sort(np.argsort(places, kind="stable")[:count])
