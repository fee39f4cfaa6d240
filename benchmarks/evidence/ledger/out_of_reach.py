"""Tables and figures of the papers that the ledger does not try, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["CHECKED", "OUT_OF_REACH"]

_NETWORKS = (
    "[architectures](results/README.md), 22 small networks on digits and 15 on part of CIFAR-10"
)
_CIFAR = "networks on CIFAR-10 and CIFAR-100 need GPU hours and data that were not available"

OUT_OF_REACH: Mapping[str, tuple[tuple[str, str, str], ...]] = MappingProxyType(
    {
        "Lotfi et al. 2022": (
            ("Figures 5 to 7 and their appendix, LML and CLML of architectures", _CIFAR, _NETWORKS),
            ("Tables 1 and 2 and Figure 10, learning curves of networks", _CIFAR,
             "[training-speed](results/README.md), six architectures on digits"),
            ("Figure 1, an overview of pitfalls", "a drawing, without results", "fourier"),
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
        "Harvey and Hughes 2026": (
            ("The figures of a later version: signal-to-noise ratios by rank, number of points, "
             "noise and temperature", "known from the authors' public code alone, without a text",
             "elbo-families, elbo-tempering"),
        ),
        "Immer et al. 2021": (
            ("Table 1, cross-validated variational inference",
             "variational networks are not in the library; 70 of them a set, trained by draws for "
             "10,000 epochs, would take several hours of one core",
             "uci-networks, all other columns"),
            ("Figure 3, the method in two steps on an image network",
             "networks on CIFAR-10 take too much compute", "evidence-ranking"),
            ("Figures 2 and 7 and Table 2 at their size",
             "networks on CIFAR-10, and all of MNIST and Fashion-MNIST, take too much compute",
             "evidence-ranking; [online](results/README.md), precisions of a grid and learned"),
        ),
        "Immer et al. 2023": (
            ("Figure 2, an overview of the bounds", "a drawing, without results",
             "evidence-bounds"),
            ("Figures 1, 3 to 6 and 13 at their size", "1000 images and 100 values of a range: "
             "hours of one core", "evidence-bounds, 200 and 100 images"),
            ("The appendix: evidence and test log density over 500 epochs of training, by "
             "structure (full, blocks, Kronecker, diagonal, kernel), size of batches, one output "
             "or all, with and without a learned rotation",
             "840 trainings of 500 epochs by the authors' scripts: days of one core",
             "evidence-bounds, the same estimates at the end of training; affine-invariance, "
             "training by four of them"),
            ("Tables 1 and 2, precisions and invariances at scale",
             "networks on CIFAR-10, CIFAR-100 and TinyImageNet need compute and data that were "
             "not available",
             "affine-invariance"),
        ),
    }
)  # fmt: skip
"""By paper: what, why, and what there is in its place."""

CHECKED: Mapping[str, str] = MappingProxyType(
    {
        "Lotfi et al. 2022": "data and contents of Figures 2, 3, 4, 8, 9, 11 and 23 with arrays "
        "and notebooks of the authors' public code, Section 6 with its instructions. Not checked: "
        "numbers of other sections, equations and appendices.",
        "Lyle et al. 2020": "the caption of Figure 2 as quoted elsewhere, and the linear problems "
        "with the authors' scripts. Not checked: numbers of sections and equations, and Figures 3, "
        "4, 8 and 9.",
        "Harvey and Hughes 2026": "data, seeds, steps and printed numbers of Figures 1 to 5 with "
        "the notebooks and scripts of the authors' public code, the main claims with the abstract "
        "(arXiv 2604.25984). Not checked: Appendix C.",
        "Immer et al. 2021": "the abstract, the caption of Figure 3 as quoted elsewhere, and the "
        "online algorithm with the authors' public code. Not checked: numbers of sections and "
        "figures, and the digits of Table 1.",
        "Immer et al. 2023": "the caption of Figure 2 as quoted elsewhere; network, images, ranges "
        "and estimates of Figures 1, 3 to 6, 13 and of the appendix with the authors' public code. "
        "Not checked: numbers of theorems and sections.",
    }
)  # fmt: skip
"""By paper: what of the citations was checked, and against what."""
