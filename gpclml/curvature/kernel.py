"""Curvature in the space of samples: the neural tangent kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from gpclml._utils.arguments import checked
from gpclml.curvature._layers import record_layers
from gpclml.curvature._records import LayerRecord
from gpclml.curvature._sample_gradients import Cotangents, sample_gradients
from gpclml.curvature.structure import Curvature, Structure
from gpclml.errors import UnsupportedError
from gpclml.linalg import safe_cholesky

__all__ = ["FunctionSpace", "FunctionSpaceCurvature"]


class FunctionSpaceCurvature(Curvature):
    r"""Inner products :math:`v_{nk}^\top J_n J_m^\top v_{ml}`, a matrix for each parameter.

    Its log-determinant, :math:`\log |I + s V^\top J P_0^{-1} J^\top V|`, is that of the full
    curvature; it gives no weights and no sums.

    Args:
        grams: ``(N K, N K)`` by name.
    """

    @checked(late=True)
    def __init__(self, grams: Mapping[str, Tensor]) -> None:
        self.grams = dict(grams)

    @override
    def log_det_ratio(
        self, precisions: Mapping[str, Tensor], scale: Tensor | float = 1.0
    ) -> Tensor:
        kernel = torch.stack([gram / precisions[name] for name, gram in self.grams.items()]).sum(0)
        eye = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
        factor = safe_cholesky(torch.addcmul(eye, kernel, torch.as_tensor(scale).to(kernel)))
        return 2 * factor.diagonal().log().sum().to(kernel.dtype)

    @override
    def sample(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        raise UnsupportedError("curvature", "a FunctionSpace", "one with draws", "Use Full.")

    @override
    def __add__(self, other: Self) -> Self:
        raise UnsupportedError(
            "curvature", "a FunctionSpace over several batches", "one batch", "Use Full for a sum."
        )


@dataclass(frozen=True)
class FunctionSpace(Structure):
    """The full curvature from inner products of layers, without gradients of single points.

    The way to a stochastic estimate of the evidence of a large network: few points, few
    outputs (Immer et al. 2023, Section 4). Exact for every network.

    Note:
        K passes back, (N K)² (in + out) a plain layer; a convolution takes the gradients of its
        weight at single points, N K times its size. So do parameters of other modules, and those
        of layers that :class:`Kronecker` refuses, such as tied or normed ones.
    """

    @override
    def of(
        self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents
    ) -> FunctionSpaceCurvature:
        grams = {}
        records, others = record_layers(module, x, cotangents, only=False)
        for record in records:
            if record.weight is not None:
                grams[record.weight] = _weight_gram(record)
            if record.bias is not None:
                grams[record.bias] = _gram(record.summed_gradients())
        if others:
            gradients = sample_gradients(module, x, cotangents, others)
            grams |= {
                name: _gram(rows.reshape(*rows.shape[:2], -1)) for name, rows in gradients.items()
            }
        return FunctionSpaceCurvature(grams)


def _weight_gram(record: LayerRecord) -> Tensor:
    if not record.is_plain:
        return _gram(record.weight_gradients())
    gradients, inputs = record.summed_gradients(), record.mean_inputs()
    k = gradients.shape[1]
    of_inputs = (inputs @ inputs.mT).repeat_interleave(k, 0).repeat_interleave(k, 1)
    return of_inputs * _gram(gradients)


def _gram(rows: Tensor) -> Tensor:
    flat = rows.flatten(0, 1)
    return flat @ flat.mT
