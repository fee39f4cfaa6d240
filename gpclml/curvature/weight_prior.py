"""A Gaussian prior over the weights of a network."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from gpclml._utils.arguments import check_positive, checked
from gpclml.curvature.structure import layer_of
from gpclml.errors import ArgumentError

__all__ = ["GaussianWeightPrior"]


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
        >>> prior = GaussianWeightPrior(network, by="layer", precision=10.0)
        >>> prior.precisions()["0.weight"]
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
        self._group_of = {name: groups.index(group(name)) for name in trained}
        like = next(iter(trained.values()))
        start = torch.full((len(groups),), math.log(precision), dtype=like.dtype)
        self.log_precision: torch.nn.Parameter = torch.nn.Parameter(start.to(like.device))

    def precisions(self) -> dict[str, Tensor]:
        """The precision of each parameter tensor by name, each a number."""
        values = self.log_precision.exp()
        return {name: values[group] for name, group in self._group_of.items()}

    def penalty(self, network: torch.nn.Module) -> Tensor:
        r"""The quadratic form :math:`w^\top P_0 w` at the network's weights.

        Args:
            network: The network, or one with the same parameters.

        Returns:
            A number; differentiable in weights and precisions.
        """
        parameters = dict(network.named_parameters())
        terms = [
            precision * parameters[name].square().sum()
            for name, precision in self.precisions().items()
        ]
        return torch.stack(terms).sum()
