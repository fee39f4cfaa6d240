"""Tables and figures of the papers that the ledger does not try, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["OUT_OF_REACH"]

_NETWORKS = "[architectures](results/README.md), 22 small networks on digits"
_CIFAR = "networks on CIFAR-10 and CIFAR-100: no GPU hours, and no such data at hand"

OUT_OF_REACH: Mapping[str, tuple[tuple[str, str, str], ...]] = MappingProxyType(
    {
        "Lotfi et al. 2022": (
            ("Figures 5 to 7 and their appendix, LML and CLML of architectures", _CIFAR, _NETWORKS),
            ("Tables 1 and 2 and Figure 10, learning curves of networks", _CIFAR,
             "[training-speed](results/README.md), six architectures on digits"),
            ("Figure 9a, deep kernels on UCI sets", "not a toy: it has a benchmark of its own",
             "[UCI](../uci/results/README.md)"),
            ("Figure 9b and Tables 3 and 4, deep kernel transfer",
             "not a toy: it has a benchmark of its own; QMUL faces are not public",
             "[few-shot](../dkt/results/README.md)"),
        ),
        "Lyle et al. 2020": (
            ("Figure 3 at its size", "Fashion images and ten runs of large networks: compute",
             "training-speed-networks"),
            (
                "Figures 8 and 9, subnetworks on other images",
                "no Fashion images at hand",
                "training-speed-subnetworks",
            ),
        ),
        "Harvey and Hughes 2026": (),
        "Immer et al. 2021": (
            ("Table 1, UCI regression", "ten splits of 10,000 epochs each: not run whole",
             "[online](results/README.md), four sets, splits of our own"),
            ("Figures 1 and 4, one-dimensional regression", "not built yet", "-"),
            ("Figures 2, 3 and 7, Table 2, image networks",
             "networks on CIFAR-10, FMNIST and MNIST: compute", _NETWORKS),
        ),
        "Immer et al. 2023": (
            ("Figures 1, 3 to 6 and 13, tightness and time of estimators",
             "ranges of precision and angle are not swept yet",
             "[bounds](results/README.md), every estimator at one precision"),
            ("Tables 1 and 2, invariances and precisions at scale",
             "networks on CIFAR-10, CIFAR-100 and TinyImageNet: compute",
             "[invariance](results/README.md), one rotation on MNIST digits"),
        ),
    }
)  # fmt: skip
"""By paper: what, why, and what there is in its place."""
