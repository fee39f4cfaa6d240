"""The images to classify, the networks that are compared, and how they are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from gpytorch.likelihoods import SoftmaxLikelihood
from torch import Tensor

from benchmarks.data import has_files, load_images
from benchmarks.dkt.tasks import turned
from gpclml.curvature import (
    BlockDiagonal,
    Diagonal,
    Full,
    FunctionSpace,
    GaussianWeightPrior,
    Kronecker,
)
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.evaluation.calibration import expected_calibration_error
from gpclml.evidence.sampling import marginal_log_densities
from gpclml.fit import fit_map, fit_online
from gpclml.kernels.networks import MLP
from gpclml.mlls import LaplaceEvidence, LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

DATA = {
    "digits": ("digits", None, 8),
    "mnist-test": ("mnist-test", None, 28),
    "fashion-part": ("fashion-part", None, 28),
    "cifar10-part": ("cifar10-part", "cifar10-part-test", 32),
}
"""Name to the images to train on, those to test on where they are others, and their size."""

_MOST_TEST = 2000


class Images(NamedTuple):
    """Images of ten classes.

    Attributes:
        train_x: ``(N, channels, size, size)``, mean 0 and variance 1 over all pixels.
        train_y: Classes, ``(N,)``.
        test_x: Others, scaled alike.
        test_y: Their classes.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def images(name: str, num_train: int, seed: int, device: str = "cpu") -> Images:
    """Random images to train on and at most 2000 others to test on.

    Args:
        name: One of :data:`DATA`.
        num_train: Number of them to train on.
        seed: Seed of the choice.
        device: Where they are put.

    Raises:
        UnknownNameError: No such data.
        ArgumentError: There are not as many.
        DataError: A file is missing.
    """
    if name not in DATA:
        raise UnknownNameError("data", name, DATA)
    source, other, _ = DATA[name]
    train = load_images(source)
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))
    # Without test images of their own at least one image is left to test on.
    most = len(order) if other else len(order) - 1
    if not 1 <= num_train <= most:
        raise ArgumentError("num_train", num_train, f"1 to {most}, the images of {name}")
    rows, others = order[:num_train], order[num_train : num_train + _MOST_TEST]
    test = load_images(other) if other else train
    if other:
        others = torch.arange(min(len(test.labels), _MOST_TEST))
    x = train.images[rows].to(torch.get_default_dtype()) / 255
    # Test images are scaled as those of training, whose moments are known then.
    mean, scale = x.mean(), x.std()
    test_x = test.images[others].to(x) / 255
    tensors = ((x - mean) / scale, train.labels[rows], (test_x - mean) / scale, test.labels[others])
    return Images(*(tensor.to(device) for tensor in tensors))


def image_source() -> str:
    """Images of digits: ``"mnist-test"`` if the data folder has them, or ``"digits"``.

    Digits ship with scikit-learn, so that this runs everywhere.
    """
    return "mnist-test" if has_files("mnist-test") else "digits"


def rotated(x: Tensor, largest: float, seed: int) -> Tensor:
    """Images turned by angles drawn from a range.

    Args:
        x: Images, ``(N, channels, size, size)``.
        largest: Half the range, in radians.
        seed: Seed of the angles.
    """
    generator = torch.Generator().manual_seed(seed)
    angle = largest * (2 * torch.rand(len(x), generator=generator) - 1).to(x)
    empty = x.min()  # what has no ink, where the corners come from outside
    return turned(x - empty, angle) + empty


ARCHITECTURES = (
    *(f"mlp-{width}x{depth}" for width in (8, 32, 128) for depth in (1, 2, 3)),
    *(f"cnn-{width}x{depth}" for width in (4, 8, 16) for depth in (1, 2, 3)),
    *(f"resnet-{width}x{depth}" for width in (4, 8) for depth in (1, 2)),
)
"""Twenty-two of them: width, and number of hidden layers, convolutions or residual blocks."""

_LEARNING_RATES = {"mlp": 3e-3, "cnn": 3e-3, "resnet": 1e-2}


def learning_rate(name: str) -> float:
    """The learning rate at which a network's training begins, by its family.

    Residual networks have no normalization and begin as constant functions (Fixup). At .003,
    which MLPs and CNNs take, 500 steps leave up to half of 1,000 training digits wrong; from .02
    on, some starts end as a constant function, because their scalar shifts move too fast. At .01
    none of 24 starts does, and 1,000 steps fit 98 to 100 % of the digits, 81 to 92 % with the
    smallest of these networks.

    Args:
        name: Of the network, such as ``"resnet-8x1"``.
    """
    return _LEARNING_RATES[name.partition("-")[0]]


