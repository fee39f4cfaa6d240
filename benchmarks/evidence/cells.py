"""The studies: their cells, checked before any is computed, and what each cell computes."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from benchmarks._options import check_device, check_known, check_positive
from benchmarks.data import load, split
from benchmarks.evidence.invariances import AffineAugmentation, AveragedNetwork
from benchmarks.evidence.training import (
    ARCHITECTURES,
    STRUCTURES,
    Images,
    evidence_of_all,
    images,
    learning_rate,
    mode_scores,
    network,
    objective,
    outputs_at,
    predictive_scores,
    recipe_of,
    rotated,
    train,
    trained,
    trained_online,
)
from gpclml.conditioning import partition_at_random, partition_by_class
from gpclml.curvature import FunctionSpace, GaussianWeightPrior
from gpclml.evaluation.calibration import fit_temperature
from gpclml.evidence.sampling import (
    estimate_conditional_log_density,
    joint_log_density,
    laplace_conditional_log_density,
    linearized_outputs,
    marginal_log_densities,
    rescaled,
    sample_sgld,
    sampled_outputs,
)
from gpclml.fit import fit_hyperparameters, fit_online
from gpclml.kernels.networks import MLP
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork, Standardizer

Cell, Weights, Pair = Mapping[str, Any], Mapping[str, Tensor], tuple[Tensor, Tensor]

_DRAWS = 100
_TEST_DRAWS = 30
_SEED_STEP = 1000  # so that no two cells of a study share a start
_SGLD: dict[str, Any] = {"count": 10, "epochs": 10, "batch_size": 100}


def run_architecture(cell: Cell) -> dict[str, float]:
    """Scores of a network on its training points, and what it reaches on others.

    The LML is of a network that is trained on all points. The CLML is of one that is trained on
    80% of them: its linearized Laplace posterior, scaled by the accuracy on 5%, explains the other
    15% (Appendix B of the paper), and so do draws by Langevin dynamics from its weights on and an
    ensemble of networks from other starts.

    Args:
        cell: ``data``, ``architecture``, ``precision``, ``num_train``, ``epochs``, ``lr``,
            ``members`` (networks of the ensemble; 1 for none), ``seed``, ``device``. Those of
            papers have a ``recipe``, the ``structure`` of the curvature and the number of
            ``draws``; without a ``clml`` by Laplace's method, which keeps what all held-out
            images are computed from in memory.

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
    x, y = data.train_x, data.train_y
    structure = STRUCTURES[cell.get("structure", "kronecker")]
    scores, temperature = _held_out_scores(data, cell)
    # Scores need held-out points, the evidence none: it is of networks trained on all points.
    whole, ensemble = _trained_ensemble(data, x, y, cell)
    for by in ("network", "layer"):
        fitted = objective(whole.model.network, len(x), cell["precision"], by, structure)
        fit = fit_hyperparameters(fitted, x, y, steps=100, batch_size=500, progress=False)
        # Before the first step precisions are those of training, whatever their groups.
        scores["lml"] = fit.history[0]
        scores["lml_global" if by == "network" else "lml_layer"] = fit.objective
    model = whole.model.network
    weights = evidence_of_all(whole, x, y).sample_weights(cell.get("draws", _TEST_DRAWS))
    # The Laplace posterior as the held-out points have scaled it.
    weights = rescaled(weights, scores["posterior_scale"], _mode(model))
    scores |= mode_scores(whole, x, y, "train")
    for label, outputs in (
        ("map", outputs_at(model, data.test_x).unsqueeze(0)),
        ("bma", linearized_outputs(model, weights, [(data.test_x,)])),
    ):
        scores |= predictive_scores(whole, outputs, data.test_y, label)
        # A temperature changes probabilities, but not which class is largest for one network.
        tempered = outputs / temperature
        scores |= predictive_scores(whole, tempered, data.test_y, f"{label}_tempered")
    for label, draws in _averaged(whole, (x, y), ensemble, cell).items():
        outputs = sampled_outputs(model, draws, [(data.test_x,)])
        scores |= predictive_scores(whole, outputs, data.test_y, label)
    start = _started(cell, data)
    scores["parameters"] = float(sum(p.numel() for p in start.parameters()))
    if "recipe" in cell and not recipe_of(cell).every:
        return scores  # no precision is learned in training
    online = trained_online(start, x, y, cell, "layer")
    return {
        **scores,
        "lml_online": float(evidence_of_all(online, x, y)().detach()),
        **mode_scores(online, data.test_x, data.test_y, "online"),
    }


