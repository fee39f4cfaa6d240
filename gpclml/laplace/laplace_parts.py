"""Parts of a Laplace posterior: outputs and parameters of a network, precisions, temperature."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Categorical

from gpclml._utils.arguments import checked
from gpclml.curvature.output_likelihoods import output_likelihood
from gpclml.curvature.structure import in_single, layer_of
from gpclml.errors import ArgumentError, ShapeError
from gpclml.evidence.sampling import laplace_conditional_log_density, linearized_outputs
from gpclml.mlls import LaplaceEvidence
from gpclml.models import LinearizedNetwork

__all__ = [
    "bridged",
    "chosen_parameters",
    "factor_by_clml",
    "factor_by_folds",
    "only_trained",
    "outputs_of",
]


@torch.no_grad()
@checked(late=True, passes_on="x", x="(N, *event)")
def outputs_of(network: torch.nn.Module, x: Tensor) -> Tensor:
    """The network's outputs, ``(N, C)``; a typed error where it does not take the points."""
    outputs = network(x)
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(x):
        got = f"outputs {tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs)}"
        raise ShapeError("network", got, f"outputs ({len(x)}, C), a row for each point")
    return in_single(outputs)


@checked(late=True)
def chosen_parameters(
    network: torch.nn.Module, weights: str | Sequence[str], x: Tensor
) -> list[str]:
    """Names of the parameters that are meant by ``"last"``, ``"all"``, or names of modules too.

    Args:
        network: The network.
        weights: What is meant.
        x: Points, at two of which the order of the layers is found.

    Raises:
        ArgumentError: A name is not known, or there is no parameter.
    """
    named = dict(network.named_parameters())
    if weights == "last":
        return _last_layer(network, x)
    if weights == "all":
        found = [name for name, p in named.items() if p.requires_grad]
    else:
        given = [weights] if isinstance(weights, str) else weights
        for one in given:
            if not any(_is_part(name, one) for name in named):
                expected = f"'last', 'all', or some of {', '.join(named)} or of their modules"
                raise ArgumentError("weights", repr(one), expected)
        found = [name for name in named if any(_is_part(name, one) for one in given)]
    if not found:
        raise ArgumentError("weights", "no parameter", "at least one", "Set requires_grad.")
    return found


def _last_layer(network: torch.nn.Module, x: Tensor) -> list[str]:
    """Names of the trainable parameters of the last layer that has some and changes the outputs.

    In a network whose parameters are all frozen, which says nothing of how it was trained, frozen
    ones count too. A layer is a module with parameters of its own or of parametrizations.
    """
    named = dict(network.named_parameters())
    trainable = [name for name, p in named.items() if p.requires_grad] or list(named)
    layers: dict[str, list[str]] = {}
    for name in trainable:
        layers.setdefault(layer_of(name), []).append(name)
    called: list[str] = []

    def note(layer: str, *_: Any) -> None:
        called.append(layer)

    gradients: Sequence[Tensor | None] = ()
    handles = [
        part.register_forward_pre_hook(partial(note, layer_of(f"{name}.")))
        for name, part in network.named_modules() if part._parameters
    ]  # fmt: skip
    try:
        outputs_of(network, x[:2])  # its checks
        called.clear()
        with only_trained(network, trainable), torch.enable_grad():
            total = network(x[:2]).sum()
            if total.requires_grad:
                parameters = [named[name] for name in trainable]
                gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    used = {name for name, g in zip(trainable, gradients, strict=False) if g is not None}
    for name in reversed(called):
        if used.intersection(layers.get(name, ())):
            return layers[name]
    suggestion = "Give names of parameters as weights."
    raise ArgumentError("network", "no layer with parameters", "at least one", suggestion)


def _is_part(name: str, given: str) -> bool:
    return name == given or name.startswith(f"{given}.")


