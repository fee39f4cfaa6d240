"""The images to classify, the networks that are compared, and how they are trained."""

from __future__ import annotations

import copy
import importlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from gpytorch.likelihoods import SoftmaxLikelihood
from torch import Tensor

from benchmarks.data import has_files, load_images
from benchmarks.dkt.tasks import turned
from gpclml.conditioning import partition_at_random
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

CLASSES = 10

DATA = {
    "digits": ("digits", None, 8),
    "mnist-test": ("mnist-test", None, 28),
    "fashion-part": ("fashion-part", None, 28),
    "cifar10-part": ("cifar10-part", "cifar10-part-test", 32),
    "mnist": ("mnist", "mnist-test", 28),
    "fashion": ("fashion", "fashion-test", 28),
    "cifar10": ("cifar10", "cifar10-test", 32),
    "cifar100": ("cifar100", "cifar100-test", 32),
}
"""Name to the images to train on, those to test on where they are others, and their size."""

_MOST_TEST = 2000


class Images(NamedTuple):
    """Images of some classes, to train and to test on.

    Attributes:
        train_x: ``(N, channels, size, size)``, mean 0 and variance 1 over all pixels.
        train_y: Classes, ``(N,)``.
        test_x: Others, scaled alike.
        test_y: Their classes.
        num_classes: Number of classes of the data they are drawn from.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int = CLASSES


def images(name: str, num_train: int, seed: int, device: str = "cpu") -> Images:
    """Random images to train on, and others to test on.

    Those to test on are the data's test images, or at most 2000 of the others where it has none.

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
        others = torch.arange(len(test.labels))
    x = train.images[rows].to(torch.get_default_dtype()) / 255
    # Test images are scaled as those of training, whose moments are known then.
    mean, scale = x.mean(), x.std()
    test_x = test.images[others].to(x) / 255
    tensors = ((x - mean) / scale, train.labels[rows], (test_x - mean) / scale, test.labels[others])
    num_classes = int(torch.cat([train.labels, test.labels]).max()) + 1
    return Images(*(tensor.to(device) for tensor in tensors), num_classes=num_classes)


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

_TORCHVISION = "torchvision==0.28.0"  # belongs to torch 2.13.0

_LEARNING_RATES = {"resnet": 1e-2, "wrn": 1e-2}


def learning_rate(name: str) -> float:
    """The learning rate of Adam at which a network's training begins, by its family.

    Residual networks have no normalization and begin as constant functions (Fixup). At .003,
    which the others take, 500 steps leave up to half of 1,000 training digits wrong; from .02
    on, some starts end as a constant function, because their scalar shifts move too fast. At .01
    none of 24 starts does, and 1,000 steps fit 98 to 100 % of the digits, 81 to 92 % with the
    smallest of these networks.

    Args:
        name: Of the network, such as ``"resnet-8x1"``.
    """
    return _LEARNING_RATES.get(name.partition("-")[0], 3e-3)


def network(name: str, channels: int, size: int, outputs: int, seed: int) -> torch.nn.Module:
    """A network by its name.

    - ``"mlp-32x2"``, ``"cnn-8x3"``, ``"resnet-8x1"``: width x number of hidden layers,
      convolutions or residual blocks;
    - ``"convnet-8x5"``: width x number of convolutions without pooling after the first (Lotfi et
      al. 2022, Appendix F);
    - ``"resnet-20-16"``, ``"wrn-16-4"``: depth and width as papers write them, of three stages of
      blocks of two convolutions (He et al. 2016; of 16 times that width, Zagoruyko and Komodakis
      2016);
    - ``"lenet"``, and of torchvision ``"resnet18"``, ``"vgg19"``, ``"densenet121"`` and
      ``"googlenet"`` with batch normalization, which begin with a 3 x 3 convolution for images of
      32 x 32.

    Residual networks but ``"resnet18"`` have Fixup in place of normalization.

    Args:
        name: The name.
        channels: Channels of an image.
        size: Its pixels a side.
        outputs: Number of classes.
        seed: Seed of the start.

    Raises:
        ArgumentError: The name is none of a network, images are too small for it, or it is one
            of torchvision's, which is not installed.
    """
    with torch.random.fork_rng(devices=[]):  # torch's layers draw their start from the global one
        torch.manual_seed(seed)
        if name in _NAMED:
            if size < 28:
                raise ArgumentError("architecture", repr(name), f"one for {size} x {size} pixels")
            return _NAMED[name](channels, size, outputs)
        family, sign, first, second = _parsed(name)
        return _FAMILIES[family, sign](channels, size, outputs, first, second)


