"""Published test errors of networks on UCI sets, to stand beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["PUBLISHED_NLL"]

PUBLISHED_NLL: Mapping[str, Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "boston": {
            "CV MAP": (2.71, 0.10), "CV Laplace": (2.57, 0.05), "full, ggn": (2.69, 0.12),
            "full, ef": (2.62, 0.12), "kronecker, ggn": (2.70, 0.09),
        },
        "concrete": {
            "CV MAP": (3.17, 0.04), "CV Laplace": (3.05, 0.04), "full, ggn": (3.06, 0.05),
            "full, ef": (3.07, 0.04), "kronecker, ggn": (3.13, 0.06),
        },
        "energy": {
            "CV MAP": (1.02, 0.05), "CV Laplace": (0.82, 0.03), "full, ggn": (0.55, 0.11),
            "full, ef": (0.73, 0.15), "kronecker, ggn": (0.53, 0.02),
        },
        "yacht": {
            "CV MAP": (2.30, 0.02), "CV Laplace": (1.01, 0.05), "full, ggn": (5.89, 1.25),
            "full, ef": (2.43, 0.61), "kronecker, ggn": (1.48, 0.07),
        },
    }
)  # fmt: skip
"""Test NLL (nats, original units) and its standard error over ten splits, by data set and method:
Immer et al. (2021), Table 1; a curvature's name stands for their online marginal likelihood."""
