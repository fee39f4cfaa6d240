"""Hyperparameters of GPyTorch's modules: values, and gradients with respect to raw parameters."""

from __future__ import annotations

from typing import Any, NamedTuple, Self, cast

import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive
from torch import Tensor

from gpclml.gram.autograd import Gradients

__all__ = ["Hyperparameter", "Transform", "transform_of"]

_KNOWN_CONSTRAINTS = (GreaterThan, Interval, LessThan, Positive)
_LINEAR = 20.0  # above which PyTorch's softplus is the identity


class Transform(NamedTuple):
    """How a constraint makes a hyperparameter of a raw parameter, elementwise.

    Attributes:
        is_softplus: By a softplus; if not, the two are equal.
        lower_bound: Added to the softplus, ``()`` or ``(1,)``; None for zero.
    """

    is_softplus: bool
    lower_bound: Tensor | None = None

    def value(self, raw: Tensor) -> Tensor:
        """The hyperparameter, in the type of the raw parameter."""
        if not self.is_softplus:
            return raw
        value = torch.nn.functional.softplus(raw)
        return value if self.lower_bound is None else value + self.lower_bound.to(raw)

    def slope(self, raw: Tensor) -> Tensor | float:
        """The derivative of the hyperparameter with respect to the raw parameter."""
        return torch.sigmoid(raw) if self.is_softplus else 1.0

    def inverse(self, value: Tensor) -> Tensor:
        """The raw parameter."""
        if not self.is_softplus:
            return value
        if self.lower_bound is not None:
            value = value - self.lower_bound.to(value)
        return torch.where(value > _LINEAR, value, value + (-torch.expm1(-value)).log())


def transform_of(constraint: Interval | None) -> Transform | None:
    """The transform of a constraint of GPyTorch; None if it is none of those known here."""
    if constraint is None:
        return Transform(is_softplus=False)
    kind = type(constraint)
    if kind not in _KNOWN_CONSTRAINTS or "transform" in vars(constraint):
        return None
    function = constraint._transform
    if function is None:
        return Transform(is_softplus=False)
    if type(function) is not torch.nn.Softplus:
        return None
    if function.beta != 1.0 or function.threshold != _LINEAR:
        return None
    if kind is Positive:
        return Transform(is_softplus=True)
    if kind is not GreaterThan or constraint.lower_bound.numel() != 1:
        return None
    return Transform(is_softplus=True, lower_bound=constraint.lower_bound)


class Hyperparameter:
    """A hyperparameter of a module, and the tensor that its gradient is taken with respect to.

    That is the raw parameter where the constraint is one whose derivative is known. Elsewhere it is
    the value as the module computes it, from which autograd goes on.

    Args:
        module: A kernel, mean, or noise model of GPyTorch.
        name: Of the hyperparameter, such as ``"lengthscale"``.
        dtype: Type of the value.

    Attributes:
        value: The hyperparameter, without a gradient.
        tensor: The raw parameter, or the value with its gradient.
    """

    __slots__ = ("_transform", "tensor", "value")

    def __init__(self, module: torch.nn.Module, name: str, dtype: torch.dtype) -> None:
        raw = getattr(module, f"raw_{name}", None)
        self._transform = None
        if raw is not None:
            constraint = getattr(module, f"raw_{name}_constraint", None)
            self._transform = transform_of(cast(Interval | None, constraint))
        if self._transform is None:
            value: Any = getattr(module, name)
            self.tensor: Tensor = cast(Tensor, value() if callable(value) else value)
            self.value: Tensor = self.tensor.detach().to(dtype)
        else:
            self.tensor = cast(Tensor, raw)
            self.value = self._transform.value(self.tensor.detach().to(dtype))

    @classmethod
    def of(cls, source: torch.nn.Module | Tensor, name: str, dtype: torch.dtype) -> Self:
        """That of a module; or a tensor that is the hyperparameter itself."""
        if isinstance(source, torch.nn.Module):
            return cls(source, name, dtype)
        given = cls.__new__(cls)
        given.tensor, given.value, given._transform = source, source.detach().to(dtype), None
        return given

    @property
    def needed(self) -> bool:
        """Whether a gradient is wanted."""
        return self.tensor.requires_grad

    def gradients(self, grad: Tensor) -> Gradients:
        """By the chain rule, from a gradient with respect to the value; none where none is needed.

        Args:
            grad: Of the shape of the value, or of one that the value was broadcast to.
        """
        tensor = self.tensor
        if not tensor.requires_grad:
            return []
        if grad.shape != tensor.shape:
            grad = grad.sum_to_size(tensor.shape)
        if self._transform is not None and self._transform.is_softplus:
            grad = grad * torch.sigmoid(tensor.detach())
        return [(tensor, grad.to(tensor.dtype))]
