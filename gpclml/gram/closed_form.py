"""Which kernels are computed in closed form, and why others are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    CosineKernel,
    IndexKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from torch import Tensor

from gpclml.gram.kernels import (
    ColumnsGram,
    ConstantGram,
    Gram,
    LinearGram,
    PeriodicGram,
    PolynomialGram,
    ProductGram,
    RadialGram,
    ScaledGram,
    SpectralMixtureGram,
    SumGram,
    TasksGram,
)

__all__ = ["Reason", "closed_form", "has_hooks"]

_METHOD = "_closed_form"  # by which a class of kernels gives its closed form
_MATERN = {0.5: "matern_12", 1.5: "matern_32", 2.5: "matern_52"}


@dataclass(frozen=True)
class Reason:
    """Why a kernel is evaluated by GPyTorch.

    Attributes:
        text: In words, such as "MyKernel is a kernel of its own".
    """

    text: str

    def __str__(self) -> str:
        return self.text


def closed_form(kernel: Kernel, *, select: bool = False) -> Gram | Reason:
    """A kernel with its vector-Jacobian product, or the reason why it is left to GPyTorch.

    These are known: RBF, Matern, rational quadratic, cosine, periodic, spectral mixture, linear,
    polynomial, constant and index kernels of GPyTorch, deep kernels and cosine similarity, and
    sums, products and multiples of these on any columns. A subclass is another kernel, and so is
    one with hooks or with a ``forward`` of its own.

    Args:
        kernel: Any kernel of GPyTorch.
        select: Whether its points are to have all columns, of which it takes its ``active_dims``;
            else they are as its ``forward`` is given them.
    """
    gram = _forward(kernel)
    dims = cast(Tensor | None, kernel.active_dims)
    if not select or dims is None or isinstance(gram, Reason):
        return gram
    return ColumnsGram(gram, dims)


def _forward(kernel: Kernel) -> Gram | Reason:
    kind = type(kernel)
    if has_hooks(kernel):
        return Reason(f"{kind.__name__} has hooks, or a forward that was exchanged")
    if kind is ScaleKernel:  # which selects the columns for its base, and calls its forward
        base = closed_form(cast(Kernel, kernel.base_kernel))
        return base if isinstance(base, Reason) else ScaledGram(kernel, [base])
    if kind is AdditiveKernel or kind is ProductKernel:
        children = [closed_form(child, select=True) for child in cast(Any, kernel.kernels)]
        for child in children:
            if isinstance(child, Reason):
                return child
        combined = SumGram if kind is AdditiveKernel else ProductGram
        return combined(kernel, cast(list[Gram], children))
    method = vars(kind).get(_METHOD)
    if method is not None:
        return method(kernel)
    if kind.forward is IndexKernel.forward:
        return TasksGram(kernel)
    make = _KNOWN.get(kind)
    if make is not None:
        return make(kernel)
    known = next((base for base in kind.__mro__ if base in _KNOWN or _METHOD in vars(base)), None)
    if known is not None:
        return Reason(f"{kind.__name__} is a subclass of {known.__name__}")
    return Reason(f"{kind.__name__} is not known in closed form")


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling a module does anything else than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _matern(kernel: Kernel) -> Gram:
    return RadialGram(kernel, _MATERN[cast(MaternKernel, kernel).nu])


_KNOWN: dict[type[Kernel], Callable[[Kernel], Gram]] = {
    ConstantKernel: ConstantGram,
    CosineKernel: lambda kernel: RadialGram(kernel, "cosine", "period_length"),
    LinearKernel: LinearGram,
    MaternKernel: _matern,
    PeriodicKernel: PeriodicGram,
    PolynomialKernel: PolynomialGram,
    RBFKernel: lambda kernel: RadialGram(kernel, "rbf"),
    RQKernel: lambda kernel: RadialGram(kernel, "rational_quadratic", power="alpha"),
    SpectralMixtureKernel: SpectralMixtureGram,
}
