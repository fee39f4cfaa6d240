"""Base classes of curvature and its structures, and gradients at single points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpclml._utils.arguments import check_finite
from gpclml.errors import ArgumentError, ModelModeError, ShapeError, UnsupportedError

Cotangents = Callable[[Tensor], Tensor]
"""Maps outputs ``(N, C)`` to columns of their curvature, ``(N, K, C)``."""


_DROPOUT = torch.nn.modules.dropout._DropoutNd
_BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm
Precisions = Mapping[str, Tensor]
"""Prior precision of each parameter by name: a number, or one for each weight."""

Scale = Tensor | float
"""Factor of the curvature."""

Draw = Callable[..., Tensor]
Draws = dict[str, Tensor]
OutputCovariance = Callable[..., Tensor]
"""Maps gradients of outputs by the parameter's name, ``(N, C, *shape)``, to ``(N, C, C)``.

With a second argument q points follow each other in groups of q: ``(N / q, q C, q C)``."""


class Curvature(ABC):
    r"""Base class of the curvature H of a network's negative log likelihood, or an approximation.

    :math:`H = \sum_{nk} (J_n^\top v_{nk}) (J_n^\top v_{nk})^\top` with columns v of output
    curvature.
    """

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Names of its parameters."""

    @abstractmethod
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        r""":math:`\log |s H + P_0| - \log |P_0|`, in nats.

        Args:
            precisions: Prior precision of each parameter, by name.
            scale: Factor s of H.

        Returns:
            A number; differentiable in the precisions, the scale and the points.
        """

    @torch.no_grad()
    def sample(
        self,
        precisions: Precisions,
        scale: Tensor | float = 1.0,
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        r"""Draws from :math:`\mathcal N(0, (s H + P_0)^{-1})`: deviations of weights.

        Args:
            precisions: Prior precision of each parameter, by name.
            scale: Factor s of H.
            count: Number of draws.
            generator: Source of the draws; seed 0 if None.

        Returns:
            Draws by name, ``(count, *shape)``.

        Raises:
            UnsupportedError: Draws are not available in this structure.
        """
        source = torch.Generator().manual_seed(0) if generator is None else generator
        like = next(iter(precisions.values()))

        def draw(*shape: int) -> Tensor:
            # In float64, so that one seed gives one draw in every dtype and on every device.
            normal = torch.randn(shape, generator=source, dtype=torch.float64, device=source.device)
            return normal.to(like)

        return self._draws(precisions, float(scale), count, draw)

    @abstractmethod
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        """What :meth:`sample` returns, made of standard normal numbers ``draw(*shape)``."""

    @abstractmethod
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        r"""The covariance of outputs that are linear in weights of :math:`\mathcal N(0, \Sigma)`.

        .. math:: J_n \Sigma J_n^\top, \qquad \Sigma = (s H + P_0)^{-1}

        Args:
            precisions: Prior precision of each parameter, by name.
            scale: Factor s of H.

        Returns:
            A function from the gradients of outputs at points, ``(N, C, *shape)`` by the
            parameter's name or as :func:`output_gradients` gives them, to ``(N, C, C)``; what does
            not depend on points is computed once. Its second argument q, 1 by default, asks for
            the joint covariance of each q points that follow each other, ``(N / q, q C, q C)``.

        Raises:
            UnsupportedError: The structure has no posterior.
        """

    @abstractmethod
    def __add__(self, other: Any) -> Self:
        """The curvature at the points of both, or an UnsupportedError if it is not known."""


class Structure(ABC):
    """Base class of structures: which parts of the curvature are kept, and in which form."""

    @abstractmethod
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> Curvature:
        """The curvature at points.

        Args:
            module: Maps ``(N, *event)`` to ``(N, C)``.
            x: Points, ``(N, *event)``; if they require a gradient so does the curvature.
            cotangents: Maps outputs to columns of their curvature, ``(N, K, C)``.

        Raises:
            ArgumentError: No parameter is trainable.
            ModelModeError: Dropout or batch normalization is in train mode.
            ShapeError: The network's outputs or the columns have other shapes.
            NonFiniteError: A column is not finite.
            UnsupportedError: The structure does not support a module of the network, which the
                error names.
        """


def softmax_columns(p: Tensor) -> Tensor:
    """Columns √p_k (e_k - p) with diag(p) - p pᵀ = S Sᵀ, as rows, ``(N, C, C)``."""
    eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    return p.sqrt().unsqueeze(-1) * (eye - p.unsqueeze(-2))


def probe_weights(like: Tensor) -> Tensor:
    """Positive weights of rows, by which a sum of gradients is compared with autograd's."""
    drawn = torch.rand(like.shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(like) + 0.5


def differing(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of gradients that are not those expected, up to rounding (TF32 has 1e-3)."""
    if not expected:
        return []
    sizes = torch.stack([g.detach().norm() for g in expected.values()])
    distances = [(gradients[name] - g).detach().norm() for name, g in expected.items()]
    eps = torch.finfo(sizes.dtype).eps
    # A gradient that cancels to near zero has the rounding of the others.
    wrong = torch.stack(distances) > eps**0.25 * sizes + 1000 * eps * sizes.norm()
    return [name for name, bad in zip(expected, wrong.tolist(), strict=True) if bad]


@contextmanager
def twice_differentiable(module: torch.nn.Module, again: bool = False) -> Iterator[None]:
    """A context in which gradients of recurrent layers in eval mode exist, which cuDNN has not.

    Where gradients are differentiated ``again``, attention goes by its formula: fused kernels have
    first derivatives alone.
    """
    recurrent = any(isinstance(layer, torch.nn.RNNBase) for layer in module.modules())
    fused = sdpa_kernel(SDPBackend.MATH) if again else nullcontext()
    with torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext(), fused:
        yield


def check_network(module: torch.nn.Module) -> None:
    """Raises where the curvature of a network is not defined."""
    if not any(p.requires_grad for p in module.parameters()):
        raise ArgumentError(
            "module", "a network without trainable parameters", "at least one",
            "Set requires_grad on some.",
        )  # fmt: skip
    check_mode(module)


def check_mode(module: torch.nn.Module) -> None:
    """Raises where dropout or batch normalization makes outputs depend on more than points."""
    for name, layer in module.named_modules():
        active = isinstance(layer, _DROPOUT) and layer.p > 0
        # Without running statistics a normalization takes those of the batch in eval mode too.
        batch = isinstance(layer, _BATCH_NORM) and layer.running_mean is None
        if batch or (layer.training and (active or isinstance(layer, _BATCH_NORM))):
            state = "without running statistics" if batch else "in train mode"
            suggestion = "Call module.eval() before curvature is computed, and train() after it."
            raise ModelModeError(
                "module",
                f"{name or 'the module'} ({type(layer).__name__}) {state}",
                "one whose output at a point is a function of that point",
                "Use another normalization." if batch else suggestion,
            )


def check_own_outputs(alone: Tensor, outputs: Tensor) -> None:
    """Raises where outputs at points alone are others than among further points."""
    alone, outputs = alone.detach(), outputs.detach()
    tolerance = torch.finfo(outputs.dtype).eps ** 0.25  # TF32 has rounding of 1e-3
    if float((alone - outputs).abs().max()) > tolerance * (1 + float(outputs.abs().max())):
        raise UnsupportedError(
            "module", "one whose output at a point changes with the other points, or by chance",
            "one whose output at a point is a function of that point",
            "Leave out what mixes the points of a batch, or draws random numbers.",
        )  # fmt: skip


def check_cotangents(cotangents: Tensor, outputs: Tensor) -> None:
    """Raises where outputs are no ``(N, C)``, or columns of their curvature not finite."""
    if outputs.ndim != 2:
        raise ShapeError("module", f"outputs {tuple(outputs.shape)}", "outputs (N, C)")
    check_finite("output curvature", cotangents, "Check the outputs of the network.")


def call_with(module: torch.nn.Module, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The module's outputs with other values of its parameters, by name.

    Tied parameters have the same value. A part that has two names is set by one of them:
    ``functional_call`` itself sets it twice, and leaves the module with the value of the first.
    """
    # Found by identity: names of tied parameters are several, the tensor is one.
    named = dict(module.named_parameters())
    chosen = {id(named[name]): value for name, value in values.items()}
    slots = {
        f"{owner}.{kind}".removeprefix("."): chosen[id(p)]
        for owner, layer in module.named_modules()
        for kind, p in layer._parameters.items() if id(p) in chosen
    }  # fmt: skip
    return functional_call(module, slots, (x,), tie_weights=False)


def in_single(values: Tensor) -> Tensor:
    """Values of half precision, as autocast makes them, in single precision; others as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def fresh_parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """The trainable parameters, detached: gradients do not reach those of the network."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def layer_of(name: str) -> str:
    """The module that a parameter belongs to, by the parameter's name.

    That of an original weight of a parametrization, as of spectral norm, is the layer that has it.
    """
    owner, parametrized, _ = f".{name}".partition(".parametrizations.")
    return (owner if parametrized else owner.rpartition(".")[0]).removeprefix(".")
