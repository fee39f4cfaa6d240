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

__all__ = ["ModelStack"]


class ModelStack:
    """Exact GPs of one build and size, in train mode, stacked along a batch dimension in front.

    Hyperparameters get the shapes that GPyTorch's own batch modules have, a network becomes a
    :class:`~gpclml.kernels.networks.StackedNetwork`. The stack has parameters of its own, which
    :meth:`write_back` copies to the models.
    """

    def __init__(self, models: Sequence[ExactGP]) -> None:
        self._count = len(models)
        self._pairs: list[tuple[torch.nn.Parameter, list[Tensor]]] = []
        self._done: dict[int, torch.nn.Module] = {}
        self.model: Any = copy.deepcopy(models[0])
        self._stack(self.model, models)
        inputs = [cast(tuple[Tensor, ...], model.train_inputs) for model in models]
        if len({len(one) for one in inputs}) > 1:
            raise _unlike("different numbers of training inputs")
        columns = tuple(_stacked(column) for column in zip(*inputs, strict=True))
        targets = _stacked([cast(Tensor, model.train_targets) for model in models])
        self.model.set_train_data(columns, targets, strict=False)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trainable parameters of the stack, ``(k, ...)`` each."""
        return [stacked for stacked, _ in self._pairs if stacked.requires_grad]

    def own_parameters(self, member: int) -> list[Tensor]:
        """A member's own parameters, in the order of :attr:`parameters`."""
        return [own[member] for stacked, own in self._pairs if stacked.requires_grad]

    @torch.no_grad()
    def write_back(self, member: int, values: Sequence[Tensor] | None = None) -> None:
        """Copies a member's parameters, or these values of :attr:`parameters`, to its model."""
        pairs = [pair for pair in self._pairs if pair[0].requires_grad]
        source = [stacked for stacked, _ in pairs] if values is None else values
        for (_, own), value in zip(pairs, source, strict=True):
            own[member].copy_(value[member])

    def _stack(self, target: torch.nn.Module, modules: Sequence[torch.nn.Module]) -> None:
        """Puts the stacked parameters of the modules into the target, and into its children."""
        if id(target) in self._done:
            return
        self._done[id(target)] = target
        _check_types(target, modules)
        if isinstance(target, (Prior, Interval)):
            return _check_equal(target, modules)
        for name, _ in list(target.named_parameters(recurse=False)):
            own = [cast(Tensor, getattr(module, name)) for module in modules]
            target.register_parameter(name, self._paired(own))
        for name, buffer in list(target.named_buffers(recurse=False)):
            own = [cast(Tensor, getattr(module, name)) for module in modules]
            if buffer.is_floating_point():
                target.register_buffer(name, _stacked(own))
            elif not all(torch.equal(buffer, one) for one in own):
                raise _unlike(f"buffers {name} of {type(target).__name__}")
        if isinstance(target, Kernel):
            target.batch_shape = torch.Size([self._count, *target._batch_shape])
        for name, child in list(target.named_children()):
            children = [module.get_submodule(name) for module in modules]
            if _is_network(child):
                setattr(target, name, self._network(child, children))
            else:
                self._stack(child, children)

    def _network(
        self, child: torch.nn.Module, networks: Sequence[torch.nn.Module]
    ) -> torch.nn.Module:
        if id(child) not in self._done:
            _check_types(child, networks)
            for name, _ in child.named_parameters():
                _check_shapes([network.get_parameter(name) for network in networks])
            stacked = StackedNetwork(networks)
            for name, parameter in stacked.named_stacks():
                own = [network.get_parameter(name) for network in networks]
                parameter.requires_grad_(_all_trainable(own))
                self._pairs.append((parameter, cast(list[Tensor], own)))
            self._done[id(child)] = stacked
        return self._done[id(child)]

    def _paired(self, own: list[Tensor]) -> torch.nn.Parameter:
        stacked = torch.nn.Parameter(_stacked(own), requires_grad=_all_trainable(own))
        self._pairs.append((stacked, own))
        return stacked


def _is_network(module: torch.nn.Module) -> bool:
    """Whether it is plain torch with parameters: GPyTorch's modules take a batch themselves."""
    containers = (torch.nn.ModuleList, torch.nn.ModuleDict)
    of_gpytorch = any(isinstance(part, gpytorch.Module) for part in module.modules())
    plain = not of_gpytorch and not isinstance(module, containers)
    return plain and any(True for _ in module.parameters())


def _check_shapes(own: Sequence[Tensor]) -> None:
    if len({(one.shape, one.dtype, one.device) for one in own}) > 1:
        raise _unlike("parameters of different shapes, dtypes or devices")


def _stacked(own: Sequence[Tensor]) -> Tensor:
    _check_shapes(own)
    return torch.stack([one.detach() for one in own])


def _all_trainable(own: Sequence[Tensor]) -> bool:
    flags = {one.requires_grad for one in own}
    if len(flags) > 1:
        raise _unlike("parameters frozen in some and trained in others")
    return flags.pop()


def _check_types(target: torch.nn.Module, modules: Sequence[torch.nn.Module]) -> None:
    names = sorted({type(module).__name__ for module in modules})
    children = [name for name, _ in target.named_children()]
    if len({type(module) for module in modules}) > 1:
        raise _unlike(f"modules {', '.join(names)} at the same place")
    if any([name for name, _ in module.named_children()] != children for module in modules):
        raise _unlike(f"{names[0]} with different parts")


def _check_equal(target: torch.nn.Module, modules: Sequence[torch.nn.Module]) -> None:
    state = target.state_dict()
    for module in modules:
        other = module.state_dict()
        if state.keys() != other.keys() or not all(
            torch.equal(value, other[name]) for name, value in state.items()
        ):
            raise _unlike(f"{type(target).__name__} with different values")


def _unlike(what: str) -> UnsupportedError:
    suggestion = "Fit such models one by one with fit_mll."
    return UnsupportedError("models", what, "models that differ only in values", suggestion)
