"""Weights and hyperparameters of a network in one training, the latter by its Laplace evidence."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml._utils.checkpoint import write_checkpoint
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.fit._online_run import CHECKPOINT, OnlineFit, OnlineRun
from gpclml.fit._weight_training import check_training
from gpclml.mlls import LaplaceMarginalLogLikelihood

__all__ = ["OnlineFit", "fit_online"]

_PARTITIONS = ("random", "class")


@checked(train_x="(N, *event)", train_y="(N, *outputs)")
def fit_online(
    mll: LaplaceMarginalLogLikelihood,
    train_x: Tensor,
    train_y: Tensor,
    *,
    epochs: int = 100,
    batch_size: int | None = None,
    lr: float = 1e-3,
    final_lr: float | None = None,
    hyper_lr: float = 0.1,
    hyper_steps: int = 10,
    burn_in: int = 10,
    every: int = 1,
    patience: int | None = None,
    partition: Literal["random", "class"] = "random",
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> OnlineFit:
    """Alternates Adam steps on the weights and on the hyperparameters (Immer et al. 2021, Alg. 1).

    Weights climb the log joint density of mini-batches, in the network's own mode; after a
    burn-in, every few epochs, prior precisions, noise, a temperature that is a parameter and the
    ranges of an augmentation climb the evidence, in eval mode. Its curvature is computed once a
    time, over all data in batches; ``FunctionSpace``, estimates from one output and an
    augmentation take a fresh batch a step. What was best by the evidence is kept, weights and
    hyperparameters together.

    With a checkpoint the training is saved after every look and, as of the last whole epoch, at
    an interrupt. It goes on from there bit for bit as if it had not stopped; only layers that draw
    from PyTorch's global source, such as dropout, draw anew. A training with other data, seed,
    rates or the like does not go on from it; ``patience`` may differ, and ``epochs`` where there
    is no ``final_lr``.

    Args:
        mll: The objective; ``num_data`` is the number of training points. Trained in place.
        train_x: Points, ``(N, *event)``.
        train_y: Their targets.
        epochs: Number of passes over the data.
        batch_size: Points of a batch; all if None.
        lr: Learning rate of the weights in the first epoch.
        final_lr: That in the last, by half a cosine; the first throughout if None.
        hyper_lr: That of the hyperparameters.
        hyper_steps: Steps on the hyperparameters at a time.
        burn_in: Epochs before the first of them.
        every: Epochs between them.
        patience: Looks without a better evidence after which training ends; None never ends it.
        partition: Of the points, where the evidence is estimated from batches: ``"random"``, or
            by ``"class"``, a tighter bound as a rule.
        seed: Seed of the order of the points.
        checkpoint: File to save to at every look and at an interrupt, and to go on from.
        progress: Whether to show a progress bar on standard error.

    Returns:
        The course of the training.

    Raises:
        ArgumentError: A number is out of range, or ``num_data`` is another.
        ShapeError: Points and targets are not as many.
        NonFiniteError: A log joint density or an evidence is not finite.
        UnsupportedError, ModelModeError, NotPSDError: As the objective.
        DataError: The checkpoint cannot be written or read, is damaged, or is of another model or
            training; says in what they differ.

    Warns:
        UserWarning: The checkpoint is of an earlier release, which did not store what decided it.
    """
    check_training(
        mll, train_x, train_y, epochs=epochs, batch_size=batch_size, hyper_steps=hyper_steps,
        every=every, patience=patience, lr=lr, final_lr=final_lr, hyper_lr=hyper_lr,
    )  # fmt: skip
    if burn_in < 0:
        raise ArgumentError("burn_in", burn_in, "0 or more epochs")
    if partition not in _PARTITIONS:
        raise UnknownNameError("partition", partition, _PARTITIONS)
    if partition == "class" and train_y.is_floating_point():
        raise ArgumentError("partition", "'class' and targets that are no classes", "'random'")
    run = OnlineRun(
        mll, train_x, train_y, hyper_lr, batch_size=batch_size, lr=lr, final_lr=final_lr,
        epochs=epochs, seed=seed, by_class=partition == "class",
    )  # fmt: skip
    decided_by: dict[str, Any] = {}
    if checkpoint is not None:
        decided_by = run.fingerprint(
            batch_size=batch_size, lr=lr, final_lr=final_lr, hyper_lr=hyper_lr,
            hyper_steps=hyper_steps, burn_in=burn_in, every=every, partition=partition, seed=seed,
        )  # fmt: skip
        if final_lr is not None:  # the rate of an epoch depends on how many there are
            decided_by["epochs"] = epochs
        if Path(checkpoint).exists():
            run.read(checkpoint, decided_by)

    def save(path: str | Path, content: dict[str, Any]) -> None:
        write_checkpoint(path, CHECKPOINT, {**content, "fingerprint": decided_by})

    from tqdm import tqdm

    fit = run.fit
    start = time.perf_counter() - fit.seconds
    done = len(fit.objectives)
    if patience is not None and fit.looks and run.looks_since_best() >= patience:
        epochs = done  # it had ended
    whole: dict[str, Any] = {}
    with tqdm(total=epochs, initial=done, desc="epochs", disable=not progress) as bar:
        try:
            for epoch in range(done + 1, epochs + 1):
                whole = run.content() if checkpoint is not None else {}
                run.train_weights(epoch - 1)
                bar.update()
                if epoch > burn_in and (epoch - burn_in - 1) % every == 0:
                    run.train_hyperparameters(hyper_steps)
                    bar.set_postfix(evidence=f"{fit.evidences[-1]:.4f}", refresh=False)
                    fit.seconds = time.perf_counter() - start
                    if checkpoint is not None:
                        save(checkpoint, run.content())
                    if patience is not None and run.looks_since_best() >= patience:
                        break
        except KeyboardInterrupt:
            # What an epoch or a look has begun is left out: it is done again, as it was.
            if checkpoint is not None and whole:
                whole["fit"]["seconds"] = time.perf_counter() - start
                save(checkpoint, whole)
            raise
    run.keep_best()
    fit.seconds = time.perf_counter() - start
    return fit