@contextmanager
def only_trained(network: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Within the block these parameters alone require a gradient."""
    before = {name: p.requires_grad for name, p in network.named_parameters()}
    try:
        for name, p in network.named_parameters():
            p.requires_grad_(name in names)
        yield
    finally:
        for name, p in network.named_parameters():
            p.requires_grad_(before[name])


def bridged(outputs: Tensor, covariance: Tensor) -> Categorical:
    r"""Mean class probabilities of a softmax of normal outputs, by the Laplace bridge.

    .. math:: \alpha_k = \frac1{\Sigma_{kk}} \Big(1 - \frac2C
        + \frac{e^{\mu_k}}{C^2} \sum_l e^{-\mu_l}\Big), \qquad
        \mu - \frac{\Sigma 1 1^\top \mu}{1^\top \Sigma 1}, \quad
        \Sigma - \frac{\Sigma 1 1^\top \Sigma}{1^\top \Sigma 1} \text{ for } \mu, \Sigma

    is the Dirichlet distribution whose Laplace approximation in the outputs, on the plane where
    they add up to zero, is the normal (Hobbhahn et al. 2022, Eq. 7); its mean is
    :math:`\alpha / \sum_l \alpha_l`. Unlike the probit approximation it does not tend to the
    softmax as covariances vanish.

    Args:
        outputs: Means of outputs, ``(N, C)``.
        covariance: Their covariances, ``(N, C, C)``.
    """
    mu, sigma, count = outputs.double(), covariance.double(), outputs.shape[-1]
    of_sum = sigma.sum(-1)  # covariance of each output with their sum
    variance, own = of_sum.sum(-1, keepdim=True), sigma.diagonal(dim1=-2, dim2=-1)
    inverse = torch.where(variance > 1e-9 * own.sum(-1, keepdim=True), 1 / variance, 0.0)
    mu = mu - of_sum * mu.sum(-1, keepdim=True) * inverse
    own = own - of_sum.square() * inverse
    terms = torch.stack(
        [
            torch.full_like(mu, math.log1p(-2 / count) if count > 2 else -math.inf),
            mu - 2 * math.log(count) + torch.logsumexp(-mu, -1, keepdim=True),
        ]
    ).logsumexp(0)
    return Categorical(logits=(terms - own.clamp_min(1e-300).log()).to(outputs))


_FOLDS = 5
Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]


def factor_by_clml(
    evidence: LaplaceEvidence, held_out: tuple[Tensor, Tensor], factors: Sequence[float]
) -> float:
    r"""The factor of the precisions for which the CLML of held-out points is largest.

    :math:`\log p(\mathcal D_{\text{held out}} \mid \mathcal D)` of the linearized network, by
    :func:`gpclml.evidence.sampling.laplace_conditional_log_density`.
    """
    prior = cast(LinearizedNetwork, evidence.mll.model).prior
    before = prior.log_precision.detach().clone()
    scores = []
    for factor in factors:
        with torch.no_grad():
            prior.log_precision.copy_(before + math.log(factor))
        scores.append(laplace_conditional_log_density(evidence, held_out))
    with torch.no_grad():
        prior.log_precision.copy_(before)
    return factors[max(range(len(factors)), key=scores.__getitem__)]


class _Fold:
    """Sums over the batches of a fold: the evidence, and the gradient of the log likelihood."""

    def __init__(self) -> None:
        self.evidence: LaplaceEvidence | None = None
        self.gradient: dict[str, Tensor] = {}

    def add(self, evidence: LaplaceEvidence, gradient: Mapping[str, Tensor]) -> None:
        self.evidence = evidence if self.evidence is None else self.evidence + evidence
        self.gradient = {k: g + self.gradient.get(k, 0.0) for k, g in gradient.items()}


def factor_by_folds(
    evidence_of: Callable[[Tensor, Tensor], LaplaceEvidence],
    batches: Batches,
    covariances: Callable[[Callable, Tensor, int], Tensor],
    factors: Sequence[float],
) -> float:
    r"""The factor of the precisions of the largest cross-validated density, without training again.

    A fold of batches is left out by a Newton step of the linearized network from its mode,

    .. math:: w_{-k} = w_* - \Sigma_{-k} \nabla \log p(\mathcal D_k \mid w_*), \qquad
        \Sigma_{-k} = (H - H_k + P_0)^{-1}

    (Giordano et al. 2019), and its targets are predicted with the covariance
    :math:`J \Sigma_{-k} J^\top`.

    Args:
        evidence_of: The evidence at a batch.
        batches: Makes an iterator of batches, the same at each call.
        covariances: Of outputs at points, from a curvature's function.
        factors: Those that are tried.

    Raises:
        ArgumentError: There are fewer batches than two, or others in a second pass.
    """
    folds = [_Fold() for _ in range(_FOLDS)]
    seen = []
    for place, (x, y) in enumerate(batches()):
        part = evidence_of(x, y)
        folds[place % _FOLDS].add(part, _gradient(part, x, y))
        seen.append((x.double().sum(), y.clone()))
    made = [fold for fold in folds if fold.evidence is not None]
    if len(made) < 2:
        suggestion = "Give a smaller batch_size."
        raise ArgumentError("data", "one batch", "at least two for cross-validation", suggestion)
    others = [_sum(fold.evidence for fold in made if fold is not one) for one in made]
    scores = torch.zeros(len(factors), dtype=torch.float64)
    for place, (x, y) in enumerate(batches()):
        first, labels = seen[place]
        if not torch.equal(labels, y) or not torch.equal(first, x.double().sum()):
            suggestion = "Set shuffle=False."
            expected = "a loader that gives the same batches in each pass"
            raise ArgumentError("data", "batches in another order", expected, suggestion)
        k = place % _FOLDS
        for at, factor in enumerate(factors):
            scores[at] += _density(others[k], made[k].gradient, x, y, factor, covariances)
    return factors[int(scores.nan_to_num(-math.inf).argmax())]


def _sum(parts: Iterator[LaplaceEvidence | None]) -> LaplaceEvidence:
    return cast(LaplaceEvidence, sum(part for part in parts if part is not None))


def _gradient(evidence: LaplaceEvidence, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Of the log likelihood of a batch in the weights."""
    network = cast(LinearizedNetwork, evidence.mll.model).network
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        likelihood = output_likelihood(cast(Likelihood, evidence.mll.likelihood))
        value = likelihood.log_density(network(x), y).sum()
    found = torch.autograd.grad(value, list(named.values()), materialize_grads=True)
    return dict(zip(named, found, strict=True))


@torch.no_grad()
def _density(
    others: LaplaceEvidence,
    gradient: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    factor: float,
    covariances: Callable[[Callable, Tensor, int], Tensor],
) -> float:
    """The log density of a batch that is predicted from the other folds."""
    mll = others.mll
    model = cast(LinearizedNetwork, mll.model)
    precisions = {name: factor * p.detach() for name, p in model.prior.precisions().items()}
    function = others.curvature.output_covariance(precisions, others.curvature_scale())
    rows = {name: g[None, None].requires_grad_() for name, g in gradient.items()}
    with torch.enable_grad():
        half = 0.5 * function(rows).sum()
    steps = torch.autograd.grad(half, list(rows.values()), materialize_grads=True)
    moved = {
        name: model.network.get_parameter(name) - step[0]
        for name, step in zip(rows, steps, strict=True)
    }
    outputs = linearized_outputs(model.network, moved, x)[0]
    likelihood = output_likelihood(cast(Likelihood, mll.likelihood))
    predicted = likelihood.predictive(outputs, covariances(function, x, outputs.shape[-1]))
    return float(predicted.log_prob(y.reshape(predicted.batch_shape)).double().sum())
