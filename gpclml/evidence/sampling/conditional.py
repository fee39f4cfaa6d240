"""Log densities of targets, and the CLML of a network, from draws of its weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from gpclml._utils.arguments import callers_level, check_positive, checked
from gpclml.curvature.output_likelihoods import output_likelihood
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.evidence.sampling.monte_carlo import SampledDensity, log_mean
from gpclml.evidence.sampling.weights import linearized_outputs, rescaled
from gpclml.mlls import LaplaceEvidence
from gpclml.models import LinearizedNetwork

__all__ = [
    "SampledConditional",
    "estimate_conditional_log_density",
    "joint_log_density",
    "laplace_conditional_log_density",
    "marginal_log_densities",
]

SCALES = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Scales of a posterior's covariance that are tried if none are given."""

_STEPS, _REMEMBERED = 60, 20  # of L-BFGS
_GAIN = 1e-5  # nats that a further step has to promise
_FEWEST_DRAWS = 5  # effective ones, below which a joint density is that of the best few draws

OutputsOf = Callable[[Mapping[str, Tensor], Tensor], Tensor]


@checked(outputs="float (S, N, C)", target="(N,) | (N, C)")
def joint_log_density(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> SampledDensity:
    r"""The log density of all targets together, averaged over draws, in nats.

    .. math:: \log \frac1S \sum_s \prod_i p(y_i \mid w_s)

    With draws from the posterior given some points and the targets of all others this is the
    conditional log marginal likelihood of a network (Lotfi et al. 2022, Appendix B): each draw has
    to explain all targets at once, where :func:`marginal_log_densities` scores each target alone.

    Args:
        likelihood: As :class:`gpclml.mlls.LaplaceMarginalLogLikelihood` takes them.
        outputs: Outputs of a network at draws of its weights, ``(S, N, C)``.
        target: Targets, ``(N,)`` or ``(N, C)``.

    Returns:
        The estimate and its error.

    Raises:
        UnsupportedError: The likelihood is of another class.
        ShapeError, ArgumentError: Targets do not fit outputs or likelihood.
        NonFiniteError: As :func:`log_mean`.
    """
    return log_mean(_log_densities(likelihood, outputs, target).sum(-1))


@checked(outputs="float (S, N, C)", target="(N,) | (N, C)")
def marginal_log_densities(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> Tensor:
    r"""The log density of each target alone, :math:`\log \frac1S \sum_s p(y_i \mid w_s)`.

    Args:
        likelihood: As :class:`gpclml.mlls.LaplaceMarginalLogLikelihood` takes them.
        outputs: Outputs of a network at draws of its weights, ``(S, N, C)``.
        target: Targets, ``(N,)`` or ``(N, C)``.

    Returns:
        Nats, ``(N,)``.

    Raises:
        UnsupportedError: The likelihood is of another class.
        ShapeError, ArgumentError: Targets do not fit outputs or likelihood.
    """
    densities = _log_densities(likelihood, outputs, target)
    return torch.logsumexp(densities, dim=0) - math.log(len(densities))


@dataclass(frozen=True)
class SampledConditional:
    """A conditional log marginal likelihood estimated from draws.

    Attributes:
        joint: Log density of all held-out targets together, in nats.
        marginal: Mean over held-out targets of the log density of each alone, nats a point.
        scale: Factor of the posterior's covariance.
        num_held_out: Number of held-out targets.
        at_edge: Whether the scale is the smallest or the largest that was tried. At the smallest
            the draws are nearly their center, and the density is that of a validation loss.
    """

    joint: SampledDensity
    marginal: float
    scale: float
    num_held_out: int
    at_edge: bool = False


@checked
def estimate_conditional_log_density(
    likelihood: Likelihood,
    outputs_of: OutputsOf,
    weights: Mapping[str, Tensor],
    held_out: tuple[Tensor, Tensor],
    *,
    scaling: tuple[Tensor, Tensor] | None = None,
    center: Mapping[str, Tensor] | None = None,
    scales: Sequence[float] = SCALES,
    scale_by: Literal["density", "accuracy"] = "density",
) -> SampledConditional:
    r"""The CLML of a network: the log density of held-out targets under posterior draws.

    .. math:: \log p(\mathcal D_{\text{held out}} \mid \mathcal D_{\text{rest}})
        \approx \log \frac1S \sum_s p(\mathcal D_{\text{held out}} \mid w_s)

    A Laplace posterior is too wide where the curvature at the mode differs from that around it; it
    is exact for outputs that are linear in the weights, :func:`linearized_outputs`. If scaling
    points are given, the covariance of the draws is therefore multiplied by the best of ``scales``
    at these points (Lotfi et al. 2022, Appendix B: 80% of the points for the posterior, 5% for its
    scale, 15% held out). The best scale has the largest marginal density, which for an
    overconfident network is often the smallest scale, or, as in the paper, the largest accuracy of
    the mean over draws; of equal ones the largest is taken.

    Args:
        likelihood: As :class:`gpclml.mlls.LaplaceMarginalLogLikelihood` takes them.
        outputs_of: Maps draws and points to outputs ``(S, N, C)``, such as
            ``functools.partial(linearized_outputs, network)``.
        weights: Draws by name, ``(S, *shape)``.
        held_out: Points and targets that neither the draws nor the scale have seen.
        scaling: Points and targets that the draws have not seen.
        center: Weights that the draws are scaled around, by name; their mean if None.
        scales: Factors of the covariance among which one is chosen.
        scale_by: Criterion of this choice; ``"accuracy"`` needs classes.

    Returns:
        The joint and the marginal density, and the scale; 1 without scaling points.

    Raises:
        ArgumentError: No scale is given, or one is not positive.
        UnsupportedError, ShapeError: As :func:`joint_log_density`, or there are no classes.

    Warns:
        UserWarning: Fewer than five draws have nearly all the weight in the joint density. Its
            value is then nearly that of the best draw, less the logarithm of the number of draws.
    """
    scale, at_edge = 1.0, False
    if scaling is not None:
        if not scales or not all(0 < scale < math.inf for scale in scales):
            raise ArgumentError("scales", list(scales), "positive numbers")
        x, y = scaling
        scores = {}
        for scale in scales:
            outputs = outputs_of(rescaled(weights, scale, center), x)
            if scale_by == "accuracy":
                scores[scale] = _accuracy(likelihood, outputs, y)
            else:
                scores[scale] = float(marginal_log_densities(likelihood, outputs, y).mean())
        scale = max(scores, key=lambda scale: (scores[scale], scale))
        at_edge = scale in (min(scores), max(scores))
        weights = rescaled(weights, scale, center)
    x, y = held_out
    outputs = outputs_of(weights, x)
    marginal = float(marginal_log_densities(likelihood, outputs, y).mean())
    joint = joint_log_density(likelihood, outputs, y)
    draws = len(outputs)
    if joint.effective_draws < min(_FEWEST_DRAWS, draws):
        warnings.warn(
            f"{joint.effective_draws:.1f} of {draws} draws have nearly all the weight in the joint "
            "density: it is at least the value given. Take more draws, or a smaller scale.",
            stacklevel=callers_level(),
        )
    return SampledConditional(joint, marginal, scale, len(y), at_edge)


def _accuracy(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> float:
    """Share of points whose class is the likeliest of the mean over draws."""
    if isinstance(likelihood, GaussianLikelihood):
        expected = "a likelihood of classes"
        raise UnsupportedError("scale_by", "'accuracy' in regression", expected, "Use 'density'.")
    densities = [
        marginal_log_densities(likelihood, outputs, torch.full_like(target, label))
        for label in range(max(2, outputs.shape[-1]))
    ]
    return float((torch.stack(densities).argmax(0) == target).double().mean())


@torch.no_grad()
@checked
def laplace_conditional_log_density(
    evidence: LaplaceEvidence, held_out: tuple[Tensor, Tensor], *, scale: float = 1.0
) -> float:
    r"""The CLML of a network by Laplace's method, without draws, in nats.

    .. math:: \log p(\mathcal D_h \mid w_* + \Delta) - \tfrac12 \Delta^\top A \Delta
        - \tfrac12 \log \frac{|A + H_h|}{|A|}, \qquad A = (H + P_0) / c

    in the network that is linear in its weights, where L-BFGS finds the :math:`\Delta` that
    maximizes the first two terms. It is the difference of the Laplace evidences of all points and
    of those seen (Lotfi et al. 2022, Eq. 6), and exact for a full curvature in a linear regression.
    Use it if single draws have all the weight in a joint density, for example with hundreds of
    held-out points. It is too small if the posterior is so wide that the density is not Gaussian in
    the weights.

    Args:
        evidence: Evidence of the points seen, from
            :meth:`gpclml.mlls.LaplaceMarginalLogLikelihood.evidence_of`.
        held_out: Points and targets that the network has not seen.
        scale: Factor c of the posterior's covariance.

    Returns:
        The log density of all held-out targets together, given those seen.

    Raises:
        ArgumentError: The scale is not positive.
        ShapeError: The network does not take the points, or targets do not fit.
        UnsupportedError: The evidence is not of all points and outputs, or its structure does not
            support posteriors or sums.
    """
    check_positive(scale=scale)
    evidence.check_whole()
    mll = evidence.mll
    likelihood = output_likelihood(cast(Likelihood, mll.likelihood))
    model = cast(LinearizedNetwork, mll.model)
    precisions, factor = model.prior.precisions(), float(evidence.curvature_scale())
    x, target = model.points(held_out[0]), held_out[1]
    shapes = {name: p.shape for name, p in model.network.named_parameters() if p.requires_grad}
    weights = [model.network.get_parameter(name) for name in shapes]
    with torch.enable_grad():
        outputs = model(held_out[0]).mean
    covariance = evidence.curvature.output_covariance(precisions, factor)
    sizes = [shape.numel() for shape in shapes.values()]

    def named(flat: Tensor) -> dict[str, Tensor]:
        parts = zip(shapes.items(), flat.split(sizes), strict=True)
        return {name: part.reshape(1, 1, *shape) for (name, shape), part in parts}

    def solve(flat: Tensor) -> Tensor:
        """The inverse of A times a vector: the gradient of half a quadratic form."""
        rows = {name: part.requires_grad_() for name, part in named(flat).items()}
        with torch.enable_grad():
            half = 0.5 * scale * covariance(rows).sum()
        return _flat(torch.autograd.grad(half, list(rows.values()), materialize_grads=True))

    def linear_at(change: Tensor) -> Tensor:
        """Linear outputs at a change of the weights."""
        moved = {
            name: p + part[0]
            for p, (name, part) in zip(weights, named(change).items(), strict=True)
        }
        return linearized_outputs(model.network, moved, x)[0]

    def fit(linear: Tensor) -> tuple[float, Tensor]:
        """The log density of the targets, and its gradient in the weights."""
        with torch.enable_grad():
            leaf = linear.detach().requires_grad_()
            value = likelihood.log_density(leaf, target).double().sum() / mll.temperature
        (slope,) = torch.autograd.grad(value, leaf)
        gradients = torch.autograd.grad(
            outputs, weights, slope, retain_graph=True, materialize_grads=True
        )
        return float(value), _flat(gradients)

    best, linear = _maximum(fit, linear_at, solve, outputs)
    columns = scale**0.5 * mll.columns(linear, target)
    both = evidence.curvature + mll.curvature.of(model.network, x, lambda _: columns)
    return best - 0.5 * float(both.log_det_ratio(precisions, factor) - evidence.log_det_ratio())


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def _maximum(
    fit: Callable[[Tensor], tuple[float, Tensor]],
    linear_at: Callable[[Tensor], Tensor],
    solve: Callable[[Tensor], Tensor],
    outputs: Tensor,
) -> tuple[float, Tensor]:
    r"""The largest :math:`l(f + J \Delta) - \Delta^\top A \Delta / 2`, and the outputs there.

    L-BFGS whose first metric is A, on :math:`u = A \Delta`, since A itself is not at hand.
    """
    linear = outputs.detach()
    value, gradient = fit(linear)
    dual = change = torch.zeros_like(gradient)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []  # of u, of the change, of the slope
    for _ in range(_STEPS):
        slope = gradient - dual
        new_dual, factors = slope, []
        for _, d_change, d_slope in reversed(steps):
            factors.append((d_change @ new_dual) / (d_change @ d_slope))
            new_dual = new_dual - factors[-1] * d_slope
        new_change = solve(new_dual)
        for (d_dual, d_change, d_slope), factor in zip(steps, reversed(factors), strict=True):
            more = factor - (d_slope @ new_change) / (d_change @ d_slope)
            new_dual, new_change = new_dual + more * d_dual, new_change + more * d_change
        gain, t = float(slope @ new_change), 1.0
        if not gain > _GAIN:
            break
        moved = linear_at(change + new_change) - linear  # outputs are linear in the change
        while t > 1e-6:
            found, gradient = fit(linear + t * moved)
            penalty = 0.5 * float((dual + t * new_dual) @ (change + t * new_change))
            if found - penalty >= value + 1e-4 * t * gain:
                break
            t /= 2
        else:
            break
        dual, change, linear = dual + t * new_dual, change + t * new_change, linear + t * moved
        value = found - penalty
        difference = slope - (gradient - dual)
        if float(difference @ new_change) > 0:
            steps = [*steps[-_REMEMBERED + 1 :], (t * new_dual, t * new_change, difference)]
    return value, linear


@torch.no_grad()
def _log_densities(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> Tensor:
    """Log densities of each target at each draw, ``(S, N)``, in float64."""
    count, n = outputs.shape[:2]
    every = target.repeat(count, *[1] * (target.ndim - 1))
    densities = output_likelihood(likelihood).log_density(outputs.flatten(0, 1), every)
    return densities.reshape(count, n).double()
