"""Published test errors of the bottleneck deep kernel, to stand beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["PUBLISHED_MEDIANS", "PUBLISHED_SHARE"]

PUBLISHED_SHARE = 0.1
"""The share that the published CLML holds out, m = 0.9 n."""

PUBLISHED_MEDIANS: Mapping[str, Mapping[int, tuple[float, float]]] = MappingProxyType(
    {
        "boston": {
            100: (0.411, 0.334), 200: (0.405, 0.279), 300: (0.331, 0.224), 400: (0.283, 0.241),
            455: (0.279, 0.229),
        },
        "concrete": {
            100: (0.731, 0.588), 200: (0.497, 0.476), 300: (0.446, 0.439), 400: (0.409, 0.439),
            500: (0.364, 0.425), 600: (0.392, 0.395), 700: (0.361, 0.385),
        },
        "energy": {
            100: (0.285, 0.238), 200: (0.220, 0.199), 300: (0.198, 0.194), 400: (0.171, 0.154),
            500: (0.138, 0.141), 600: (0.130, 0.122), 691: (0.106, 0.118),
        },
        "power": {
            100: (0.444, 0.364), 200: (0.358, 0.289), 300: (0.322, 0.283), 400: (0.306, 0.280),
            500: (0.303, 0.273), 600: (0.293, 0.266), 700: (0.291, 0.267),
        },
        "wine-red": {
            100: (1.074, 0.998), 200: (1.298, 0.974), 300: (1.198, 0.955), 400: (1.107, 0.893),
            500: (1.117, 0.845), 600: (0.969, 0.888), 700: (0.974, 0.831),
        },
        "wine-white": {
            100: (1.397, 1.115), 200: (1.178, 1.023), 300: (1.164, 0.953), 400: (1.178, 0.960),
            500: (1.178, 0.951), 600: (1.206, 0.918), 700: (1.164, 0.890),
        },
    }
)  # fmt: skip
"""RMSE under the LML and under the CLML by data set and n, medians of ten trials, normalised
units: Lotfi et al. (2022), box plots of Figures 9(a) and 24, read off to about 0.01."""
