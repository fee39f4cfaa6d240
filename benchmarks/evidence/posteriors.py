"""Laplace posteriors of networks on digits: ``python -m benchmarks.evidence.posteriors``.

Networks with batch normalization are trained on digits, with many images or few. Predictions of
the network alone are compared with those of its posterior, as the evidence has it and as validation
images choose it, with an ensemble's and with laplace-torch's, if that is installed. On
scikit-learn's digits the classes 8 and 9 are what a network should be uncertain of; on part of
MNIST they are images of clothes and letters.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import typer
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typer import Option

from benchmarks._options import Csv
from benchmarks._tables import print_tables
from benchmarks.data import load_images
from gpclml import Laplace
from gpclml.evaluation import expected_calibration_error

__all__ = ["DATA", "compare_posteriors", "main"]

_WIDER = {"digits": 32, "mnist-test": 16}
_MEMBERS = 5
_LABELS = 100  # draws of all labels from predictions
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Digits:
    """Images with labels in a random order, and others that are of no such class by name."""

    x: Tensor
    y: Tensor
    others: Mapping[str, Tensor]
    train: int
    validation: int
    test: int
    classes: int

    def split(self, share: float) -> tuple[Pair, Pair, Pair]:
        """A share of the training images, validation images, and test images."""
        test, validation = len(self.x) - self.test, len(self.x) - self.test - self.validation
        spans = slice(round(share * self.train)), slice(validation, test), slice(test, None)
        return tuple((self.x[rows], self.y[rows]) for rows in spans)


def _scaled(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


def _small(seed: int) -> Digits:
    data = load_images("digits")
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(seed))
    x, y = _scaled(data.images)[order], data.labels[order]
    # A network that has seen eight classes should be unsure of the other two.
    return Digits(x[y < 8], y[y < 8], {"classes 8, 9": x[y >= 8]}, 800, 200, 400, 8)


def _mnist(seed: int) -> Digits:
    data, letters = load_images("mnist-test"), load_images("omniglot-small").images
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(seed))[:3000]
    clothes = load_images("fashion-part").images
    some = torch.randperm(len(letters), generator=torch.Generator().manual_seed(seed))[:900]
    others = {"clothes": _scaled(clothes), "letters": _scaled(letters[some])}
    return Digits(_scaled(data.images[order]), data.labels[order], others, 1000, 300, 1500, 10)


DATA: Mapping[str, Callable[[int], Digits]] = {"digits": _small, "mnist-test": _mnist}


def network(width: int, size: int, classes: int) -> nn.Sequential:
    """Three convolutions with batch normalization, and a linear layer."""
    layers: list[nn.Module] = []
    # 8 x 8 and 28 x 28 images both end with four positions of each channel.
    strides = (1, 2, 2) if size < 28 else (2, 2, 1)
    channels = ((1, width), (width, 2 * width), (2 * width, 2 * width))
    for (inputs, outputs), stride in zip(channels, strides, strict=True):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
        ]  # fmt: skip
    pooled = nn.Sequential() if size < 28 else nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(*layers, pooled, nn.Flatten(), nn.Linear(8 * width, classes))


def trained(width: int, train: Pair, classes: int, epochs: int, seed: int) -> nn.Sequential:
    """The network, trained by Adam with a cosine decay, in eval mode."""
    torch.manual_seed(seed)
    x, y = train
    model = network(width, x.shape[-1], classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def compare_posteriors(
    data: str, width: int, share: float, epochs: int, seed: int, members: int = _MEMBERS
) -> Iterator[tuple[str, dict[str, float]]]:
    """Scores on test images of each way to predict, by its name.

    ``expected error`` is the mean calibration error of labels that are drawn from the predictions:
    what the measure gives for as many images where every probability is right.
    """
    digits = DATA[data](seed)
    train, validation, test = digits.split(share)
    loader = DataLoader(TensorDataset(*train), batch_size=100)

    def drawn_error(probabilities: Tensor) -> float:
        return expected_calibration_error(probabilities, probabilities.multinomial(1)[:, 0])

    def auroc(inside: Tensor, outside: Tensor) -> float:
        # By the largest probability: a network says by it how sure it is.
        confidence = torch.cat([inside, outside]).max(-1).values
        return float(roc_auc_score([True] * len(inside) + [False] * len(outside), confidence))

    def scores(predict: Callable[[Tensor], Tensor]) -> dict[str, float]:
        inside, labels = predict(test[0]), test[1]
        return {
            "accuracy": float((inside.argmax(-1) == labels).double().mean()),
            "log loss": -float(inside[torch.arange(len(labels)), labels].double().log().mean()),
            "calibration error": expected_calibration_error(inside, labels),
            "expected error": float(np.mean([drawn_error(inside) for _ in range(_LABELS)])),
        } | {f"AUROC, {name}": auroc(inside, predict(x)) for name, x in digits.others.items()}

    models = [
        trained(width, train, digits.classes, epochs, seed + 1000 * member)
        for member in range(members)
    ]
    layers: tuple[Literal["last", "all"], ...] = ("last", "all")
    for weights in layers:
        # Without validation images the prior precision is that of most evidence.
        for chosen in (None, validation):
            posterior = Laplace(models[0], "classification", weights=weights)
            posterior.fit(loader, validation=chosen, progress=False)
            if weights == "last" and chosen is None:
                yield "the network alone", scores(_probabilities(posterior, "mode"))
            by = "validation" if chosen is not None else "evidence"
            yield f"{weights} weights, by {by}", scores(_probabilities(posterior, "closed"))
    if members > 1:
        with torch.no_grad():
            yield (
                f"ensemble of {members}",
                scores(lambda x: torch.stack([model(x).softmax(-1) for model in models]).mean(0)),
            )
    # The package is optional: its rows are left out where it is not installed.
    if importlib.util.find_spec("laplace") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for method in ("marglik", "gridsearch"):
                by = "evidence" if method == "marglik" else "validation"
                predict = _laplace_torch_predictions(models[0], loader, method, validation)
                yield f"laplace-torch, last weights, by {by}", scores(predict)


def _probabilities(posterior: Laplace, method: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: posterior.predict(x, method, progress=False).probs


def _laplace_torch_predictions(
    model: nn.Sequential, loader: DataLoader, method: str, validation: Pair
) -> Callable[[Tensor], Tensor]:
    """The last layer's posterior with Kronecker factors, which takes batch normalization."""
    import laplace

    fitted: Any = laplace.Laplace(
        copy.deepcopy(model), "classification", subset_of_weights="last_layer",
        hessian_structure="kron",
    )  # fmt: skip
    fitted.fit(loader)
    others = DataLoader(TensorDataset(*validation), batch_size=300)
    fitted.optimize_prior_precision(
        pred_type="glm", method=method, link_approx="probit", val_loader=others, grid_size=21
    )
    return lambda x: torch.cat([fitted(some, link_approx="probit") for some in x.split(100)])


def main(
    data: Annotated[str, Option(help="digits, or mnist-test.")] = "digits",
    seeds: Annotated[int, Option(min=1)] = 3,
    epochs: Annotated[int, Option(min=1)] = 40,
    members: Annotated[int, Option(min=1, help="Networks of the ensemble.")] = _MEMBERS,
    only: Annotated[str, Option(help="One network, by its name in the table.")] = "",
    csv: Csv = None,
) -> None:
    """Prints a table of means over seeds for each network."""

    def tables() -> Iterator[pd.DataFrame]:
        wide = _WIDER[data]
        settings = (("width 8", 8, 1.0), (f"width {wide}", wide, 1.0), ("few images", 8, 0.25))
        for name, width, share in settings:
            if only and name != only:
                continue
            rows = [
                {"network": name, "predictions": how, "seed": seed, **scores}
                for seed in range(seeds)
                for how, scores in compare_posteriors(data, width, share, epochs, seed, members)
            ]
            means = pd.DataFrame(rows).drop(columns="seed")
            yield means.groupby(["network", "predictions"], sort=False).mean().reset_index()

    print_tables("benchmarks.evidence.posteriors", tables(), threads=1, csv=csv, digits=".3f")


if __name__ == "__main__":
    typer.run(main)
