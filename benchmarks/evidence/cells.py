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
    CLASSES,
    DATA,
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
    rotated,
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
    x, y = data.train_x, data.train_y
    scores, temperature = _held_out_scores(data, cell)
    # Scores need held-out points, the evidence none: it is of networks trained on all points.
    whole, ensemble = _trained_ensemble(x, y, cell)
    for by in ("network", "layer"):
        fitted = objective(whole.model.network, len(x), cell["precision"], by)
        fit = fit_hyperparameters(fitted, x, y, steps=100, batch_size=500, progress=False)
        # Before the first step precisions are those of training, whatever their groups.
        scores["lml"] = fit.history[0]
        scores["lml_global" if by == "network" else "lml_layer"] = fit.objective
    model = whole.model.network
    weights = evidence_of_all(whole, x, y).sample_weights(_TEST_DRAWS)
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
        outputs = sampled_outputs(model, draws, data.test_x)
        scores |= predictive_scores(whole, outputs, data.test_y, label)
    start = _started(cell, x)
    online = trained_online(start, x, y, cell, "layer")
    return {
        **scores,
        "lml_online": float(evidence_of_all(online, x, y)().detach()),
        **mode_scores(online, data.test_x, data.test_y, "online"),
        "parameters": float(sum(p.numel() for p in start.parameters())),
    }


def _trained_ensemble(x: Tensor, y: Tensor, cell: Cell) -> tuple[Any, Weights]:
    """A network at its mode, and the weights of an ensemble in which it is the first.

    Every member has its own start and its own order of the points.
    """
    seeds = [cell["seed"] + _SEED_STEP * member for member in range(cell["members"])]
    cells = [{**cell, "seed": seed} for seed in seeds]
    members = [trained(_started(member, x), x, y, member) for member in cells]
    # One tensor a parameter, members along its first axis, as draws of a posterior are.
    weights = torch.func.stack_module_state([member.model.network for member in members])[0]
    return members[0], {name: draws.detach() for name, draws in weights.items()}


def _started(cell: Cell, x: Tensor) -> torch.nn.Module:
    """A network for images; its convolutions are up to twice as fast with channels last."""
    start = network(cell["architecture"], *x.shape[1:3], CLASSES, cell["seed"]).to(x.device)
    return start.to(memory_format=torch.channels_last)


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
    mll, ensemble = _trained_ensemble(seen, seen_y, cell)
    start = mll.model.network
    # The temperature is fitted to all points that the network has not seen.
    unseen_x, unseen_y = (torch.cat(pair) for pair in zip(scaling, held_out, strict=True))
    temperature = fit_temperature(outputs_at(start, unseen_x), unseen_y)
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
    sampled_clml: dict[str, float] = {}
    for name, draws in _averaged(mll, (seen, seen_y), ensemble, cell).items():
        outputs = sampled_outputs(start, draws, held_out[0])
        joint = joint_log_density(mll.likelihood, outputs, held_out[1])
        sampled_clml[f"clml_{name}"] = joint.value / estimate.num_held_out
    scores = {
        **sampled_clml,
        "clml": clml / estimate.num_held_out,
        "clml_sampled": estimate.joint.value / estimate.num_held_out,
        "clml_draws": estimate.joint.effective_draws,
        "clml_marginal": estimate.marginal,
        "posterior_scale": estimate.scale,
        "posterior_at_edge": float(estimate.scale_at_edge),
        "validation": mode_scores(mll, *held_out, "held_out")["log_density_held_out"],
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
    start = _started(cell, x)
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
    start = network(cell["architecture"], *x.shape[1:3], CLASSES, cell["seed"]).to(x.device)
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
    start = network(cell["architecture"], *x.shape[1:3], CLASSES, cell["seed"]).to(x.device)
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
    plain = network(cell["architecture"], *x.shape[1:3], CLASSES, cell["seed"]).to(cell["device"])
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
    with torch.no_grad():
        outputs = torch.cat([averaged(augmentation(some)) for some in test_x.split(100)])
    return {
        "rotation": math.degrees(augmentation.ranges()["rotation"]),
        "evidence": fit.objective,
        "best_epoch": float(fit.best),
        **predictive_scores(mll, outputs.unsqueeze(0), data.test_y, "map"),
    }


_UCI = ("boston", "concrete", "energy", "yacht")
_SIZES = (25, 50, 100, 200, 400, 800)
_PRECISIONS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True)
class Settings:
    """What a study is run with; epochs are steps of at most 100 images in ``training-speed``.

    Only ``architectures`` has ensembles, of so many members, and takes another learning rate
    than that of the network's family.
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


STUDIES: Mapping[str, Settings] = {
    "architectures": Settings(precisions=(100.0, 0.1, 0.001), epochs=100),
    "bounds": Settings(architectures=("mlp-32x2", "cnn-8x2"), num_train=500, seeds=1),
    "invariance": Settings("mnist-test", ("cnn-8x2",), epochs=20),
    "online": Settings(architectures=("mlp-32x2", "cnn-8x2"), precisions=_PRECISIONS),
    "training-speed": Settings(
        architectures=SIX, precisions=(0.1,), num_train=max(_SIZES), epochs=500
    ),
}
"""The studies with their usual settings, which end in under 30 minutes on two cores each."""


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
    channels = images(settings.data, settings.num_train, 0).train_x.shape[1]
    for name in settings.architectures:
        network(name, channels, DATA[settings.data][2], CLASSES, 0)
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


_CELLS = {
    "architectures": _architectures, "bounds": _bounds, "invariance": _invariance,
    "online": _online, "training-speed": _training_speed,
}  # fmt: skip

_FUNCTIONS: Mapping[str, Callable[[Cell], dict[str, float]]] = {
    "architectures": run_architecture,
    "bounds": run_estimator,
    "invariance": run_invariance,
    "online-regression": run_regression,
    "online-search": run_search,
    "training-speed": run_size,
}


def run_cell(cell: Cell) -> dict[str, float]:
    """What a network reaches: scores by name; the cell has what its study's function asks for."""
    return _FUNCTIONS[cell["study"]](cell)
