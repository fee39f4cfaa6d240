"""Fits of several candidates, one after the other or in several processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpclml._utils.progress import progress_bar
from gpclml.estimators.candidates import CANDIDATES, fit_candidate, make_candidate
from gpclml.estimators.warps import Warp
from gpclml.models import GPRegression

__all__ = ["FitOptions", "FittedCandidate", "fit_candidates"]


@dataclass(frozen=True)
class FitOptions:
    """How candidates are fitted.

    ``rows`` are those by which hyperparameters are fitted, all if None. After so many ``seconds``,
    at the clock time ``deadline``, no further candidate is begun but the ``first``.
    """

    rows: Tensor | None = None
    seed: int = 0
    restarts: int = 0
    seconds: float | None = None
    deadline: float = float("inf")
    first: str = ""
    categories: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class FittedCandidate:
    """A fitted model of all rows, a sentence on the fit, its seconds, the transform of targets."""

    model: GPRegression
    note: str
    seconds: float
    warp: Warp | None = None


_Fits = tuple[dict[str, FittedCandidate], dict[str, str]]


def fit_candidates(
    names: Sequence[str],
    x: Tensor,
    y: Tensor,
    options: FitOptions,
    *,
    n_jobs: int | None = None,
    progress: bool | None = None,
) -> _Fits:
    """Fits candidates in the order of their names; ``n_jobs`` is as joblib takes it.

    Returns:
        The fitted candidates by name, and why others failed. In neither is a candidate of
        transformed targets if no transform makes them more likely, nor one of categories if there
        are none.
    """
    if options.seconds is not None:
        deadline = time.time() + options.seconds
        options = replace(options, deadline=deadline, first=names[0])
    if n_jobs in (None, 1):
        return _fit_in_turn(names, x, y, options, progress)
    from joblib import Parallel, delayed

    runs = Parallel(n_jobs=n_jobs)(
        delayed(_fit_elsewhere)(chain, x, y, options, torch.get_num_threads())
        for chain in _chains(names)
    )
    found: dict[str, FittedCandidate] = {}
    failures: dict[str, str] = {}
    for states, failed in runs:  # pyright: ignore[reportGeneralTypeIssues]
        failures |= failed
        for name, (state, note, seconds, warp) in states.items():
            targets = y if warp is None else warp.forward(y)
            model = make_candidate(name, x, targets, options.seed, options.categories)
            model.load_state_dict(state)
            found[name] = FittedCandidate(model.eval(), note, seconds, warp)
    in_order = {name: found[name] for name in names if name in found}
    return in_order, {name: failures[name] for name in names if name in failures}


def _fit_in_turn(
    names: Sequence[str], x: Tensor, y: Tensor, options: FitOptions, progress: bool | None
) -> _Fits:
    found: dict[str, FittedCandidate] = {}
    failures: dict[str, str] = {}
    with progress_bar(names, progress=progress, desc="stack") as bar:
        for name in bar:
            bar.set_postfix_str(name)
            if time.time() >= options.deadline and name != options.first:
                failures[name] = f"the time budget of {options.seconds:g} seconds was spent"
                continue
            start = time.perf_counter()
            try:
                made = fit_candidate(
                    name, x, y, {one: fit.model for one, fit in found.items()},
                    categories=options.categories, rows=options.rows, seed=options.seed,
                    restarts=options.restarts, progress=False,
                )  # fmt: skip
            except Exception as error:  # whatever it is, the others are worth having
                failures[name] = f"{type(error).__name__}: {error}"
                continue
            if made is not None:
                model, note, warp = made
                found[name] = FittedCandidate(model, note, time.perf_counter() - start, warp)
    return found, failures


def _chains(names: Sequence[str]) -> list[list[str]]:
    """The names in lists, in which each comes after the one that it starts from."""
    chains: list[list[str]] = []
    for name in names:
        start = CANDIDATES[name].start
        chain = next((chain for chain in chains if start in chain), None)
        if chain is None:
            chains.append([name])
        else:
            chain.append(name)
    return chains


def _fit_elsewhere(
    names: list[str], x: Tensor, y: Tensor, options: FitOptions, threads: int
) -> tuple[dict[str, tuple[dict[str, Any], str, float, Warp | None]], dict[str, str]]:
    """In another process: states of the models, which can be sent, in place of the models."""
    torch.set_num_threads(threads)
    found, failures = _fit_in_turn(names, x, y, options, progress=False)
    states = {
        name: (dict(fit.model.state_dict()), fit.note, fit.seconds, fit.warp)
        for name, fit in found.items()
    }
    return states, failures
