"""The functions to maximize, on the unit cube, and the surrogates that are fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import AdditiveKernel
from torch import Tensor

from benchmarks._options import check_known
from benchmarks.uci.training import make_objective
from gpclml.fit import fit_mll
from gpclml.kernels import DeepKernel

FUNCTIONS: Mapping[str, tuple[str, int]] = {
    "branin": ("Branin", 2),
    "hartmann-6": ("Hartmann", 6),
    "ackley-10": ("Ackley", 10),
    "levy-10": ("Levy", 10),
}
"""Classes of ``botorch.test_functions`` and numbers of inputs, by name."""


@dataclass(frozen=True)
class Problem:
    """A function on the unit cube, without noise, to be maximized.

    Args:
        dim: Number of inputs.
        optimum: Its largest value, to the five or six digits that BoTorch has.
        values: Maps points ``(n, dim)`` to values ``(n, 1)``.
    """

    dim: int
    optimum: float
    values: Callable[[Tensor], Tensor]

    def regrets(self, x: Tensor) -> Tensor:
        """How much less than the largest value the function is at points.

        Args:
            x: Points in the unit cube. Shape ``(n, dim)``.

        Returns:
            Regrets, not negative. Shape ``(n,)``.
        """
        return (self.optimum - self.values(x)[:, 0]).clamp_min(0.0)


def make_problem(name: str) -> Problem:
    """The negative of BoTorch's test function of that name.

    Args:
        name: One of :data:`FUNCTIONS`.

    Raises:
        UnknownNameError: No such function.
    """
    from botorch import test_functions
    from botorch.utils.transforms import unnormalize

    check_known("functions", [name], FUNCTIONS)
    cls, dim = FUNCTIONS[name]
    # Branin has two inputs and takes no dimension.
    sizes: dict[str, Any] = {} if cls == "Branin" else {"dim": dim}
    function = getattr(test_functions, cls)(negate=True, dtype=torch.float64, **sizes)

    def values(x: Tensor) -> Tensor:
        return function(unnormalize(x, function.bounds.to(x))).unsqueeze(-1)

    return Problem(dim, float(function.optimal_value), values)


def initial_points(dim: int, seed: int) -> Tensor:
    """The points that an optimization starts from: 2 (dim + 1) of a scrambled Sobol sequence.

    Returns:
        Points in the unit cube, float64. Shape ``(2 (dim + 1), dim)``.
    """
    sobol = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
    return sobol.draw(2 * (dim + 1), dtype=torch.float64)


SURROGATES = ("deep", "laplace", "single-task")
"""``"single-task"`` is BoTorch's ``SingleTaskGP``, ``"deep"`` is ``DeepKernelGP`` and
``"laplace"`` the Laplace posterior of a network."""

_FEATURE_SHARE = 0.1  # of the deep surrogate's variance at the start: its network is in use
_ANEW, _FURTHER = 50, 15  # most iterations of the line search
_LR = 0.01
_HIDDEN, _EPOCHS, _DECAY = 50, 500, 1e-4  # of the network with a Laplace posterior


def fitted(
    surrogate: str,
    objective: str,
    x: Tensor,
    y: Tensor,
    *,
    steps: int | None,
    seed: int,
    before: torch.nn.Module | None = None,
    anew: bool = True,
) -> torch.nn.Module:
    """A surrogate fitted to points.

    What ``SingleTaskGP`` has is fitted by L-BFGS, held-out points fixed: by at most 50 iterations
    from its start, or 15 from the fit before. In between, what the deep kernel adds is trained by
    Adam at a rate of 0.01, held-out points drawn afresh at each step; it always goes on from the
    fit before, Adam's state apart.

    The network with a Laplace posterior starts anew at each fit, from the same weights for a seed.

    Args:
        surrogate: One of :data:`SURROGATES`.
        objective: As for :func:`benchmarks.uci.training.make_objective`.
        x: Points in the unit cube. Shape ``(n, d)``.
        y: Values. Shape ``(n, 1)``.
        steps: Number of Adam steps; not used without a network.
        seed: Seed of the network and of held-out points.
        before: The model of the fit before; None at the first one.
        anew: Whether what ``SingleTaskGP`` has is fitted from its start.

    Returns:
        The model, in eval mode.
    """
    from botorch.models import SingleTaskGP

    from gpclml.models.botorch import DeepKernelGP

    if surrogate == "laplace":
        return _laplace(x, y, seed)
    model: torch.nn.Module = SingleTaskGP(x, y)
    if surrogate == "deep":
        options: Any = {"input_transform": None, "feature_share": _FEATURE_SHARE}
        model = DeepKernelGP(x, y, seed=seed, **options)
    mll = make_objective(objective, model, seed=seed)
    names = [name for name, _ in model.named_parameters()]
    added = [name for name in names if name.startswith(_added_by_features(model))]
    # Adam's part always goes on from the fit before; the rest only between two fresh fits.
    if before is not None:
        _take_over(model, before, added if anew else names)
    frozen = [f"model.{name}" for name in added]
    # What SingleTaskGP has comes first: the network then learns what a plain kernel leaves.
    if anew:
        fit_mll(mll, "lbfgs", steps=_ANEW, freeze=frozen, progress=False)
    if added:
        others = [name for name, _ in mll.named_parameters() if name not in frozen]
        fit_mll(mll, "adam", steps=steps, lr=_LR, freeze=others, progress=False)
    if added or not anew:
        fit_mll(mll, "lbfgs", steps=_FURTHER, freeze=frozen, progress=False)
    return model


@torch.no_grad()
def feature_share(model: torch.nn.Module) -> float:
    """The part of a surrogate's prior variance that is on its network's features, 0 to 1."""
    for module in model.modules():
        if isinstance(module, AdditiveKernel):
            weight = float(module.kernels[1].outputscale)
            return weight / (1 + weight)
    return 0.0


def _laplace(x: Tensor, y: Tensor, seed: int) -> torch.nn.Module:
    """An MLP trained by squared errors, with the posterior of all its weights by the evidence."""
    from botorch.models.transforms import Standardize

    from gpclml import MLP, Laplace

    transform = Standardize(1)
    targets = transform(y)[0].detach()
    transform.eval()
    generator = torch.Generator().manual_seed(seed)
    sizes = [x.shape[1], _HIDDEN, _HIDDEN, 1]
    network = MLP(sizes, torch.nn.Tanh, generator=generator, dtype=x.dtype)
    # Without a penalty the network meets its targets, and the noise falls to its bound.
    optimizer = torch.optim.Adam(network.parameters(), lr=_LR, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _EPOCHS)
    for _ in range(_EPOCHS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(network(x), targets).backward()
        optimizer.step()
        schedule.step()
    posterior = Laplace(network.eval(), "regression", weights="all", structure="full")
    posterior.fit((x, targets), progress=False)
    return posterior.to_botorch(outcome_transform=transform)


def _added_by_features(model: torch.nn.Module) -> tuple[str, ...]:
    """Prefixes of the parameters that a deep kernel has beside those of ``SingleTaskGP``."""
    return tuple(
        f"{name}.{submodule}"
        for name, module in model.named_modules()
        if isinstance(module, DeepKernel)
        for submodule in ("feature_extractor", "base_kernel.kernels.1")
    )


@torch.no_grad()
def _take_over(model: torch.nn.Module, before: torch.nn.Module, names: Iterable[str]) -> None:
    for name in names:
        model.get_parameter(name).copy_(before.get_parameter(name))
