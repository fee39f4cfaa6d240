"""Memory of networks on images read from disk: ``python -m benchmarks.evidence.memory``.

Random images are written to a file, which a ``DataLoader`` reads batch by batch. Each step runs in
a process of its own; its memory is the highest that is resident, less what is resident before.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from torch.utils.data import DataLoader, Dataset
from typer import Option

from benchmarks._options import Csv
from benchmarks._tables import print_tables
from benchmarks.evidence.training import CLASSES, network, objective
from benchmarks.speed.timing import highest_resident, in_fresh_process, start_of_peak
from gpclml import Laplace
from gpclml.evidence.sampling import sampled_outputs
from gpclml.fit import fit_hyperparameters, fit_map, fit_online

_SHAPE = (3, 32, 32)


class ImagesOnDisk(Dataset):
    """Images and labels of two ``.npy`` files, which are read when they are asked for."""

    def __init__(self, folder: str) -> None:
        self.images = np.load(f"{folder}/images.npy", mmap_mode="r")
        self.labels = np.load(f"{folder}/labels.npy")

    def __len__(self) -> int:
        """Their number."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """An image with values from -1 to 1, and its label."""
        image = torch.from_numpy(np.array(self.images[index]))
        return image.float() / 127.5 - 1, int(self.labels[index])


def write_images(folder: str | Path, count: int) -> None:
    """Writes so many random images, with the label that their mean has."""
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, count, dtype=np.uint8)
    noise = random.integers(0, 100, (count, *_SHAPE), dtype=np.uint8)
    # Classes differ in brightness, so that there is something to learn.
    np.save(f"{folder}/images.npy", noise + 12 * labels[:, None, None, None])
    np.save(f"{folder}/labels.npy", labels)


def _laplace(mll: Any, loader: DataLoader) -> None:
    posterior = Laplace(mll.model.network, "classification")
    posterior.fit(loader, progress=False).predict(loader, progress=False)


def _sampled_outputs(mll: Any, loader: DataLoader) -> None:
    draws = {
        name: torch.stack([p.detach()] * 10) for name, p in mll.model.network.named_parameters()
    }
    sampled_outputs(mll.model.network, draws, loader)


STEPS: dict[str, Callable[[Any, DataLoader], None]] = {
    "fit_map, an epoch": partial(fit_map, epochs=1, progress=False),
    "fit_online, an epoch": partial(fit_online, epochs=1, burn_in=0, hyper_steps=5, progress=False),
    "fit_hyperparameters": partial(fit_hyperparameters, steps=20, progress=False),
    "Laplace: fit and predict": _laplace,
    "sampled_outputs, 10 draws": _sampled_outputs,
}


def memory_of_step(step: str, architecture: str, folder: str) -> int:
    """Highest resident memory during a step less that before it, in bytes, of this process."""
    torch.set_num_threads(1)
    data = ImagesOnDisk(folder)
    model = network(architecture, _SHAPE[0], _SHAPE[1], CLASSES, seed=0).eval()
    loader = DataLoader(data, batch_size=200)
    with torch.no_grad():
        model(next(iter(loader))[0])  # loads the libraries
    # The peak is counted from here on: what torch itself loads is not the step's.
    before = start_of_peak()
    STEPS[step](objective(model, len(data), 1.0), loader)
    return highest_resident() - before


def main(
    images: Annotated[int, Option(min=1, help="Images of 3 x 32 x 32 pixels.")] = 50_000,
    architecture: Annotated[str, Option(help="E.g. cnn-8x3, resnet-8x2.")] = "cnn-4x1",
    csv: Csv = None,
) -> None:
    """Memory and time of fits, evidence, predictions and draws on images read from disk."""
    from benchmarks.evidence.memory import memory_of_step  # its module's name is not __main__

    def rows() -> Any:
        for step in STEPS:
            start = time.perf_counter()
            taken = in_fresh_process(memory_of_step, step, architecture, folder) / 2**20
            row = {"step": step, "images": images, "MiB": taken}
            yield pd.DataFrame([row | {"seconds": time.perf_counter() - start}])

    with tempfile.TemporaryDirectory() as folder:
        write_images(folder, images)
        print_tables("benchmarks.evidence.memory", rows(), threads=1, csv=csv, digits=".0f")


if __name__ == "__main__":
    typer.run(main)