def _parsed(name: str) -> tuple[str, str, int, int]:
    """Family, sign between its numbers, and both of them."""
    match = re.fullmatch(r"([a-z]+)-([0-9]+)([x-])([0-9]+)", name)
    if match is None or (match[1], match[3]) not in _FAMILIES:
        such = "e.g. mlp-32x2, cnn-8x3, convnet-8x5, resnet-8x1, resnet-20-16, wrn-16-4"
        raise ArgumentError("architecture", repr(name), f"{such}, {', '.join(_NAMED)}")
    family, first, sign, second = match[1], int(match[2]), match[3], int(match[4])
    if not first or not second:
        raise ArgumentError("architecture", repr(name), "a width and a depth of at least 1")
    least = {"resnet": 2, "wrn": 4}.get(family, 0)
    if sign == "-" and (first <= least or (first - least) % 6):
        raise ArgumentError("architecture", repr(name), f"a depth of 6 n + {least}, n = 1, 2, ...")
    return family, sign, first, second


def _mlp(channels: int, size: int, outputs: int, width: int, depth: int) -> torch.nn.Module:
    # The global generator, seeded above, gives this network its own seed.
    generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    sizes = [channels * size * size, *[width] * depth, outputs]
    return torch.nn.Sequential(torch.nn.Flatten(), MLP(sizes, generator=generator))


def _cnn(
    channels: int, size: int, outputs: int, width: int, depth: int, unpooled: int = 0
) -> torch.nn.Module:
    """Convolutions, of which the first ones may be without pooling."""
    layers: list[torch.nn.Module] = []
    for layer in range(depth):
        wide = width * 2**layer
        layers += [torch.nn.Conv2d(channels, wide, 3, padding=1), torch.nn.ReLU()]
        channels = wide
        # Images of three pixels or less are not halved any more.
        if size > 3 and layer >= unpooled:
            layers.append(torch.nn.MaxPool2d(2))
            size //= 2
    layers += [torch.nn.Flatten(), torch.nn.Linear(channels * size * size, outputs)]
    return torch.nn.Sequential(*layers)


def _resnet(channels: int, size: int, outputs: int, width: int, depth: int) -> torch.nn.Module:
    blocks = [(width * 2**block, 1 + (block > 0)) for block in range(depth)]
    return _fixup(channels, outputs, width, blocks)


def _three_stages(
    channels: int, size: int, outputs: int, depth: int, width: int, stem: int | None = None
) -> torch.nn.Module:
    """Three stages of blocks, each of half the pixels and twice the width of the one before."""
    first = width if stem is None else stem * width
    stages = [(first * 2**stage, 1 + (stage > 0)) for stage in range(3)]
    each = (depth - 2) // 6
    blocks = [(wide, stride if k == 0 else 1) for wide, stride in stages for k in range(each)]
    return _fixup(channels, outputs, first if stem is None else stem, blocks)


def _fixup(
    channels: int, outputs: int, width: int, blocks: Sequence[tuple[int, int]]
) -> torch.nn.Module:
    """A convolution, and residual blocks of so many channels and such a stride."""
    layers: list[torch.nn.Module] = [
        torch.nn.Conv2d(channels, width, 3, padding=1, bias=False), Shift(), torch.nn.ReLU(),
    ]  # fmt: skip
    for wide, stride in blocks:
        layers.append(FixupBlock(width, wide, len(blocks), stride))
        width = wide
    last = torch.nn.Linear(width, outputs)
    # Fixup: the network starts as a constant function.
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), Shift(), last]
    return torch.nn.Sequential(*layers)


