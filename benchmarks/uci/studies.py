"""The grids of the benchmark as data: products of settings, some of them with a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["STUDIES", "Product"]


@dataclass(frozen=True)
class Product:
    """Every combination of these settings.

    Args:
        datasets: Data sets.
        sizes: Numbers of training rows, n.
        seeds: Number of seeds; they are 0 to ``seeds - 1``.
        objectives: Objectives.
        kernels: Kernels.
        means: Means.
        steps: Numbers of Adam steps; not used under L-BFGS.
        lr: Learning rate of Adam; not used under L-BFGS.
        held_out: Shares of the training points that are held out, 1 - m/n; for objectives with
            such a share.
        trace: Whether the test error is also recorded in the course of training by Adam.
        dtype: ``"float64"`` or ``"float32"``; matrices up to n = 512 are factored in float64
            either way.
    """

    datasets: tuple[str, ...]
    sizes: tuple[int, ...] = (100,)
    seeds: int = 10
    objectives: tuple[str, ...] = ("lml", "clml")
    kernels: tuple[str, ...] = ("rbf", "deep", "deep-bottleneck")
    means: tuple[str, ...] = ("constant",)
    steps: tuple[int, ...] = (300,)
    lr: float = 0.01
    held_out: tuple[float, ...] = (0.1,)
    trace: bool = False
    dtype: str = "float64"


_PAPER = ("boston", "concrete", "energy", "power", "wine-red", "wine-white")
_ALL = (*_PAPER, "kin8nm", "naval", "protein", "yacht")
_LARGE = ("kin8nm", "naval", "protein", "power")
_ABLATION = ("boston", "concrete", "energy", "yacht", "power", "wine-red")
_UP_TO_700 = tuple(range(100, 701, 100))
_DEEP_SIZES = (100, 200, 300, 500, 700)
_SHARES = (0.9, 0.75, 0.5, 0.25, 0.1)


def _ablated(
    objectives: tuple[str, ...], steps: int = 300, held_out: tuple[float, ...] = (0.1,)
) -> Product:
    return Product(
        _ABLATION, objectives=objectives, kernels=("deep-bottleneck",), means=("constant", "mlp"),
        steps=(steps,), held_out=held_out,
    )  # fmt: skip


STUDIES: Mapping[str, tuple[Product, ...]] = MappingProxyType(
    {
        "paper": (
            Product(
                _PAPER, _UP_TO_700, kernels=("deep-bottleneck",), steps=(100,), held_out=_SHARES,
                dtype="float32",
            ),
        ),
        "baselines": (
            Product(
                _ALL, _UP_TO_700, objectives=("lml",), kernels=("rbf", "rq", "spectral_mixture")
            ),
            Product(_ALL, _UP_TO_700, objectives=("clml",), kernels=("rbf",)),
        ),
        "deep": (
            Product(_ALL, _DEEP_SIZES, objectives=("clml",), kernels=("deep",)),
            Product(_ALL, _DEEP_SIZES, objectives=("lml",), kernels=("rbf",)),
        ),
        "large": (
            Product(_LARGE, (1000, 2000, 5000), 5, ("clml",), ("deep",)),
            Product(_LARGE, (1000, 2000, 5000), 5, ("lml",), ("rbf", "rq")),
        ),
        "ablation": (
            _ablated(
                (
                    "lml", "clml", "clml-fixed", "clml-folds", "clml-orderings", "loo",
                    "lml-subset",
                )
            ),
            _ablated(("clml",), held_out=(0.25, 0.5, 0.75, 0.9)),
            _ablated(("lml", "clml"), steps=100),
            Product(_ABLATION, kernels=("deep-bottleneck",), steps=(1000,), trace=True),
            Product(_ABLATION, kernels=("rbf",)),
        ),
    }
)  # fmt: skip
"""Named grids, each a union of products: ``paper`` is that of Lotfi et al. (2022), Figures 9(a)
and 24, in single precision as their code; ``baselines`` kernels without a network; ``deep`` the
residual deep kernel beside the plain ARD GP; ``large`` the same from n = 1000; ``ablation`` what
makes the difference between the objectives at n = 100."""
