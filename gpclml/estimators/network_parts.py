"""Outputs of a network, the parameters that are chosen from it, and mean probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributions import Categorical

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError

__all__ = ["bridged", "chosen_parameters", "only_trained", "outputs_of"]


@torch.no_grad()
@checked(late=True, passes_on="x", x="(N, *event)")
def outputs_of(network: torch.nn.Module, x: Tensor) -> Tensor:
    """The network's outputs, ``(N, C)``; a typed error where it does not take the points."""
    outputs = network(x)
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(x):
        got = f"outputs {tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs)}"
        raise ShapeError("network", got, f"outputs ({len(x)}, C), a row for each point")
    return outputs


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
    """Names of the parameters of the module that comes last, of those with parameters."""
    called: list[str] = []
    handles = [
        part.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, part in network.named_modules() if part._parameters
    ]  # fmt: skip
    try:
        outputs_of(network, x[:2])
    finally:
        for handle in handles:
            handle.remove()
    names = {id(p): name for name, p in network.named_parameters()}  # once where it is tied
    for name in reversed(called):
        own = [p for p in network.get_submodule(name)._parameters.values() if p is not None]
        if own:
            return [names[id(p)] for p in own]
    raise ArgumentError("network", "no layer with parameters", "at least one")


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
