"""Data sets that ship with a dependency: no file, no network."""

from __future__ import annotations

import torch

from gpclml.datasets.regression_data import RegressionData


def load_diabetes() -> RegressionData:
    """The diabetes data (Efron et al. 2004) as scikit-learn holds them: n = 442, d = 10.

    Inputs and targets are in original units. scikit-learn's default scales the inputs by
    all rows' statistics, which would let test rows into the training inputs.
    """
    from sklearn import datasets

    inputs, targets = datasets.load_diabetes(return_X_y=True, scaled=False)
    return RegressionData(
        name="diabetes",
        inputs=torch.as_tensor(inputs, dtype=torch.float64),
        targets=torch.as_tensor(targets, dtype=torch.float64),
        note="target: disease progression one year after baseline; original units",
        source="scikit-learn: sklearn.datasets.load_diabetes(scaled=False)",
        licence="BSD-3-Clause (scikit-learn)",
    )


EMBEDDED = {"diabetes": load_diabetes}