def network(name: str, channels: int, size: int, outputs: int, seed: int) -> torch.nn.Module:
    """A network by its name, such as ``"mlp-32x2"``, ``"cnn-8x3"``, ``"resnet-8x1"``.

    Raises:
        ArgumentError: The name is none of a network.
    """
    family, _, shape = name.partition("-")
    width, _, depth = shape.partition("x")
    build = {"mlp": _mlp, "cnn": _cnn, "resnet": _resnet}.get(family)
    if build is None or not width.isdecimal() or not depth.isdecimal():
        raise ArgumentError("architecture", repr(name), "e.g. mlp-32x2, cnn-8x3, resnet-8x1")
    if not int(width) or not int(depth):
        raise ArgumentError("architecture", repr(name), "a width and a depth of at least 1")
    with torch.random.fork_rng(devices=[]):  # torch's layers draw their start from the global one
        torch.manual_seed(seed)
        return build(channels, size, outputs, int(width), int(depth))


def _mlp(channels: int, size: int, outputs: int, width: int, depth: int) -> torch.nn.Module:
    # The global generator, seeded above, gives this network its own seed.
    generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    sizes = [channels * size * size, *[width] * depth, outputs]
    return torch.nn.Sequential(torch.nn.Flatten(), MLP(sizes, generator=generator))


def _cnn(channels: int, size: int, outputs: int, width: int, depth: int) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for layer in range(depth):
        wide = width * 2**layer
        layers += [torch.nn.Conv2d(channels, wide, 3, padding=1), torch.nn.ReLU()]
        channels = wide
        # Images of three pixels or less are not halved any more.
        if size > 3:
            layers.append(torch.nn.MaxPool2d(2))
            size //= 2
    layers += [torch.nn.Flatten(), torch.nn.Linear(channels * size * size, outputs)]
    return torch.nn.Sequential(*layers)


def _resnet(channels: int, size: int, outputs: int, width: int, depth: int) -> torch.nn.Module:
    layers: list[torch.nn.Module] = [
        torch.nn.Conv2d(channels, width, 3, padding=1, bias=False), Shift(), torch.nn.ReLU(),
    ]  # fmt: skip
    for block in range(depth):
        narrow, wide = width * 2 ** max(block - 1, 0), width * 2**block
        layers.append(FixupBlock(narrow, wide, depth, stride=1 + (block > 0)))
    last = torch.nn.Linear(width * 2 ** (depth - 1), outputs)
    # Fixup: the network starts as a constant function.
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), Shift(), last]
    return torch.nn.Sequential(*layers)


class Shift(torch.nn.Module):
    """A number that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.shift


class Scale(torch.nn.Module):
    """A number that multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x * self.scale


class FixupBlock(torch.nn.Module):
    """A residual block that trains without normalization (Zhang et al. 2019, Fixup, Section 3).

    Args:
        inputs: Channels in.
        outputs: Channels out.
        blocks: Number of blocks of the network, by which its start is scaled.
        stride: Of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, blocks: int, stride: int = 1) -> None:
        super().__init__()
        first = torch.nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        second = torch.nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        with torch.no_grad():
            first.weight.mul_(blocks**-0.5)
            second.weight.zero_()
        self.branch = torch.nn.Sequential(
            Shift(), first, Shift(), torch.nn.ReLU(), Shift(), second, Scale(), Shift()
        )
        self.skip = torch.nn.Identity()
        # A block that changes the shape needs a convolution on its skip too.
        if inputs != outputs or stride != 1:
            self.skip = torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images of the block's channels, ``(N, outputs, ...)``."""
        return torch.relu(self.skip(x) + self.branch(x))


CLASSES = 10
_AT_ONCE = 500

STRUCTURES = {
    "full": Full(), "block": BlockDiagonal("layer"), "block-parameter": BlockDiagonal("parameter"),
    "kronecker": Kronecker(others="diagonal"),
    "kronecker-reduce": Kronecker("reduce", others="diagonal"), "diagonal": Diagonal(),
    "kernel": FunctionSpace(),
}  # fmt: skip
"""The structures of the curvature by name."""


