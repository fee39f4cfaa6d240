"""Curvature as dense matrices: of all parameters, or of blocks of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from gpclml._utils.arguments import checked
from gpclml.curvature._draws import Draw, normal_draws
from gpclml.curvature._parameters import layer_of
from gpclml.curvature._sample_gradients import Cotangents, sample_gradients
from gpclml.curvature.structure import Curvature, Structure
from gpclml.errors import UnknownNameError
from gpclml.linalg import safe_cholesky

__all__ = ["BlockDiagonal", "DenseCurvature", "Full"]

_FORMS = ("smaller", "parameters", "samples")


@dataclass(frozen=True)
class _Block:
    """A block as its rows, ``(N K, p)``, or as the product of these, ``(p, p)``."""

    shapes: Mapping[str, torch.Size]
    by_samples: bool
    matrix: Tensor

    def _roots(self, precisions: Mapping[str, Tensor]) -> Tensor:
        """Prior standard deviations, ``(p,)``."""
        parts = [precisions[name].rsqrt().expand(n.numel()) for name, n in self.shapes.items()]
        return torch.cat(parts)

    def log_det_ratio(self, precisions: Mapping[str, Tensor], scale: Tensor | float) -> Tensor:
        root = self._roots(precisions)
        if self.by_samples:
            rows = self.matrix * root
            inner = rows @ rows.mT
        else:
            inner = self.matrix * root * root.unsqueeze(-1)
        eye = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        factor = safe_cholesky(torch.addcmul(eye, inner, torch.as_tensor(scale).to(inner)))
        return 2 * factor.diagonal().log().sum().to(inner.dtype)

    def sample(
        self, precisions: Mapping[str, Tensor], scale: float, count: int, draw: Draw
    ) -> dict[str, Tensor]:
        root = self._roots(precisions)
        prior = draw(count, len(root))  # of standardized weights
        if self.by_samples:  # a draw from the prior, moved by what noisy rows say of it
            rows = scale**0.5 * self.matrix * root
            eye = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
            factor = safe_cholesky(rows @ rows.mT + eye).to(rows.dtype)
            seen = prior @ rows.mT + draw(count, len(rows))
            values = prior - torch.cholesky_solve(seen.mT, factor).mT @ rows
        else:
            inner = scale * self.matrix * root * root.unsqueeze(-1)
            eye = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
            factor = safe_cholesky(inner + eye).to(inner.dtype)
            values = torch.linalg.solve_triangular(factor.mT, prior.mT, upper=True).mT
        parts = (root * values).split([n.numel() for n in self.shapes.values()], dim=-1)
        return {
            name: part.reshape(count, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def plus(self, other: _Block) -> _Block:
        if self.by_samples and other.by_samples:
            rows = torch.cat([self.matrix, other.matrix])
            by_samples = len(rows) < rows.shape[1]
            return replace(
                self, by_samples=by_samples, matrix=rows if by_samples else rows.mT @ rows
            )
        mine, theirs = (
            one.matrix.mT @ one.matrix if one.by_samples else one.matrix for one in (self, other)
        )
        return replace(self, by_samples=False, matrix=mine + theirs)


class DenseCurvature(Curvature):
    r"""Blocks of :math:`H = \sum_{nk} (J_n^\top v_{nk}) (J_n^\top v_{nk})^\top`."""

    @checked(late=True)
    def __init__(self, blocks: Sequence[_Block]) -> None:
        self._blocks = tuple(blocks)

    @classmethod
    def of_gradients(
        cls, gradients: Mapping[str, Tensor], blocks: Iterable[Iterable[str]], form: str
    ) -> DenseCurvature:
        """From the rows of each parameter.

        Args:
            gradients: ``(N, K, *shape)`` by name.
            blocks: Names of the parameters of each block.
            form: ``"parameters"`` for matrices as large as a block, ``"samples"`` for N K x N K,
                ``"smaller"`` for whichever is.
        """
        made = []
        flat = {name: rows.reshape(*rows.shape[:2], -1) for name, rows in gradients.items()}
        for names in map(tuple, blocks):
            rows = torch.cat([flat[name] for name in names], dim=-1).flatten(0, 1)
            shapes = {name: gradients[name].shape[2:] for name in names}
            by_samples = form == "samples" or (form == "smaller" and len(rows) < rows.shape[1])
            made.append(_Block(shapes, by_samples, rows if by_samples else rows.mT @ rows))
        return cls(made)

    @override
    def log_det_ratio(
        self, precisions: Mapping[str, Tensor], scale: Tensor | float = 1.0
    ) -> Tensor:
        return torch.stack([one.log_det_ratio(precisions, scale) for one in self._blocks]).sum()

    @override
    @torch.no_grad()
    def sample(
        self,
        precisions: Mapping[str, Tensor],
        scale: Tensor | float = 1.0,
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        draw = normal_draws(generator, next(iter(precisions.values())))
        draws: dict[str, Tensor] = {}
        for block in self._blocks:
            draws |= block.sample(precisions, float(scale), count, draw)
        return draws

    @override
    def __add__(self, other: Self) -> Self:
        pairs = zip(self._blocks, other._blocks, strict=True)
        return type(self)([one.plus(two) for one, two in pairs])


@checked
@dataclass(frozen=True)
class Full(Structure):
    """The curvature of all parameters together.

    Args:
        form: ``"parameters"``, a P x P matrix; ``"samples"``, N K x N K; or the ``"smaller"``.

    Note:
        The smaller of P and N K, cubed; N K P numbers in memory.
    """

    form: Literal["smaller", "parameters", "samples"] = "smaller"

    def __post_init__(self) -> None:
        _check_form(self.form)

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> DenseCurvature:
        gradients = sample_gradients(module, x, cotangents)
        return DenseCurvature.of_gradients(gradients, [gradients], self.form)


@checked
@dataclass(frozen=True)
class BlockDiagonal(Structure):
    """The curvature of each layer, or each parameter tensor, without what couples them.

    Its log-determinant is at least that of the full curvature (Fischer's inequality; Immer et
    al. 2023, Theorem 1): the evidence is a lower bound.

    Args:
        by: ``"layer"``, a module with its weight and bias, or ``"parameter"``.
        form: As for :class:`Full`.
    """

    by: Literal["layer", "parameter"] = "layer"
    form: Literal["smaller", "parameters", "samples"] = "smaller"

    def __post_init__(self) -> None:
        _check_form(self.form)
        if self.by not in ("layer", "parameter"):
            raise UnknownNameError("by", self.by, ("layer", "parameter"))

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> DenseCurvature:
        gradients = sample_gradients(module, x, cotangents)
        blocks: dict[str, list[str]] = {}
        for name in gradients:
            blocks.setdefault(layer_of(name) if self.by == "layer" else name, []).append(name)
        return DenseCurvature.of_gradients(gradients, blocks.values(), self.form)


def _check_form(form: str) -> None:
    if form not in _FORMS:
        raise UnknownNameError("form", form, _FORMS)
