"""Examples of fits, of few-shot tasks, of draws of weights and of several processes."""

from __future__ import annotations

from typing import Any

import torch

import gpclml.mlls
from benchmarks.robustness.fuzz.building_blocks import (
    classes,
    classifier,
    generator,
    gp,
    inputs,
    labels,
    linear_model,
    mlp,
    normal,
    objective,
    regressor,
    targets,
    tasks,
    train,
    transfer,
)
from benchmarks.robustness.fuzz.examples import example
from gpclml.conditioning import RandomHoldout


@example("fit.distributed.DistributedConditioning")
def _() -> dict[str, Any]:
    return {"conditioning": RandomHoldout(0.2), "num_replicas": 2, "rank": 1}


@example("fit.distributed.average_gradients")
def _() -> dict[str, Any]:
    return {"parameters": list(mlp().parameters()), "value": normal(1)}


@example("fit.distributed.SharedTraining")
def _() -> dict[str, Any]:
    mll = objective()
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.01)
    return {"mll": mll, "optimizer": optimizer, "data": (inputs(), targets()), "settings": {"a": 1}}


@example("fit.distributed.broadcast_parameters")
def _() -> dict[str, Any]:
    return {"module": mlp()}


_WORK = ["steps", "epochs", "restarts", "retries", "hyper_steps", "every", "burn_in"]


@example("fit.suggest_batch_size")
def _() -> dict[str, Any]:
    return {"num_data": 50}


@example("fit.fit_batch", sizes=_WORK)
def _() -> dict[str, Any]:
    return {"mlls": [objective(), objective()], "steps": 2, "freeze": ("likelihood",)}


@example("fit.fit_mll", sizes=_WORK)
def _() -> dict[str, Any]:
    return {"mll": objective(), "steps": 2, "optimizer": "adam"}


@example("fit.fit_networks", sizes=[*_WORK, "folds"])
def _() -> dict[str, Any]:
    return {"mll": objective(gp("deep-bottleneck")), "steps": 4, "folds": 2}


@example("fit.fit_linear_bound", sizes=_WORK)
def _() -> dict[str, Any]:
    model = linear_model()
    mll = gpclml.mlls.LinearEvidenceLowerBound(model.likelihood, model)
    return {"mll": mll, "steps": 2}


@example("fit.fit_map", sizes=_WORK)
def _() -> dict[str, Any]:
    return {
        "mll": classifier(),
        "epochs": 2,
        "batch_size": 4,
        "train_x": inputs(),
        "train_y": labels(),
    }


@example("fit.fit_map.regression", sizes=_WORK, call=gpclml.fit.fit_map)
def _() -> dict[str, Any]:
    return train(mll=regressor(), epochs=2, batch_size=4)


@example("fit.fit_hyperparameters", sizes=_WORK)
def _() -> dict[str, Any]:
    return train(mll=regressor(), steps=2, batch_size=4)


@example("fit.fit_online", sizes=_WORK)
def _() -> dict[str, Any]:
    return {
        "mll": classifier(), "train_x": inputs(), "train_y": labels(), "epochs": 2,
        "batch_size": 4, "hyper_steps": 1, "burn_in": 0, "patience": 2,
    }  # fmt: skip


@example("evidence.sampling.sample_sgld", sizes=["count", "cycles", "epochs_per_cycle"])
def _() -> dict[str, Any]:
    return train(mll=regressor(), count=2, cycles=1, epochs_per_cycle=4, batch_size=4)


def _draws() -> dict[str, torch.Tensor]:
    parameters = mlp(3).named_parameters()
    return {name: p.detach().unsqueeze(0).repeat(2, *[1] * p.ndim) for name, p in parameters}


@example("evidence.sampling.estimate_conditional_log_density")
def _() -> dict[str, Any]:
    network = mlp(3)

    def outputs_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return gpclml.evidence.sampling.sampled_outputs(network, weights, x)

    return {
        "likelihood": classes(), "outputs_of": outputs_of, "weights": _draws(),
        "held_out": (inputs(), labels()), "scaling": (inputs(5), labels(5)),
    }  # fmt: skip


@example("evidence.sampling.linearized_outputs")
def _() -> dict[str, Any]:
    return {"network": mlp(3), "weights": _draws(), "x": inputs()}


@example("evidence.sampling.sampled_outputs")
def _() -> dict[str, Any]:
    return {"network": mlp(3), "weights": _draws(), "x": inputs()}


@example("evidence.sampling.stacked_weights")
def _() -> dict[str, Any]:
    return {"networks": [mlp(), mlp()]}


@example("meta.Conv3", sizes=["width"])
def _() -> dict[str, Any]:
    return {"channels": 1, "width": 2, "generator": generator()}


@example("meta.Conv4", sizes=["width"])
def _() -> dict[str, Any]:
    return {"channels": 1, "width": 2, "generator": generator()}


@example("meta.ConvBlocks", sizes=["blocks", "width"])
def _() -> dict[str, Any]:
    return {"blocks": 1, "channels": 1, "width": 2, "generator": generator()}


@example("meta.DeepKernelTransfer")
def _() -> dict[str, Any]:
    return {"backbone": mlp(), "kernel": "rbf", "num_features": 2}


@example("meta.DeepKernelTransfer.predict")
def _() -> dict[str, Any]:
    return {"self": transfer(), "episodes": tasks().draw(range(2))}


@example("meta.HeadPoseTasks")
def _() -> dict[str, Any]:
    return {"images": torch.zeros(2, 7, 19, 1, 2, 2, dtype=torch.uint8), "support": 3}


@example("meta.ImageTasks", sizes=["queries"])
def _() -> dict[str, Any]:
    images = torch.zeros(12, 1, 3, 3, dtype=torch.uint8)
    return {"images": images, "labels": labels(12), "ways": 2, "shots": 1, "queries": 2}


@example("meta.PeriodicTasks", sizes=["support", "queries"])
def _() -> dict[str, Any]:
    return {"support": 3, "queries": 4}


@example("meta.RotationTasks", sizes=["queries", "support"])
def _() -> dict[str, Any]:
    return {"images": torch.zeros(3, 1, 4, 4, dtype=torch.uint8), "support": 3, "queries": 4}


@example("meta.evaluate_tasks", sizes=["count"])
def _() -> dict[str, Any]:
    return {"model": transfer(), "tasks": tasks(), "count": 2}


@example("meta.load_model")
def _() -> dict[str, Any]:
    return {"model": transfer(), "path": "no such model.pt"}


_OF_TASKS = ["steps", "tasks_per_step", "validation_tasks", "look_every"]


@example("meta.train_on_tasks", sizes=_OF_TASKS)
def _() -> dict[str, Any]:
    model = transfer()
    mll = gpclml.mlls.ConditionalMarginalLogLikelihood(model.likelihood, model)
    return {"model": model, "mll": mll, "tasks": tasks(), "steps": 2, "tasks_per_step": 2}
