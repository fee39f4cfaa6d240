"""Laplace posteriors of networks on digits: ``python -m benchmarks.evidence.posteriors``.

Networks with batch normalization are trained on the classes 0 to 7 of scikit-learn's digits, with
all training images or few. Predictions of the network alone are compared with those of its
posterior, as the evidence has it and as validation images choose it; classes 8 and 9 are what a
network should be uncertain of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pandas as pd
import torch
import typer
from torch import Tensor, nn

from gpclml import Laplace
from gpclml.datasets import load_images
from gpclml.evaluation import expected_calibration_error, out_of_distribution_auroc

__all__ = ["compare_posteriors", "main"]

_KNOWN = 8  # classes
_VALIDATION, _TEST = 200, 400  # images
_SETTINGS = {"width 8": (8, 800), "width 32": (32, 800), "width 8, 200 images": (8, 200)}
Pair = tuple[Tensor, Tensor]


def network(width: int) -> nn.Sequential:
    """Three convolutions with batch normalization, and a linear layer."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, width, 1), (width, 2 * width, 2), (2 * width,) * 2 + (2,)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
        ]  # fmt: skip
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * width, _KNOWN))


def trained(width: int, train: Pair, epochs: int, seed: int) -> nn.Sequential:
    """The network, trained by Adam with a cosine decay, in eval mode."""
    torch.manual_seed(seed)
    model, (x, y) = network(width), train
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def digits(seed: int) -> tuple[Pair, Tensor]:
    """Images and labels of the known classes in a random order, and images of the others."""
    data = load_images("digits", progress=False)
    x, y = data.images.float() / 127.5 - 1, data.labels
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    return (x[y < _KNOWN], y[y < _KNOWN]), x[y >= _KNOWN]


def scores(inside: Tensor, labels: Tensor, outside: Tensor) -> dict[str, float]:
    """Accuracy, log loss, calibration error and detection of other classes, of probabilities."""
    return {
        "accuracy": float((inside.argmax(-1) == labels).double().mean()),
        "log loss": -float(inside[torch.arange(len(labels)), labels].double().log().mean()),
        "calibration error": expected_calibration_error(inside, labels),
        "AUROC of classes 8, 9": out_of_distribution_auroc(inside, outside),
    }


def compare_posteriors(
    width: int, images: int, epochs: int, seed: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Scores on test images of each way to predict, by its name."""
    (x, y), outside = digits(seed)
    train = x[:images], y[:images]
    validation, test = (
        (x[start : start + size], y[start : start + size])
        for start, size in ((len(x) - _VALIDATION - _TEST, _VALIDATION), (len(x) - _TEST, _TEST))
    )
    model = trained(width, train, epochs, seed)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), batch_size=100)
    parts: tuple[Literal["last", "all"], ...] = ("last", "all")
    for weights in parts:
        for chosen in (None, validation):
            posterior = Laplace(model, "classification", weights=weights)
            posterior.fit(loader, validation=chosen, progress=False)
            if weights == "last" and chosen is None:
                inside, other = (posterior.predict(at, "mode").probs for at in (test[0], outside))
                yield "the network alone", scores(inside, test[1], other)
            inside, other = (posterior.predict(at).probs for at in (test[0], outside))
            by = "validation" if chosen is not None else "evidence"
            yield f"{weights} weights, by {by}", scores(inside, test[1], other)


def main(seeds: int = 3, epochs: int = 40) -> None:
    """Prints a table of means over seeds for each network."""
    rows = [
        {"network": name, "predictions": how, "seed": seed, **found}
        for name, (width, images) in _SETTINGS.items()
        for seed in range(seeds)
        for how, found in compare_posteriors(width, images, epochs, seed)
    ]
    table = pd.DataFrame(rows).drop(columns="seed")
    means = table.groupby(["network", "predictions"], sort=False).mean()
    print("|", " | ".join(["network", "predictions", *means.columns]), "|")
    print("|---" * (2 + means.shape[1]) + "|")
    for names, values in zip(means.index, means.to_numpy(), strict=True):
        print("|", " | ".join([*names, *(f"{value:.3f}" for value in values)]), "|")


if __name__ == "__main__":
    typer.run(main)
