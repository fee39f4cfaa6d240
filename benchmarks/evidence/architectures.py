"""Which score of a network says how it will generalize, and who learns fast (Lotfi et al. 2022)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.evidence.training import (
    CLASSES,
    Images,
    evidence_of_all,
    images,
    network,
    objective,
    outputs_at,
    predictive_scores,
    trained,
    trained_online,
)
from gpclml.evaluation.calibration import fit_temperature
from gpclml.evidence.sampling import (
    estimate_conditional_log_density,
    joint_log_density,
    laplace_conditional_log_density,
    linearized_outputs,
    rescaled,
    sample_sgld,
    sampled_outputs,
)
from gpclml.fit import fit_hyperparameters
from gpclml.mlls import LaplaceMarginalLogLikelihood

__all__ = ["SIX", "run_architecture", "run_size"]

_DRAWS = 100
_TEST_DRAWS = 30
_SEED_STEP = 1000  # so that no two cells of a study share a start
_SGLD: dict[str, Any] = {"count": 10, "epochs": 10, "batch_size": 100}


def run_architecture(cell: Mapping[str, Any]) -> dict[str, float]:
    """Scores of a network on its training points, and what it reaches on others.

    The LML is of a network that is trained on all points. The CLML is of one that is trained on
    80% of them: its linearized Laplace posterior, scaled by the accuracy on 5%, explains the other
    15% (Appendix B of the paper), and so do draws by Langevin dynamics from its weights on and an
    ensemble of networks from other starts.

    Args:
        cell: ``data``, ``architecture``, ``precision``, ``num_train``, ``epochs``, ``lr``,
            ``members`` (networks of the ensemble; 1 for none), ``seed``, ``device``.

    Returns:
        Per point, larger is better: ``lml``, ``lml_global`` and ``lml_layer`` (precisions
        fitted to it, one or one a layer), ``lml_online`` (of a network in whose training the
        precisions of layers are learned), ``clml`` (of all targets together, by Laplace's method),
        ``clml_sampled`` (by draws, with their effective number), ``clml_marginal``,
        ``clml_sgld`` and ``clml_ensemble`` (of all targets together, by those networks),
        ``posterior_scale`` and whether it is at the edge of its grid,
        ``validation`` (mean log density of the mode on the 15%); and of test points, by the mode
        (``_map``), the averages over the Laplace posterior (``_bma``), over Langevin draws
        (``_sgld``) and over an ensemble (``_ensemble``), the first two after temperature
        scaling (``_tempered``), and the mode with learned precisions (``_online``), accuracy, log
        density and calibration error; of the mode also at its training points (``_train``).
    """
    data = images(cell["data"], cell["num_train"], cell["seed"], cell["device"])
    held_out = _held_out_scores(data, cell)
    # Scores need held-out points, the evidence none: it is of networks trained on all points.
    whole, ensemble = _trained_ensemble(data.train_x, data.train_y, cell)
    return {
        **{name: value for name, value in held_out.items() if not name.startswith("_")},
        **_evidences(whole, data, cell["precision"]),
        **_test_scores(whole, ensemble, data, held_out, cell),
        **_online_scores(data, cell),
        "parameters": float(sum(p.numel() for p in whole.model.network.parameters())),
    }


def _trained_ensemble(
    x: torch.Tensor, y: torch.Tensor, cell: Mapping[str, Any]
) -> tuple[LaplaceMarginalLogLikelihood, Mapping[str, torch.Tensor]]:
    """A network at its mode, and the weights of an ensemble in which it is the first.

    Every member has its own start and its own order of the points.
    """
    seeds = [cell["seed"] + _SEED_STEP * member for member in range(cell["members"])]
    members = [
        trained(_started(cell, x, seed), x, y, cell["precision"], cell["epochs"], seed, cell["lr"])
        for seed in seeds
    ]
    # One tensor a parameter, members along its first axis, as draws of a posterior are.
    weights = torch.func.stack_module_state([member.model.network for member in members])[0]
    return members[0], {name: draws.detach() for name, draws in weights.items()}


def _started(cell: Mapping[str, Any], x: torch.Tensor, seed: int) -> torch.nn.Module:
    """A network for images; its convolutions are up to twice as fast with channels last."""
    channels, size = x.shape[1:3]
    start = network(cell["architecture"], channels, size, CLASSES, seed).to(x.device)
    return start.to(memory_format=torch.channels_last)


def _averaged(
    draws: Mapping[str, torch.Tensor], ensemble: Mapping[str, torch.Tensor], members: int
) -> dict[str, Mapping[str, torch.Tensor]]:
    """Weights that are averaged over, by name, besides those of the Laplace posterior."""
    return {"sgld": draws, "ensemble": ensemble} if members > 1 else {"sgld": draws}


def _held_out_scores(data: Images, cell: Mapping[str, Any]) -> dict[str, float]:
    x, y = data.train_x, data.train_y
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(cell["seed"]))
    # 80 % to train on, 5 % to scale the posterior by, 15 % to score.
    first, second = round(0.8 * len(x)), round(0.05 * len(x))
    split = order.to(x.device).split([first, second, len(x) - first - second])
    (seen, seen_y), scaling, held_out = ((x[rows], y[rows]) for rows in split)
    mll, ensemble = _trained_ensemble(seen, seen_y, cell)
    start = mll.model.network
    held_out_outputs = outputs_at(start, held_out[0])
    validation = predictive_scores(mll, held_out_outputs.unsqueeze(0), held_out[1], "held_out")
    # The temperature is fitted to all points that the network has not seen.
    every = outputs_at(start, torch.cat([scaling[0], held_out[0]]))
    evidence = evidence_of_all(mll, seen, seen_y)
    weights = evidence.sample_weights(_DRAWS)
    with warnings.catch_warnings():  # the number of effective draws is in the results
        warnings.filterwarnings("ignore", ".* draws have nearly all the weight")
        estimate = estimate_conditional_log_density(
            mll.likelihood, partial(linearized_outputs, start),
            weights, held_out, scaling=scaling, center=_mode(start), scale_by="accuracy",
        )  # fmt: skip
    # At the scale that the draws were given, so that both are of one posterior.
    clml = laplace_conditional_log_density(evidence, held_out, scale=estimate.scale)
    draws = sample_sgld(mll, seen, seen_y, seed=cell["seed"], progress=False, **_SGLD)
    sampled_clml: dict[str, float] = {}
    for name, some in _averaged(draws, ensemble, cell["members"]).items():
        outputs = sampled_outputs(start, some, held_out[0])
        joint = joint_log_density(mll.likelihood, outputs, held_out[1])
        sampled_clml[f"clml_{name}"] = joint.value / estimate.num_held_out
    return {
        **sampled_clml,
        "clml": clml / estimate.num_held_out,
        "clml_sampled": estimate.joint.value / estimate.num_held_out,
        "clml_draws": estimate.joint.effective_draws,
        "clml_marginal": estimate.marginal,
        "posterior_scale": estimate.scale,
        "posterior_at_edge": float(estimate.scale_at_edge),
        "validation": validation["log_density_held_out"],
        "_temperature": fit_temperature(every, torch.cat([scaling[1], held_out[1]])),
    }


def _mode(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def _evidences(
    mll: LaplaceMarginalLogLikelihood, data: Images, precision: float
) -> dict[str, float]:
    x, y = data.train_x, data.train_y
    evidences: dict[str, float] = {}
    for by in ("network", "layer"):
        fitted = objective(mll.model.network, len(x), precision, by)
        fit = fit_hyperparameters(fitted, x, y, steps=100, batch_size=500, progress=False)
        # Before the first step precisions are those of training, whatever their groups.
        evidences["lml"] = fit.history[0]
        evidences["lml_global" if by == "network" else "lml_layer"] = fit.objective
    return evidences


def _online_scores(data: Images, cell: Mapping[str, Any]) -> dict[str, float]:
    x, y = data.train_x, data.train_y
    start = _started(cell, x, cell["seed"])
    mll = trained_online(
        start, x, y, cell["precision"], "layer", cell["epochs"], cell["seed"], cell["lr"]
    )
    outputs = outputs_at(start, data.test_x).unsqueeze(0)
    return {
        "lml_online": float(evidence_of_all(mll, x, y)().detach()),
        **predictive_scores(mll, outputs, data.test_y, "online"),
    }


def _test_scores(
    mll: LaplaceMarginalLogLikelihood,
    ensemble: Mapping[str, torch.Tensor],
    data: Images,
    held_out: Mapping[str, float],
    cell: Mapping[str, Any],
) -> dict[str, float]:
    model = mll.model.network
    weights = evidence_of_all(mll, data.train_x, data.train_y).sample_weights(_TEST_DRAWS)
    # The Laplace posterior as the held-out points have scaled it.
    weights = rescaled(weights, held_out["posterior_scale"], _mode(model))
    outputs = {
        "map": outputs_at(model, data.test_x).unsqueeze(0),
        "bma": linearized_outputs(model, weights, [(data.test_x,)]),
    }
    train_outputs = outputs_at(model, data.train_x).unsqueeze(0)
    scores = dict(predictive_scores(mll, train_outputs, data.train_y, "train"))
    for label, test_outputs in outputs.items():
        scores |= predictive_scores(mll, test_outputs, data.test_y, label)
        # A temperature changes probabilities, but not which class is largest for one network.
        tempered = test_outputs / held_out["_temperature"]
        scores |= predictive_scores(mll, tempered, data.test_y, f"{label}_tempered")
    draws = sample_sgld(mll, data.train_x, data.train_y, seed=cell["seed"], progress=False, **_SGLD)
    for label, some in _averaged(draws, ensemble, cell["members"]).items():
        test_outputs = sampled_outputs(model, some, data.test_x)
        scores |= predictive_scores(mll, test_outputs, data.test_y, label)
    return scores


SIX = ("mlp-8x1", "mlp-128x1", "mlp-32x3", "cnn-4x1", "cnn-16x2", "resnet-8x1")
"""The architectures that are compared."""


def run_size(cell: Mapping[str, Any]) -> dict[str, float]:
    """A network trained on the first n points, and how it predicts the next n.

    The log densities of the next points, added up over n = 25, 50, 100, ..., are the training
    speed in the sense of Lyle et al. (2020): what a log marginal likelihood is for an exact
    Bayesian, block by block.

    Args:
        cell: ``data``, ``architecture``, ``precision``, ``num_train`` (n), ``num_pool`` (of
            which these are the first), ``steps`` (of 100 points at most), ``lr``, ``seed``,
            ``device``.

    Returns:
        In nats a point: ``next_log_density`` of points n to 2 n where there are such, ``lml``
        with precisions fitted to it; accuracy, log density and calibration error at test points.
    """
    data = images(cell["data"], cell["num_pool"], cell["seed"], cell["device"])
    n = cell["num_train"]
    x, y = data.train_x[:n], data.train_y[:n]
    start = _started(cell, x, cell["seed"])
    # As many steps with few points as with many.
    epochs = max(1, cell["steps"] * 100 // max(n, 100))
    mll = trained(start, x, y, cell["precision"], epochs, cell["seed"], cell["lr"])
    ahead = slice(n, 2 * n)
    next_x, next_y = data.train_x[ahead], data.train_y[ahead]
    following = {}
    # The last size has no next n points.
    if len(next_y) == n:
        next_outputs = outputs_at(start, next_x).unsqueeze(0)
        next_scores = predictive_scores(mll, next_outputs, next_y, "next")
        following = {"next_log_density": next_scores["log_density_next"]}
    fitted = objective(start, n, cell["precision"], "layer")
    outputs = outputs_at(start, data.test_x).unsqueeze(0)
    return {
        **following,
        "lml_fixed": float(evidence_of_all(mll, x, y)().detach()),
        "lml": fit_hyperparameters(fitted, x, y, batch_size=500).objective,
        **predictive_scores(mll, outputs, data.test_y, "map"),
    }
