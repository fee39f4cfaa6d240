"""Searches of the Laplace evidence that do not depend on the units of the targets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
)
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from gpclml.curvature import GaussianWeightPrior
from gpclml.curvature.output_likelihoods import output_likelihood
from gpclml.likelihoods import HeteroscedasticGaussianLikelihood
from gpclml.mlls import LaplaceEvidence

_FLOOR = 1e-10  # least noise, of the variance of the targets
_UPSTREAMS_FLOOR = 1e-4  # that of GPyTorch, in units of the targets
_NEAR_BOUND = 0.01  # distance from a bound, where a transform is flat and has no way back
_FURTHEST = 30.0  # logarithm of the factor by which a search may move a hyperparameter
_LEAST_SLOPE = 0.1  # nats by an e-fold of a hyperparameter, below which nothing is left to gain
_ROUNDINGS = 100  # of a sum over points, that its slope may have
_UNLIKE = 30.0  # factor between the sizes of outputs and targets that have the same units
_EXPLAINED = 1e-3  # of the targets' variance, below which outputs say nothing about them
_ERRORS = 1.5  # standard errors by which labels must tell logits
_UNEQUAL = 3.0  # factor between the residuals of outputs that share one noise


class LogNoise:
    """The logarithm of a regression's noise, which is trained in place of the parameter.

    GPyTorch's own parameter is the noise itself where that is above one, so that steps of any
    search depend on the units of the targets. Of a noise for each output it is that of their mean:
    ratios stay as they are. ``parameter`` is the likelihood's own, ``leaf`` the logarithm.
    """

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = module, name
        self.parameter: torch.nn.Parameter = getattr(module, f"raw_{name}")
        self.leaf: torch.nn.Parameter = torch.nn.Parameter(self.parameter.detach()[:1].clone())
        self.read()

    @classmethod
    def of(cls, likelihood: Any) -> LogNoise | None:
        """That of a likelihood; None where there is no noise, or it is frozen."""
        module, name = likelihood, "noise"
        if isinstance(likelihood, GaussianLikelihood):
            module = likelihood.noise_covar
        elif isinstance(likelihood, MultitaskGaussianLikelihood):
            name = "task_noises"
        raw = getattr(module, f"raw_{name}", None)
        return cls(module, name) if raw is not None and raw.requires_grad else None

    @property
    def noise(self) -> Tensor:
        """The likelihood's noise; of several outputs that of each."""
        return getattr(self._module, self._name)

    @property
    def _constraint(self) -> Any:
        return getattr(self._module, f"raw_{self._name}_constraint")

    @property
    def bounds(self) -> tuple[float, float]:
        """Logarithms of the least and the largest noise that the likelihood takes."""
        constraint, ratios = self._constraint, self._ratios
        low = float(constraint.lower_bound.max() / ratios.min())
        high = float(constraint.upper_bound.min() / ratios.max())
        least = math.log(low * (1 + _NEAR_BOUND)) if low > 0 else -math.inf
        return least, math.log(high * (1 - _NEAR_BOUND)) if high < math.inf else math.inf

    @torch.no_grad()
    def read(self) -> None:
        """Takes the noise from the likelihood."""
        noise = self.noise.detach()
        self.leaf.copy_(noise.mean().log())
        self._ratios = noise / noise.mean()

    @torch.no_grad()
    def write(self, log_noise: float | None = None) -> None:
        """Gives the noise to the likelihood, within its bounds; another one if that is given."""
        if log_noise is not None:
            self.leaf.fill_(log_noise)
        setattr(self._module, self._name, self.leaf.clamp(*self.bounds).exp() * self._ratios)

    @torch.no_grad()
    def take(self, noise: Tensor) -> None:
        """Gives each output a noise of its own."""
        low, high = (getattr(self._constraint, f"{end}_bound") for end in ("lower", "upper"))
        setattr(self._module, self._name, noise.clamp(low * (1 + _NEAR_BOUND) + 1e-300, high))
        self.read()

    @torch.no_grad()
    def scale_floor(self, target: Tensor) -> None:
        """Makes GPyTorch's least noise, which is a number in any units, relative to the targets.

        A constraint that was chosen by the caller stays.
        """
        constraint = self._constraint
        if type(constraint) is not GreaterThan or not constraint.enforced:
            return
        bound = constraint.lower_bound
        if abs(float(bound.max()) / _UPSTREAMS_FLOOR - 1) > 1e-6:
            return
        values = target.double().reshape(-1, self.noise.numel())
        spread, square = (values - values.mean(0)).square().mean(0), values.square().mean(0)
        noise = self.noise.clone()
        # Of several outputs by the one of the smallest targets.
        least = min((s or q or 1.0) for s, q in zip(spread.tolist(), square.tolist(), strict=True))
        bound.fill_(max(_FLOOR * least, 1e-30))
        self.take(noise)


