"""Models scored, ranked and put in a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import UnknownNameError
from gpclml.evaluation._checks import checked_models, common_targets
from gpclml.evaluation._criteria import CRITERIA, Criterion, value_of
from gpclml.evaluation._fits import fit_findings
from gpclml.evaluation._orders import checked_m, number_of_curves, shared_orders
from gpclml.evaluation._table import make_table
from gpclml.evaluation.comparison import Comparison
from gpclml.evaluation.findings import collect_findings
from gpclml.evaluation.model_scores import ModelScores, score_model
from gpclml.inference.units import Units

if TYPE_CHECKING:
    import pandas

__all__ = ["compare", "score_models"]


@checked(orderings="index (k, n)")
def score_models(
    models: Mapping[str, ExactGP],
    *,
    m: int | None = None,
    orderings: int | Tensor | None = None,
    curves: int | None = None,
    rank_by: Criterion = "loo",
    units: Units = "original",
    seed: int = 0,
    problems: Mapping[str, str] | None = None,
    progress: bool = False,
) -> Comparison:
    """Compares models as :func:`compare` does, and keeps all that the table was made of.

    Args:
        models: As for :func:`compare`, and so all other arguments.
        m: See there.
        orderings: See there.
        curves: See there.
        rank_by: See there.
        units: See there.
        seed: See there.
        problems: See there.
        progress: See there.

    Returns:
        The table, scores of single points and orderings, findings and sentences; the plots of
        this package take it.

    Raises:
        ArgumentError, ShapeError, UnsupportedError, NonFiniteError, NotPSDError: As
            :func:`compare`.
    """
    from tqdm import tqdm

    if rank_by not in CRITERIA:
        raise UnknownNameError("rank_by", rank_by, CRITERIA)
    checked = checked_models(models)
    targets = common_targets(checked, units)
    rows = (~targets.isnan()).nonzero().squeeze(-1)
    m = checked_m(m, len(rows))
    orders = shared_orders(orderings, targets, m, seed)
    num_curves = number_of_curves(curves, len(orders), len(rows))
    scores: dict[str, ModelScores] = {}
    error: Exception | None = None
    for name, model in tqdm(checked.items(), desc="models", disable=not progress):
        scores[name], errors = score_model(name, model, targets, orders, m, num_curves, units)
        if error is None and rank_by.upper() in errors:
            error = errors[rank_by.upper()]
            error.add_note(f"This happened in the scores of models[{name!r}].")
    values = {name: value_of(rank_by, one) for name, one in scores.items()}
    if error is not None and all(map(math.isnan, values.values())):
        raise error
    order = {
        name: (True, 0.0, name) if math.isnan(value) else (False, -value, name)
        for name, value in values.items()
    }
    ranked = sorted(order, key=order.__getitem__)
    scores = {name: scores[name] for name in ranked}
    of_fits = fit_findings(scores, checked, problems or {})
    findings = (*of_fits, *collect_findings(scores))
    return Comparison(
        table=make_table(scores, rank_by, findings),
        scores=scores,
        findings=findings,
        models={name: checked[name] for name in ranked},
        targets=targets[rows],
        rows=rows,
        orders=orders[:, : len(rows)],
        m=m,
        rank_by=rank_by,
        units=units,
    )


@checked(orderings="index (k, n)")
def compare(
    models: Mapping[str, ExactGP],
    *,
    m: int | None = None,
    orderings: int | Tensor | None = None,
    curves: int | None = None,
    rank_by: Criterion = "loo",
    units: Units = "original",
    seed: int = 0,
    problems: Mapping[str, str] | None = None,
    progress: bool = False,
) -> pandas.DataFrame:
    r"""Which of several models to trust on their data, and whether the criteria agree.

    The table has a row a model, the best first, indexed by name, with these columns, in nats:

    - ``rank``: from 0;
    - ``lml``: the log marginal likelihood, :math:`\log p(y)`;
    - ``clml``, ``clml_se``: :math:`\log p(y_{>m} \mid y_{\le m})`, the mean over random orderings
      (Lotfi et al. 2022, Section 6), and its error from the choice of the orderings alone;
    - ``loo``, ``loo_se``: :math:`\sum_i \log p(y_i \mid y_{-i})`, noise included, and its error
      from the spread over points (Vehtari, Gelman and Gabry 2017, Eq. 23);
    - ``difference``, ``difference_se``: the ranking criterion less that of the first row, and its
      error, paired over points for LOO and over orderings for the CLML; the LML has none;
    - ``p_worse``: the probability that the model predicts worse than the first row, from the paired
      differences of LOO in a normal approximation, whatever ranks; NaN in the first row;
    - ``weight``: the stacking weight; see :func:`stacking_weights`;
    - ``findings``: names of what calls for care, a tuple;
    - ``failure``: what could not be computed, and why; empty where all could.

    What cannot be computed of a model, e.g. as a covariance is not positive definite, is NaN in its
    row, and the other models and criteria are as they are. A model without the criterion that ranks
    is in a last row; only where no model has it an error is raised.

    LOO ranks by default: each point is predicted from as many others as the model will have in use,
    and its terms, one a point, are what errors of differences, ``p_worse`` and the weights are made
    of. The error of a CLML knows nothing of other data, and the LML has no terms that are the same
    in every order.

    What calls for care has these names:

    - ``"fit-failed"``: as ``problems`` says;
    - ``"predicts-mean"``: predictions of points from all others vary by less than a thousandth of
      the predictive variance;
    - ``"below-contained"``: a GP with a rational quadratic kernel is below one with an RBF kernel,
      which it contains, by half a nat of LML, and in LOO: its fit ended early;
    - ``"criteria-disagree"``: two criteria prefer different models, each clearly: by one nat of
      LML, two standard errors of CLML, one of LOO;
    - ``"first-terms"``: a third or more of what the model's LML is below the best comes from the
      first tenth of the points, in the mean over orderings, and it is below by one nat or more;
    - ``"prior-sensitive"``: with a prior covariance of the function four times as large, noise and
      mean kept, the LML changes by 2 nats or more and LOO by no more than a tenth of that. For a
      linear model that is 4 times the prior variance of the weights, for a GP 4 times its
      outputscale;
    - ``"ill-conditioned"``: the condition number of the covariance of the observations times the
      rounding of its type (1.2e-7 or 2.2e-16) is .01 or more, above which scores were found to be
      off by nats; LAPACK's estimate in the 1-norm, for linear models the ratio of eigenvalues;
    - ``"few-points"``: fewer than 100; errors over points are mostly too small, by up to a half;
    - ``"small-difference"``: LOO differs from that of the first row by less than 4 nats: the two
      predict alike and ``p_worse`` is not well calibrated (Sivula et al. 2025; this limit and the
      one before are those of R's ``loo_compare``);
    - ``"not-scored"``: a score or a diagnostic could not be computed;
    - ``"many-models"``: of more than 11 models the best is no further above the median than the
      best of as many equal ones would be (McLatchie and Vehtari 2024).

    Hyperparameters stay as they are: LOO and CLML leave points out of the posterior, not out of
    the fit. Nothing changes parameters, modes or caches. The same orderings serve all models.

    Args:
        models: Exact GPs by name, of GPyTorch, BoTorch or gpclml, trained on the same targets in
            the same order. Missing targets, NaN under ``observation_nan_policy("mask")``, are left
            out.
        m: Number of points that the CLML conditions on, below n; nine tenths of them if None.
        orderings: Number k of random orderings, or the orderings, ``(k, n)``. If None 1000, or
            fewer where more than 180 points are held out: 134 for 500, and never below 4.
        curves: Number of orderings, the first ones, whose whole learning curves are computed. If
            None 100, or fewer where n exceeds 650: 30 for 1000, and 4 from 2000 on.
        rank_by: ``"loo"``, ``"clml"`` or ``"lml"``.
        units: ``"original"``, in which models that standardize differently compare, or
            ``"training"``, which all models must then have in common.
        seed: Seed of the orderings.
        problems: What is wrong with fits, by name of the model, as ``FitResult.message`` says it;
            empty where nothing is.
        progress: Whether to show a progress bar.

    Returns:
        The table; its ``attrs`` have ``m``, ``orderings``, ``curves``, ``rank_by``, ``units`` and
        ``num_data``. One model gives one row.

    Raises:
        ArgumentError: If there is no model, a number is out of range, or a model has other targets
            than the first; the message names it.
        ShapeError: If a model has another number of points, several outputs or a batch.
        UnsupportedError: If a model is no exact GP, or its targets are not transformed by a
            standardization.
        NonFiniteError, NotPSDError: If no model has the criterion that ranks; the error is that of
            the first, which a note names.
        UnknownNameError: If ``rank_by`` is no criterion.

    Note:
        A model costs about 5 n³ floating-point operations, n³/3 for each learning curve and
        (n - m)³/3 for each ordering, with a few n x n matrices at a time; by default about half a
        minute for n = 5000 on two cores. A linear model of R features costs n R² in place of n³.

    Examples:
        >>> compare({"rbf": rbf, "deep": deep})
        >>> comparison = score_models({"rbf": rbf, "deep": deep}, m=85)
        >>> print(comparison)
        >>> plot_compare(comparison).savefig("criteria.png")
    """
    comparison = score_models(
        models, m=m, orderings=orderings, curves=curves, rank_by=rank_by, units=units, seed=seed,
        problems=problems, progress=progress,
    )  # fmt: skip
    first = next(iter(comparison.scores.values()))
    table = comparison.table
    table.attrs = {
        "m": comparison.m,
        "orderings": len(comparison.orders),
        "curves": len(first.curves),
        "rank_by": rank_by,
        "units": units,
        "num_data": len(comparison.targets),
    }
    return table
