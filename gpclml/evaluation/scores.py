"""Scores of a model as it stands: log densities of data, without priors, without training.

They ask the same of any exact GP, of GPyTorch, BoTorch or gpclml, in train or eval mode, and
leave its parameters, mode and caches alone. Nothing is divided by a number of points. Numpy arrays
and pandas objects are taken where tensors are.

Densities are of the original targets, so that models with different standardizations compare;
``units="training"`` gives those of the targets as the model was trained on them. For each target
the two differ by the logarithm of the scale, which is zero if targets are not transformed.
"""

from __future__ import annotations

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import check_finite, checked, seeded
from gpclml._utils.arrays import ArrayLike, takes_arrays
from gpclml.conditioning import Conditioning, LastPoints, LeaveOneOut, as_orders
from gpclml.errors import ArgumentError
from gpclml.inference.observations import Solver, training_observations
from gpclml.inference.posterior import marginal_predictive, predictive_observations
from gpclml.inference.units import Units, term_offset, to_training_units, units_of_targets


@torch.no_grad()
@checked
def log_marginal_likelihood(model: ExactGP, *, units: Units = "original") -> Tensor:
    """The log density of all training targets under the prior, in nats.

    Args:
        model: An exact GP with training data.
        units: Units of the targets; see the module.

    Returns:
        Total over the observed targets, ``(*batch,)``.

    Note:
        n³/3 floating-point operations.

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression, log_marginal_likelihood
        >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)
        >>> round(log_marginal_likelihood(GPRegression(x, (9 * x).sin())).item(), 2)
        -22.64
    """
    return conditional_log_marginal_likelihood(model, LastPoints(m=0), units=units).squeeze(-1)


@torch.no_grad()
@checked
def conditional_log_marginal_likelihood(
    model: ExactGP,
    conditioning: Conditioning,
    *,
    units: Units = "original",
    seed: int = 0,
    solver: Solver = "auto",
) -> Tensor:
    r"""The joint log density of each held-out block given all other points, in nats.

    With one block of the n - m points after the first m it is
    :math:`\log p(y_{>m} \mid y_{\le m})`, the log marginal likelihood of all points less that
    of the first m (Lotfi et al. 2022, Section 4.3; m counts the points conditioned on). The mean
    over random orderings is their averaged CLML; the sum over folds or single points is the
    log score of cross-validation.

    Args:
        model: An exact GP with training data.
        conditioning: Which points are held out.
        units: Units of the targets; see the module.
        seed: Seed of the draw, where the strategy has none.
        solver: See :class:`~gpclml.mlls.ConditionalMarginalLogLikelihood`.

    Returns:
        One value for each block, ``(*batch, k)``; blocks of one size come together.

    Note:
        One factorization; with several blocks, one inverse.

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression, RandomOrderings, conditional_log_marginal_likelihood
        >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)
        >>> model, orderings = GPRegression(x, (9 * x).sin()), RandomOrderings(k=100, m=27)
        >>> conditional_log_marginal_likelihood(model, orderings).shape
        torch.Size([100])
    """
    data = training_observations(model)
    split = data.split(conditioning, seeded(seed))
    used, blocks = data.at(split, drop_missing=False)
    values = used.covariance_by(solver, blocks).block_log_densities(used.residual, blocks)
    # A missing target has its own, constant term; so has the change of units.
    offset = term_offset(model, data, units)
    offsets = [offset[..., group.to(offset.device)].sum(-1) for group in split.held_out]
    return values - torch.cat(offsets, dim=-1)


@torch.no_grad()
@takes_arrays()
@checked(orderings="index (k, n)")
def learning_curve(
    model: ExactGP,
    orderings: int | ArrayLike = 1,
    *,
    units: Units = "original",
    seed: int = 0,
) -> Tensor:
    r"""All terms :math:`\log p(y_i \mid y_{<i})` of one or many orderings, in nats.

    The sum of a curve is the log marginal likelihood, for any order; the sum of its terms
    after the m-th is the CLML that conditions on the first m.

    Args:
        model: An exact GP with training data and one target for each row.
        orderings: Number of random orderings, or the orderings, ``(k, n)``.
        units: Units of the targets; see the module.
        seed: Seed of random orderings.

    Returns:
        Term i of curve j is that of point ``orderings[j, i]``, ``(*batch, k, n)``; NaN where the
        target is missing.

    Raises:
        ArgumentError: If orderings are not permutations, or the model is a multitask one.
        ShapeError: If orderings are not ``(k, n)``.

    Note:
        n³/3 floating-point operations and one n x n matrix at a time for each ordering; about
        4 n R² for a linear model of R features, all orderings at once.

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression, learning_curve
        >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)
        >>> learning_curve(GPRegression(x, (9 * x).sin()), orderings=5).shape
        torch.Size([5, 30])
    """
    data = training_observations(model)
    if data.num_tasks > 1:
        raise ArgumentError(
            "model", f"{data.num_tasks} targets for each row", "one", "Use a long-format model."
        )
    orders = as_orders(orderings, data.num_rows, seeded(seed))
    offset = term_offset(model, data, units)
    if data.missing is not None:
        offset = offset.masked_fill(data.missing, float("nan"))
    return data.covariance.sequential(data.residual, orders) - offset[..., orders.to(offset.device)]


