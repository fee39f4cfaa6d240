"""The prior over a network's weights, and likelihoods as functions of its outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    SoftmaxLikelihood,
)
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Normal
from typing_extensions import override

from gpclml._utils.arguments import check_finite, check_positive, checked, reads_are_free
from gpclml.curvature.structure import layer_of
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError

__all__ = [
    "GaussianWeightPrior",
    "OutputLikelihood",
    "check_targets_belong",
    "gradient_columns",
    "output_column",
    "output_likelihood",
]


class GaussianWeightPrior(torch.nn.Module):
    r"""Gaussian prior of weights, :math:`w \sim \mathcal N(0, P_0^{-1})`.

    Each group of weights has one precision. The logarithms of the precisions are parameters.

    Args:
        network: Network whose trainable parameters it is over.
        by: ``"network"`` for one precision, ``"layer"`` for one for each module, ``"parameter"``
            for one for each tensor.
        precision: Start of all precisions.

    Raises:
        UnknownNameError: The grouping is not known.
        ArgumentError: The precision is not positive, or no parameter is trainable.

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
        by: Literal["network", "layer", "parameter"] = "layer",
        precision: float = 1.0,
    ) -> None:
        super().__init__()
        check_positive(precision=precision)
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        if not trained:
            raise ArgumentError("network", "no trainable parameter", "at least one")
        group = {"network": lambda name: "", "layer": layer_of, "parameter": str}[by]
        groups = list(dict.fromkeys(map(group, trained)))
        self.groups: tuple[str, ...] = tuple(groups)
        self.group_of = {name: groups.index(group(name)) for name in trained}
        like = next(iter(trained.values()))
        dtype = torch.promote_types(like.dtype, torch.float32)
        start = torch.full((len(groups),), math.log(precision), dtype=dtype)
        self.log_precision: torch.nn.Parameter = torch.nn.Parameter(start.to(like.device))

    def precisions(self) -> dict[str, Tensor]:
        """The precision of each parameter tensor by name, each a number."""
        values = self.log_precision.exp()
        return {name: values[group] for name, group in self.group_of.items()}

    def penalty(self, network: torch.nn.Module) -> Tensor:
        r"""The quadratic form :math:`w^\top P_0 w` at the network's weights.

        Args:
            network: The network, or one with the same parameters.

        Returns:
            A number; differentiable in weights and precisions.
        """
        parameters = dict(network.named_parameters())
        terms = [
            precision * parameters[name].to(precision.dtype).square().sum()
            for name, precision in self.precisions().items()
        ]
        return torch.stack(terms).sum()


_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_WORSE = 1.5  # times the log loss of frequencies, which shuffled labels of a sure network exceed


