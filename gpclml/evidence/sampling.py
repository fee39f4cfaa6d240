"""Draws of a network's weights, its outputs at draws, and log densities as means over draws."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from gpclml._utils.arguments import (
    all_finite,
    callers_level,
    check_counts,
    check_placement,
    check_positive,
    checked,
    seeded,
)
from gpclml._utils.environment import progress_bar
from gpclml.conditioning.batches import Loader, Points, TrainingBatches, points_of
from gpclml.curvature import OuterProducts, output_gradients
from gpclml.curvature.output_likelihoods import output_likelihood
from gpclml.curvature.structure import (
    call_with,
    check_mode,
    fresh_parameters,
    twice_differentiable,
)
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError
from gpclml.mlls import LaplaceEvidence, LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

__all__ = [
    "Estimate",
    "SampledConditional",
    "SampledDensity",
    "estimate_conditional_log_density",
    "joint_log_density",
    "laplace_conditional_log_density",
    "linearized_outputs",
    "log_mean",
    "marginal_log_densities",
    "rescaled",
    "sample_sgld",
    "sampled_outputs",
]

SCALES = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Scales of a posterior's covariance that are tried if none are given."""

Weights = Mapping[str, Tensor]
OutputsOf = Callable[[Weights, Tensor], Tensor]

_FEWEST_DRAWS = 5  # effective ones, below which a joint density is that of the best few draws
_NUMBERS = 2**24  # of gradients in memory at a time
_POINTS = 256  # of a loader at a time
_STEPS, _REMEMBERED = 60, 20  # of L-BFGS
_GAIN = 1e-5  # nats that a further step has to promise


@dataclass(frozen=True)
class Estimate:
    """An estimate and its standard error.

    Attributes:
        value: The estimate, in nats in all.
        standard_error: Standard error of the value; infinite for a single repetition or chain.
    """

    value: float
    standard_error: float


@dataclass(frozen=True)
class SampledDensity(Estimate):
    """The log of a mean density over draws, with its Monte Carlo error.

    Its standard error, from the spread over draws (to first order), is far too small if few draws
    dominate the mean.

    Attributes:
        effective_draws: Number of draws of equal weight with the same error, from 1 to S.
    """

    effective_draws: float


@checked(log_values="float (S,)")
def log_mean(log_values: Tensor) -> SampledDensity:
    r"""The log of the mean of densities given by their logs, in nats.

    .. math:: \log \frac1S \sum_s e^{\ell_s}

    The standard error is that of the mean divided by the mean (to first order), from the spread of
    the terms. The number of effective draws is :math:`(\sum_s u_s)^2 / \sum_s u_s^2` with
    :math:`u_s = e^{\ell_s}`.

    Args:
        log_values: Logs :math:`\ell_s`, ``(S,)``; minus infinity for a term of zero.

    Returns:
        The estimate, its standard error (infinite for one draw) and the effective draws.

    Raises:
        ShapeError: There are no draws, or not one number for each draw.
        NonFiniteError: A log is NaN or plus infinity, or all are minus infinity.
    """
    log_values = log_values.double()
    count = len(log_values)
    value = float(torch.logsumexp(log_values, dim=0)) - math.log(count)
    if not math.isfinite(value):
        expected = "no NaN, none plus infinity, not all minus infinity"
        raise NonFiniteError("log_values", f"a log mean of {value}", expected)
    weights = torch.softmax(log_values, dim=0)
    effective = 1 / float(weights.square().sum())
    spread = float((count * weights).std()) if count > 1 else math.inf
    return SampledDensity(value, spread / math.sqrt(count), effective)


def mean_estimate(totals: Tensor) -> Estimate:
    """The mean of independent values ``(r,)``, with its error."""
    spread = float(totals.std()) if len(totals) > 1 else math.inf
    return Estimate(float(totals.mean()), spread / math.sqrt(len(totals)))