def _trained_ensemble(data: Images, x: Tensor, y: Tensor, cell: Cell) -> tuple[Any, Weights]:
    """A network at its mode, and the weights of an ensemble in which it is the first.

    Every member has its own start and its own order of the points.
    """
    seeds = [cell["seed"] + _SEED_STEP * member for member in range(cell["members"])]
    cells = [{**cell, "seed": seed} for seed in seeds]
    members = [trained(_started(member, data), x, y, member) for member in cells]
    # One tensor a parameter, members along its first axis, as draws of a posterior are.
    weights = torch.func.stack_module_state([member.model.network for member in members])[0]
    return members[0], {name: draws.detach() for name, draws in weights.items()}


def _network(cell: Cell, data: Images) -> torch.nn.Module:
    x, seed = data.train_x, cell["seed"]
    return network(cell["architecture"], *x.shape[1:3], data.num_classes, seed).to(x.device)


def _started(cell: Cell, data: Images) -> torch.nn.Module:
    """A network for images; its convolutions are up to twice as fast with channels last."""
    return _network(cell, data).to(memory_format=torch.channels_last)


def _averaged(
    mll: LaplaceMarginalLogLikelihood, points: Pair, ensemble: Weights, cell: Cell
) -> dict[str, Weights]:
    """Weights that are averaged over, by name, besides those of the Laplace posterior."""
    draws = sample_sgld(mll, *points, seed=cell["seed"], progress=False, **_SGLD)
    return {"sgld": draws, "ensemble": ensemble} if cell["members"] > 1 else {"sgld": draws}


def _held_out_scores(data: Images, cell: Cell) -> tuple[dict[str, float], float]:
    """Scores of a network on points that it was not trained on, and the temperature by them."""
    x, y = data.train_x, data.train_y
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(cell["seed"]))
    # 80 % to train on, 5 % to scale the posterior by, 15 % to score.
    first, second = round(0.8 * len(x)), round(0.05 * len(x))
    split = order.to(x.device).split([first, second, len(x) - first - second])
    (seen, seen_y), scaling, held_out = ((x[rows], y[rows]) for rows in split)
    mll, ensemble = _trained_ensemble(data, seen, seen_y, cell)
    start = mll.model.network
    # The temperature is fitted to all points that the network has not seen.
    unseen_x, unseen_y = (torch.cat(pair) for pair in zip(scaling, held_out, strict=True))
    temperature = fit_temperature(outputs_at(start, unseen_x), unseen_y)
    evidence = evidence_of_all(mll, seen, seen_y)
    weights = evidence.sample_weights(cell.get("draws", _DRAWS))

    def linear_outputs(draws: Weights, points: Tensor) -> Tensor:
        return linearized_outputs(start, draws, [(points,)])  # some at a time

    with warnings.catch_warnings():  # the number of effective draws is in the results
        warnings.filterwarnings("ignore", ".* draws have nearly all the weight")
        estimate = estimate_conditional_log_density(
            mll.likelihood, linear_outputs, weights, held_out, scaling=scaling,
            center=_mode(start), scale_by="accuracy",
        )  # fmt: skip
    # Before Langevin dynamics, which leave the network at their last weights.
    validation = mode_scores(mll, *held_out, "held_out")["log_density_held_out"]
    clmls: dict[str, float] = {}
    if "recipe" not in cell:
        # At the scale that the draws were given, so that both are of one posterior.
        clml = laplace_conditional_log_density(evidence, held_out, scale=estimate.scale)
        clmls["clml"] = clml / estimate.num_held_out
    for name, draws in _averaged(mll, (seen, seen_y), ensemble, cell).items():
        outputs = sampled_outputs(start, draws, [(held_out[0],)])
        joint = joint_log_density(mll.likelihood, outputs, held_out[1])
        clmls[f"clml_{name}"] = joint.value / estimate.num_held_out
    scores = {
        **clmls,
        "clml_sampled": estimate.joint.value / estimate.num_held_out,
        "clml_draws": estimate.joint.effective_draws,
        "clml_marginal": estimate.marginal,
        "posterior_scale": estimate.scale,
        "posterior_at_edge": float(estimate.scale_at_edge),
        "validation": validation,
    }
    return scores, temperature


