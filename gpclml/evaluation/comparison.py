"""Comparison of models on their training data: ``compare`` and ``score_models``."""

from __future__ import annotations

import html
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, cast

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.annotations import is_integer
from gpclml._utils.arguments import checked, seeded
from gpclml._utils.arrays import ArrayLike, takes_arrays
from gpclml._utils.environment import progress_bar
from gpclml.conditioning import as_orders
from gpclml.errors import ArgumentError, ShapeError, UnknownNameError, UnsupportedError
from gpclml.evaluation.copies import copied_rows
from gpclml.evaluation.model_scores import (
    ROUNDING,
    Criterion,
    ModelScores,
    PairedDifference,
    favourites,
    score_model,
    scored_in,
    stacking_weights,
)
from gpclml.inference.posterior import are_constant
from gpclml.inference.units import Units, units_of_targets

if TYPE_CHECKING:
    import pandas

Scores = Mapping[str, ModelScores]

_SAME_SHARE = 1e-6  # of the spread of the targets
_ROUNDINGS = 64  # of the largest target
_OPERATIONS = 3e10  # three times those of all factors of a kind
_NUMBERS = 2**25  # in all held-out blocks
_MOST_ORDERS, _MOST_CURVES, _FEWEST = 1000, 100, 4
_SMALLEST_WEIGHT = 0.005  # that is told
# Columns that fit a line of a terminal. Findings and failures are among the sentences.
_PRINTED = ["lml", "clml", "loo", "difference", "difference_se", "p_worse", "weight"]

_CLEAR_LML = 1.0  # nats
_CLEAR_CLML, _CLEAR_LOO = 2.0, 1.0  # standard errors
_FIRST_SHARE, _LARGE_SHARE = 0.1, 1 / 3  # of the points, of the difference
_LARGEST_ROUNDING = 0.01
_FEW_POINTS = 100
_SMALL_DIFFERENCE = 4.0  # nats
_MOST_DECIMALS = 4
_SMALLEST = 0.5 * 10**-_MOST_DECIMALS


