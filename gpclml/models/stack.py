"""Models of one build as a single model with a batch dimension, each with parameters of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import gpytorch
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.models import ExactGP
from gpytorch.priors import Prior
from torch import Tensor

from gpclml.errors import UnsupportedError
from gpclml.kernels.networks import StackedNetwork


class ModelStack:
    """Exact GPs of one build and size, in train mode, stacked along a batch dimension in front.

    Hyperparameters get the shapes that GPyTorch's tensors batch modules have, a network becomes a
    :class:`~gpclml.kernels.networks.StackedNetwork`. The stack has parameters of its tensors, which
    :meth:`write_back` copies to the models.
    """

    def __init__(self, models: Sequence[ExactGP]) -> None:
        kinds = [{name: type(m) for name, m in model.named_modules()} for model in models]
        for kind in kinds[1:]:
            for name, module in kinds[0].items():
                if kind.get(name) is not module:
                    raise _unlike(f"modules of different classes at the same place, {name}")
        self._count = len(models)
        self._pairs: list[tuple[torch.nn.Parameter, list[Tensor]]] = []
        self._done: dict[int, torch.nn.Module] = {}
        self.model: Any = copy.deepcopy(models[0])
        self._stack(self.model, models)
        inputs = [cast(tuple[Tensor, ...], model.train_inputs) for model in models]
        columns = tuple(_stacked(column) for column in zip(*inputs, strict=True))
        targets = _stacked([cast(Tensor, model.train_targets) for model in models])
        self.model.set_train_data(columns, targets, strict=False)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trainable parameters of the stack, ``(k, ...)`` each."""
        return [stacked for stacked, _ in self._pairs if stacked.requires_grad]

    def own_parameters(self, member: int) -> list[Tensor]:
        """A member's own parameters, in the order of :attr:`parameters`."""
        return [tensors[member] for stacked, tensors in self._pairs if stacked.requires_grad]

    @torch.no_grad()
    def write_back(self, member: int, values: Sequence[Tensor] | None = None) -> None:
        """Copies a member's parameters, or these values of :attr:`parameters`, to its model."""
        source = self.parameters if values is None else values
        for tensor, value in zip(self.own_parameters(member), source, strict=True):
            tensor.copy_(value[member])

    def _stack(self, target: torch.nn.Module, modules: Sequence[torch.nn.Module]) -> None:
        """Puts the stacked parameters of the modules into the target, and into its children."""
        if id(target) in self._done:
            return
        self._done[id(target)] = target
        # Priors and constraints have no batch: one stands for all, and must be the same.
        if isinstance(target, (Prior, Interval)):
            state = target.state_dict()
            for module in modules:
                other = module.state_dict()
                if not all(torch.equal(value, other[name]) for name, value in state.items()):
                    raise _unlike(f"{type(target).__name__} with different values")
            return
        for name, _ in list(target.named_parameters(recurse=False)):
            tensors = [cast(Tensor, getattr(module, name)) for module in modules]
            stacked = torch.nn.Parameter(_stacked(tensors), requires_grad=_all_trainable(tensors))
            self._pairs.append((stacked, tensors))
            target.register_parameter(name, stacked)
        for name, buffer in list(target.named_buffers(recurse=False)):
            tensors = [cast(Tensor, getattr(module, name)) for module in modules]
            if buffer.is_floating_point():
                target.register_buffer(name, _stacked(tensors))
            elif not all(torch.equal(buffer, other) for other in tensors):
                raise _unlike(f"buffers {name} of {type(target).__name__}")
        # The registered shapes above have the batch in front, as those of a kernel made for one.
        if isinstance(target, Kernel):
            target.batch_shape = torch.Size([self._count, *target._batch_shape])
        for name, child in list(target.named_children()):
            children = [module.get_submodule(name) for module in modules]
            if not _is_network(child):
                self._stack(child, children)
                continue
            if id(child) not in self._done:  # a network may be that of kernel and mean
                self._done[id(child)] = self._stacked_network(children)
            setattr(target, name, self._done[id(child)])

    def _stacked_network(self, networks: Sequence[torch.nn.Module]) -> StackedNetwork:
        for name, _ in networks[0].named_parameters():
            _stacked([network.get_parameter(name) for network in networks])  # of one shape
        stacked = StackedNetwork(networks)
        for name, parameter in stacked.named_stacks():
            tensors = [cast(Tensor, network.get_parameter(name)) for network in networks]
            parameter.requires_grad_(_all_trainable(tensors))
            self._pairs.append((parameter, tensors))
        return stacked


def _is_network(module: torch.nn.Module) -> bool:
    """Whether it is plain torch with parameters: GPyTorch's modules take a batch themselves."""
    containers = (torch.nn.ModuleList, torch.nn.ModuleDict)
    has_gpytorch = any(isinstance(child, gpytorch.Module) for child in module.modules())
    plain = not has_gpytorch and not isinstance(module, containers)
    return plain and any(True for _ in module.parameters())


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    if len({(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        raise _unlike("parameters of different shapes, dtypes or devices")
    return torch.stack([tensor.detach() for tensor in tensors])


def _all_trainable(tensors: Sequence[Tensor]) -> bool:
    flags = {tensor.requires_grad for tensor in tensors}
    if len(flags) > 1:
        raise _unlike("parameters frozen in some and trained in others")
    return flags.pop()


def _unlike(what: str) -> UnsupportedError:
    suggestion = "Fit such models one by one with fit_mll."
    return UnsupportedError("models", what, "models that differ only in values", suggestion)
