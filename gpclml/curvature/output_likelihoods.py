"""The prior over a network's weights, and likelihoods as functions of its outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal, cast

import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Normal, StudentT
from typing_extensions import override

from gpclml._utils.arguments import check_finite, check_positive, checked, reads_are_free
from gpclml.curvature.structure import Precisions, layer_of, softmax_columns
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.likelihoods import HeteroscedasticGaussianLikelihood, LogisticLikelihood


class GaussianWeightPrior(torch.nn.Module):
    r"""Gaussian prior of weights, :math:`w \sim \mathcal N(\mu_0, P_0^{-1})`.

    Each group of weights has one precision. The logarithms of the precisions are parameters.

    Args:
        network: Network whose trainable parameters it is over.
        by: ``"network"`` for one precision, ``"layer"`` for one for each module, ``"parameter"``
            for one for each tensor, ``"weight"`` for one for each weight, which Kronecker factors
            do not take.
        precision: Start of all precisions.
        mean: The mean :math:`\mu_0` of all weights; or tensors by the names of parameters, such as
            the weights of a network that this one was fine-tuned from, 0 for those not named. Those
            of parameters that are not trained are left out.

    Raises:
        UnknownNameError: The grouping is not known.
        ArgumentError: The precision is not positive, no parameter is trainable, or a mean has the
            name of none.
        ShapeError: A mean does not fit its parameter.

    Examples:
        >>> from torch.nn import Linear, Sequential, Tanh
        >>> from gpclml import GaussianWeightPrior
        >>> network = Sequential(Linear(3, 9), Tanh(), Linear(9, 1))
        >>> prior = GaussianWeightPrior(network, by="layer", precision=10.0)
        >>> prior.precisions()["0.weight"].item()
        10.0
    """

    @checked
    def __init__(
        self,
        network: torch.nn.Module,
        by: Literal["network", "layer", "parameter", "weight"] = "layer",
        precision: float = 1.0,
        mean: float | Mapping[str, Tensor] = 0.0,
    ) -> None:
        super().__init__()
        check_positive(precision=precision)
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        if not trained:
            raise ArgumentError("network", "no trainable parameter", "at least one")
        group = {"network": lambda name: "", "layer": layer_of}.get(by, str)
        self.groups: tuple[str, ...] = tuple(dict.fromkeys(map(group, trained)))
        self.group_of = {name: self.groups.index(group(name)) for name in trained}
        # For each group how many precisions it has, and the shape of those of each parameter.
        self._shapes = {name: p.shape if by == "weight" else () for name, p in trained.items()}
        self._sizes = [p.numel() if by == "weight" else 1 for p in trained.values()]
        self.mean: float | Mapping[str, Tensor] = _checked_mean(mean, network)
        like = next(iter(trained.values()))
        dtype = torch.promote_types(like.dtype, torch.float32)
        count = sum(self._sizes) if by == "weight" else len(self.groups)
        start = torch.full((count,), math.log(precision), dtype=dtype)
        self.log_precision: torch.nn.Parameter = torch.nn.Parameter(start.to(like.device))

    def precisions(self) -> dict[str, Tensor]:
        """The precision of each parameter tensor by name: a number, or one for each weight."""
        return self.named_precisions(self.log_precision.exp())

    def named_precisions(self, values: Tensor) -> dict[str, Tensor]:
        """Precisions in the shape of ``log_precision`` by the name of each parameter."""
        per_weight = len(values) != len(self.groups)
        grouped = values.split(self._sizes) if per_weight else values
        return {name: grouped[g].reshape(self._shapes[name]) for name, g in self.group_of.items()}

    def deviations(self, network: torch.nn.Module) -> dict[str, Tensor]:
        """Differences of the network's weights from the mean, by name."""
        deviations, mean = {}, self.mean
        for name, p in network.named_parameters():
            if name in self.group_of:
                center = mean.get(name, 0.0) if isinstance(mean, Mapping) else mean
                deviations[name] = p - (center.to(p) if isinstance(center, Tensor) else center)
        return deviations

    def from_groups(self, values: Tensor) -> Tensor:
        """A number for each group as one for each precision, in the shape of ``log_precision``."""
        sizes = torch.tensor(self._sizes, device=values.device)
        whole = len(self.log_precision) == len(self.groups)
        return values if whole else values.repeat_interleave(sizes)

    def penalty(
        self,
        network: torch.nn.Module,
        precisions: Precisions | None = None,
        constant: bool = False,
    ) -> Tensor:
        r"""The quadratic form :math:`(w - \mu_0)^\top P_0 (w - \mu_0)` at the network's weights.

        Args:
            network: The network, or one with the same parameters.
            precisions: Other precisions, by name.
            constant: Whether the weights get no gradient.

        Returns:
            A number; differentiable in weights and precisions.
        """
        precisions = precisions or self.precisions()
        deviations, terms = self.deviations(network), []
        for name, precision in precisions.items():
            deviation = deviations[name].detach() if constant else deviations[name]
            squares = deviation.to(precision.dtype).square()
            terms.append((precision * (squares if precision.ndim else squares.sum())).sum())
        return torch.stack(terms).sum()