@torch.no_grad()
@checked
def leave_one_out(model: ExactGP, *, units: Units = "original") -> Tensor:
    """The log density of each training point given all others, in nats.

    Noise is included (Rasmussen and Williams 2006, Eqs. 5.10-5.12). A point of a multitask
    model is a row with all its tasks. Arguments are those of :func:`log_marginal_likelihood`.

    Returns:
        One value for each row with a target, in data order, ``(*batch, n)``.

    Note:
        About n³ floating-point operations.

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression, leave_one_out
        >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)
        >>> leave_one_out(GPRegression(x, (9 * x).sin())).shape
        torch.Size([30])
    """
    return conditional_log_marginal_likelihood(model, LeaveOneOut(), units=units)


@torch.no_grad()
@takes_arrays("x", "y", "noise")
@checked(x="float (*batch, t, d) | (t,)")
def joint_log_predictive(
    model: ExactGP,
    x: ArrayLike,
    y: ArrayLike,
    *,
    noise: ArrayLike | None = None,
    units: Units = "original",
) -> Tensor:
    """The joint log density of new points given the training data, in nats.

    Args:
        model: An exact GP with training data.
        x: New inputs as the model takes them, ``(*batch, t, d)``, or ``(t,)`` for one column.
        y: Their targets in original units, ``(*batch, t)``.
        noise: Noise variances of the new points in training units, for a fixed-noise
            likelihood, ``(*batch, t)``.
        units: Units of the targets in the result; see the module.

    Returns:
        Total over the new points, ``(*batch,)``.

    Raises:
        ShapeError: If ``y`` does not fit ``x``.
        ArgumentError: If a fixed-noise likelihood comes without ``noise``.

    Note:
        (n + t)³/3 floating-point operations.

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression, joint_log_predictive
        >>> x, new = torch.linspace(0, 1, 30).double(), torch.tensor([0.31, 0.62]).double()
        >>> model = GPRegression(x, (9 * x).sin())
        >>> round(joint_log_predictive(model, new, (9 * new).sin()).item(), 2)
        -0.97
    """
    data, held_out = predictive_observations(model, x, y, noise)
    value = data.covariance.conditional_log_density(data.residual, held_out)
    return value - term_offset(model, data, units)[..., held_out.to(value.device)].sum(-1)


@torch.no_grad()
@takes_arrays("x", "y", "noise")
@checked(x="float (*batch, t, d) | (t,)", y="float (*batch, t)", noise="float (*batch, t)")
def marginal_log_predictive(
    model: ExactGP,
    x: ArrayLike,
    y: ArrayLike,
    *,
    noise: ArrayLike | None = None,
    units: Units = "original",
) -> Tensor:
    """The log density of each new point given the training data alone, in nats.

    The negative mean of these is the usual test NLL. Arguments and errors are those of
    :func:`joint_log_predictive`, for a model of one target for each row; a NonFiniteError says that
    x or ``y`` is not finite.

    Returns:
        One value for each new point, ``(*batch, t)``.

    Note:
        About n³/3 + 3 n² t floating-point operations and no t x t matrix.

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression, marginal_log_predictive
        >>> x, new = torch.linspace(0, 1, 30).double(), torch.tensor([0.31, 0.62]).double()
        >>> marginal_log_predictive(GPRegression(x, (9 * x).sin()), new, (9 * new).sin()).shape
        torch.Size([2])
    """
    normal = marginal_predictive(model, x, noise)
    check_finite("y", y)
    scale, _ = units_of_targets(model, units)
    return normal.log_prob(to_training_units(model, y)) - scale.to(normal.mean).log()
