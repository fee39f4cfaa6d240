"""Transformations of images with learnable ranges, and networks averaged over them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gpclml._utils.resuming import ResumableDraws

_GENERATORS = {
    "translation_x": ((0, 0, 1), (0, 0, 0), (0, 0, 0)),
    "translation_y": ((0, 0, 0), (0, 0, 1), (0, 0, 0)),
    "rotation": ((0, -1, 0), (1, 0, 0), (0, 0, 0)),
    "scale": ((1, 0, 0), (0, 1, 0), (0, 0, 0)),
    "stretch": ((1, 0, 0), (0, -1, 0), (0, 0, 0)),
    "shear": ((0, 1, 0), (1, 0, 0), (0, 0, 0)),
}


class AffineAugmentation(ResumableDraws):
    r"""Random affine transformations of images, whose ranges are parameters.

    .. math:: A = \exp\Big(\sum_i u_i \eta_i G_i\Big), \qquad u_i \sim \mathcal U[-1, 1]

    with G the generators of the affine group (Benton et al. 2020, Section 4; Immer et al. 2022).
    The images are differentiable in the ranges, so that these can be learned by maximizing the
    evidence of a network averaged over the transformations.

    Args:
        ranges: Start of the ranges by name: ``"translation_x"`` and ``"translation_y"`` (one is
            half an image), ``"rotation"`` (radians), ``"scale"``, ``"stretch"`` and ``"shear"``
            (logarithms).
        samples: Number S of versions of each image.
        seed: Seed of the transformations; each call draws new ones. The state of the generator
            is part of ``state_dict()``.

    Examples:
        >>> augmentation = AffineAugmentation({"rotation": 0.1}, samples=8)
        >>> model = LinearizedNetwork(AveragedNetwork(network), augmentation=augmentation)
    """

    def __init__(self, ranges: Mapping[str, float], samples: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.names: tuple[str, ...] = tuple(ranges)
        self.samples = samples
        start = torch.tensor([math.log(value) for value in ranges.values()])
        self.log_ranges: torch.nn.Parameter = torch.nn.Parameter(start)
        # Generators are constants: they move with the module and are not saved.
        generators = torch.tensor([_GENERATORS[name] for name in ranges], dtype=start.dtype)
        self.register_buffer("generators", generators, persistent=False)
        self._generator = torch.Generator().manual_seed(seed)

    def ranges(self) -> dict[str, float]:
        """The current ranges by name."""
        return dict(zip(self.names, self.log_ranges.detach().exp().tolist(), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """S versions of each image, zero outside of it, ``(N, S, channels, height, width)``."""
        shape = len(x) * self.samples, len(self.names)
        # Drawn in float64 on the CPU: one seed gives one set of versions on every device.
        u = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        steps = (2 * u - 1).to(x) * self.log_ranges.exp().to(x)
        generators = self.get_buffer("generators").to(x)
        # The last row of an affine matrix is (0, 0, 1): a grid needs the first two.
        affine = torch.linalg.matrix_exp(torch.einsum("ni,ijk->njk", steps, generators))[:, :2]
        images = x.repeat_interleave(self.samples, dim=0)
        grid = torch.nn.functional.affine_grid(affine, list(images.shape), align_corners=False)
        made = torch.nn.functional.grid_sample(images, grid, align_corners=False)
        return made.unflatten(0, (len(x), self.samples))


class AveragedNetwork(torch.nn.Module):
    r"""A network whose outputs are the mean over S versions of each point.

    .. math:: \bar f(x) = \frac1S \sum_s f(x_s)

    Use ``Kronecker("reduce")`` for its curvature: the versions share weights, and their gradients
    add up.

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Mean outputs over versions of points, ``(N, S, *event)`` to ``(N, C)``."""
        outputs = self.network(x.flatten(0, 1))
        return outputs.unflatten(0, x.shape[:2]).mean(1)