def _mode(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


SIX = ("mlp-8x1", "mlp-128x1", "mlp-32x3", "cnn-4x1", "cnn-16x2", "resnet-8x1")
"""The architectures that are compared."""


def run_size(cell: Cell) -> dict[str, float]:
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
    start = _started(cell, data)
    # As many steps with few points as with many.
    epochs = max(1, cell["steps"] * 100 // max(n, 100))
    mll = trained(start, x, y, {**cell, "epochs": epochs})
    next_x, next_y = data.train_x[n : 2 * n], data.train_y[n : 2 * n]
    following = {}
    # The last size has no next n points.
    if len(next_y) == n:
        next_scores = mode_scores(mll, next_x, next_y, "next")
        following = {"next_log_density": next_scores["log_density_next"]}
    fitted = objective(start, n, cell["precision"], "layer")
    return {
        **following,
        "lml_fixed": float(evidence_of_all(mll, x, y)().detach()),
        "lml": fit_hyperparameters(fitted, x, y, batch_size=500).objective,
        **mode_scores(mll, data.test_x, data.test_y, "map"),
    }


ESTIMATORS = (
    *((name, None, "random", "all") for name in STRUCTURES if name != "kernel"),
    *itertools.product(["kernel"], (10, 50, 150), ("random", "class"), ("all", "single", "column")),
    *itertools.product(["kronecker"], (50, 150), ["random"], ("all", "single")),
    ("block", 150, "random", "all"),
    ("diagonal", 150, "random", "all"),
)
"""Structure, batch size (None: all points), partition and outputs of each estimate."""

_MOST_BATCHES = 10


def run_estimator(cell: Cell) -> dict[str, float]:
    """Estimates of the evidence of one trained network over the batches of a partition.

    Args:
        cell: ``data``, ``architecture``, ``precision``, ``num_train``, ``epochs``, ``seed``,
            ``device``, ``structure``, ``hessian``, ``batch_size``, ``partition``, ``outputs``.

    Returns:
        In nats per point: ``evidence``, the mean over at most ten batches, and its
        ``evidence_spread`` (standard deviation) over them; ``seconds_each`` of an estimate and
        its gradient in the precisions of layers, the fastest of them.
    """
    data = images(cell["data"], cell["num_train"], cell["seed"], cell["device"])
    x, y = data.train_x, data.train_y
    start = _network(cell, data)
    trained(start, x, y, cell)
    mll = objective(
        start, len(x), cell["precision"], "layer", STRUCTURES[cell["structure"]],
        hessian=cell["hessian"], outputs=cell["outputs"], seed=cell["seed"],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(cell["seed"])
    # No batch size means one batch with all points.
    size = cell["batch_size"] or len(x)
    if cell["partition"] == "class":
        batches = partition_by_class(y, size, generator)
    else:
        batches = partition_at_random(len(x), size, generator)
    batches, values, seconds = batches[:_MOST_BATCHES], list[float](), list[float]()
    for rows in batches:
        before = time.perf_counter()
        value = mll.evidence_of(x[rows], y[rows])()
        torch.autograd.grad(value, mll.model.prior.log_precision)
        values.append(float(value.detach()))  # waits for the device
        seconds.append(time.perf_counter() - before)
    return {
        # Batches of a class differ in size: larger ones count for more.
        "evidence": float(np.average(values, weights=[len(rows) for rows in batches])),
        "evidence_spread": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
        "seconds_each": min(seconds),
        "parameters": float(sum(p.numel() for p in start.parameters())),
    }


_REGRESSION_DRAWS, _WIDTH = 200, 50


def run_regression(cell: Cell) -> dict[str, float]:
    """A network [D, 50, 1] on a UCI set, its precisions and noise learned online.

    Args:
        cell: ``data``, ``seed`` (of the 90/10 split and the start), ``structure``, ``hessian``,
            ``epochs``, ``precision`` (the start; one a layer), ``device``.

    Returns:
        ``nll_map`` and ``nll_laplace`` of test points, in nats and original units, by the mode
        and by the linearized posterior; ``rmse``, of the mode, original units; ``evidence``, nats
        a training point in standardized units; ``noise`` (standard deviation, standardized).
    """
    data = load(cell["data"])
    rows = split(data.num_data, cell["seed"])
    to = {"dtype": torch.get_default_dtype(), "device": cell["device"]}
    x_scale = Standardizer.fit(data.inputs[rows.train], dim=0)
    y_scale = Standardizer.fit(data.targets[rows.train], dim=0)
    x = x_scale.transform(data.inputs).to(**to)
    y = y_scale.transform(data.targets).to(**to)
    train_x, train_y, test_x, test_y = x[rows.train], y[rows.train], x[rows.test], y[rows.test]
    unit = float(y_scale.scale)
    generator = torch.Generator().manual_seed(cell["seed"])
    # A seed gives the split and the start.
    start = MLP([x.shape[1], _WIDTH, 1], generator=generator).to(cell["device"])
    likelihood = GaussianLikelihood().to(cell["device"])
    likelihood.noise = 1.0
    model = LinearizedNetwork(start, GaussianWeightPrior(start, "layer", cell["precision"]))
    mll = LaplaceMarginalLogLikelihood(
        likelihood, model, len(train_x), STRUCTURES[cell["structure"]],
        hessian=cell["hessian"],
    )  # fmt: skip
    fit = fit_online(
        mll, train_x, train_y, epochs=cell["epochs"], lr=1e-2, final_lr=1e-4, burn_in=100,
        every=50, hyper_steps=10, seed=cell["seed"], progress=False,
    )  # fmt: skip
    evidence = mll.evidence_of(train_x, train_y)
    # Of the epoch with the best evidence, whose state the fit has kept.
    draws = linearized_outputs(start, evidence.sample_weights(_REGRESSION_DRAWS), test_x)
    mode_outputs = outputs_at(start, test_x).unsqueeze(0)
    nlls = {
        # Log densities of standardized targets become those of original units.
        name: float(math.log(unit) - marginal_log_densities(likelihood, at, test_y).mean())
        for name, at in (("nll_map", mode_outputs), ("nll_laplace", draws))
    }
    error = mode_outputs.flatten() - test_y
    return {
        **nlls, "rmse": float(error.square().mean().sqrt()) * unit, "evidence": fit.objective,
        "noise": float(likelihood.noise.detach().sqrt()), "best_epoch": float(fit.best),
    }  # fmt: skip


def run_search(cell: Cell) -> dict[str, float]:
    """A classifier trained at one precision of a grid, or with precisions learned online.

    Args:
        cell: ``data``, ``architecture``, ``precision``, ``by`` (``"grid"``: it stays;
            ``"network"`` or ``"layer"``: the start of what is learned), ``num_train``,
            ``epochs``, ``seed``, ``device``.

    Returns:
        ``evidence`` in nats a point; accuracy, log density and calibration error of the mode at
        test points.
    """
    data = images(cell["data"], cell["num_train"], cell["seed"], cell["device"])
    x, y = data.train_x, data.train_y
    start = _network(cell, data)
    if cell["by"] == "grid":
        mll = trained(start, x, y, cell)
    else:
        # The precision is only the start of those that are learned.
        mll = trained_online(start, x, y, cell, cell["by"])
    precisions = mll.model.prior.log_precision.detach().exp()
    return {
        "evidence": float(evidence_of_all(mll, x, y)().detach()),
        "precision_least": float(precisions.min()),
        "precision_largest": float(precisions.max()),
        **mode_scores(mll, data.test_x, data.test_y, "map"),
    }


_SAMPLES, _TEST_SAMPLES = 4, 20


def run_invariance(cell: Cell) -> dict[str, float]:
    """A classifier of images that are turned by up to a half of a right angle, or upright.

    Args:
        cell: ``data``, ``architecture``, ``precision`` (the start; one a layer), ``turned``
            (largest angle of the images, degrees), ``invariance`` (``"learned"``; ``"none"``: a
            network without), ``num_train``, ``epochs``, ``seed``, ``device``.

    Returns:
        ``rotation``, the range that is learned, in degrees, at the best evidence; ``evidence``;
        accuracy, log density and calibration error at test points, turned alike.
    """
    data = images(cell["data"], cell["num_train"], cell["seed"], cell["device"])
    largest = math.radians(cell["turned"])
    x = rotated(data.train_x, largest, cell["seed"])
    # Test images are turned by other angles of the same range.
    test_x = rotated(data.test_x, largest, cell["seed"] + 1)
    plain = _network(cell, data)
    if cell["invariance"] == "none":
        mll = trained(plain, x, data.train_y, cell)
        return mode_scores(mll, test_x, data.test_y, "map")
    averaged = AveragedNetwork(plain)
    augmentation = AffineAugmentation({"rotation": 0.2}, _SAMPLES, cell["seed"]).to(cell["device"])
    mll = objective(
        averaged, len(x), cell["precision"], "layer", FunctionSpace(), augmentation,
        outputs="single", seed=cell["seed"],
    )  # fmt: skip
    fit = fit_online(
        mll, x, data.train_y, epochs=cell["epochs"], batch_size=100, lr=3e-3, final_lr=3e-5,
        hyper_lr=0.05, hyper_steps=10, burn_in=3, every=1, seed=cell["seed"], progress=False,
    )  # fmt: skip
    averaged.eval()
    # Testing averages over more versions: no gradient has to be kept.
    augmentation.samples = _TEST_SAMPLES
    outputs = _augmented_outputs(mll, test_x)
    return {
        "rotation": math.degrees(augmentation.ranges()["rotation"]),
        "evidence": fit.objective,
        "best_epoch": float(fit.best),
        **predictive_scores(mll, outputs.unsqueeze(0), data.test_y, "map"),
    }


@torch.no_grad()
def _augmented_outputs(mll: LaplaceMarginalLogLikelihood, x: Tensor) -> Tensor:
    """Outputs at images, or their mean over versions of each where the model has them."""
    return torch.cat([mll.model(some).mean for some in x.split(100)])


LEARNED_BY: Mapping[str, tuple[str, str, int | None, str]] = {
    "none": ("kronecker", "ggn", None, "all"),
    "diagonal-EF": ("diagonal", "ef", None, "all"),
    "KFAC-N-C": ("kronecker", "ggn", None, "all"),
    "KFAC-N-1": ("kronecker", "ggn", None, "single"),
    "KFAC-500-C": ("kronecker", "ggn", 500, "all"),
    **{
        f"{name}-{size}-1": (structure, "ggn", size, "single")
        for name, structure in (("KFAC", "kronecker"), ("NTK", "kernel"))
        for size in (150, 400, 500)
    },
}
"""Structure, Hessian, points (None: all) and outputs of the evidence, by the papers' names.

``"none"`` learns nothing."""

_RANGES: Mapping[str, float] = dict.fromkeys(
    ("translation_x", "translation_y", "rotation", "scale", "stretch", "shear"), 0.1
)


def run_learned(cell: Cell) -> dict[str, float]:
    """A network whose precisions, or invariances too, are learned in training by an estimate.

    Args:
        cell: ``data``, ``architecture``, ``precision`` (the start; one a layer), ``recipe``,
            ``estimate`` (one of :data:`LEARNED_BY`), ``samples`` (versions of each image, whose
            six affine ranges are learned; 0: none), ``num_train``, ``epochs``, ``seed``,
            ``device``.

    Returns:
        ``evidence`` in nats a point, by that estimate, the mean over at most ten batches where it
        is of some points; accuracy, log density and calibration error at test points;
        ``range_`` of each transformation; ``seconds_hyper``, processor time of a step on
        hyperparameters, the median.
    """
    data = images(cell["data"], cell["num_train"], cell["seed"], cell["device"])
    x, y, seed = data.train_x, data.train_y, cell["seed"]
    structure, hessian, size, outputs = LEARNED_BY[cell["estimate"]]
    recipe, start, augmentation = recipe_of(cell), _started(cell, data), None
    if cell["samples"]:
        start = AveragedNetwork(start)
        augmentation = AffineAugmentation(_RANGES, cell["samples"], seed).to(cell["device"])
        # Versions of an image share weights, and their gradients add up.
        structure = "kronecker-reduce" if structure == "kronecker" else structure
    mll = objective(
        start, len(x), cell["precision"], "layer", STRUCTURES[structure], augmentation,
        hessian=hessian, outputs=outputs, seed=seed, temperature=recipe.temperature,
    )  # fmt: skip
    if cell["estimate"] == "none":
        recipe = recipe._replace(every=0)
    seconds = train(mll, x, y, recipe, cell["epochs"], seed, size)
    with torch.no_grad():
        if size is None:
            evidence = float(evidence_of_all(mll, x, y)())
        else:
            generator = torch.Generator().manual_seed(seed)
            batches = partition_at_random(len(x), min(size, len(x)), generator)[:_MOST_BATCHES]
            values = [float(mll.evidence_of(x[rows], y[rows])()) for rows in batches]
            evidence = float(np.average(values, weights=[len(rows) for rows in batches]))
    ranges = augmentation.ranges() if augmentation else {}
    outputs_of_tests = _augmented_outputs(mll, data.test_x).unsqueeze(0)
    return {
        "evidence": evidence,
        "parameters": float(sum(p.numel() for p in start.parameters())),
        **{f"range_{name}": value for name, value in ranges.items()},
        **({"seconds_hyper": float(np.median(seconds))} if seconds else {}),
        **predictive_scores(mll, outputs_of_tests, data.test_y, "map"),
    }


_UCI = ("boston", "concrete", "energy", "yacht")
_SIZES = (25, 50, 100, 200, 400, 800)
_PRECISIONS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True)
class Settings:
    """What a study is run with; epochs are steps of at most 100 images in ``training-speed``.

    Only ``architectures`` and the studies of papers take another learning rate than that of the
    network's family or of the paper; ensembles, of so many members, are of ``architectures`` and of
    Lotfi et al. (2022). A study of a paper has the ``kind`` of its cells, a ``recipe`` of training,
    and ``ways``: further settings of a cell, each for every network.
    """

    data: str = "digits"
    architectures: tuple[str, ...] = ARCHITECTURES
    precisions: tuple[float, ...] = (1.0,)
    num_train: int = 1000
    epochs: int = 50
    seeds: int = 3
    members: int = 5
    lr: float | None = None
    device: str = "cpu"
    kind: str = ""
    recipe: str = ""
    ways: tuple[Mapping[str, Any], ...] = ()


def _grid(names: str, first: Sequence[int], second: Sequence[int]) -> tuple[str, ...]:
    return tuple(names.format(*sizes) for sizes in itertools.product(first, second))


def _estimates(*names: str, **others: Any) -> tuple[Mapping[str, Any], ...]:
    return tuple({"samples": 0, "estimate": name, **others} for name in names)


_WIDTHS = (2, 4, 8, 16, 32, 64)
_CONVNETS = _grid("convnet-{}x{}", _WIDTHS[:5], (3, 4, 5))
_RESNETS = _grid("resnet-{}-{}", (8, 20, 32, 56, 110), _WIDTHS)
_DECAY = 5e-4  # weight decay, the prior precision of a point
_CURVE = {
    250: (900, 32), 500: (900, 32), 1000: (900, 32), 2000: (600, 64), 5000: (600, 64),
    10_000: (300, 128), 20_000: (300, 128), 45_000: (300, 128),
}  # fmt: skip
"""Epochs and batches by the number of images (Lotfi et al. 2022, Table 2)."""

_lotfi = partial(
    Settings, num_train=50_000, epochs=250, seeds=1, members=1, kind="architectures",
    recipe="lotfi-2022", ways=({"structure": "kronecker", "draws": 20},),
)  # fmt: skip
_immer_2021 = partial(
    Settings, num_train=60_000, epochs=300, seeds=5, kind="learned", recipe="immer-2021",
    ways=_estimates("KFAC-N-C", "diagonal-EF"),
)  # fmt: skip
_immer_2023 = partial(Settings, "cifar10", num_train=50_000, epochs=200, kind="learned")

_PAPERS: Mapping[str, Settings] = {
    # Figures 5 to 7 and 12 to 21. Which 25 networks is not stated; the text has ResNets of 20 to
    # 101 layers for CIFAR-100, of which three stages of equal depth give 98.
    "lotfi-2022-cifar10": _lotfi(
        "cifar10", (*_CONVNETS, *_grid("resnet-{}-{}", (8, 14, 20, 26, 32), (16, 48))),
        (1e2, 1e-1, 1e-2, 1e-4),
    ),
    "lotfi-2022-cifar100": _lotfi(
        "cifar100", (*_CONVNETS, *_grid("resnet-{}-{}", (20, 32, 44, 62, 98), (32, 64))),
        (1e2, 1e-1, 1e-2, 1e-3, 1e-4, 1e-6),
    ),
    # Figure 10. The prior precision is that of the weight decay: the text has no other.
    "lotfi-2022-curves": _lotfi(
        "cifar10", ("resnet18", "vgg19", "googlenet", "densenet121"), num_train=45_000,
        kind="curves", recipe="lotfi-2022-curves",
        ways=tuple(
            {"structure": "diagonal", "draws": 20, "decay": _DECAY, "num_train": n,
             "epochs": epochs, "batch_size": batch_size}
            for n, (epochs, batch_size) in _CURVE.items()
        ),
    ),
    # Table 2 and Figures 2, 6 and 7; sizes of the networks within the ranges that they name.
    "immer-2021-mnist": _immer_2021("mnist", ("mlp-256x2", "cnn-16x3")),
    "immer-2021-fashion": _immer_2021(
        "fashion",
        (*_grid("mlp-{}x{}", (8, 16, 32, 64, 128, 256), (1, 2, 3, 4)),
         *_grid("cnn-{}x{}", _WIDTHS, (1, 2, 3))),
    ),
    "immer-2021-cifar10": _immer_2021(
        "cifar10", (*_grid("cnn-{}x{}", _WIDTHS, (1, 3)), *_RESNETS), num_train=50_000
    ),
    "immer-2021-cifar100": _immer_2021("cifar100", _RESNETS, num_train=50_000),
    # Figure 5, without the images of SVHN.
    "immer-2021-augmentation": _immer_2021(
        "cifar10", ("resnet-20-16",), num_train=50_000,
        ways=(*_estimates("diagonal-EF"), *_estimates("diagonal-EF", recipe="immer-2021-crops")),
    ),
    # Table 1; the weight decay of the baseline, the start of the precisions and the three seeds
    # are our choice. --data cifar100 has its other half, where KFAC-500-C has all 100 outputs.
    "immer-2023-precision": _immer_2023(
        ("wrn-16-4",), epochs=300, recipe="immer-2023",
        ways=(*_estimates("none", decay=_DECAY),
              *_estimates("NTK-500-1", "KFAC-500-1", "KFAC-500-C", "KFAC-N-1", "KFAC-N-C")),
    ),
    # KFAC of all points is left out: its gradient in the ranges takes memory for all versions.
    "immer-2023-invariance": _immer_2023(
        ("wrn-16-4",), recipe="immer-2023-invariance",
        ways=_estimates("NTK-150-1", "KFAC-150-1", samples=20),
    ),
    # Figures 7 and 14 to 16; the depth and width of the network and the sizes are our choice.
    "immer-2023-subsets": _immer_2023(
        ("resnet-8-16",), recipe="immer-2023-subsets",
        ways=tuple(
            {"num_train": n, **way}
            for n in (1000, 5000, 10_000, 20_000, 50_000)
            for way in _estimates("NTK-400-1", "KFAC-400-1", samples=20)
        ),
    ),
}  # fmt: skip
"""Studies at the settings of papers, for those with their data and a GPU."""

STUDIES: Mapping[str, Settings] = {
    "architectures": Settings(precisions=(100.0, 0.1, 0.001), epochs=100),
    "bounds": Settings(architectures=("mlp-32x2", "cnn-8x2"), num_train=500, seeds=1),
    "invariance": Settings("mnist-test", ("cnn-8x2",), epochs=20),
    "online": Settings(architectures=("mlp-32x2", "cnn-8x2"), precisions=_PRECISIONS),
    "training-speed": Settings(
        architectures=SIX, precisions=(0.1,), num_train=max(_SIZES), epochs=500
    ),
    **_PAPERS,
}
"""The studies with their usual settings; but for those of papers they take minutes to hours."""


def make_grid(study: str, **given: Any) -> list[dict[str, Any]]:
    """The cells of a study.

    Args:
        study: One of :data:`STUDIES`.
        **given: Settings that replace the study's own; None leaves them.

    Raises:
        UnknownNameError: No such study or data.
        ArgumentError: A number is out of range, or a name is none of a network.
        DataError: A file is missing.
    """
    check_known("study", [study], STUDIES)
    chosen = {name: value for name, value in given.items() if value is not None}
    settings = replace(STUDIES[study], **chosen)
    names = ("num_train", "epochs", "seeds", "members", *([] if settings.lr is None else ["lr"]))
    check_positive(**{name: getattr(settings, name) for name in names})
    for precision in settings.precisions:
        check_positive(precisions=precision)
    check_device(settings.device)
    # Errors of data and of names of networks come before any cell is computed.
    data = images(settings.data, settings.num_train, 0)
    for name in settings.architectures:
        network(name, *data.train_x.shape[1:3], data.num_classes, 0)
    if settings.kind:
        # What is given replaces what the ways of a paper have of their own.
        names_in_ways = {"epochs": "epochs", "precisions": "decay"}
        replaced = {names_in_ways[name] for name in chosen if name in names_in_ways}
        kept = ({k: v for k, v in way.items() if k not in replaced} for way in settings.ways)
        return list(_paper(replace(settings, ways=tuple(kept))))
    return list(_CELLS[study](settings))


def _common(settings: Settings, study: str, seed: int) -> dict[str, Any]:
    return {
        "study": study, "data": settings.data, "num_train": settings.num_train,
        "epochs": settings.epochs, "seed": seed, "device": settings.device,
    }  # fmt: skip


def _networks(settings: Settings, study: str, *others: Sequence[Any]):
    """A cell for each seed, precision and network, and every combination of other values."""
    for seed, precision, name, *values in itertools.product(
        range(settings.seeds), settings.precisions, settings.architectures, *others
    ):
        common = _common(settings, study, seed)
        yield common | {"architecture": name, "precision": precision}, *values


def _architectures(settings: Settings):
    for (cell,) in _networks(settings, "architectures"):
        lr = learning_rate(cell["architecture"]) if settings.lr is None else settings.lr
        yield cell | {"members": settings.members, "lr": lr}


def _bounds(settings: Settings):
    names = ("structure", "batch_size", "partition", "outputs", "hessian")
    exact_fisher = [(*estimator, "ggn") for estimator in ESTIMATORS]
    empirical = [
        (structure, size, *others, "ef")
        for structure, size, *others in ESTIMATORS
        if size is None and structure != "kronecker-reduce"
    ]
    for cell, estimator in _networks(settings, "bounds", exact_fisher + empirical):
        yield cell | dict(zip(names, estimator, strict=True))


def _invariance(settings: Settings):
    for cell, turned, invariance in _networks(settings, "invariance", (0, 90), ("learned", "none")):
        yield cell | {"turned": turned, "invariance": invariance}


def _online(settings: Settings):
    for data in _UCI:
        load(data)
    # UCI sets are small: an epoch is one step.
    regression = replace(settings, epochs=60 * settings.epochs)
    for data, seed, structure in itertools.product(_UCI, range(5), ("kronecker", "full")):
        yield _common(regression, "online-regression", seed) | {
            "data": data, "num_train": None, "structure": structure, "hessian": "ggn",
            "precision": 1.0,
        }  # fmt: skip
    # Precisions that are learned start from one.
    ways = [*(("grid", given) for given in settings.precisions), ("network", 1.0), ("layer", 1.0)]
    for seed, name, (by, precision) in itertools.product(
        range(settings.seeds), settings.architectures, ways
    ):
        common = _common(settings, "online-search", seed)
        yield common | {"architecture": name, "precision": precision, "by": by}


def _training_speed(settings: Settings):
    sizes: Sequence[int] = [n for n in _SIZES if n <= settings.num_train]
    for cell, n in _networks(settings, "training-speed", sizes):
        # Epochs are counted in steps here, so that few points train as long as many.
        steps = cell.pop("epochs")
        yield cell | {
            "num_train": n, "num_pool": settings.num_train, "steps": steps,
            "lr": learning_rate(cell["architecture"]),
        }  # fmt: skip


def _paper(settings: Settings):
    """Cells of a study of a paper; of more images than there shall be only the fewest, cut."""
    most = settings.num_train
    fewest = min(way.get("num_train", most) for way in settings.ways)
    ways = [way for way in settings.ways if way.get("num_train", most) <= max(most, fewest)]
    others: dict[str, Any] = {} if settings.lr is None else {"lr": settings.lr}
    if settings.kind != "learned":
        others["members"] = settings.members
    for cell, way in _networks(settings, settings.kind, ways):
        cell = {**cell, "recipe": settings.recipe, **others, **way}
        cell["num_train"] = min(cell["num_train"], most)
        if "decay" in cell:
            cell["precision"] = cell.pop("decay") * cell["num_train"]
        yield cell


_CELLS = {
    "architectures": _architectures, "bounds": _bounds, "invariance": _invariance,
    "online": _online, "training-speed": _training_speed,
}  # fmt: skip

_FUNCTIONS: Mapping[str, Callable[[Cell], dict[str, float]]] = {
    "architectures": run_architecture,
    "bounds": run_estimator,
    "curves": run_architecture,
    "invariance": run_invariance,
    "learned": run_learned,
    "online-regression": run_regression,
    "online-search": run_search,
    "training-speed": run_size,
}


def run_cell(cell: Cell) -> dict[str, float]:
    """What a network reaches: scores by name; the cell has what its study's function asks for."""
    return _FUNCTIONS[cell["study"]](cell)