def _checked_mean(
    mean: float | Mapping[str, Tensor], network: torch.nn.Module
) -> float | Mapping[str, Tensor]:
    if not isinstance(mean, Mapping):
        check_finite("mean", torch.as_tensor(mean))
        return mean
    named = dict(network.named_parameters())
    for name, value in mean.items():
        if name not in named:
            raise ArgumentError("mean", repr(name), f"names of parameters, {', '.join(named)}")
        if value.shape not in ((), named[name].shape):
            expected = f"{tuple(named[name].shape)}, as the parameter"
            raise ShapeError(f"mean of {name}", tuple(value.shape), expected)
        check_finite("mean", value)
    return {k: v.detach().clone() for k, v in mean.items() if named[k].requires_grad}


_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_WORSE = 1.5  # times the log loss of frequencies, which shuffled labels of a sure network exceed


class OutputLikelihood(ABC):
    r"""Density of targets given a network's outputs, independent for each point.

    Its derivatives in the outputs are those of a core, which has no hyperparameters, times a scale.
    A density without hyperparameters is its own core.

    Attributes:
        moderation: The k with which predictions divide an output of variance v by
            :math:`\sqrt{1 + k v}`.
        regression: Whether targets are real numbers, which have units.
    """

    moderation: float = math.pi / 8
    regression: bool = False

    @abstractmethod
    def log_density(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Log density of each point, ``(N,)``."""

    @abstractmethod
    def columns(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Columns of S, as rows, with S Sᵀ the Hessian of the negative core, ``(N, K, C)``."""

    @abstractmethod
    def predictive(
        self,
        outputs: Tensor,
        covariance: Tensor,
        temperature: Tensor | float = 1.0,
        noise: Tensor | None = None,
    ) -> Distribution:
        r"""The distribution of targets where outputs are normal.

        A Gaussian and a probit likelihood have it in closed form. A softmax is taken of
        :math:`f / \sqrt{1 + \pi v / 8}` with the variances v (MacKay 1992), or averaged over draws.

        Args:
            outputs: Means of outputs, ``(N, C)``.
            covariance: Covariances of the outputs of each point, ``(N, C, C)``.
            temperature: Divisor T of outputs; of a Gaussian likelihood a factor of the noise.
            noise: Standard normal numbers from which outputs are drawn, ``(S, N, C)``; used by a
                softmax.

        Returns:
            ``Normal`` of shape ``(N,)`` or of several outputs ``(N, C)``, ``StudentT``,
            ``Categorical`` or ``Bernoulli``.
        """

    def core(self, outputs: Tensor, target: Tensor) -> Tensor:
        """The part of the log density that depends on outputs, divided by the scale, ``(N,)``."""
        return self.log_density(outputs, target)

    def scale(self) -> Tensor | float:
        """Factor of the core: the inverse noise variance of a Gaussian."""
        return 1.0


@checked
def output_likelihood(likelihood: Likelihood) -> OutputLikelihood:
    """The likelihood of a network's outputs that corresponds to one of GPyTorch.

    Args:
        likelihood: ``GaussianLikelihood``, ``MultitaskGaussianLikelihood`` of rank 0 without a
            global noise, ``StudentTLikelihood``, ``SoftmaxLikelihood`` without mixing weights or
            ``BernoulliLikelihood`` (probit) of GPyTorch, ``LogisticLikelihood`` or
            ``HeteroscedasticGaussianLikelihood`` of :mod:`gpclml.likelihoods`. A softmax of two
            classes also takes networks of one output, a logit.

    Raises:
        UnsupportedError: The likelihood is of another class.
    """
    if isinstance(likelihood, GaussianLikelihood):
        return _Gaussian(likelihood.noise.squeeze(-1))
    if isinstance(likelihood, StudentTLikelihood):
        return _StudentT(likelihood.noise.squeeze(-1), likelihood.deg_free.squeeze(-1))
    if isinstance(likelihood, HeteroscedasticGaussianLikelihood):
        return _Heteroscedastic()
    if isinstance(likelihood, SoftmaxLikelihood) and likelihood.mixing_weights is None:
        return _Softmax(likelihood.num_classes)
    if isinstance(likelihood, LogisticLikelihood):
        return _Logistic(2)
    if isinstance(likelihood, BernoulliLikelihood):
        return _Probit()
    got, expected = type(likelihood).__name__, "a Gaussian, Student-t, softmax, logistic or probit"
    if isinstance(likelihood, MultitaskGaussianLikelihood):
        if likelihood.rank == 0 and likelihood.has_task_noise and not likelihood.has_global_noise:
            noises = cast(Tensor, likelihood.task_noises)
            return _Gaussian(noises.mean(-1), noises.detach() / noises.detach().mean(-1))
        expected = "one of rank 0, with has_global_noise=False"
    elif "Pairwise" in got:
        expected = "LogisticLikelihood, of a network that gives the difference of two rewards"
    elif isinstance(likelihood, SoftmaxLikelihood):
        expected = "SoftmaxLikelihood(mixing_weights=False)"
    raise UnsupportedError("likelihood", got, expected)


@torch.no_grad()
def check_targets_belong(argument: str, outputs: Tensor, target: Tensor) -> None:
    """Raises where targets have nothing to do with the outputs of a network that is sure of them.

    Of classes: the network is right no more often than by chance, and its log loss is far larger
    than that of the classes' frequencies, as with labels that were shuffled apart from their
    points. A network that was not trained has a log loss near that. Outputs are ``(N, C)``; targets
    that are no classes ``(N,)`` are not checked.
    """
    classes = outputs.shape[-1]
    if target.is_floating_point() or target.ndim != 1 or classes == 1:
        return
    low, high = map(int, target.aminmax())
    if low < 0 or high >= classes:
        got = f"classes from {low} to {high}"
        raise ArgumentError(argument, got, f"integers from 0 to {classes - 1}")
    target = target.long()
    shares = torch.bincount(target, minlength=classes).double() / len(target)
    guessed = outputs.argmax(-1)
    chance = float(shares @ torch.bincount(guessed, minlength=classes).double() / len(target))
    right = float((guessed == target).double().mean())
    # The standard error of a share that is right by chance.
    error = math.sqrt(chance * (1 - chance) / len(target))
    loss = float(torch.nn.functional.cross_entropy(outputs.double(), target))
    frequencies = float(torch.special.entr(shares).sum())
    # Where few classes occur, a network that was not trained has the loss of equal probabilities.
    sure = max(_WORSE * max(frequencies, 0.1), 1.2 * math.log(classes))
    if right <= chance + 3 * error and loss > sure:
        raise ArgumentError(
            argument,
            f"targets of which the network has {100 * right:.0f} % right, as by chance, with a log "
            f"loss of {loss:.2f} ({frequencies:.2f} by the frequencies of classes)",
            "the targets of these points",
            "Were points and targets shuffled apart from each other?",
        )


def gradient_columns(likelihood: OutputLikelihood, outputs: Tensor, target: Tensor) -> Tensor:
    """The gradient of each core as its one column, ``(N, 1, C)``: the empirical Fisher."""
    graph = outputs.requires_grad
    with torch.enable_grad():
        outputs = outputs if graph else outputs.detach().requires_grad_()
        total = likelihood.core(outputs, target).sum()
        (gradient,) = torch.autograd.grad(total, outputs, create_graph=graph)
    return gradient.unsqueeze(1)


def output_column(columns: Tensor, index: int) -> Tensor:
    """Curvature ``(N, K, C)`` of one output alone, as one column ``(N, 1, C)``."""
    column = torch.zeros_like(columns[:, :1])
    column[..., index] = columns[..., index].norm(dim=-1, keepdim=True)
    return column


class _Gaussian(OutputLikelihood):
    """Of noise times a ratio for each output, which is a constant: one search serves all noises."""

    regression = True

    def __init__(self, noise: Tensor, ratios: Tensor | None = None) -> None:
        self.noise, self._ratios = noise, ratios

    def log_density(self, outputs: Tensor, target: Tensor) -> Tensor:
        constant = outputs.shape[-1] * (0.5 * self.scale().log() - _HALF_LOG_2PI)
        if self._ratios is not None:
            constant = constant - 0.5 * self._ratios.log().sum()
        return self.scale() * self.core(outputs, target) + constant

    def core(self, outputs: Tensor, target: Tensor) -> Tensor:
        squares = (_real_targets(outputs, target) - outputs).square()
        if self._ratios is not None:
            if outputs.shape[-1] != len(self._ratios):
                expected = f"{len(self._ratios)}, as the likelihood's num_tasks"
                raise ShapeError("network", f"{outputs.shape[-1]} outputs", expected)
            squares = squares / self._ratios
        return -0.5 * squares.sum(-1)

    def columns(self, outputs: Tensor, target: Tensor) -> Tensor:
        eye = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        eye = eye if self._ratios is None else eye * self._ratios.to(eye).rsqrt()
        return eye.expand(len(outputs), *eye.shape)

    @override
    def predictive(self, outputs, covariance, temperature=1.0, noise=None):
        variance = temperature * self.noise_of(outputs.shape[-1])
        deviation = (covariance.diagonal(dim1=-2, dim2=-1) + variance).clamp_min(0.0).sqrt()
        if outputs.shape[-1] == 1:
            outputs, deviation = outputs.squeeze(-1), deviation.squeeze(-1)
        return Normal(outputs, deviation)

    def scale(self) -> Tensor:
        return 1 / self.noise

    def noise_of(self, outputs: int) -> Tensor:
        """Noise variances of the outputs."""
        return self.noise.expand(outputs) if self._ratios is None else self.noise * self._ratios


class _StudentT(OutputLikelihood):
    """By its Fisher matrix, (ν + 1) / ((ν + 3) σ²), since its Hessian is negative in the tails."""

    regression = True

    def __init__(self, noise: Tensor, deg_free: Tensor) -> None:
        self.noise, self._deg_free = noise, deg_free

    def log_density(self, outputs: Tensor, target: Tensor) -> Tensor:
        if outputs.shape[-1] != 1:
            raise ShapeError(
                "network", f"{outputs.shape[-1]} outputs", "one for StudentTLikelihood"
            )
        target = _real_targets(outputs, target)
        return StudentT(self._deg_free, outputs, self.noise.sqrt()).log_prob(target).squeeze(-1)

    def core(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self.log_density(outputs, target) / self.scale()

    def columns(self, outputs: Tensor, target: Tensor) -> Tensor:
        return torch.ones_like(outputs).unsqueeze(1)

    @override
    def predictive(self, outputs, covariance, temperature=1.0, noise=None):
        # With the tail of the noise: a variance of outputs widens it, and has none of its own.
        variance = covariance[:, 0, 0].clamp_min(0.0) + temperature * self.noise
        return StudentT(self._deg_free, outputs.squeeze(-1), variance.sqrt())

    def scale(self) -> Tensor:
        return (self._deg_free + 1) / ((self._deg_free + 3) * self.noise)


class _Heteroscedastic(OutputLikelihood):
    """By its Fisher matrix, 1 / σ² of the mean and 1 / 2 of the logarithm of the variance."""

    regression = True

    def log_density(self, outputs: Tensor, target: Tensor) -> Tensor:
        if outputs.shape[-1] != 2:
            expected = "two, a mean and the logarithm of a variance"
            raise ShapeError("network", f"{outputs.shape[-1]} outputs", expected)
        mean, log_variance = outputs.unbind(-1)
        residual = _real_targets(mean.unsqueeze(-1), target).squeeze(-1) - mean
        return -0.5 * (residual.square() * (-log_variance).exp() + log_variance) - _HALF_LOG_2PI

    def columns(self, outputs: Tensor, target: Tensor) -> Tensor:
        roots = torch.stack(
            [(-0.5 * outputs[:, 1]).exp(), torch.full_like(outputs[:, 1], 0.5**0.5)]
        )
        return torch.diag_embed(roots.mT)

    @override
    def predictive(self, outputs, covariance, temperature=1.0, noise=None):
        # The mean of the variance, whose logarithm is normal.
        mean, log_variance = outputs.unbind(-1)
        variance = temperature * (log_variance + 0.5 * covariance[:, 1, 1]).exp()
        return Normal(mean, (covariance[:, 0, 0].clamp_min(0.0) + variance).sqrt())


class _Softmax(OutputLikelihood):
    """A softmax; of one output f and two classes that of (0, f), the logistic function."""

    def __init__(self, num_classes: int) -> None:
        self.classes = num_classes

    def log_density(self, outputs: Tensor, target: Tensor) -> Tensor:
        if self._is_binary(outputs) and tuple(target.shape) == tuple(outputs.shape):
            target = target.squeeze(-1)
        if target.ndim == 2 and target.shape == outputs.shape:
            suggestion = "Of one-hot rows these are target.argmax(-1)."
            expected = f"numbers of classes, ({len(outputs)},)"
            raise ShapeError("target", tuple(target.shape), expected, suggestion)
        _check_shape(target, (len(outputs),))
        if outputs.shape[-1] != self.classes and not self._is_binary(outputs):
            expected = f"{self.classes}, as the likelihood's num_classes"
            raise ShapeError("network", f"{outputs.shape[-1]} outputs", expected)
        expected = f"integers from 0 to {self.classes - 1}, as SoftmaxLikelihood has classes"
        binary = self._is_binary(outputs) and bool(((target == 0) | (target == 1)).all())
        inexact = target.is_floating_point() or target.is_complex() or target.dtype == torch.bool
        if inexact and not binary:
            raise ArgumentError("target", target.dtype, expected)
        if int(target.min()) < 0 or int(target.max()) >= self.classes:
            got = f"{target.dtype} from {target.min().item()} to {target.max().item()}"
            raise ArgumentError("target", got, expected)
        outputs = self._logits(outputs)
        return -torch.nn.functional.cross_entropy(outputs, target.long(), reduction="none")

    @override
    def predictive(self, outputs, covariance, temperature=1.0, noise=None):
        outputs = outputs / temperature
        if noise is not None:
            # Eigenvectors, since a covariance of outputs may be singular.
            values, vectors = torch.linalg.eigh(covariance / temperature**2)
            root = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
            draws = outputs + (root @ noise.to(outputs).unsqueeze(-1)).squeeze(-1)
            return Categorical(probs=self._logits(draws).softmax(-1).mean(0))
        variance = covariance.diagonal(dim1=-2, dim2=-1) / temperature**2
        return Categorical(logits=self._logits(outputs / (1 + math.pi / 8 * variance).sqrt()))

    def columns(self, outputs: Tensor, target: Tensor) -> Tensor:
        p = self._logits(outputs).softmax(-1)
        if self._is_binary(outputs):  # of two columns one is minus the other
            return p.prod(-1).sqrt()[:, None, None]
        return softmax_columns(p)

    def _logits(self, outputs: Tensor) -> Tensor:
        """A logit for each class, zero for the first one of a single output."""
        return torch.nn.functional.pad(outputs, (int(self._is_binary(outputs)), 0))

    def _is_binary(self, outputs: Tensor) -> bool:
        return self.classes == 2 and outputs.shape[-1] == 1


class _Logistic(_Softmax):
    """Of one output, a logit."""

    def log_density(self, outputs: Tensor, target: Tensor) -> Tensor:
        if outputs.shape[-1] != 1:
            suggestion = "A SoftmaxLikelihood takes an output for each class."
            got = f"{outputs.shape[-1]} outputs"
            raise ShapeError("network", got, "one for LogisticLikelihood", suggestion)
        values = target.reshape(-1) if tuple(target.shape) == tuple(outputs.shape) else target
        _check_shape(values, (len(outputs),))
        if not bool(((target == 0) | (target == 1)).all()):
            got = f"labels {target.unique().tolist()[:5]} of type {target.dtype}"
            raise ArgumentError(
                "target", got, "zeros and ones for LogisticLikelihood, of one output"
            )
        return super().log_density(outputs, values)


class _Probit(OutputLikelihood):
    moderation = 1.0

    def log_density(self, outputs: Tensor, target: Tensor) -> Tensor:
        return torch.special.log_ndtr(self._margin(outputs, target))

    @override
    def predictive(self, outputs, covariance, temperature=1.0, noise=None):
        variance = covariance[:, 0, 0] / temperature**2
        margin = outputs[:, 0] / temperature / (1 + variance).sqrt()
        return Bernoulli(probs=torch.special.ndtr(margin))

    def columns(self, outputs: Tensor, target: Tensor) -> Tensor:
        # In logarithms: far below zero density and cumulative probability both underflow.
        z = self._margin(outputs, target)
        slope = (-0.5 * z.square() - _HALF_LOG_2PI - torch.special.log_ndtr(z)).exp()
        return (slope * (z + slope)).clamp_min(0.0).sqrt()[:, None, None]

    @staticmethod
    def _margin(outputs: Tensor, target: Tensor) -> Tensor:
        if outputs.shape[-1] != 1:
            raise ShapeError("network", f"{outputs.shape[-1]} outputs", "one, as it is binary")
        _check_shape(target, (len(outputs),))
        if not bool(((target == 0) | (target == 1)).all()):
            raise ArgumentError("target", "other values", "zeros and ones")
        return (2 * target.to(outputs) - 1) * outputs.squeeze(-1)


def _real_targets(outputs: Tensor, target: Tensor) -> Tensor:
    """Targets as a column for each output; raises where they are not finite real numbers."""
    target = target.unsqueeze(-1) if target.ndim == 1 else target
    _check_shape(target, tuple(outputs.shape))
    if target.dtype == torch.bool or target.is_complex():
        raise ArgumentError("target", f"{target.dtype}", "real numbers")
    # On an accelerator this check would wait for all queued work at each step.
    if reads_are_free(target.device):
        suggestion = "A network needs every target: leave points without one out."
        check_finite("target", target, suggestion)
    return target


def _check_shape(target: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(target.shape) != expected:
        text = f"{expected}, as the network's outputs"
        raise ShapeError("target", tuple(target.shape), text)
