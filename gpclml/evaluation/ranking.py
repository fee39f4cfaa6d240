"""Comparison of models on their training data: ``compare`` and ``score_models``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, cast

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import checked, seeded
from gpclml._utils.arrays import ArrayLike, takes_arrays
from gpclml._utils.environment import progress_bar
from gpclml.conditioning import as_orders
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.evaluation.comparison import Comparison, make_table
from gpclml.evaluation.findings import collect_findings, failed_fits, fit_findings
from gpclml.evaluation.model_scores import Criterion, ModelScores, score_model, value_of
from gpclml.inference.units import Units, units_of_targets

if TYPE_CHECKING:
    import pandas

__all__ = ["compare", "score_models"]

_SAME_SHARE = 1e-6  # of the spread of the targets
_ROUNDINGS = 64  # of the largest target
_OPERATIONS = 3e10  # three times those of all factors of a kind
_NUMBERS = 2**25  # in all held-out blocks
_MOST_ORDERS, _MOST_CURVES, _FEWEST = 1000, 100, 4


@takes_arrays()
@checked(orderings="index (k, n)")
def score_models(
    models: Mapping[str, ExactGP],
    *,
    m: int | None = None,
    orderings: int | ArrayLike | None = None,
    curves: int | None = None,
    rank_by: Criterion = "loo",
    units: Units = "original",
    seed: int = 0,
    problems: Mapping[str, str] | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Compares models as :func:`compare` does, and returns all scores besides the table.

    Arguments and errors are those of :func:`compare`.

    Returns:
        The table, scores of single points and orderings, findings and sentences. The plots of this
        package take it.
    """
    checked = _checked_models(models)
    targets = _common_targets(checked, units)
    rows = (~targets.isnan()).nonzero().squeeze(-1)
    m = _checked_m(m, len(rows))
    orders = _shared_orders(orderings, targets, m, seed)
    num_curves = _number_of_curves(curves, len(orders), len(rows))
    scores: dict[str, ModelScores] = {}
    error: Exception | None = None
    for name, model in progress_bar(checked.items(), progress=progress, desc="models"):
        scores[name], errors = score_model(name, model, targets, orders, m, num_curves, units)
        if error is None and rank_by.upper() in errors:
            error = errors[rank_by.upper()]
            error.add_note(f"This happened in the scores of models[{name!r}].")
    values = {name: value_of(rank_by, one) for name, one in scores.items()}
    if error is not None and all(map(math.isnan, values.values())):
        raise error
    failed = failed_fits(fit_findings(scores, checked, problems or {}))
    order = {
        name: (2, 0.0, name) if math.isnan(value) else (int(name in failed), -value, name)
        for name, value in values.items()
    }
    ranked = sorted(order, key=order.__getitem__)
    scores = {name: scores[name] for name in ranked}
    of_fits = tuple(fit_findings(scores, checked, problems or {}))
    findings = (*of_fits, *collect_findings(scores))
    table = make_table(scores, rank_by, findings)
    table.attrs = {
        "m": m,
        "orderings": len(orders),
        "curves": num_curves,
        "rank_by": rank_by,
        "units": units,
        "num_data": len(rows),
    }
    return Comparison(
        table=table,
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


def compare(
    models: Mapping[str, ExactGP],
    *,
    m: int | None = None,
    orderings: int | ArrayLike | None = None,
    curves: int | None = None,
    rank_by: Criterion = "loo",
    units: Units = "original",
    seed: int = 0,
    problems: Mapping[str, str] | None = None,
    progress: bool | None = None,
) -> pandas.DataFrame:
    r"""Compares models on their training data by LOO, CLML and LML, and ranks them.

    The table has a row for each model, the best first, indexed by name. Its columns, in nats, are:

    - ``rank``: from 0; NaN for a model whose fit failed (``"fit-failed"``, ``"below-contained"``),
      which comes after those whose fit did not;
    - ``lml``: the log marginal likelihood, :math:`\log p(y)`;
    - ``clml``, ``clml_se``: :math:`\log p(y_{>m} \mid y_{\le m})`, the mean over random orderings
      (Lotfi et al. 2022, Section 6), and its error from the choice of the orderings alone;
    - ``loo``, ``loo_se``: :math:`\sum_i \log p(y_i \mid y_{-i})`, noise included, and its error
      from the spread over points (Vehtari, Gelman and Gabry 2017, Eq. 23);
    - ``difference``, ``difference_se``: the ranking criterion less that of the first row, and its
      error, paired over points for LOO and over orderings for the CLML; the LML has none;
    - ``p_worse``: the probability that the model predicts worse than the first row, from the paired
      differences of LOO in a normal approximation, for any ``rank_by``; NaN in the first row;
    - ``weight``: the stacking weight; see :func:`stacking_weights`;
    - ``findings``: names of the findings, which are reasons for care, a tuple;
    - ``failure``: what could not be computed, and why; empty if everything could.

    A score that cannot be computed, for example because a covariance is not positive definite, is
    NaN in the row of its model; other models and criteria are not affected. Models without the
    ranking criterion are in the last rows. An error is raised only if no model has it.

    Models are ranked by LOO by default: each point is predicted from about as many others as the
    model will have in use, and the terms of single points give the errors of differences,
    ``p_worse`` and the weights. The error of a CLML does not cover other data, and the LML has no
    terms that are the same in every order.

    The findings are:

    - ``"fit-failed"``: reported by ``problems``;
    - ``"copied-points"``: points are copies of others in inputs and target, and not measured anew
      (``gpclml.evaluation.copies.copied_rows``), so that LOO and CLML are too high;
    - ``"predicts-mean"``: predictions of points from all others vary by less than a thousandth of
      the predictive variance;
    - ``"below-contained"``: a GP with a rational quadratic kernel is below one with an RBF kernel
      by half a nat of LML, and in LOO. Its fit ended too early, since its kernel contains the RBF
      kernel;
    - ``"criteria-disagree"``: two criteria prefer different models, each clearly: by one nat of
      LML, two standard errors of CLML, one of LOO;
    - ``"first-terms"``: the model's LML is one nat or more below the best, and a third or more of
      that comes from the first tenth of the points, in the mean over orderings;
    - ``"prior-sensitive"``: with a prior covariance of the function four times as large, noise and
      mean kept, the LML changes by 2 nats or more and LOO by no more than a tenth of that. For a
      linear model that is 4 times the prior variance of the weights, for a GP 4 times its
      outputscale;
    - ``"ill-conditioned"``: the condition number of the covariance of the observations times the
      rounding of its type (1.2e-7 or 2.2e-16) is .01 or more, where scores can be off by nats. The
      condition number is LAPACK's estimate in the 1-norm, for linear models the ratio of
      eigenvalues;
    - ``"few-points"``: there are fewer than 100 points, for which errors over points are mostly too
      small, by up to a half;
    - ``"small-difference"``: LOO differs from that of the first row by less than 4 nats: the two
      predict alike and ``p_worse`` is not well calibrated (Sivula et al. 2025; this limit and the
      one before are those of R's ``loo_compare``);
    - ``"not-scored"``: a score or a diagnostic could not be computed;
    - ``"many-models"``: of more than 11 models the best is as close to the median as the best of so
      many equal models would be (McLatchie and Vehtari 2024).

    LOO and CLML leave points out of the posterior, but not out of the fit of the hyperparameters.
    Parameters, modes and caches of the models are not changed. All models share the orderings.

    Args:
        models: Exact GPs by name, of GPyTorch, BoTorch or gpclml, trained on the same targets in
            the same order. Missing targets, NaN under ``observation_nan_policy("mask")``, are left
            out.
        m: Number of points that the CLML conditions on, below n; nine tenths of n if None.
        orderings: Number k of random orderings, or the orderings, ``(k, n)``. If None 1000, or
            fewer where more than 180 points are held out: 134 for 500, and never below 4.
        curves: Number of orderings, the first ones, whose learning curves are computed. If
            None 100, or fewer where n exceeds 650: 30 for 1000, and 4 from 2000 on.
        rank_by: ``"loo"``, ``"clml"`` or ``"lml"``.
        units: ``"original"``, in which models that standardize differently can be compared, or
            ``"training"``, if these units are the same for all models.
        seed: Seed of the orderings.
        problems: Problems of fits by name of the model, such as ``FitResult.message``; an empty
            text means no problem.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        The table, whose ``attrs`` are ``m``, ``orderings``, ``curves``, ``rank_by``, ``units`` and
        ``num_data``.

    Raises:
        ArgumentError: If there is no model, a number is out of range, or a model, which the message
            names, has other targets than the first.
        ShapeError: If a model has another number of points, several outputs or a batch.
        UnsupportedError: If a model is not an exact GP, or its targets are not transformed by a
            standardization.
        NonFiniteError, NotPSDError: If no model has the ranking criterion; the error is that of the
            first model, which a note names.
        UnknownNameError: If ``rank_by`` is not a criterion.

    Note:
        Each model costs about 5 n³ floating-point operations, n³/3 for each learning curve and
        (n - m)³/3 for each ordering, with a few n x n matrices at a time; by default about half a
        minute for n = 5000 on two cores. A linear model of R features costs n R² in place of n³.

    Examples:
        >>> compare({"rbf": rbf, "deep": deep})
        >>> comparison = score_models({"rbf": rbf, "deep": deep}, m=85)
        >>> print(comparison)
        >>> plot_compare(comparison).figure.savefig("criteria.png")
    """
    return score_models(
        models, m=m, orderings=orderings, curves=curves, rank_by=rank_by, units=units, seed=seed,
        problems=problems, progress=progress,
    ).table  # fmt: skip


def _checked_models(models: Mapping[str, ExactGP]) -> dict[str, ExactGP]:
    """The models, checked to be exact GPs of one output with training data."""
    if not models:
        raise ArgumentError("models", "none", "at least one model")
    for name, model in models.items():
        argument = f"models[{name!r}]"
        if not isinstance(name, str):
            raise ArgumentError(argument, f"a name of type {type(name).__name__}", "a string")
        if not isinstance(model, ExactGP):
            raise UnsupportedError(argument, type(model).__name__, "an exact GP")
        if model.train_inputs is None or model.train_targets is None:
            raise ArgumentError(argument, "no training data", "a model with training data")
        targets = _targets(model)
        if targets.ndim != 1:
            got, expected = f"targets of shape {tuple(targets.shape)}", "(n,), one output, no batch"
            suggestion = "Compare outputs, or members of a batch, as models of their own."
            raise ShapeError(argument, got, expected, suggestion)
    return dict(models)


def _common_targets(models: Mapping[str, ExactGP], units: Units) -> Tensor:
    """The targets that all models share, NaN where missing, ``(n,)`` in float64."""
    first, targets, rounding = "", torch.empty(0), 0.0
    for name, model in models.items():
        values = _targets_in(name, model, units)
        own_rounding = torch.finfo(_targets(model).dtype).eps
        if not first:
            first, targets, rounding = name, values, own_rounding
        _check_same(name, values, first, targets, max(rounding, own_rounding), units)
    return targets


def _checked_m(m: int | None, count: int) -> int:
    """Number of observed points that the CLML conditions on, by default nine tenths."""
    if m is None:
        return count - max(1, round(count / 10))
    suggestion = "m is the number of points conditioned on; at least one must remain."
    return _whole("m", m, 0, count - 1, suggestion)


def _shared_orders(orderings: int | Tensor | None, targets: Tensor, m: int, seed: int) -> Tensor:
    """Orders of all rows, those with missing targets last, ``(k, n)``."""
    n = len(targets)
    missing = targets.isnan()
    if orderings is None:
        held_out = n - int(missing.sum()) - m
        orderings = _affordable(held_out, min(_MOST_ORDERS, _NUMBERS // held_out**2))
    orders = as_orders(orderings, n, seeded(seed)).cpu()
    return orders.gather(-1, missing[orders].to(torch.int8).argsort(dim=-1, stable=True))


def _number_of_curves(curves: int | None, num_orders: int, n: int) -> int:
    """Number of orders whose learning curves are computed."""
    if curves is None:
        return min(num_orders, _affordable(n, _MOST_CURVES))
    return _whole("curves", curves, 1, num_orders, "At most as many as orderings.")


def _targets(model: ExactGP) -> Tensor:
    targets = model.train_targets
    assert isinstance(targets, Tensor)
    return targets.detach()


def _targets_in(name: str, model: ExactGP, units: Units) -> Tensor:
    try:
        scale, shift = units_of_targets(model, units)
    except UnsupportedError as error:
        suggestion = "Compare in units='training' if all models transform targets alike."
        expected = "a standardization of the targets, or none"
        got = f"an outcome transform {type(getattr(model, 'outcome_transform', None)).__name__}"
        raise UnsupportedError(f"models[{name!r}]", got, expected, suggestion) from error
    return scale.cpu() * _targets(model).to("cpu", torch.float64) + shift.cpu()


def _check_same(
    name: str, values: Tensor, first: str, targets: Tensor, rounding: float, units: Units
) -> None:
    argument = f"models[{name!r}]"
    if values.shape != targets.shape:
        expected = f"the {len(targets)} of {first!r}"
        suggestion = "Train all models on the same rows."
        raise ShapeError(argument, f"{len(values)} training points", expected, suggestion)
    missing = targets.isnan()
    if not torch.equal(missing, values.isnan()):
        row = int((missing != values.isnan()).nonzero()[0])
        suggestion = "Train all models on the same targets."
        raise ArgumentError(
            argument, f"row {row} missing in one of the two", f"as {first!r}", suggestion
        )
    observed = targets[~missing]
    if len(observed) == 0:
        raise ArgumentError(argument, "no observed target", "at least one")
    apart = (values[~missing] - observed).abs()
    allowed = _SAME_SHARE * observed.std(correction=0)
    allowed = allowed + _ROUNDINGS * rounding * observed.abs().max()
    if bool((apart > allowed).any()):
        row = int((~missing).nonzero()[apart.argmax()])
        got = f"target {float(values[row]):.6g} in row {row}, in {units} units"
        suggestion = "Train all models on the same rows in the same order."
        if units == "training":
            suggestion += " Models that standardize differently compare in units='original'."
        raise ArgumentError(argument, got, f"{float(targets[row]):.6g}, as {first!r}", suggestion)


def _affordable(size: int, most: int) -> int:
    """Number of matrices of a size that are factored at most."""
    return max(int(min(_OPERATIONS // size**3, most)), _FEWEST)


def _whole(argument: str, value: object, least: int, most: int, suggestion: str) -> int:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= cast(int, value) <= most:
        raise ArgumentError(argument, value, f"an integer from {least} to {most}", suggestion)
    return int(cast(int, value))