def _lenet(channels: int, size: int, outputs: int) -> torch.nn.Module:
    """LeNet-5 with ReLU and max pooling; images of 28 x 28 get a border of two pixels."""
    border = (32 - size) // 2
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, 6, 5, padding=border), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(6, 16, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
        torch.nn.Linear(400, 120), torch.nn.ReLU(), torch.nn.Linear(120, 84), torch.nn.ReLU(),
        torch.nn.Linear(84, outputs),
    )  # fmt: skip


_SMALL = {
    "resnet18": ("conv1", "maxpool"),
    "densenet121": ("features.conv0", "features.pool0"),
    "googlenet": ("conv1.conv", "maxpool1", "maxpool2"),
}
"""Of networks of torchvision the first convolution, and poolings that small images do without."""

_OPTIONS: Mapping[str, Mapping[str, bool]] = {
    "googlenet": {"aux_logits": False, "init_weights": False}
}


def _torchvision(channels: int, size: int, outputs: int, name: str) -> torch.nn.Module:
    """A network of torchvision, whose beginning is replaced by one for small images."""
    try:
        models = importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
        raise ArgumentError(
            "architecture", f"{name}, for which torchvision cannot be imported ({error})",
            "a network whose package is installed",
            f"Run pip install --no-deps {_TORCHVISION}, or the release that belongs to your torch.",
        ) from error  # fmt: skip
    if name == "vgg19":
        # Five poolings leave one pixel: no layers of 4,096 units are needed, as for large images.
        features = models.vgg.make_layers(models.vgg.cfgs["E"], batch_norm=True)
        features[0] = torch.nn.Conv2d(channels, 64, 3, padding=1)
        return torch.nn.Sequential(features, torch.nn.Flatten(), torch.nn.Linear(512, outputs))
    network = getattr(models, name)(num_classes=outputs, **_OPTIONS.get(name, {}))
    first, *poolings = _SMALL[name]
    network.set_submodule(first, torch.nn.Conv2d(channels, 64, 3, padding=1, bias=False))
    for pooling in poolings:
        network.set_submodule(pooling, torch.nn.Identity())
    return network


_FAMILIES: Mapping[tuple[str, str], Callable[..., torch.nn.Module]] = {
    ("mlp", "x"): _mlp, ("cnn", "x"): _cnn, ("convnet", "x"): partial(_cnn, unpooled=1),
    ("resnet", "x"): _resnet, ("resnet", "-"): _three_stages,
    ("wrn", "-"): partial(_three_stages, stem=16),
}  # fmt: skip
"""What builds a network, by its family and the sign between its two numbers."""