def objective(
    network: torch.nn.Module,
    num_data: int,
    precision: float,
    by: Any = "network",
    curvature: Any = STRUCTURES["kronecker"],
    augmentation: torch.nn.Module | None = None,
    **options: Any,
) -> LaplaceMarginalLogLikelihood:
    """The Laplace evidence of a classifier of ten classes.

    Args:
        network: The network.
        num_data: Number of points that it is trained on.
        precision: Prior precision of all weights.
        by: Groups of weights with a precision each.
        curvature: The structure.
        augmentation: Of the model.
        **options: Of the objective.
    """
    device = next(network.parameters()).device
    prior = GaussianWeightPrior(network, by, precision)
    model = LinearizedNetwork(network, prior, augmentation)
    likelihood = SoftmaxLikelihood(num_classes=CLASSES, mixing_weights=False).to(device)
    return LaplaceMarginalLogLikelihood(likelihood, model, num_data, curvature, **options)


def trained(
    network: torch.nn.Module, x: Tensor, y: Tensor, cell: Mapping[str, Any]
) -> LaplaceMarginalLogLikelihood:
    """A network at its mode under a prior; in eval mode.

    The cell has the ``precision``, ``epochs``, the ``seed`` of the order of the points, and the
    learning rate ``lr`` where it is not .003.
    """
    mll, lr = objective(network, len(x), cell["precision"]), cell.get("lr", 3e-3)
    fit_map(
        mll, x, y, epochs=cell["epochs"], batch_size=100, lr=lr, final_lr=lr / 100,
        seed=cell["seed"], progress=False,
    )  # fmt: skip
    network.eval()
    return mll


def trained_online(
    network: torch.nn.Module, x: Tensor, y: Tensor, cell: Mapping[str, Any], by: str
) -> LaplaceMarginalLogLikelihood:
    """A network whose precisions, from one start, are learned by the evidence; in eval mode.

    They are updated ten times at most in the epochs, each after several. Half as many epochs
    follow at the precisions that were best, at a third of the learning rate. The cell is as for
    :func:`trained`; ``by`` says which groups of weights have a precision.
    """
    mll, lr = objective(network, len(x), cell["precision"], by), cell.get("lr", 3e-3)
    epochs, seed = cell["epochs"], cell["seed"]
    fit_online(
        mll, x, y, epochs=epochs, batch_size=100, lr=lr, burn_in=min(5, epochs - 1),
        every=max(5, epochs // 10), hyper_steps=50, seed=seed, progress=False,
    )  # fmt: skip
    fit_map(
        mll, x, y, epochs=max(1, epochs // 2), batch_size=100, lr=lr / 3, final_lr=lr / 100,
        seed=seed, progress=False,
    )  # fmt: skip
    network.eval()
    return mll


def evidence_of_all(mll: LaplaceMarginalLogLikelihood, x: Tensor, y: Tensor) -> LaplaceEvidence:
    """The evidence with the curvature of all points, added up over batches."""
    batches = torch.arange(len(x)).split(_AT_ONCE)
    evidences = [mll.evidence_of(x[rows], y[rows]) for rows in batches]
    # Curvatures of batches add up; sum() would start from the number 0.
    return sum(evidences[1:], evidences[0])


@torch.no_grad()
def outputs_at(network: torch.nn.Module, x: Tensor) -> Tensor:
    """Of the network, ``(N, C)``."""
    return torch.cat([network(batch) for batch in x.split(_AT_ONCE)])


def mode_scores(
    mll: LaplaceMarginalLogLikelihood, x: Tensor, y: Tensor, label: str
) -> dict[str, float]:
    """:func:`predictive_scores` of the network as it is."""
    return predictive_scores(mll, outputs_at(mll.model.network, x).unsqueeze(0), y, label)


def predictive_scores(
    mll: LaplaceMarginalLogLikelihood, outputs: Tensor, y: Tensor, label: str
) -> dict[str, float]:
    """Accuracy, log density and calibration error of the mean over draws.

    Args:
        mll: Whose likelihood is asked.
        outputs: ``(S, N, C)``.
        y: Classes.
        label: What the names of the scores end in.
    """
    probabilities = outputs.softmax(-1).mean(0)
    densities = marginal_log_densities(mll.likelihood, outputs, y)
    return {
        f"accuracy_{label}": float((probabilities.argmax(-1) == y).double().mean()),
        f"log_density_{label}": float(densities.mean()),
        f"calibration_error_{label}": expected_calibration_error(probabilities, y),
    }
