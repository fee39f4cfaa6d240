"""Tables and figures of the papers that the ledger does not try, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["OUT_OF_REACH"]

_NETWORKS = "[architectures](results/README.md), 22 small networks on digits"
_CIFAR = "networks on CIFAR-10 and CIFAR-100 need GPU hours and data that were not available"

OUT_OF_REACH: Mapping[str, tuple[tuple[str, str, str], ...]] = MappingProxyType(
    {
        "Lotfi et al. 2022": (
            ("Figures 5 to 7 and their appendix, LML and CLML of architectures", _CIFAR, _NETWORKS),
            ("Tables 1 and 2 and Figure 10, learning curves of networks", _CIFAR,
             "[training-speed](results/README.md), six architectures on digits"),
            ("Figure 9a, deep kernels on UCI sets", "this has a benchmark of its own",
             "[UCI](../uci/results/README.md)"),
            ("Figure 9b and Tables 3 and 4, deep kernel transfer",
             "this has a benchmark of its own; QMUL faces are not public",
             "[few-shot](../dkt/results/README.md)"),
        ),
        "Lyle et al. 2020": (
            ("Figure 3 at its size", "ten runs of large networks on fashion images take too much "
             "compute",
             "training-speed-networks"),
        ),
        "Harvey and Hughes 2026": (),
        "Immer et al. 2021": (
            ("Table 1, the other sets, the empirical Fisher and cross-validation",
             "not computed yet: a cell takes minutes on one core for small sets, up to an hour "
             "for kin8nm, power and naval",
             "the same command goes on where it stopped: `run uci-networks`"),
            ("Figure 3, image networks", "networks on CIFAR-10 take too much compute",
             "evidence-ranking"),
            ("Figures 2 and 7 and Table 2 at their size",
             "networks on CIFAR-10, and all of MNIST and Fashion-MNIST, take too much compute",
             "evidence-ranking; [online](results/README.md), precisions of a grid and learned"),
        ),
        "Immer et al. 2023": (
            ("Figures 1, 3 to 6 and 13 at their size", "1000 images and 100 values of a range: "
             "hours of one core", "evidence-bounds, 200 and 100 images"),
            ("Tables 1 and 2, precisions and invariances at scale",
             "networks on CIFAR-10, CIFAR-100 and TinyImageNet need compute and data that were "
             "not available",
             "affine-invariance"),
        ),
    }
)  # fmt: skip
"""By paper: what, why, and what there is in its place."""
