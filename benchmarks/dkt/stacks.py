"""Models of several seeds as one: each parameter has a row a model, each step one pass of all.

A step of a few-shot model is small: a GPU waits for its launches, for ten as long as for one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import gpytorch
import torch
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.nn.functional import batch_norm, max_pool2d, pad

from gpclml.errors import UnsupportedError
from gpclml.kernels.networks import MLP
from gpclml.meta import ConvBlocks

__all__ = ["Stack", "StackedBlocks", "StackedLinear", "StackedNormalization"]

_Pairs = list[tuple[Tensor, list[Tensor]]]


class Stack:
    """Models of one build, stacked. Task ``i`` of a batch is one of model ``i``.

    Args:
        models: Models of tasks, such as :class:`gpclml.meta.DeepKernelTransfer`, with
            :class:`gpclml.meta.ConvBlocks` or :class:`gpclml.kernels.networks.MLP` as backbones.

    Attributes:
        module: The stack, a model like each of them.

    Raises:
        UnsupportedError: A backbone is of another kind.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self.module = copy.deepcopy(models[0])
        self._count, self._pairs = len(models), _Pairs()
        self._fill(self.module, models)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies parameters and running statistics to the models."""
        for stacked, own in self._pairs:
            for row, one in zip(stacked, own, strict=True):
                one.copy_(row.reshape(one.shape))

    def _fill(self, target: torch.nn.Module, modules: Sequence[torch.nn.Module]) -> None:
        for name, first in list(target.named_parameters(recurse=False)):
            own = [module.get_parameter(name) for module in modules]
            stacked = torch.stack([one.detach() for one in own])
            if isinstance(target, gpytorch.Module):
                stacked = stacked.unsqueeze(1)  # hyperparameters that the ways of a task share
            parameter = torch.nn.Parameter(stacked, requires_grad=first.requires_grad)
            target.register_parameter(name, parameter)
            self._pairs.append((parameter, list(own)))
        if isinstance(target, Kernel):
            target.batch_shape = torch.Size([self._count, 1])
        for name, child in list(target.named_children()):
            children = [module.get_submodule(name) for module in modules]
            kind = _STACKED.get(next((one for one in _STACKED if isinstance(child, one)), None))
            if kind is not None:
                part = kind(children)
                setattr(target, name, part)
                self._pairs += part.pairs
            elif name == "backbone" and not isinstance(child, MLP):
                expected = "ConvBlocks, such as Conv4, or an MLP"
                raise UnsupportedError("models", f"a backbone {type(child).__name__}", expected)
            else:
                self._fill(child, children)


class StackedNormalization(torch.nn.Module):
    """Batch normalizations of several models, for training alone.

    Args:
        layers: One a model.
    """

    def __init__(self, layers: Sequence[torch.nn.modules.batchnorm._BatchNorm]) -> None:
        super().__init__()
        self.eps, self.momentum, self.count = layers[0].eps, layers[0].momentum or 0.0, len(layers)
        self.pairs: _Pairs = []
        for name in ("weight", "bias"):
            own = [layer.get_parameter(name) for layer in layers]
            self.register_parameter(name, torch.nn.Parameter(_rows(own)))
            self.pairs.append((self.get_parameter(name), list(own)))
        for name in ("running_mean", "running_var"):
            own = [layer.get_buffer(name) for layer in layers]
            self.register_buffer(name, _rows(own))
            self.pairs.append((self.get_buffer(name), own))

    def forward(self, values: Tensor) -> Tensor:
        """Normalizes features ``(models * n, q)``, those of the first model first."""
        by_model = values.unflatten(0, (self.count, -1)).mT
        return self.normalize(by_model, self.weight, self.bias).mT.flatten(0, 1)

    def normalize(self, values: Tensor, weight: Tensor, bias: Tensor, alone: bool = False):
        """Normalizes values ``(models, channels, *others)`` by their own statistics, in any mode.

        Args:
            values: The values.
            weight: Scales, ``(models, channels)``.
            bias: Shifts.
            alone: Whether to leave the running statistics as they are.
        """
        flat = values.reshape(1, weight.numel(), -1)
        mean, variance = (None, None) if alone else (self.running_mean, self.running_var)
        mean, variance = (None if one is None else one.view(-1) for one in (mean, variance))
        normalized = batch_norm(
            flat, mean, variance, weight.reshape(-1), bias.reshape(-1),
            training=True, momentum=self.momentum, eps=self.eps,
        )  # fmt: skip
        return normalized.view(values.shape)


class StackedLinear(torch.nn.Module):
    """Linear layers of several models, each of which maps points of its own.

    Args:
        layers: One a model.
    """

    def __init__(self, layers: Sequence[torch.nn.Linear]) -> None:
        super().__init__()
        self.count = len(layers)
        self.weight = torch.nn.Parameter(_rows([layer.weight for layer in layers]))
        self.bias = torch.nn.Parameter(_rows([layer.bias for layer in layers]))
        self.pairs: _Pairs = [
            (self.weight, [layer.weight for layer in layers]),
            (self.bias, [layer.bias for layer in layers]),
        ]

    def forward(self, values: Tensor) -> Tensor:
        """Maps values ``(models * n, inputs)``, those of the first model first."""
        by_model = values.unflatten(0, (self.count, -1))
        return torch.baddbmm(self.bias.unsqueeze(1), by_model, self.weight.mT).flatten(0, 1)


class StackedBlocks(torch.nn.Module):
    """Backbones of several models; each sees images of its own.

    Args:
        networks: One a model, of one build.
    """

    def __init__(self, networks: Sequence[ConvBlocks]) -> None:
        super().__init__()
        self.count = len(networks)
        self.weights = torch.nn.ParameterList()
        self.normalizations = torch.nn.ModuleList()
        self.pairs: _Pairs = []
        for block in zip(*(network.blocks for network in networks), strict=True):
            convolutions, layers = zip(*((one[0], one[1]) for one in block), strict=True)
            for name in ("weight", "bias"):
                own = [convolution.get_parameter(name) for convolution in convolutions]
                self.weights.append(torch.nn.Parameter(_rows(own)))
                self.pairs.append((self.weights[-1], list(own)))
            self.normalizations.append(StackedNormalization(layers))
            self.pairs += self.normalizations[-1].pairs

    @staticmethod
    def own_parameters(network: ConvBlocks) -> list[torch.nn.Parameter]:
        """Those of one network in the order of :meth:`parameter_list`."""
        layers = [block[place] for place in (0, 1) for block in network.blocks]
        return [own for layer in layers for own in layer.parameters()]

    def parameter_list(self) -> list[torch.nn.Parameter]:
        """All parameters in the order in which :meth:`transform` takes them."""
        return list(self.parameters())

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(models * n, q)`` of images ``(models * n, channels, height, width)``."""
        return self.transform(images, self.parameter_list())

    def transform(
        self, images: Tensor, parameters: Sequence[Tensor], alone: bool = False
    ) -> Tensor:
        """Features by given parameters.

        Args:
            images: Images, as in :meth:`forward`.
            parameters: In the place of :meth:`parameter_list`.
            alone: Whether to leave the running statistics as they are.
        """
        x = images.unflatten(0, (self.count, -1)).transpose(1, 2)
        blocks = len(self.normalizations)
        for place, layer in enumerate(self.normalizations):
            weight, bias = parameters[2 * place : 2 * place + 2]
            scale, shift = parameters[2 * (blocks + place) : 2 * (blocks + place) + 2]
            # A product of matrices, since grouped convolutions are slow in single precision. x is
            # (models, channels, n, height, width), its patches have 3 x 3 more dimensions.
            patches = pad(x, (1, 1, 1, 1)).unfold(3, 3, 1).unfold(4, 3, 1)
            columns = patches.permute(0, 1, 5, 6, 2, 3, 4).flatten(1, 3).flatten(2)
            y = torch.baddbmm(bias.unsqueeze(-1), weight.flatten(2), columns)
            y = layer.normalize(y, scale, shift, alone).unflatten(-1, x.shape[2:])
            x = max_pool2d(y.flatten(0, 1), 2).relu().unflatten(0, y.shape[:2])
        return x.transpose(1, 2).flatten(2).flatten(0, 1)


def _rows(own: Sequence[Tensor]) -> Tensor:
    return torch.stack([one.detach() for one in own]).contiguous()


_STACKED = {
    ConvBlocks: StackedBlocks,
    torch.nn.BatchNorm1d: StackedNormalization,
    torch.nn.Linear: StackedLinear,
}