@checked(train_x="(N, *event)", train_y="(N, *outputs)")
def sample_sgld(
    mll: LaplaceMarginalLogLikelihood,
    train_x: Tensor | Loader,
    train_y: Tensor | None = None,
    *,
    count: int = 20,
    epochs: int = 20,
    batch_size: int | None = None,
    lr: float = 1e-3,
    seed: int = 0,
    progress: bool | None = None,
) -> dict[str, Tensor]:
    r"""Draws from the posterior of the weights by Langevin dynamics with a falling step.

    .. math:: w \leftarrow w + \epsilon \nabla \frac1N \log p(w, \mathcal D)
        + \sqrt{2 \epsilon / N}\, \xi, \qquad
        \epsilon_k = \frac{\epsilon_0}2 \Big[\cos\Big(\pi \frac{k}{M}\Big) + 1\Big]

    with the gradient of a mini-batch (Welling and Teh 2011) and M steps, a cycle of Zhang et al.
    (2020, Eq. 1). Draws are taken evenly over the steps, so that the network should begin at its
    mode. With smaller steps the draws follow the posterior more exactly and are more correlated.

    Args:
        mll: The objective, whose :meth:`~gpclml.mlls.LaplaceMarginalLogLikelihood.log_joint` is
            the density; its hyperparameters stay fixed. The network ends with the last weights.
        train_x: Points, ``(N, *event)``; or a ``DataLoader`` of pairs of points and targets.
        train_y: Their targets; None with a loader.
        count: Number S of draws.
        epochs: Passes over the data.
        batch_size: Points of a batch of tensors; all if None.
        lr: The largest step :math:`\epsilon_0`, per point: N times what it is for the total.
        seed: Seed of the batches and the noise.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        Weights by name, ``(S, *shape)``.

    Raises:
        ArgumentError: A number is out of range, ``num_data`` is another, or a loader gives
            nothing or no pairs.
        ShapeError: The numbers of points and targets differ.
        NonFiniteError: Data are not finite, or the weights diverged.
    """
    check_counts(count=count, epochs=epochs, batch_size=batch_size)
    check_positive(lr=lr)
    generator, model = seeded(seed), cast(LinearizedNetwork, mll.model)
    device = next(iter(model.network.parameters())).device
    data = TrainingBatches(
        train_x, train_y, mll.num_data, batch_size=batch_size, generator=generator, device=device
    )
    steps = epochs * len(data)
    if count > steps:
        suggestion = "Take more epochs, or batches."
        raise ArgumentError("count", count, f"at most {steps}, one a step", suggestion)
    trained = {name: p for name, p in model.network.named_parameters() if p.requires_grad}
    kept = {steps - 1 - (steps * i) // count for i in range(count)}
    batches = itertools.chain.from_iterable(itertools.repeat(data))  # a pass after the other
    draws: list[dict[str, Tensor]] = []
    for k in progress_bar(range(steps), desc="SGLD", progress=progress):
        step = lr / 2 * (math.cos(math.pi * k / steps) + 1)
        x, y = next(batches)
        value = mll.log_joint(model(x), y)
        gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        deviation = math.sqrt(2 * step / mll.num_data)
        with torch.no_grad():
            for p, gradient in zip(trained.values(), gradients, strict=True):
                if gradient is not None:
                    p.add_(gradient, alpha=step)
                p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=deviation)
        if k in kept:
            draws.append({name: p.detach().clone() for name, p in trained.items()})
            for name, values in draws[-1].items():
                if not all_finite(values):
                    raise NonFiniteError("weights", name, "finite values", "Lower lr.")
    return {name: torch.stack([draw[name] for draw in draws]) for name in trained}