@dataclass(frozen=True)
class Finding:
    """A reason for care in a comparison.

    Attributes:
        name: Name of the finding; :func:`gpclml.evaluation.compare` says what each means.
        models: Names of the models that it is about.
        text: A sentence with the figures.
    """

    name: str
    models: tuple[str, ...]
    text: str


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Scores of models on their training data; it prints as a table with sentences.

    Attributes:
        table: The table of :func:`gpclml.evaluation.compare`.
        scores: All scores of each model, in the order of the ranking.
        findings: Reasons for care.
        models: The models, in the same order.
        targets: Observed targets in the units of the comparison, ``(n,)``.
        rows: Rows of these targets in the training data, ``(n,)``.
        orders: Rows in the order of each ordering, ``(k, n)``.
        m: Number of points that the CLML conditions on.
        rank_by: The criterion by which models are ranked.
        units: Units of the targets.

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression, score_models
        >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)
        >>> y = (9 * x).sin() + 0.2 * (70 * x).cos()
        >>> models = {name: GPRegression(x, y, name) for name in ("rbf", "matern")}
        >>> comparison = score_models(models)
        >>> best, densities = comparison.table.index[0], comparison.scores["rbf"].loo
    """

    table: pandas.DataFrame
    scores: Scores
    findings: tuple[Finding, ...]
    models: Mapping[str, ExactGP]
    targets: Tensor
    rows: Tensor
    orders: Tensor
    m: int
    rank_by: Criterion
    units: Units

    @property
    def sentences(self) -> tuple[str, ...]:
        """The comparison in sentences: ranking, agreement, weights, then each finding."""
        texts = tuple(finding.text for finding in self.findings)
        if len(self.scores) == 1:
            return texts
        # Stacking is over all models, while those whose fit failed have no rank.
        failed = failed_fits(self.findings)
        ranked = {name: model for name, model in self.scores.items() if name not in failed}
        weights = self.table["weight"].dropna().to_dict()
        return (
            *_ranking(ranked, self.rank_by),
            *(_agreement(ranked, self.findings) if len(ranked) > 1 else ()),
            *(_mixture(weights) if len(weights) > 1 else ()),
            *texts,
        )

    def __repr__(self) -> str:
        table = self._shown.to_string(float_format="{:.2f}".format, na_rep="")
        return "\n".join([self._head, table, *(f"- {sentence}" for sentence in self.sentences)])

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.sentences)
        table = self._shown.to_html(float_format="{:.2f}".format, na_rep="")
        return f"<p>{html.escape(self._head)}</p>{table}<ul>{items}</ul>"

    @property
    def _shown(self) -> pandas.DataFrame:
        """The table as it is printed."""
        probabilities = self.table["p_worse"].map("{:.3f}".format, na_action="ignore")
        return self.table[_PRINTED].assign(p_worse=probabilities)

    @property
    def _head(self) -> str:
        return (
            f"{len(self.models)} models of {len(self.targets)} targets in {self.units} units, in "
            f"nats; CLML of {len(self.targets) - self.m} points given {self.m}, mean over "
            f"{len(self.orders)} orderings; ranked by {self.rank_by.upper()}"
        )


@takes_arrays()
@checked(orderings="index (k, n)")
def score_models(
    models: Mapping[str, ExactGP],
    *,
    m: int | None = None,
    orderings: int | ArrayLike | None = None,
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

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression, score_models
        >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)
        >>> y = (9 * x).sin() + 0.2 * (70 * x).cos()
        >>> print(score_models({name: GPRegression(x, y, name) for name in ("rbf", "matern")}))
    """
    targets = _common_targets(models, units)
    for name in problems or ():
        if name not in models:
            raise UnknownNameError("problems", name, models)
    observed = ~targets.isnan()
    num_data = int(observed.sum())
    if m is None:
        m = num_data - max(1, round(num_data / 10))
    if isinstance(m, bool) or not is_integer(m) or not 0 <= m < num_data:
        suggestion = "m is the number of points conditioned on; at least one must remain."
        raise ArgumentError("m", m, f"an integer from 0 to {num_data - 1}", suggestion)
    m = int(m)
    if orderings is None:
        left = num_data - m
        orderings = _affordable(left, min(_MOST_ORDERS, _NUMBERS // left**2))
    orders = as_orders(orderings, len(targets), seeded(seed)).cpu()
    # Rows without a target last, so that a tail of observed ones is one of the first num_data.
    last = (~observed)[orders].to(torch.int8)
    orders = orders.gather(-1, last.argsort(dim=-1, stable=True))
    curves = min(len(orders), _affordable(num_data, _MOST_CURVES))
    scores: dict[str, ModelScores] = {}
    error: Exception | None = None
    for name, model in progress_bar(models.items(), progress=progress, desc="models"):
        scores[name], errors = score_model(name, model, targets, orders, m, curves, units)
        # A model without the criterion is a row of the table; it is an error if all are.
        if error is None and rank_by.upper() in errors:
            error = errors[rank_by.upper()]
            error.add_note(f"This happened in the scores of models[{name!r}].")
    if error is not None and not scored_in(rank_by, scores):
        raise error
    failed = {name for name, problem in (problems or {}).items() if problem}

    def sort_key(name: str) -> tuple[int, float, str]:
        """By value, then by name. Failed fits come after the others, missing values last."""
        value = scores[name].value(rank_by)
        return (2, 0.0, name) if math.isnan(value) else (int(name in failed), -value, name)

    scores = {name: scores[name] for name in sorted(scores, key=sort_key)}
    findings = (*find_bad_fits(scores, models, problems or {}), *find_in_scores(scores))
    table = _table(scores, rank_by, findings)
    table.attrs = {
        "m": m,
        "orderings": len(orders),
        "curves": curves,
        "rank_by": rank_by,
        "units": units,
        "num_data": num_data,
    }
    return Comparison(
        table=table,
        scores=scores,
        findings=findings,
        models={name: models[name] for name in scores},
        targets=targets[observed],
        rows=observed.nonzero().squeeze(-1),
        orders=orders[:, :num_data],
        m=m,
        rank_by=rank_by,
        units=units,
    )


def compare(
    models: Mapping[str, ExactGP],
    *,
    m: int | None = None,
    orderings: int | ArrayLike | None = None,
    rank_by: Criterion = "loo",
    units: Units = "original",
    seed: int = 0,
    problems: Mapping[str, str] | None = None,
    progress: bool | None = None,
) -> pandas.DataFrame:
    r"""Compares models on their training data by LOO, CLML and LML, and ranks them.

    The table has a row for each model, the best first, indexed by name. Its columns, in nats, are:

    - ``rank``: from 0; NaN for a model whose fit failed (``"fit-failed"``), which comes after those
      whose fit did not;
    - ``lml``: the log marginal likelihood, :math:`\log p(y)`;
    - ``clml``, ``clml_se``: :math:`\log p(y_{>m} \mid y_{\le m})`, the mean over random orderings
      (Lotfi et al. 2022, Section 4.3), and its error from the choice of the orderings alone;
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

    LOO ranks by default: each point is predicted from about as many others as the model will have
    in use, and its terms give the errors of differences, ``p_worse`` and the weights. The error of
    a CLML does not cover other data, and the LML has no terms that are the same in every order.

    The findings are:

    - ``"fit-failed"``: reported by ``problems``;
    - ``"copied-points"``: points are copies of others in inputs and target, and not measured anew
      (``gpclml.evaluation.copies.copied_rows``), so that LOO and CLML are too high;
    - ``"predicts-mean"``: predictions of points from all others vary by less than a thousandth of
      the predictive variance;
    - ``"criteria-disagree"``: two criteria prefer different models, each clearly: by one nat of
      LML, two standard errors of CLML, one of LOO;
    - ``"first-terms"``: the model's LML is one nat or more below the best, and a third or more of
      that comes from the first tenth of the points, in the mean over orderings;
    - ``"ill-conditioned"``: the condition number of the covariance of the observations times the
      rounding of its type (1.2e-7 or 2.2e-16) is .01 or more, where scores can be off by nats. The
      condition number is LAPACK's estimate in the 1-norm, for linear models the ratio of
      eigenvalues;
    - ``"few-points"``: there are fewer than 100 points, for which errors over points are mostly too
      small, by up to a half;
    - ``"small-difference"``: LOO differs from that of the first row by less than 4 nats: the two
      predict alike and ``p_worse`` is not well calibrated (Sivula et al. 2025; this limit and the
      one before are those of R's ``loo_compare``);
    - ``"not-scored"``: a score or a diagnostic could not be computed.

    LOO and CLML leave points out of the posterior, but not out of the fit of the hyperparameters.
    Parameters, modes and caches of the models are not changed. All models share the orderings.

    Args:
        models: Exact GPs by name, of GPyTorch, BoTorch or gpclml, trained on the same targets in
            the same order. Missing targets, NaN under ``observation_nan_policy("mask")``, are left
            out.
        m: Number of points that the CLML conditions on, below n; nine tenths of n if None.
        orderings: Number k of random orderings, or the orderings, ``(k, n)``. If None 1000, or
            fewer where more than 180 points are held out: 134 for 500, and never below 4. Of the
            first 100 learning curves are computed, or of fewer where n exceeds 650: of 4 from 2000.
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
        Each model costs about 3 n³ floating-point operations, n³/3 for each learning curve and
        (n - m)³/3 for each ordering, with a few n x n matrices at a time; by default about half a
        minute for n = 5000 on two cores. A linear model of R features costs n R² in place of n³.

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression, compare
        >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)
        >>> y = (9 * x).sin() + 0.2 * (70 * x).cos()
        >>> compare({name: GPRegression(x, y, name) for name in ("rbf", "matern")}).index.tolist()
        ['matern', 'rbf']
    """
    return score_models(
        models, m=m, orderings=orderings, rank_by=rank_by, units=units, seed=seed,
        problems=problems, progress=progress,
    ).table  # fmt: skip


def _common_targets(models: Mapping[str, ExactGP], units: Units) -> Tensor:
    """The targets that all models share, NaN where missing, ``(n,)`` in float64."""
    if not models:
        raise ArgumentError("models", "none", "at least one model")
    first = next(iter(models))
    targets, rounding = torch.empty(0), 0.0
    for name, model in models.items():
        argument = f"models[{name!r}]"
        if model.train_inputs is None or model.train_targets is None:
            raise ArgumentError(argument, "no training data", "a model with training data")
        trained_on = cast(Tensor, model.train_targets).detach()
        if trained_on.ndim != 1:
            got = f"targets of shape {tuple(trained_on.shape)}"
            suggestion = "Compare outputs, or members of a batch, as models of their own."
            raise ShapeError(argument, got, "(n,), one output, no batch", suggestion)
        try:
            scale, shift = units_of_targets(model, units)
        except UnsupportedError as error:
            suggestion = "Compare in units='training' if all models transform targets alike."
            expected = "a standardization of the targets, or none"
            got = f"an outcome transform {type(getattr(model, 'outcome_transform', None)).__name__}"
            raise UnsupportedError(argument, got, expected, suggestion) from error
        values = scale.cpu() * trained_on.to("cpu", torch.float64) + shift.cpu()
        # Each model has standardized the targets in its own way and precision.
        eps = torch.finfo(trained_on.dtype).eps
        if name == first:
            targets, rounding = values, eps
        if len(values) != len(targets):
            expected = f"the {len(targets)} of {first!r}"
            suggestion = "Train all models on the same rows."
            raise ShapeError(argument, f"{len(values)} training points", expected, suggestion)
        missing = targets.isnan()
        if bool(missing.all()):
            raise ArgumentError(argument, "no observed target", "at least one")
        if bool((missing != values.isnan()).any()):
            got = f"row {int((missing != values.isnan()).nonzero()[0])} missing in one of the two"
            suggestion = "Train all models on the same targets."
            raise ArgumentError(argument, got, f"as {first!r}", suggestion)
        observed = targets[~missing]
        allowed = _SAME_SHARE * observed.std(correction=0)
        allowed = allowed + _ROUNDINGS * max(rounding, eps) * observed.abs().max()
        apart = (values - targets).abs().nan_to_num()
        if bool((apart > allowed).any()):
            row = int(apart.argmax())
            got = f"target {float(values[row]):.6g} in row {row}, in {units} units"
            expected = f"{float(targets[row]):.6g}, as {first!r}"
            suggestion = "Train all models on the same rows in the same order."
            if units == "training":
                suggestion += " Models that standardize differently compare in units='original'."
            raise ArgumentError(argument, got, expected, suggestion)
    return targets


def _affordable(size: int, most: int) -> int:
    """Number of matrices of a size that are factored at most."""
    return max(int(min(_OPERATIONS // size**3, most)), _FEWEST)


def _table(scores: Scores, rank_by: Criterion, findings: tuple[Finding, ...]) -> pandas.DataFrame:
    """The table, with a row for each model in their order."""
    import pandas

    first, failed = next(iter(scores.values())), failed_fits(findings)
    # Weights come from all models that have LOO, whichever criterion ranks.
    names = scored_in("loo", scores)
    weights: dict[str, float] = {}
    if names:
        stacked = stacking_weights(torch.stack([scores[name].loo for name in names]))
        weights = dict(zip(names, stacked.tolist(), strict=True))
    rows = []
    for rank, (name, model) in enumerate(scores.items()):
        difference = model.difference(first, rank_by)
        rows.append(
            {
                "rank": math.nan if name in failed else rank,
                "lml": model.lml,
                # Orderings are averaged and points are added up, and so are their errors.
                "clml": model.value("clml"),
                "clml_se": _standard_error(model.clml),
                "loo": model.value("loo"),
                "loo_se": _standard_error(model.loo) * len(model.loo),
                "difference": difference.value,
                "difference_se": difference.standard_error,
                "p_worse": model.difference(first, "loo").p_worse if rank else math.nan,
                "weight": weights.get(name, math.nan),
                "findings": tuple(f.name for f in findings if name in f.models),
                "failure": "; ".join(failures_in_words(model)),
            }
        )
    return pandas.DataFrame(rows, index=pandas.Index(list(scores), name="model"))


def _standard_error(values: Tensor) -> float:
    """Standard error of the mean; NaN for one value."""
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _ranking(scores: Scores, rank_by: Criterion) -> Iterator[str]:
    """Which model is first, by how much, and how surely."""
    first, *others = scored_in(rank_by, scores) or [""]
    if not first:
        yield "No model is ranked, because each fit failed."
    elif not others:
        why = "fit did not fail" if len(scores) == 1 else f"{rank_by.upper()} could be computed"
        yield f"{first} is the only model whose {why}."
    else:
        second = others[0]
        lead = scores[first].difference(scores[second], rank_by)
        yield f"{rank_by.upper()} ranks {first} first, {plus_minus(lead)} ahead of {second}."
        loo = scores[second].difference(scores[first], "loo")
        if not math.isnan(loo.value):
            yield (
                f"The probability that {second} predicts worse than {first} is {loo.p_worse:.3f}, "
                "from paired differences in LOO."
            )


def _agreement(scores: Scores, findings: tuple[Finding, ...]) -> Iterator[str]:
    """Which models the criteria prefer."""
    best = favourites(scores)
    criteria = {
        name: [criterion.upper() for criterion in best if best[criterion] == name]
        for name in dict.fromkeys(best.values())
    }
    if len(criteria) == 1:
        ((winner, names),) = criteria.items()
        alike = [
            name
            for name, model in scores.items()
            if all(abs(model.difference(scores[winner], by).value) < ROUNDING for by in best)
        ]
        if len(alike) == len(scores):
            yield f"{joined(names)} are the same for all models."
        elif len(names) > 1:
            yield f"{joined(names)} {'all' if len(names) > 2 else 'both'} prefer {joined(alike)}."
        return
    # Clearly only where the finding says so; favourites may differ by less than their errors.
    clauses = "; ".join(
        f"{joined(names)} {'prefer' if len(names) > 1 else 'prefers'} {name}"
        for name, names in criteria.items()
    )
    is_clear = any(finding.name == "criteria-disagree" for finding in findings)
    yield f"{clauses}{'' if is_clear else ', none of them clearly'}."


def _mixture(weights: Mapping[Hashable, float]) -> Iterator[str]:
    """Which mixture predicts best."""
    shares = {name: weight for name, weight in weights.items() if weight >= _SMALLEST_WEIGHT}
    if len(shares) == 1:
        yield f"Stacking gives {next(iter(shares))} all weight: no mixture predicts better."
        return
    terms = [f"{weight:.2f} of {name}" for name, weight in shares.items()]
    yield f"The mixture that predicts best in LOO is {joined(terms)}."


def find_bad_fits(
    scores: Scores, models: Mapping[str, ExactGP], problems: Mapping[str, str]
) -> Iterator[Finding]:
    """Findings of the data, and of fits that failed, as reported or as seen in the scores."""
    model = cast(Any, next(iter(models.values())))
    y = model.train_targets.detach().cpu().double()
    x = model.train_inputs[0].detach().cpu().double().reshape(len(y), -1)
    observed = ~y.isnan()
    count = int(copied_rows(x[observed].numpy(), y[observed].numpy()).sum())
    if count:
        text = (
            f"{count} of {int(observed.sum())} points are copies of others in inputs and target: "
            "LOO and CLML predict each from its copy, and say less of new points. Leave them out."
        )
        yield Finding("copied-points", tuple(models), text)
    for name, problem in problems.items():
        if problem:
            yield Finding("fit-failed", (name,), f"{name}: {problem}")
    constant = [
        name for name, model in scores.items()
        if are_constant(model.loo_mean.var(correction=0), model.loo_variance.mean())
    ]  # fmt: skip
    if constant:
        text = (
            f"Whatever the inputs, {joined(constant)} predict{'s' if len(constant) == 1 else ''} "
            "the mean: there is nothing to find, or the fit missed it."
        )
        yield Finding("predicts-mean", tuple(constant), text)


def failed_fits(findings: Iterable[Finding]) -> set[str]:
    """Names of models whose fit failed, which are not ranked."""
    return {
        model for finding in findings if finding.name == "fit-failed" for model in finding.models
    }


def failures_in_words(scores: ModelScores) -> list[str]:
    """What could not be computed for a model, and why: a text for each reason."""
    missing: dict[str, list[str]] = {}
    for name, reason in scores.failures.items():
        missing.setdefault(reason, []).append(name)
    return [f"no {joined(names, 'or')} ({reason.rstrip('.')})" for reason, names in missing.items()]


def find_in_scores(scores: Scores) -> tuple[Finding, ...]:
    """Findings that follow from the scores alone."""
    rules = _disagreement, _first_terms, _reliability
    return tuple(finding for rule in rules for finding in rule(scores))


def _disagreement(scores: Scores) -> Iterator[Finding]:
    """Whether two criteria clearly prefer different models."""
    best = favourites(scores)
    clauses: dict[str, None] = {}  # in order, and each once: three criteria make three pairs
    for first, second in combinations(best, 2):
        a, b = best[first], best[second]
        if a == b:
            continue
        leads = scores[a].difference(scores[b], first), scores[b].difference(scores[a], second)
        if _is_clear(first, leads[0]) and _is_clear(second, leads[1]):
            clauses[f"{first.upper()} prefers {a} to {b} by {plus_minus(leads[0])}"] = None
            clauses[f"{second.upper()} prefers {b} to {a} by {plus_minus(leads[1])}"] = None
    if clauses:
        models = tuple(name for name in scores if name in best.values())
        yield Finding("criteria-disagree", models, "; ".join(clauses) + ".")


def _is_clear(criterion: Criterion, lead: PairedDifference) -> bool:
    if criterion == "lml":
        return lead.value >= _CLEAR_LML
    # NaN, the error of a single term, is not clear: every comparison with it is False.
    errors = _CLEAR_CLML if criterion == "clml" else _CLEAR_LOO
    return lead.p_worse < 0.5 and lead.value >= errors * lead.standard_error


def _first_terms(scores: Scores) -> Iterator[Finding]:
    """Whether the first points decide a difference in LML."""
    best = favourites(scores).get("lml")
    if best is None:
        return
    count = scores[best].curves.shape[-1]
    first = max(1, round(_FIRST_SHARE * count))
    shares = {}
    for name, model in scores.items():
        difference = scores[best].lml - model.lml
        if difference < _CLEAR_LML or first == count:
            continue
        # The terms of a curve add up to the LML in every order, here in the mean over orders.
        gains = (scores[best].curves - model.curves).mean(0)
        share = float(gains[:first].sum()) / difference
        if share >= _LARGE_SHARE:
            less = f"that {name} is below {best} in LML"
            shares[name] = f"{share:.0%} of the {nats(difference)} {less}"
    if shares:
        text = (
            f"{joined(list(shares.values()))} come from the first {first} of {count} points, "
            "before the models have learned much."
        )
        yield Finding("first-terms", tuple(shares), text)


def _reliability(scores: Scores) -> Iterator[Finding]:
    """Whether scores are missing, rounded, of few points, or too close to the first to tell."""
    for name, model in scores.items():
        if model.failures:
            text = f"{name} has {'; '.join(failures_in_words(model))}."
            yield Finding("not-scored", (name,), text)
    numbers = {
        name: f"{model.condition_number:.1e} ({name})"
        for name, model in scores.items()
        if model.rounding >= _LARGEST_ROUNDING
    }
    if numbers:
        text = (
            f"The condition number of the covariance is {joined(list(numbers.values()))}: rounding "
            "may change scores by nats. Use float64, more noise, or fewer near duplicates."
        )
        yield Finding("ill-conditioned", tuple(numbers), text)
    # The two limits are those of R's loo_compare (Sivula et al. 2025).
    first, *others = scores
    count = len(scores[first].loo)
    if count < _FEW_POINTS:
        text = (
            f"With n = {count}, fewer than {_FEW_POINTS} points, standard errors over points are "
            "mostly too small; the true ones may be twice as large."
        )
        yield Finding("few-points", tuple(scores), text)
    loo = scores[first].value("loo")
    close = [name for name in others if abs(scores[name].value("loo") - loo) < _SMALL_DIFFERENCE]
    if close:
        text = (
            f"In LOO {joined(close)} {'is' if len(close) == 1 else 'are'} within "
            f"{_SMALL_DIFFERENCE:g} nats of {first}: they predict about equally well, and "
            "probabilities that one is worse (p_worse) are rough."
        )
        yield Finding("small-difference", tuple(close), text)


def nats(value: float) -> str:
    """A number of nats as text, to a tenth, or to two digits if it is small."""
    return f"{value:.{_decimals(value)}f} nats"


def plus_minus(difference: PairedDifference) -> str:
    """A difference and its error as text, to two digits of the error."""
    error = difference.standard_error
    if math.isnan(error) or error < _SMALLEST:
        return nats(difference.value)
    decimals = _decimals(error)
    return f"{difference.value:.{decimals}f} ± {error:.{decimals}f} nats"


def joined(words: Sequence[str], last: str = "and") -> str:
    """Joins words to a list in a sentence, with another word before the last."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _decimals(value: float) -> int:
    if abs(value) >= 1 or value == 0:
        return 1
    return min(_MOST_DECIMALS, 1 - math.floor(math.log10(abs(value))))