class OutputLikelihood(ABC):
    r"""Density of targets given a network's outputs, independent for each point.

    Its derivatives in the outputs are those of a core, which has no hyperparameters, times a scale.
    A density without hyperparameters is its own core.

    Attributes:
        moderation: The k with which predictions divide an output of variance v by
            :math:`\sqrt{1 + k v}`.
    """

    moderation: float = math.pi / 8

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
            ``Normal`` of shape ``(N,)`` or of several outputs ``(N, C)``, ``Categorical`` or
            ``Bernoulli``.
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
        likelihood: ``GaussianLikelihood``, ``SoftmaxLikelihood`` without mixing weights, or
            ``BernoulliLikelihood`` (probit). A softmax of two classes also takes networks of one
            output, a logit.

    Raises:
        UnsupportedError: The likelihood is of another class.
    """
    if isinstance(likelihood, GaussianLikelihood):
        return _Gaussian(likelihood)
    if isinstance(likelihood, SoftmaxLikelihood) and likelihood.mixing_weights is None:
        return _Softmax(likelihood.num_classes)
    if isinstance(likelihood, BernoulliLikelihood):
        return _Probit()
    raise UnsupportedError(
        "likelihood",
        type(likelihood).__name__,
        "GaussianLikelihood, SoftmaxLikelihood(mixing_weights=False) or BernoulliLikelihood",
    )


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
    if right <= chance + 3 * error and loss > _WORSE * max(frequencies, 0.1):
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
    def __init__(self, likelihood: GaussianLikelihood) -> None:
        self._likelihood = likelihood

    def log_density(self, outputs: Tensor, target: Tensor) -> Tensor:
        constant = outputs.shape[-1] * (0.5 * self.scale().log() - _HALF_LOG_2PI)
        return self.scale() * self.core(outputs, target) + constant

    def core(self, outputs: Tensor, target: Tensor) -> Tensor:
        target = target.unsqueeze(-1) if target.ndim == 1 else target
        _check_shape(target, tuple(outputs.shape))
        if target.dtype == torch.bool or target.is_complex():
            raise ArgumentError("target", f"{target.dtype}", "real numbers")
        # On an accelerator this check would wait for all queued work at each step.
        if reads_are_free(target.device):
            suggestion = "A network needs every target: leave points without one out."
            check_finite("target", target, suggestion)
        return -0.5 * (target - outputs).square().sum(-1)

    def columns(self, outputs: Tensor, target: Tensor) -> Tensor:
        eye = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        return eye.expand(len(outputs), *eye.shape)

    @override
    def predictive(self, outputs, covariance, temperature=1.0, noise=None):
        variance = covariance.diagonal(dim1=-2, dim2=-1) + temperature / self.scale()
        deviation = variance.clamp_min(0.0).sqrt()
        if outputs.shape[-1] == 1:
            outputs, deviation = outputs.squeeze(-1), deviation.squeeze(-1)
        return Normal(outputs, deviation)

    def scale(self) -> Tensor:
        return 1 / self._likelihood.noise.squeeze(-1)


class _Softmax(OutputLikelihood):
    """A softmax; of one output f and two classes that of (0, f), the logistic function."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes

    def log_density(self, outputs: Tensor, target: Tensor) -> Tensor:
        if self._is_binary(outputs) and tuple(target.shape) == tuple(outputs.shape):
            target = target.squeeze(-1)
        _check_shape(target, (len(outputs),))
        if outputs.shape[-1] != self._num_classes and not self._is_binary(outputs):
            expected = f"{self._num_classes}, as the likelihood's num_classes"
            raise ShapeError("network", f"{outputs.shape[-1]} outputs", expected)
        expected = f"integers from 0 to {self._num_classes - 1}, as SoftmaxLikelihood has classes"
        binary = self._is_binary(outputs) and bool(((target == 0) | (target == 1)).all())
        inexact = target.is_floating_point() or target.is_complex() or target.dtype == torch.bool
        if inexact and not binary:
            raise ArgumentError("target", target.dtype, expected)
        if int(target.min()) < 0 or int(target.max()) >= self._num_classes:
            got = f"{target.dtype} from {target.min().item()} to {target.max().item()}"
            raise ArgumentError("target", got, expected)
        outputs = self._logits(outputs)
        return -torch.nn.functional.cross_entropy(outputs, target.long(), reduction="none")

    @override
    def predictive(self, outputs, covariance, temperature=1.0, noise=None):
        outputs, covariance = outputs / temperature, covariance / temperature**2
        if noise is not None:
            # Eigenvectors, since a covariance of outputs may be singular.
            values, vectors = torch.linalg.eigh(covariance)
            root = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
            draws = outputs + (root @ noise.to(outputs).unsqueeze(-1)).squeeze(-1)
            return Categorical(probs=self._logits(draws).softmax(-1).mean(0))
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        return Categorical(logits=self._logits(outputs / (1 + math.pi / 8 * variance).sqrt()))

    def columns(self, outputs: Tensor, target: Tensor) -> Tensor:
        # diag(p) - p pᵀ = S Sᵀ with columns √p_k (e_k - p); of two one is minus the other.
        p = self._logits(outputs).softmax(-1)
        if self._is_binary(outputs):
            return p.prod(-1).sqrt()[:, None, None]
        eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        return p.sqrt().unsqueeze(-1) * (eye - p.unsqueeze(-2))

    def _logits(self, outputs: Tensor) -> Tensor:
        """A logit for each class, zero for the first one of a single output."""
        return torch.nn.functional.pad(outputs, (int(self._is_binary(outputs)), 0))

    def _is_binary(self, outputs: Tensor) -> bool:
        return self._num_classes == 2 and outputs.shape[-1] == 1


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


def _check_shape(target: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(target.shape) != expected:
        text = f"{expected}, as the network's outputs"
        raise ShapeError("target", tuple(target.shape), text)