_NAMED: Mapping[str, Callable[..., torch.nn.Module]] = {
    "lenet": _lenet,
    **{name: partial(_torchvision, name=name) for name in (*_SMALL, "vgg19")},
}


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
            # Pixels are left out before: the gradient of a strided convolution of one pixel writes
            # beyond its memory with channels last and fewer than 16 of them (oneDNN issue 6035).
            self.skip = torch.nn.Sequential(
                torch.nn.AvgPool2d(1, stride), torch.nn.Conv2d(inputs, outputs, 1, bias=False)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Images of the block's channels, ``(N, outputs, ...)``."""
        return torch.relu(self.skip(x) + self.branch(x))


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
    """The Laplace evidence of a classifier.

    Args:
        network: The network, whose last linear layer has an output for each class.
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
    outputs = [m.out_features for m in network.modules() if isinstance(m, torch.nn.Linear)][-1]
    likelihood = SoftmaxLikelihood(num_classes=outputs, mixing_weights=False).to(device)
    return LaplaceMarginalLogLikelihood(likelihood, model, num_data, curvature, **options)


class Recipe(NamedTuple):
    """How a paper trains a network: its weights, and where they are learned its hyperparameters.

    Attributes:
        lr: Learning rate of the weights in the first epoch.
        optimizer: ``"sgd"``, with momentum .9, or ``"adam"``.
        batch_size: Points of a batch.
        drops: Shares of the epochs after which the rate falls to a tenth.
        falls_to: Share of the rate at the end of half a cosine over the epochs; 1: none.
        crops: Whether images are mirrored and shifted at random.
        temperature: Divisor of the log likelihood.
        every: Epochs between fits of the hyperparameters; 0: they stay as they are.
        steps: Steps of Adam in each fit.
        hyper_lr: Learning rate of these steps.
        burn_in: Epochs before the first fit.
    """

    lr: float
    optimizer: str = "sgd"
    batch_size: int = 128
    drops: tuple[float, ...] = ()
    falls_to: float = 1.0
    crops: bool = False
    temperature: float = 1.0
    every: int = 0
    steps: int = 0
    hyper_lr: float = 0.1
    burn_in: int = 0

    def share(self, done: float) -> float:
        """What is left of the learning rate after a share of the epochs."""
        dropped = 0.1 ** sum(done >= drop for drop in self.drops)
        half_cosine = (1 + math.cos(math.pi * done)) / 2
        return dropped * (self.falls_to + (1 - self.falls_to) * half_cosine)


_IMMER_2021 = Recipe(
    1e-3, "adam", drops=(1 / 2, 3 / 4, 11 / 12), every=10, steps=100, hyper_lr=1.0
)  # fmt: skip
_IMMER_2023 = Recipe(0.1, falls_to=1e-5, burn_in=10, every=5, steps=50)

RECIPES: Mapping[str, Recipe] = {
    # Momentum and a constant rate are our choice: the text has SGD, its rate and its batches.
    "lotfi-2022": Recipe(0.01, every=5, steps=100, hyper_lr=1.0),
    "lotfi-2022-curves": Recipe(0.1, drops=(1 / 2, 3 / 4), crops=True),
    # The first rates and the batches are our choice.
    "immer-2021": _IMMER_2021,
    "immer-2021-resnet": _IMMER_2021._replace(lr=0.1, optimizer="sgd"),
    # With augmentation the likelihood counts five times (Figure 5), for which the rate is a fifth;
    # the evidence is of the images as they are.
    "immer-2021-crops": _IMMER_2021._replace(
        lr=0.1 / 5, optimizer="sgd", crops=True, temperature=1 / 5
    ),
    "immer-2023": _IMMER_2023,
    # The text has the steps for Figure 7; in Table 1 they are our choice.
    "immer-2023-invariance": _IMMER_2023._replace(every=1, steps=100, hyper_lr=0.01),
    "immer-2023-subsets": _IMMER_2023._replace(
        optimizer="adam", every=1, steps=100, hyper_lr=0.01
    ),
}  # fmt: skip
"""Recipes by name; of a family of networks with one of its own, by its name at the end."""


def recipe_of(cell: Mapping[str, Any]) -> Recipe:
    """The recipe of a cell, whose ``lr`` and ``batch_size``, where it has them, replace its own."""
    name, family = cell["recipe"], cell["architecture"].partition("-")[0]
    recipe = RECIPES.get(f"{name}-{family}", RECIPES[name])
    given = {key: cell[key] for key in ("lr", "batch_size") if key in cell}
    return recipe._replace(**given)


def train(
    mll: LaplaceMarginalLogLikelihood,
    x: Tensor,
    y: Tensor,
    recipe: Recipe,
    epochs: int,
    seed: int,
    num_points: int | None = None,
) -> list[float]:
    """Trains a network by a recipe, to the mode under its prior; it ends in eval mode.

    Hyperparameters climb the evidence, after the last epoch too. That of all points is computed
    once a fit, and the state of the largest one is kept (Immer et al. 2021, Algorithm 1). Of some
    points, or with an augmentation, it is another estimate at each step, and the last state stays.

    Args:
        mll: The objective, trained in place.
        x: Images.
        y: Their classes.
        recipe: The recipe.
        epochs: Passes over the images.
        seed: Seed of the batches, and of what is random in the images.
        num_points: Points of an estimate of the evidence; None for all.

    Returns:
        Seconds of processor time of each step on the hyperparameters.
    """
    model, network, n = mll.model, mll.model.network, len(x)
    augmentation = model.augmentation
    weights = list(network.parameters())
    hyper = [model.prior.log_precision, *(augmentation.parameters() if augmentation else ())]
    if recipe.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(weights, recipe.lr, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(weights, recipe.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: recipe.share(k / epochs))
    hyper_optimizer = torch.optim.Adam(hyper, recipe.hyper_lr)
    generator = torch.Generator().manual_seed(seed)

    def estimate() -> LaplaceEvidence:
        rows = partition_at_random(n, min(num_points or n, n), generator)[0]
        return mll.evidence_of(x[rows], y[rows])

    best, kept, seconds = -math.inf, None, list[float]()
    network.train()
    for done in range(1, epochs + 1):
        for rows in partition_at_random(n, min(recipe.batch_size, n), generator):
            points = mirrored_and_shifted(x[rows], generator) if recipe.crops else x[rows]
            _step(optimizer, weights, -mll.log_joint(model(points), y[rows]))
        schedule.step()
        is_due = done >= recipe.burn_in and done % max(recipe.every, 1) == 0
        if not recipe.every or not (is_due or done == epochs):
            continue
        network.eval()
        computed_once = num_points is None and augmentation is None
        whole = evidence_of_all(mll, x, y) if computed_once else None
        for _ in range(recipe.steps):
            before = time.process_time()
            _step(hyper_optimizer, hyper, -(whole or estimate())())
            seconds.append(time.process_time() - before)
        if whole is not None and (value := float(whole().detach())) > best:
            best, kept = value, copy.deepcopy(mll.state_dict())
        network.train()
    if kept is not None:
        mll.load_state_dict(kept)
    network.eval()
    return seconds


def _step(optimizer: torch.optim.Optimizer, parameters: list[Any], loss: Tensor) -> None:
    # Weights and hyperparameters share one graph: each step takes its own gradients alone.
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def mirrored_and_shifted(x: Tensor, generator: torch.Generator) -> Tensor:
    """Images mirrored with probability a half, and shifted by up to four pixels either way.

    Args:
        x: Images, ``(N, channels, size, size)``; what is shifted in is zero, their mean.
        generator: Source of the draws.
    """
    mirrored = torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5
    x = torch.where(mirrored.to(x.device), x.flip(-1), x)
    top, left = torch.randint(9, (2, len(x), 1), generator=generator)
    side, images = torch.arange(x.shape[-1]), torch.arange(len(x))[:, None, None]
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    rows, columns = (top + side)[:, :, None], (left + side)[:, None]
    # The axis of channels comes last where others are indexed around it.
    return padded[images, :, rows, columns].permute(0, 3, 1, 2)


def trained(
    network: torch.nn.Module, x: Tensor, y: Tensor, cell: Mapping[str, Any]
) -> LaplaceMarginalLogLikelihood:
    """A network at its mode under a prior; in eval mode.

    The cell has the ``precision``, ``epochs``, the ``seed`` of the order of the points, and the
    learning rate ``lr`` where it is not .003; or a ``recipe``, and the ``structure`` of the
    curvature.
    """
    if "recipe" in cell:
        mll = objective(network, len(x), cell["precision"], curvature=STRUCTURES[cell["structure"]])
        train(mll, x, y, recipe_of(cell)._replace(every=0), cell["epochs"], cell["seed"])
        return mll
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
    :func:`trained`, and a recipe says when they are updated; ``by`` says which groups of weights
    have a precision.
    """
    if "recipe" in cell:
        structure = STRUCTURES[cell["structure"]]
        mll = objective(network, len(x), cell["precision"], by, structure)
        train(mll, x, y, recipe_of(cell), cell["epochs"], cell["seed"])
        return mll
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
    if mll.outputs != "all":  # one is drawn for all points: that of each batch would be another
        return mll.evidence_of(x, y)
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
