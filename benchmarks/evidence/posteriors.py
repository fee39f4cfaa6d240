"""Laplace posteriors of classifiers: ``python -m benchmarks.evidence.posteriors``.

Networks with batch normalization are trained on digits, and networks of two layers on tables.
Predictions of the network alone are compared with those at a temperature, with those of its
posterior, as the evidence has it and as validation points choose it, with an ensemble's and with
laplace-torch's, if that is installed. On scikit-learn's digits the classes 8 and 9 are what a
network should be uncertain of; on part of MNIST they are images of clothes and letters, and of
tables test points with inputs five times as large.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import typer
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typer import Option

from benchmarks._options import Csv, check_known, errors_as_text, names
from benchmarks._tables import code, print_tables, table, with_error
from benchmarks.data import load_images
from gpclml import Laplace
from gpclml.curvature import LowRank
from gpclml.evaluation import expected_calibration_error, fit_temperature

ALONE = "the network alone"
_ABOUT = (
    "Means over seeds of the network alone, and paired differences to it, ± standard errors. The "
    "expected error is the calibration error of labels drawn from the predictions."
)
_MEMBERS = 5
_EPOCHS = {"cancer": 200, "wine": 200}  # of tables; 40 of images
_LABELS = 100  # draws of all labels from predictions
Pair = tuple[Tensor, Tensor]


class Points(NamedTuple):
    """Points with labels in a random order, and others that are of no such class by name."""

    x: Tensor
    y: Tensor
    others: Mapping[str, Tensor]
    train: int
    validation: int
    test: int
    classes: int

    def split(self, share: float) -> tuple[Pair, Pair, Pair]:
        """A share of the training points, validation points, and test points."""
        test, validation = len(self.x) - self.test, len(self.x) - self.test - self.validation
        spans = slice(round(share * self.train)), slice(validation, test), slice(test, None)
        return tuple((self.x[rows], self.y[rows]) for rows in spans)


def _scaled(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


def _order(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _small(seed: int) -> Points:
    data = load_images("digits")
    order = _order(len(data.labels), seed)
    x, y = _scaled(data.images)[order], data.labels[order]
    # A network that has seen eight classes should be unsure of the other two.
    return Points(x[y < 8], y[y < 8], {"classes 8, 9": x[y >= 8]}, 800, 200, 400, 8)


def _mnist(seed: int) -> Points:
    data, letters = load_images("mnist-test"), load_images("omniglot-small").images
    order, some = _order(len(data.labels), seed)[:3000], _order(len(letters), seed)[:900]
    clothes = load_images("fashion-part").images
    others = {"clothes": _scaled(clothes), "letters": _scaled(letters[some])}
    return Points(_scaled(data.images[order]), data.labels[order], others, 1000, 300, 1500, 10)


def _table(read: Callable, train: int, validation: int, seed: int) -> Points:
    data: Any = read()
    order = _order(len(data.target), seed)
    x, y = torch.tensor(data.data)[order], torch.tensor(data.target)[order]
    x = ((x - x[:train].mean(0)) / x[:train].std(0)).float()
    test = len(x) - train - validation
    others = {"5 x inputs": 5 * x[-test:]}
    return Points(x, y, others, train, validation, test, int(y.max()) + 1)


DATA: Mapping[str, Callable[[int], Points]] = {
    "digits": _small,
    "mnist-test": _mnist,
    "cancer": partial(_table, load_breast_cancer, 150, 100),
    "wine": partial(_table, load_wine, 80, 40),
}


def network(width: int, shape: torch.Size, classes: int) -> nn.Sequential:
    """Three convolutions with batch normalization, and a linear layer; two layers for a table."""
    size = shape[-1]
    if len(shape) == 1:
        return nn.Sequential(nn.Linear(size, 4 * width), nn.ReLU(), nn.Linear(4 * width, classes))
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
    model = network(width, x.shape[1:], classes)
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
    """Scores on test points of each way to predict, by its name.

    ``expected error`` is the mean calibration error of labels that are drawn from the predictions:
    what the measure gives for as many points where every probability is right.
    """
    points = DATA[data](seed)
    train, validation, test = points.split(share)
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
        } | {f"AUROC, {name}": auroc(inside, predict(x)) for name, x in points.others.items()}

    models = [
        trained(width, train, points.classes, epochs, seed + 1000 * member)
        for member in range(members)
    ]
    with torch.no_grad():
        yield ALONE, scores(lambda x: models[0](x).softmax(-1))
        divisor = fit_temperature(models[0](validation[0]), validation[1])
        yield "temperature", scores(lambda x: (models[0](x) / divisor).softmax(-1))

    def posterior_scores(options: dict[str, Any], **fit: Any) -> dict[str, float]:
        posterior = Laplace(models[0], "classification", **options)
        posterior.fit(loader, progress=False, **fit)
        return scores(lambda x: posterior.predict(x, progress=False).probs)

    for weights in ("last", "all"):
        # Without validation points the prior precision is that of most evidence.
        options: dict[str, Any] = {"weights": weights}
        yield f"{weights} weights, without validation", posterior_scores(options)
        for spread in ("validation", "both", "evidence"):
            tempered = posterior_scores(options, validation=validation, spread=spread)
            yield f"{weights} weights, spread {spread}", tempered
    options = {"weights": "all", "structure": LowRank(100)}
    yield "all weights, 100 directions", posterior_scores(options, validation=validation)
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


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds of the network alone, and paired differences to them ± standard errors."""
    scores = list(rows.columns[list(rows.columns).index("seed") + 1 :])
    told: list[dict[str, str]] = []
    for data, some in rows.groupby("data", sort=False):
        alone = some[some["predictions"] == ALONE].set_index("seed")[scores]
        for how, others in some.groupby("predictions", sort=False):
            values = others.set_index("seed")[scores]
            values = values if how == ALONE else values - alone
            cells = {
                str(name): with_error(column.dropna(), sign="" if how == ALONE else "+")
                for name, column in values.items()
            }
            told.append({"data": str(data), "predictions": str(how), **cells})
    return pd.DataFrame(told).set_index(["data", "predictions"])


