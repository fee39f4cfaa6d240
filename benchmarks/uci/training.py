"""The objectives by name, and how a model is trained: with a line search, or stochastically."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.utils.warnings import NumericalWarning

from benchmarks._options import check_known
from gpclml.conditioning import (
    Conditioning,
    KFold,
    LastPoints,
    LeaveOneOut,
    RandomHoldout,
    RandomOrderings,
    Split,
)
from gpclml.fit import fit_mll, fit_networks
from gpclml.kernels import DeepKernel
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

DEFAULT_HELD_OUT = 0.1
"""The share for which ``"clml"`` leaves the choice of held-out points to the library."""

_ORDERINGS = 5


class _ShareOrderings(Conditioning):
    """The tails of five random orderings, a share of the points each.

    Args:
        share: The share, in (0, 1); at least one point.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def split(self, num_data, generator=None, observed=None, points=None) -> Split:
        n = self.observed_rows(num_data, observed).numel()
        orderings = RandomOrderings(_ORDERINGS, m=n - max(1, round(self.share * n)))
        return orderings.split(num_data, generator, observed)


class _RandomSubset(Conditioning):
    """A random share of the points given none: what redrawing does without conditioning.

    Args:
        share: Share of the points that count, in (0, 1]; at least one point.
    """

    is_random = True

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def split(self, num_data, generator=None, observed=None, points=None) -> Split:
        [rows] = RandomHoldout(self.share).held_out(num_data, generator, observed)
        return Split([rows], rows.new_empty(0))


# Of the held-out share and a seed.
_CONDITIONINGS: dict[str, Callable[[float, int], Conditioning | None]] = {
    "clml": lambda share, seed: None if share == DEFAULT_HELD_OUT else RandomHoldout(share),
    "clml-fixed": lambda share, seed: RandomHoldout(share, seed=seed),
    "clml-folds": lambda share, seed: KFold(10),
    "clml-orderings": lambda share, seed: _ShareOrderings(share),
    "lml": lambda share, seed: LastPoints(m=0),
    "lml-subset": lambda share, seed: _RandomSubset(1 - share),
    "loo": lambda share, seed: LeaveOneOut(),
}
_WITH_SHARE = ("clml", "clml-fixed", "clml-orderings", "lml-subset")


def objective_names() -> tuple[str, ...]:
    """Names that ``make_objective`` knows, sorted."""
    return tuple(sorted(_CONDITIONINGS))


def uses_held_out(name: str) -> bool:
    """Whether the objective depends on the held-out share."""
    return name in _WITH_SHARE


def make_objective(
    name: str, model: GPRegression, *, held_out: float | None = None, seed: int = 0
) -> ConditionalMarginalLogLikelihood:
    """The objective of that name for a model; all share one code path and differ in blocks.

    - ``"lml"``: the log marginal likelihood, every point held out;
    - ``"clml"``: the conditional log marginal likelihood. At a held-out share of 0.1 the
      library chooses: a fresh tenth a step for Adam, ten fixed folds for L-BFGS. At another
      share, that share at random, fresh for Adam and drawn once for L-BFGS;
    - ``"clml-fixed"``: that share drawn once, the same throughout;
    - ``"clml-folds"``: all ten folds of a partition, which is redrawn at each Adam step;
    - ``"clml-orderings"``: the mean over five random orders, each conditioning on its first
      points and scoring that share, its last ones; redrawn at each Adam step;
    - ``"loo"``: the leave-one-out log predictive density;
    - ``"lml-subset"``: the log marginal likelihood of all points but that share, which is
      redrawn at each Adam step.

    Args:
        name: One of ``objective_names()``.
        model: A model in train mode.
        held_out: That share of the training points; 0.1 if None.
        seed: Seed of the draws of points.

    Raises:
        UnknownNameError: No such objective.
    """
    check_known("objective", [name], objective_names())
    share = DEFAULT_HELD_OUT if held_out is None else held_out
    conditioning = _CONDITIONINGS[name](share, seed)
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=seed)


_FAILED_FITS = ("The fit stopped", "The warm start failed")
_ENDED_EARLY = ("abnormal", "limit", "stopped")  # the other problems are of fits that converged

_NETWORK_KERNELS = ("deep", "deep-bottleneck")
KERNELS = (*_NETWORK_KERNELS, "matern", "rbf", "rq", "spectral_mixture")
"""Kernels of the benchmark, by their names in ``GPRegression``."""

MEANS = ("constant", "mlp", "zero")
"""Means of the benchmark, by their names in ``GPRegression``."""


def optimizer_for(kernel: str, mean: str) -> str:
    """The optimizer of a model: ``"adam"`` with a network in it, ``"lbfgs"`` without one.

    Raises:
        UnknownNameError: No such kernel or mean.
    """
    check_known("kernel", [kernel], KERNELS)
    check_known("mean", [mean], MEANS)
    return "adam" if kernel in _NETWORK_KERNELS or mean == "mlp" else "lbfgs"


def train(
    mll: ExactMarginalLogLikelihood,
    optimizer: str,
    steps: int | None,
    lr: float | None,
    seed: int = 0,
) -> tuple[int, str]:
    """Fits the model of an objective in place, without a progress bar.

    A residual deep kernel is trained as far as cross-validation supports
    (:func:`gpclml.fit.fit_networks`), anything else to the end.

    Args:
        mll: The objective; its model is in train mode.
        optimizer: ``"adam"`` or ``"lbfgs"``.
        steps: Number of Adam steps, at most; not used by L-BFGS, which stops by itself.
        lr: Learning rate of Adam; not used by L-BFGS.
        seed: Seed of the folds of cross-validation.

    Returns:
        The number of steps, and why the fit ended early, if it did.
    """
    # A line search stops by itself.
    options = {} if optimizer == "lbfgs" else {"steps": steps, "lr": lr}
    if any(isinstance(module, DeepKernel) and module.residual for module in mll.modules()):
        stopped = fit_networks(mll, seed=seed, progress=False, **options)
        return stopped.steps[stopped.chosen], stopped.message
    fit = fit_mll(mll, optimizer, progress=False, **options)
    return len(fit.history), fit.message if fit.problem in _ENDED_EARLY else ""


@contextmanager
def noting_failed_fits() -> Iterator[list[str]]:
    """Within the block, fits that gave up are noted in the list instead of being warned of.

    Notes of jitter are dropped: a line search that tries extreme values brings hundreds.
    Other warnings are given as usual, at the end of the block.
    """
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    # What was caught is given again, but for jitter's.
    for warning in caught:
        text = str(warning.message)
        if text.startswith(_FAILED_FITS):
            notes.append(text)
        elif not issubclass(warning.category, NumericalWarning):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
