"""Every table and figure of the papers, and those that the ledger does not try, with the reason."""

from __future__ import annotations

from collections.abc import Mapping


def _figures(*numbers: int) -> tuple[str, ...]:
    return tuple(f"Figure {number}" for number in numbers)


INDEX: Mapping[str, tuple[str, ...]] = {
    "Lotfi et al. 2022": (
        *_figures(*range(1, 26)), *(f"Table {number}" for number in range(1, 5)),
    ),
    "Lyle et al. 2020": _figures(*range(1, 10)),
    "Harvey and Hughes 2026": _figures(*range(1, 6)),
    "Immer et al. 2021": (*_figures(*range(1, 8)), "Table 1", "Table 2"),
    "Immer et al. 2023": (
        *_figures(*range(1, 17)), "Table 1", "Table 2", "Theorem 1", "Theorem 2", "Theorem 3",
        "Corollary 3.1",
    ),
}  # fmt: skip
"""By paper: its tables, figures, and theorems that are tried as such."""

REASONS: Mapping[str, str] = {
    "data": "for want of data", "hours": "for want of hours of computing",
    "drawing": "drawings without results",
}  # fmt: skip
"""Why something is not tried, and how that is counted."""


def _by(study: str, *others: str) -> str:
    """What computes the figures, for those with their data and a GPU."""
    also = f" (and {', '.join(others)})" if others else ""
    return f"; at the paper's settings `python -m benchmarks.evidence run {study}`{also}"


OUT_OF_REACH: Mapping[str, tuple[tuple[tuple[str, ...], str, str, str], ...]] = {
    "Lotfi et al. 2022": (
        (_figures(1), "drawing", "an overview of pitfalls", "fourier"),
        (_figures(5, 6, 7, *range(12, 22)), "hours",
         "25 networks on CIFAR-10 and CIFAR-100, 250 epochs each at several precisions: days "
         "of a GPU; CIFAR-100 was not at hand",
         "[architectures](results/README.md), 22 small networks on digits and 15 on part of "
         "CIFAR-10" + _by("lotfi-2022-cifar10", "lotfi-2022-cifar100")),
        ((*_figures(10), "Table 1", "Table 2"), "hours",
         "learning curves of DenseNet121, GoogLeNet, VGG19 and ResNet-18 on CIFAR-10: days of "
         "a GPU", "[training-speed](results/README.md), six architectures on digits"
         + _by("lotfi-2022-curves")),
    ),
    "Lyle et al. 2020": (),
    "Harvey and Hughes 2026": (),
    "Immer et al. 2021": (
        (_figures(5, 6), "hours",
         "residual networks on CIFAR-10 for 300 epochs: days of a core",
         "evidence-ranking" + _by("immer-2021-augmentation", "immer-2021-cifar10")),
        (("Table 2",), "hours",
         "networks on CIFAR-10, Fashion-MNIST and MNIST, 300 epochs, five starts: days of a "
         "core", "evidence-ranking; [online](results/README.md)"
         + _by("immer-2021-mnist", "immer-2021-fashion", "immer-2021-cifar10")),
    ),
    "Immer et al. 2023": (
        (_figures(2), "drawing", "an overview of the bounds", ""),
        (_figures(7, 14, 15, 16), "hours",
         "residual networks on up to 50,000 images of CIFAR-10: days of a GPU",
         "affine-invariance" + _by("immer-2023-subsets")),
        (_figures(8, 9, 10, 11), "hours",
         "840 trainings of 500 epochs by the authors' scripts: days of a core",
         "evidence-bounds, the same estimates at the end of one training"),
        (("Table 2",), "data", "TinyImageNet was not at hand", ""),
    ),
}  # fmt: skip
"""By paper: the items, the reason, what they take, and what there is in their place or by name."""

CHECKED: Mapping[str, str] = {
    "Lotfi et al. 2022": "data and contents of Figures 2, 3, 4, 8, 9, 11 and 23 with arrays "
    "and notebooks of the authors' public code, Section 6 with its instructions; settings, "
    "captions and section numbers with the text.",
    "Lyle et al. 2020": "the linear problems with the authors' scripts; settings, captions and "
    "section numbers with the text.",
    "Harvey and Hughes 2026": "data, seeds, steps and printed numbers of Figures 1 to 5 with "
    "the notebooks and scripts of the authors' public code, the main claims with the abstract "
    "(arXiv 2604.25984).",
    "Immer et al. 2021": "the online algorithm with the authors' public code; settings, "
    "captions and tables with the text. Not checked: its Appendix C, which was not at hand.",
    "Immer et al. 2023": "network, images, ranges and estimates of Figures 1, 3 to 6 and 13 "
    "with the authors' public code; settings, captions and theorems with the text.",
}  # fmt: skip
"""By paper: what of the citations was checked, and against what."""