def gradients_of(value: Tensor, leaves: Sequence[Tensor], noise: LogNoise | None) -> list[Tensor]:
    """Gradients in parameters, and in the logarithm of the noise in place of the noise."""
    parameters = [noise.parameter if noise and leaf is noise.leaf else leaf for leaf in leaves]
    gradients = list(torch.autograd.grad(value, parameters, materialize_grads=True))
    for index, leaf in enumerate(leaves):
        if noise and leaf is noise.leaf:
            # By the chain rule, with the slope of the likelihood's own transform.
            with torch.enable_grad():
                log_noise = noise.noise.log().sum()
            (slope,) = torch.autograd.grad(log_noise, noise.parameter)
            slope = slope.clamp_min(torch.finfo(slope.dtype).tiny)
            gradients[index] = (gradients[index] / slope).sum().reshape(leaf.shape)
    return gradients


def noise_and_residual(
    likelihood: Likelihood, outputs: Tensor, target: Tensor
) -> tuple[LogNoise | None, float]:
    """The noise, and the mean squared residual, near which it is where weights are trained."""
    noise = LogNoise.of(likelihood)
    if noise is None:
        return None, 0.0
    noise.scale_floor(target)
    residual = target.reshape(outputs.shape) - outputs.detach()
    return noise, float(residual.double().square().mean())


@torch.no_grad()
def take_ratios(
    likelihood: Likelihood,
    network: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    keep_mean: bool = True,
) -> None:
    """Gives the outputs noises in the ratios of their mean squared residuals, in one pass.

    Curvature depends on these ratios, so that they come before it. Where there is one noise for all
    outputs, or it is frozen, nothing is done.
    """
    noise = LogNoise.of(likelihood)
    if noise is None or not isinstance(likelihood, MultitaskGaussianLikelihood):
        return
    pairs = [(network(x), y) for x, y in batches]
    outputs, targets = (torch.cat(values) for values in zip(*pairs, strict=True))
    if outputs.shape != targets.shape:  # the objective refuses them
        return
    noise.scale_floor(targets)
    squares = (targets.double() - outputs.double()).square().mean(0)
    if float(squares.min()) > 0:
        mean = noise.noise.double().mean() if keep_mean else squares.mean()
        noise.take((squares * mean / squares.mean()).to(noise.parameter))


@torch.no_grad()
def start_from_residuals(evidence: LaplaceEvidence) -> None:
    r"""Moves noise and precisions to where a search of the evidence starts in any units.

    That is the mean squared residual for the noise, and :math:`P_g / |w_g|^2` for the precision of
    a group of :math:`P_g` weights, the most likely one under the prior. The start with the largest
    evidence is taken: the hyperparameters as they are, with this noise, or with these precisions
    too. Nothing is moved for likelihoods of classes, which have no units.
    """
    if not output_likelihood(evidence.mll.likelihood).regression:
        return
    noise, size = noise_and_residual(evidence.mll.likelihood, *evidence.seen)
    if noise is not None and size == 0:
        return
    model = evidence.mll.model
    precision = model.prior.log_precision
    current = None if noise is None else float(noise.leaf)
    residual = None if noise is None else math.log(size)
    starts = [(current, precision.clone()), (residual, precision.clone())]
    if precision.requires_grad:
        starts.append((residual, _most_likely(model.prior, model.network)))

    def move(log_noise: float | None, log_precision: Tensor) -> None:
        if noise is not None:
            noise.write(log_noise)
        precision.copy_(log_precision)

    def value(start: tuple[float | None, Tensor]) -> float:
        move(*start)
        with suppress(NanError, NotPSDError):
            if math.isfinite(nats := float(evidence.nats())):
                return nats
        return -math.inf

    move(*max(starts, key=value))


