"""All experiments of the ledger by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from benchmarks.evidence.ledger import (
    density,
    elbo_families,
    elbo_tempering,
    fourier,
    laplace_toy,
    learning_curves,
    lengthscale_bias,
    mlp_mean,
    model_combination,
    pac_bayes,
    rational_quadratic,
    training_speed_kernel,
    training_speed_linear,
    training_speed_networks,
)
from benchmarks.evidence.ledger.claims import Experiment
from gpclml.errors import UnknownNameError

__all__ = ["EXPERIMENTS", "chosen_experiments"]

_MODULES = (
    density,
    fourier,
    rational_quadratic,
    lengthscale_bias,
    mlp_mean,
    training_speed_linear,
    model_combination,
    laplace_toy,
    learning_curves,
    training_speed_kernel,
    elbo_families,
    elbo_tempering,
    training_speed_networks,
    pac_bayes,
)

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {module.EXPERIMENT.name: module.EXPERIMENT for module in _MODULES}
)
"""In the order of the page."""


def chosen_experiments(name: str, others: Iterable[str] = ()) -> list[Experiment]:
    """The experiment of that name, or every one for ``"ledger"``.

    Args:
        name: The name.
        others: Names that could also have been meant.

    Raises:
        UnknownNameError: There is none.
    """
    if name == "ledger":
        return list(EXPERIMENTS.values())
    if name not in EXPERIMENTS:
        raise UnknownNameError("study", name, [*EXPERIMENTS, "ledger", *others])
    return [EXPERIMENTS[name]]