def main(
    data: Annotated[str, Option(help=f"Data, comma-separated: {', '.join(DATA)}.")] = ",".join(
        DATA
    ),
    seeds: Annotated[int, Option(min=1)] = 5,
    first: Annotated[int, Option(min=0, help="The first seed.")] = 0,
    epochs: Annotated[int, Option(min=0, help="0 for 40 on images, 200 on tables.")] = 0,
    members: Annotated[int, Option(min=1, help="Networks of the ensemble.")] = _MEMBERS,
    width: Annotated[int, Option(min=1, help="Channels; a quarter of a table's units.")] = 8,
    share: Annotated[float, Option(help="Of the training points.")] = 1.0,
    rows: Annotated[Path | None, Option(help="Tell of this file of --csv; compute none.")] = None,
    csv: Csv = None,
) -> None:
    """Prints scores for each seed and way to predict, and their means and paired differences."""
    done: list[pd.DataFrame] = []

    def tables(chosen: tuple[str, ...]) -> Iterator[pd.DataFrame]:
        for seed, name in itertools.product(range(first, first + seeds), chosen):
            count = epochs or _EPOCHS.get(name, 40)
            compared = compare_posteriors(name, width, share, count, seed, members)
            about = {"data": name, "predictions": "", "seed": seed}
            rows = [about | {"predictions": how} | scores for how, scores in compared]
            done.append(pd.DataFrame(rows))
            yield done[-1]

    with errors_as_text():
        chosen = names(data, "data")
        check_known("data", chosen, DATA)
        if rows is None:
            print_tables(
                "benchmarks.evidence.posteriors", tables(chosen), threads=1, csv=csv, digits=".3f"
            )
        else:
            about = [line[2:] for line in rows.read_text().splitlines() if line.startswith("# ")]
            print(f"# Laplace posteriors of classifiers\n\n{code(about)}\n\n{_ABOUT}")
        told = pd.concat(done) if rows is None else pd.read_csv(rows, comment="#")
    print(f"\n{table(summary(told).replace('-', ''))}")


if __name__ == "__main__":
    typer.run(main)
