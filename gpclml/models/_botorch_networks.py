"""A network of its own for each member of a batch of models."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from gpclml.kernels.networks import StackedNetwork, reset_network

__all__ = ["NetworkBatch"]


class NetworkBatch(StackedNetwork):
    """Networks of one build and one start, each for its own member of a batch.

    Parameters have the batch's shape in front, as the hyperparameters of GPyTorch's batch
    modules have: what indexes or fits members one by one finds each member's network there.

    Args:
        network: The build and the start of each; its outputs at a point depend on that point alone.
        batch_shape: Shape of the batch, not empty.
    """

    def __init__(self, network: torch.nn.Module, batch_shape: torch.Size) -> None:
        super().__init__([network] * batch_shape.numel())
        for parameter in self.parameters():
            parameter.data = parameter.data.reshape(*batch_shape, *parameter.shape[1:])

    @property
    def members(self) -> torch.Size:
        """The shape of the batch, empty for a single network."""
        own = next(self._build[0].parameters())
        batched = next(self.parameters())
        return batched.shape[: batched.ndim - own.ndim]

    def named_stacks(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters with members along one dimension, ``(k, ...)``, by their names."""
        size = len(self.members)
        for name, parameter in super().named_stacks():
            stack = parameter.reshape(-1, *parameter.shape[size:])
            yield name, cast(torch.nn.Parameter, stack)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws one start anew, for all members, in place.

        Args:
            generator: Source of the draws.
        """
        network = copy.deepcopy(self._build[0])
        reset_network(network, generator)
        for name, stack in self.named_stacks():
            stack.copy_(network.get_parameter(name).expand_as(stack))

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of each member's network at its own points.

        Args:
            x: Points. Shape ``(*lead, n, d)``, ``lead`` broadcasts with the shape of the batch.

        Returns:
            Outputs. Shape ``(*broadcast, n, q)``.
        """
        batch_shape = self.members
        shape = torch.broadcast_shapes(x.shape[:-2], batch_shape)
        x = x.expand(*shape, *x.shape[-2:])
        # A network sees points one by one: further batch dimensions are more points.
        further = list(range(len(shape) - len(batch_shape)))
        behind = [len(batch_shape) + place for place in further]
        x = x.movedim(further, behind)
        output = super().forward(x.reshape(batch_shape.numel(), -1, x.shape[-1]))
        return output.reshape(*x.shape[:-1], output.shape[-1]).movedim(behind, further)