def _most_likely(prior: GaussianWeightPrior, network: torch.nn.Module) -> Tensor:
    """Logarithms of the precisions under which the prior density of the weights is largest."""
    counts, squares = torch.zeros(2, len(prior.groups), dtype=torch.float64)
    for name, weight in prior.deviations(network).items():
        counts[prior.group_of[name]] += weight.numel()
        squares[prior.group_of[name]] += weight.detach().double().square().sum().cpu()
    precisions = prior.from_groups((counts / squares).log().to(prior.log_precision))
    return torch.where(precisions.isfinite(), precisions, prior.log_precision.detach())


def maximize_evidence(evidence: LaplaceEvidence) -> str:
    """Climbs the evidence of all points in the logarithms of precisions and noise.

    Those that are frozen stay. Returns what is wrong with its end and what to do, or nothing.
    """
    from scipy.optimize import minimize

    start_from_residuals(evidence)
    noise = LogNoise.of(evidence.mll.likelihood)
    precision = evidence.mll.model.prior.log_precision
    leaves = [precision] if precision.requires_grad else []
    leaves += [] if noise is None else [noise.leaf]
    if not leaves:
        return ""
    first = parameters_to_vector(leaves).detach().double().cpu()
    # A search of a flat evidence would go on to precisions that are no numbers.
    box = [(float(a) - _FURTHEST, float(a) + _FURTHEST) for a in first]
    if noise is not None:
        low, high = noise.bounds
        box[-1] = max(box[-1][0], low), min(box[-1][1], high)
    with torch.no_grad():
        start = float(evidence.nats())
    prior, has_priors = evidence.mll.model.prior, _has_priors(evidence.mll)

    def loss(values: Any) -> tuple[float, Any]:
        """Nats below the start, of which rounding does not grow with the units, and the slope."""
        # In double precision: a line search takes the rounding of parameters for a kink.
        point = torch.as_tensor(values).to(precision.device)
        numbers = [p.requires_grad_() for p in point.split([leaf.numel() for leaf in leaves])]
        with torch.no_grad():
            for leaf, given in zip(leaves, numbers, strict=True):
                leaf.copy_(given.reshape(leaf.shape))
        if noise is not None:
            noise.write()
        try:
            # A search may pass vague priors, of which rounding leaves no factor without a jitter.
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore", NumericalWarning)
                value = evidence.nats(
                    prior.named_precisions(numbers[0].exp()) if precision.requires_grad else None,
                    None if noise is None else numbers[-1].squeeze(0).exp(),
                )
                slope = torch.cat(torch.autograd.grad(value, numbers, retain_graph=has_priors))
                if has_priors:  # of the parameters themselves
                    slope += parameters_to_vector(gradients_of(value, leaves, noise))
        except (NanError, NotPSDError):
            return math.inf, numpy.zeros(len(values))
        return start - float(value.detach()), -slope.cpu().numpy()

    options = {"maxiter": 500, "ftol": 1e-9, "gtol": 1e-3}
    end: Any = minimize(
        loss, first.numpy(), jac=True, bounds=box, method="L-BFGS-B", options=options
    )
    (value, slope), (low, high) = loss(end.x), numpy.transpose(box)
    # A hyperparameter at a bound that pushes outwards has converged, too.
    held = (end.x <= low) & (slope > 0) | (end.x >= high) & (slope < 0)
    if noise is not None and held[-1]:
        return _bound_note(end.x[-1])
    left = numpy.abs(numpy.where(held, 0.0, slope)).max()
    # What is left of the slope may be the rounding of a sum over all points.
    rounding = _ROUNDINGS * torch.finfo(precision.dtype).eps * evidence.mll.num_data
    if not math.isfinite(value) or left > max(_LEAST_SLOPE, rounding):
        return (
            f"The evidence still climbs, by {left:.3g} nats by an e-fold of a hyperparameter. "
            "Give precision=, a number."
        )
    return ""