@checked
def rescaled(
    weights: Mapping[str, Tensor], scale: float, center: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Scales draws around their center, so that their covariance is multiplied by a number.

    Args:
        weights: Draws by name, ``(S, *shape)``.
        scale: The number.
        center: Weights that the draws are scaled around, by name; their mean if None.

    Returns:
        The scaled draws.

    Raises:
        ArgumentError: The scale is negative, or the center has other names.
        ShapeError: A center has another shape than the draws.
    """
    if not 0 <= scale < math.inf:
        raise ArgumentError("scale", scale, "a number of at least 0")
    if center is not None and center.keys() != weights.keys():
        expected = f"{', '.join(weights)}, as the draws"
        raise ArgumentError("center", ", ".join(center) or "nothing", expected)
    scaled = {}
    for name, draws in weights.items():
        if not draws.is_floating_point() or draws.ndim == 0 or len(draws) == 0:
            got = f"{draws.dtype} of shape {tuple(draws.shape)}"
            raise ShapeError(f"weights[{name!r}]", got, "real numbers (S, *shape)")
        middle = draws.mean(0) if center is None else center[name]
        check_placement(f"center[{name!r}]", middle, draws, "the draws")
        if middle.shape != draws.shape[1:]:
            expected = f"{tuple(draws.shape[1:])}, as each draw"
            raise ShapeError(f"center[{name!r}]", tuple(middle.shape), expected)
        scaled[name] = middle + scale**0.5 * (draws - middle)
    return scaled


@torch.no_grad()
@checked(passes_on="x", x="(N, *event)")
def sampled_outputs(network: torch.nn.Module, weights: Weights, x: Points) -> Tensor:
    """The network's outputs with each draw of weights in turn.

    The weights of an ensemble of networks, ``torch.func.stack_module_state(networks)[0]``, are
    draws that explore modes where a Laplace posterior explores one (Lakshminarayanan et al. 2017).

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``; parameters without draws keep their values.
        weights: Draws by name, ``(S, *shape)``, as
            :meth:`gpclml.mlls.LaplaceEvidence.sample_weights` gives them.
        x: Points, ``(N, *event)``; or a ``DataLoader`` of points, or of pairs that begin with
            them.

    Returns:
        Outputs, ``(S, N, C)``.

    Raises:
        ShapeError: The draws' names or shapes are not those of the network's parameters.
        ModelModeError: Dropout or batch normalization is in train mode.
    """
    _check_weights(network, weights)
    count = len(next(iter(weights.values())))
    draws = [{name: values[s] for name, values in weights.items()} for s in range(count)]

    def outputs(points: Tensor) -> Tensor:
        return torch.stack([call_with(network, draw, points) for draw in draws])

    return _over_points(outputs, network, x)


@checked(passes_on="x", x="(N, *event)")
def linearized_outputs(network: torch.nn.Module, weights: Weights, x: Points) -> Tensor:
    r"""Outputs of the network made linear around its weights, :math:`f + J (w - w_*)`.

    The Gauss-Newton Laplace posterior is that of the linear model (Immer et al. 2021), in which
    draws far from the mode do not leave the region where the curvature holds.

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``, with the weights around which it is linear.
        weights: Draws by name, ``(S, *shape)``.
        x: As for :func:`sampled_outputs`, as are errors.

    Returns:
        Outputs, ``(S, N, C)``; differentiable in points that require a gradient.

    Note:
        By the gradients of all C outputs at each point, which all draws share; of no more draws
        than outputs by a derivative for each draw.
    """
    _check_weights(network, weights)
    away = {name: draws - network.get_parameter(name).detach() for name, draws in weights.items()}
    count = len(next(iter(away.values())))
    is_frozen = not all(network.get_parameter(name).requires_grad for name in weights)

    def outputs(points: Tensor) -> Tensor:
        with torch.set_grad_enabled(points.requires_grad):
            center = call_with(network, fresh_parameters(network), points)
            if is_frozen or count <= center.shape[-1]:
                try:
                    return center + _changes_by_draw(network, away, points)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:  # a layer whose gradients have no derivative
                    if is_frozen:
                        raise
            return center + _changes_by_output(network, away, points)

    return _over_points(outputs, network, x)


def _over_points(
    outputs: Callable[[Tensor], Tensor], network: torch.nn.Module, x: Points
) -> Tensor:
    """Outputs ``(S, N, C)`` at a tensor of points, or at those of a loader in chunks."""
    if isinstance(x, Tensor):
        return outputs(x)
    chunks = points_of("x", x, _POINTS, next(iter(network.parameters())).device)
    return torch.cat([outputs(points) for points in chunks], 1)


def _changes_by_draw(network: torch.nn.Module, away: Weights, x: Tensor) -> Tensor:
    """J times each change of weights, ``(S, N, C)``: gradients Jᵀu differentiated in u."""
    count = len(next(iter(away.values())))
    center = {name: network.get_parameter(name).detach().requires_grad_() for name in away}
    with torch.enable_grad(), twice_differentiable(network, True):
        outputs = call_with(network, center, x)
        if not outputs.requires_grad:
            return outputs.new_zeros(count, *outputs.shape)
        # Jᵀu is linear in u, so that its derivative times a change of weights is J times it. Unlike
        # torch.func.jvp this needs no rule for forward derivatives, which recurrent layers lack.
        u = torch.zeros_like(outputs, requires_grad=True)
        gradients = torch.autograd.grad(
            outputs, list(center.values()), u, create_graph=True, allow_unused=True
        )
        used = {name: g for name, g in zip(away, gradients, strict=True) if g is not None}
        changes = []
        for s in range(count):
            draw = [away[name][s] for name in used]
            changes += torch.autograd.grad(
                list(used.values()), u, draw, retain_graph=True, create_graph=x.requires_grad
            )
    return torch.stack(changes)


def _changes_by_output(network: torch.nn.Module, away: Weights, x: Tensor) -> Tensor:
    """J times each change of weights, ``(S, N, C)``, from the gradients of all outputs."""
    # Numbers in memory for a point: gradients, or of plain layers what draws make of its inputs.
    numbers = 0
    for name, rows in output_gradients(network, x[:2]).items():
        if isinstance(rows, OuterProducts):
            numbers += len(away.get(name, ())) * rows.gradients.shape[-1]
        else:
            numbers += rows[0].numel()
    chunks = []
    for points in x.split(max(2, _NUMBERS // max(1, numbers))):
        gradients = output_gradients(network, points)
        change = torch.zeros((), dtype=x.dtype, device=x.device)
        for name, draws in away.items():
            rows = gradients[name]
            if isinstance(rows, OuterProducts):
                moved = torch.einsum("soi,ni->nso", draws.flatten(2), rows.inputs.flatten(1))
                change = change + torch.einsum("nco,nso->snc", rows.gradients, moved)
            else:
                change = change + torch.einsum("ncp,sp->snc", rows.flatten(2), draws.flatten(1))
        chunks.append(change)
    return torch.cat(chunks, 1)


def _check_weights(network: torch.nn.Module, weights: Weights) -> None:
    """Refuses draws of other names or shapes than the network's parameters, and train mode."""
    check_mode(network)
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    every = f"draws of {', '.join(shapes)}"
    if not weights:
        raise ShapeError("weights", "no parameter", every)
    for name, value in weights.items():
        if tuple(value.shape[1:]) != shapes.get(name):
            expected = f"(S, {', '.join(map(str, shapes[name]))})" if name in shapes else every
            raise ShapeError("weights", f"{name} of shape {tuple(value.shape)}", expected)
    counts = {name: len(value) for name, value in weights.items()}
    if len(set(counts.values())) > 1:
        raise ShapeError("weights", f"numbers of draws {counts}", "the same number of each")


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

    Arguments and errors, but for the last, are those of :func:`joint_log_density`.

    Returns:
        Nats, ``(N,)``.
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
        scale_at_edge: Whether the scale is the smallest or the largest that was tried. At the
            smallest the draws are nearly their center, and the density is that of a validation
            loss.
    """

    joint: SampledDensity
    marginal: float
    scale: float
    num_held_out: int
    scale_at_edge: bool = False


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
    scale, is_edge = 1.0, False
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
        is_edge = scale in (min(scores), max(scores))
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
    return SampledConditional(joint, marginal, scale, len(y), is_edge)


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
        """The numbers of each parameter, ``(1, 1, *shape)``."""
        vectors = zip(shapes.items(), flat.split(sizes), strict=True)
        return {name: vector.reshape(1, 1, *shape) for (name, shape), vector in vectors}

    def solve(flat: Tensor) -> Tensor:
        """The inverse of A times a vector: the gradient of half a quadratic form."""
        rows = {name: values.requires_grad_() for name, values in named(flat).items()}
        with torch.enable_grad():
            half = 0.5 * scale * covariance(rows).sum()
        return _flat(torch.autograd.grad(half, list(rows.values()), materialize_grads=True))

    def linear_at(change: Tensor) -> Tensor:
        """Linear outputs at a change of the weights."""
        changes = named(change).items()
        moved = {name: p + c[0] for p, (name, c) in zip(weights, changes, strict=True)}
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
    # The ratio of determinants for all points, with the curvature of new ones at the maximum, less
    # that for those seen: the prior's determinant cancels.
    columns = scale**0.5 * mll.columns(linear, target)
    both = evidence.curvature + mll.curvature.of(model.network, x, lambda _: columns)
    return best - 0.5 * float(both.log_det_ratio(precisions, factor) - evidence.log_det_ratio())


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers in one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


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
        # The two loops of L-BFGS (Nocedal and Wright 2006, Algorithm 7.4); solving with A takes the
        # place of a multiple of the identity, and products with it are carried along.
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
        # Armijo's condition: halving is enough, since the objective is concave along the line.
        while t > 1e-6:
            density, gradient = fit(linear + t * moved)
            penalty = 0.5 * float((dual + t * new_dual) @ (change + t * new_change))
            if density - penalty >= value + 1e-4 * t * gain:
                break
            t /= 2
        else:
            break
        dual, change, linear = dual + t * new_dual, change + t * new_change, linear + t * moved
        value = density - penalty
        difference = slope - (gradient - dual)
        # Only positive curvature keeps the metric positive definite.
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