def _has_priors(mll: Any) -> bool:
    return any(True for _ in (*mll.named_priors(), *mll.added_loss_terms()))


def fit_noise_to_residuals(evidence: LaplaceEvidence) -> str:
    """Sets the noise to the mean squared residual, its most likely value at these weights.

    If a prior is registered, it is set to where the evidence of all points is largest instead.
    Returns what is wrong with it and what to do, or nothing.
    """
    noise, size = noise_and_residual(evidence.mll.likelihood, *evidence.seen)
    if noise is None:
        return ""
    mll = evidence.mll
    if _has_priors(mll):  # they count too
        precision = mll.model.prior.log_precision
        precision.requires_grad_(False)
        told = maximize_evidence(evidence)
        precision.requires_grad_(True)
        return told
    (low, high), log_size = noise.bounds, math.log(size) if size > 0 else -math.inf
    noise.write(min(max(log_size, low), high))
    return "" if low <= log_size <= high or size == 0 else _bound_note(float(noise.leaf.detach()))


def _bound_note(log_noise: float) -> str:
    return (
        f"The noise ended at a bound of the likelihood, {math.exp(log_noise):.3g}. Give a "
        "noise constraint in the units of the targets, or none."
    )


@torch.no_grad()
def told_of_scales(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> str:
    """What is wrong between the sizes of outputs, ``(N, C)``, and targets; empty if nothing is."""
    if not output_likelihood(likelihood).regression:  # targets of others have no units
        return ""
    heteroscedastic = isinstance(likelihood, HeteroscedasticGaussianLikelihood)
    outputs = (outputs[:, :1] if heteroscedastic else outputs).double()
    target = target.reshape(outputs.shape).double()
    squared = (target - outputs).square().mean(0)
    explained = 1 - float(squared.sum() / (target - target.mean(0)).square().mean(0).sum())
    sizes = [float(values.square().mean().sqrt()) for values in (outputs, target)]
    ratio = sizes[0] / sizes[1] if sizes[1] else math.inf
    if not explained >= _EXPLAINED and not 1 / _UNLIKE < ratio < _UNLIKE:
        return (
            f"The network's outputs have a root mean square of {sizes[0]:.3g} and the targets one "
            f"of {sizes[1]:.3g}: they are not in the same units, or the network is not trained. "
            "Standardize the targets before training, and give the same ones here."
        )
    least, largest = (float(square) ** 0.5 for square in squared.aminmax())
    if isinstance(likelihood, MultitaskGaussianLikelihood) or largest <= _UNEQUAL * least:
        return ""
    return (
        f"Residuals of the outputs have deviations from {least:.3g} to {largest:.3g}, and one "
        "noise for all. Standardize each target, or "
        "give MultitaskGaussianLikelihood(num_tasks, has_global_noise=False)."
    )


@torch.no_grad()
def told_of_link(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> str:
    """Whether zeros and ones say that outputs, ``(N, 1)``, under a probit are logits, or nothing.

    Weights that were trained under a probit have outputs of which it makes the labels likelier than
    the logistic function does.
    """
    if not isinstance(likelihood, BernoulliLikelihood) or len(outputs) < 2:
        return ""
    margin = (2 * target.double() - 1) * outputs[:, 0].double()
    logistic, probit = torch.nn.functional.logsigmoid(margin), torch.special.log_ndtr(margin)
    gain = logistic - probit
    if float(gain.mean()) <= _ERRORS * float(gain.std()) / math.sqrt(len(gain)):
        return ""
    return (
        f"BernoulliLikelihood is a probit, under which these outputs have a log loss of "
        f"{-float(probit.mean()):.3g}; as logits they have {-float(logistic.mean()):.3g}. Give "
        '"classification" for a network that was trained with BCEWithLogitsLoss.'
    )
