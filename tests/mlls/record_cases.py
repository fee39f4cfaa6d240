"""Cases whose values and gradients are stored in ``record.json``.

Each name there says a model, an objective and how it is evaluated, then numbers and options; see
:func:`build` and :func:`evaluate`. Hyperparameters, data and networks are drawn by a seed that the
name gives, and rounded to float32, so that both types have the same.

``PYTHONPATH=tests python tests/mlls/record_cases.py`` writes the file anew and says which cases
change, and by how much. It is only for when values are meant to change, and for cases that are new,
which are written there with ``null``.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from botorch.models import KroneckerMultiTaskGP, ModelListGP, MultiTaskGP, SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from exact_gps import PlainGP
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    MultitaskGaussianLikelihood,
)
from gpytorch.models import ExactGP, IndependentModelList
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior
from kernel_cases import KERNELS, NUM_TASKS, matern, network
from torch import Tensor

from gpclml.conditioning import (
    HeldOut,
    KFold,
    LastPoints,
    LeaveOneOut,
    RandomHoldout,
    RandomOrderings,
)
from gpclml.inference import exact_posterior, likelihood_parameters, training_observations
from gpclml.kernels import FourierFeatures, NetworkMean, PolynomialFeatures, RandomFourierFeatures
from gpclml.linalg import ConjugateGradients
from gpclml.meta import DeepKernelTransfer, Episodes
from gpclml.mlls import ConditionalMarginalLogLikelihood, SumMarginalLogLikelihood
from gpclml.mlls.fixed_loss import FixedLoss, fixed_loss
from gpclml.models import BayesianLinearModel, GPRegression

FILE = Path(__file__).with_name("record.json")
FLOAT64 = 1e-10
FLOAT32 = 1e-5
ITERATIVE = 2e-9  # the error of conjugate gradients' solves is of first order in the gradient
ILL_CONDITIONED = 1e-2  # in float32, where nothing is compared


def _number(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text or True  # an option without a value


def _parse(line: str) -> dict[str, Any]:
    model, objective, by, *options = line.split()
    pairs = [option.partition("=") for option in options]
    numbers = {key: _number(value) for key, _, value in pairs}
    return {"model": model, "objective": objective, "by": by, **numbers}


def read() -> dict[str, dict[str, Any]]:
    """The stored record: for each case its tensors, and how far float32 was from them."""
    return json.loads(FILE.read_text())


CASES = {line: _parse(line) for line in read()}


def exact(values: Tensor) -> Tensor:
    """Float64 values that float32 has too."""
    return values.detach().float().double()


# --- models ---


class TasksGP(PlainGP):
    """Several targets at each point."""

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


def _data(case: dict[str, Any], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    n, d = case["n"], case["d"]
    batch = [case["batch"]] if "batch" in case else []
    x = 2 * torch.rand(*batch, n, d, generator=generator, dtype=torch.float64) - 1
    several = [case["targets"]] if "targets" in case else batch
    if "repeated" in case:
        x[..., n // 2 :: 2, :] = x[..., : (n + 1) // 4, :]
    noise = torch.randn(*several, n, generator=generator, dtype=torch.float64)
    y = torch.sin(2.5 * x.sum(-1) / math.sqrt(d)) + 0.5 * torch.cos(4 * x[..., 0])
    y = y + 0.2 * noise + 0.4
    if case["model"].endswith("of_tasks"):
        tasks = torch.arange(n, dtype=torch.float64) % NUM_TASKS
        x = torch.cat([x, tasks.expand(*batch, n).unsqueeze(-1)], -1)
    if "nan" in case:
        missing = torch.rand(y.shape, generator=generator, dtype=torch.float64) < 0.2
        y[missing] = float("nan")
    return exact(x + 100.0 if "far" in case else x), exact(y)


def _several_targets(x: Tensor, y: Tensor, count: int) -> Tensor:
    return exact(torch.stack([y * (1 + 0.5 * i) + (i * x[..., 0]).cos() for i in range(count)], -1))


def _mean(name: str, d: int, batch: torch.Size) -> gpytorch.means.Mean:
    if name == "network":
        return NetworkMean(network(d, 1))
    if name == "linear":
        return gpytorch.means.LinearMean(d, batch_shape=batch)
    if name == "zero":
        return gpytorch.means.ZeroMean(batch_shape=batch)
    return gpytorch.means.ConstantMean(batch_shape=batch)


def _likelihood(case: dict[str, Any], y: Tensor, batch: torch.Size) -> Any:
    if "fixed_noise" not in case:
        return GaussianLikelihood(batch_shape=batch)
    noise = exact(torch.linspace(0.05, 0.2, y.shape[-1], dtype=torch.float64).expand(y.shape))
    return FixedNoiseGaussianLikelihood(noise, learn_additional_noise="learned" in case)


def _plain(case: dict[str, Any], x: Tensor, y: Tensor) -> ExactGP:
    batch = torch.Size([] if "batch" not in case or "shared" in case else [case["batch"]])
    likelihood = _likelihood(case, y, batch)
    mean = _mean(case.get("mean", "constant"), x.shape[-1], batch)
    if case["model"] == "multitask":
        y = _several_targets(x, y, NUM_TASKS)
        likelihood = MultitaskGaussianLikelihood(NUM_TASKS, rank=case.get("noise_rank", 0))
        mean = gpytorch.means.MultitaskMean(mean, NUM_TASKS)
        kernel = MultitaskKernel(matern(2.5, True)(case["d"]), NUM_TASKS, rank=1)
        return TasksGP(x, y, kernel, likelihood, mean)
    options = {"batch_shape": batch} if batch else {}
    kernel = KERNELS[case["model"]](case["d"], **options)
    return PlainGP(x, y, kernel, likelihood, mean)


def _list(case: dict[str, Any], x: Tensor, y: Tensor) -> Any:
    if case["model"] == "single_task_list":
        return ModelListGP(_single_task(case, x, y), _single_task(case, x[::2], -y[::2]))
    models = [
        _plain({**case, "model": name}, x[i:], y[i:])
        for i, name in enumerate(["rbf_ard", "deep", "rq"])
    ]
    return IndependentModelList(*models)


def _single_task(case: dict[str, Any], x: Tensor, y: Tensor) -> SingleTaskGP:
    d, several = case["d"], case.get("outputs", 1)
    targets = y.unsqueeze(-1) if several == 1 else _several_targets(x, y, several)
    variance = 0.01 + 0.05 * torch.rand_like(targets) if "fixed_noise" in case else None
    return SingleTaskGP(
        3 * x + 1,
        5 * targets - 2,
        variance,
        covar_module=KERNELS[case["kernel"]](d) if "kernel" in case else None,
        input_transform=Normalize(d),
        outcome_transform=Standardize(several, batch_shape=x.shape[:-2]),
    )


def _botorch_tasks(case: dict[str, Any], x: Tensor, y: Tensor) -> ExactGP:
    if case["model"] == "kronecker_multi_task":
        return KroneckerMultiTaskGP(x, _several_targets(x, y, 2), outcome_transform=Standardize(2))
    task = (torch.arange(len(x), dtype=torch.float64) % 2).unsqueeze(-1)
    return MultiTaskGP(torch.cat([x, task], -1), y.unsqueeze(-1), task_feature=-1)


def _regression(case: dict[str, Any], x: Tensor, y: Tensor) -> GPRegression:
    kernel = case["model"].removeprefix("regression_")
    given = _likelihood(case, y, torch.Size()) if "fixed_noise" in case else None
    return GPRegression(
        3 * x + 1, 5 * y - 2, kernel, case.get("mean", "constant"), given,
        hidden=(4,), standardize="raw" not in case,
    )  # fmt: skip


def _linear(case: dict[str, Any], x: Tensor, y: Tensor) -> BayesianLinearModel:
    features: Any = {
        "identity": PolynomialFeatures(1),
        "polynomial": PolynomialFeatures(2),
        "fourier": FourierFeatures(3) if case["d"] == 1 else None,
        "random": RandomFourierFeatures(case["d"], 9, ard=True),
        "many": RandomFourierFeatures(case["d"], 60),
    }[case["model"].removeprefix("linear_model_")]
    each = torch.ones(features(x.float()).shape[-1]) if "each" in case else 1.0
    mean = None if "mean" not in case else _mean(case["mean"], x.shape[-1], torch.Size())
    return BayesianLinearModel(x, y, features, prior_variance=each, mean=mean)


def _transfer(case: dict[str, Any], x: Tensor, y: Tensor) -> DeepKernelTransfer:
    kernel = case["model"].removeprefix("transfer_")
    return DeepKernelTransfer(network(case["d"], 4), kernel, num_features=4)


def _make(case: dict[str, Any], x: Tensor, y: Tensor) -> Any:
    if case["model"] in (*KERNELS, "multitask"):
        return _plain(case, x, y)
    kinds = {
        "regression": _regression, "linear_model": _linear, "transfer": _transfer,
        "single_task_list": _list, "plain_list": _list, "single_task": _single_task,
        "kronecker_multi_task": _botorch_tasks, "multi_task": _botorch_tasks,
    }  # fmt: skip
    return next(make for kind, make in kinds.items() if case["model"].startswith(kind))(case, x, y)


RANGES = {
    "lengthscale": (0.4, 1.6), "outputscale": (0.4, 2.5), "alpha": (0.4, 3.0),
    "period_length": (0.8, 3.0), "variance": (0.3, 1.5), "offset": (0.3, 1.2),
    "noise": (0.03, 0.3), "task_noises": (0.05, 0.4), "constant": (0.2, 1.5),
    "mixture_weights": (0.2, 0.8), "mixture_means": (0.05, 0.5), "mixture_scales": (0.05, 0.4),
}  # fmt: skip


@torch.no_grad()
def _draw(model: torch.nn.Module, case: dict[str, Any], generator: torch.Generator) -> None:
    """Other hyperparameters than those that a model starts with; all that it has in float32."""
    for path, parameter, constraint in model.named_parameters_and_constraints():
        name = path.rpartition(".")[2].removeprefix("raw_")
        draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
        if constraint is not None:
            low, high = RANGES.get(name, (0.3, 1.5))
            value = low + (high - low) * draw
            if name == "lengthscale":
                value = value * math.sqrt(case["d"])
            value = torch.full_like(value, case[name]) if name in case else value
            parameter.copy_(constraint.inverse_transform(value))
        else:
            parameter.copy_(2 * draw - 1)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):  # networks may start near zero, where all is linear
            for parameter in module.parameters():
                draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_((2 * draw - 1) * 1.5 * module.in_features**-0.5)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.copy_(exact(tensor))


def _add_priors(model: torch.nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, ScaleKernel):
            module.register_prior("scale_prior", GammaPrior(2.0, 0.8), "outputscale")
        if isinstance(module, RBFKernel | MaternKernel | RQKernel):
            module.register_prior("lengthscale_prior", LogNormalPrior(0.3, 0.9), "lengthscale")
        if isinstance(module, gpytorch.means.ConstantMean):
            module.register_prior("mean_prior", NormalPrior(0.1, 1.3), "constant")
        if isinstance(module, GaussianLikelihood):
            module.register_prior("noise_prior", GammaPrior(1.1, 4.0), "noise")


def _conditioning(name: str, n: int) -> Any:
    return {
        "default": lambda: None,
        "lml": lambda: LastPoints(m=0),
        "half": lambda: LastPoints(m=n // 2),
        "holdout": lambda: RandomHoldout(0.3, seed=5),
        "holdout_given": lambda: RandomHoldout(0.2, seed=5, condition_on=n // 2),
        "folds": lambda: KFold(4),
        "loo": LeaveOneOut,
        "orderings": lambda: RandomOrderings(3, m=n // 2),
        "groups": lambda: HeldOut([0, 3], [5], [7, 2, 9]),
    }[name]()


def _objective(case: dict[str, Any], model: Any) -> Any:
    kind: Any = gpytorch.mlls.ExactMarginalLogLikelihood
    if case["objective"] != "gpytorch":
        conditioning, solver = _conditioning(case["objective"], case["n"]), "auto"
        if "cg" in case:
            solver = ConjugateGradients(1e-11, max_error=None, preconditioner_rank=case["cg"])
        kind = partial(
            ConditionalMarginalLogLikelihood, conditioning=conditioning, seed=3, solver=solver
        )
    if case["model"].endswith("list"):
        return SumMarginalLogLikelihood(model.likelihood, model, kind)
    return kind(model.likelihood, model)


def build(case: dict[str, Any], dtype: torch.dtype) -> Any:
    """The objective of a case, its model in train mode.

    Args:
        case: A value of ``CASES``: ``n`` points of ``d`` columns; ``batch`` of so many models,
            ``shared`` if they have the same hyperparameters; so many ``targets`` at the same
            points; ``nan`` for missing targets; ``repeated`` points; points ``far``
            from zero; ``mean``; ``priors``; ``fixed_noise``, with
            ``learned`` noise beside it; ``again`` for a second evaluation; ``cg`` for conjugate
            gradients with a preconditioner of that rank; a hyperparameter by its name.
        dtype: Of the model, which is made in float64 and then converted.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(repr(sorted(case.items())).encode()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        model = _make(case, *_data(case, generator)).double()
    if "priors" in case:
        _add_priors(model)
    _draw(model, case, generator)
    return _objective(case, model.to(dtype).train()).train()


# --- evaluations ---


def _called(case: dict[str, Any], mll: Any) -> tuple[Tensor, list[Tensor]]:
    model, parameters = mll.model, ()
    inputs = list(model.train_inputs)
    if "inputs" in case:
        inputs = [x.clone().requires_grad_() for x in inputs]
    if not case["model"].endswith("list"):
        parameters = likelihood_parameters(model, mll.likelihood)
    value = mll(model(*inputs), model.train_targets, *parameters)
    return value, inputs if "inputs" in case else []


def _custom(case: dict[str, Any], mll: Any) -> tuple[Tensor, list[Tensor]]:
    # The record's losses are without the weak priors that a search of a regression has.
    return fixed_loss(mll) if type(mll.model) is GPRegression else mll.compute_custom_loss(), []


def _fixed(case: dict[str, Any], mll: Any) -> tuple[Tensor, list[Tensor]]:
    loss = FixedLoss(mll)
    if "again" in case:  # at other hyperparameters than those that it was made with
        loss()
        mll.zero_grad()
        with torch.no_grad():
            for parameter in mll.parameters():
                parameter.add_(0.125)
    value = loss()
    return torch.tensor(value, dtype=torch.float64), []


def _leave_one_out(case: dict[str, Any], mll: Any) -> tuple[Tensor, list[Tensor]]:
    data = training_observations(mll.model)
    rows = torch.arange(data.residual.shape[-1])
    return torch.stack(data.covariance.leave_one_out(data.residual, rows)), []


def _sequential(case: dict[str, Any], mll: Any) -> tuple[Tensor, list[Tensor]]:
    data = training_observations(mll.model)
    n = data.residual.shape[-1]
    orders = torch.stack([torch.arange(n), torch.arange(n).flip(0), torch.arange(n) * 7 % n])
    return data.covariance.sequential(data.residual, orders), []


def _new_points(case: dict[str, Any], model: Any) -> Tensor:
    x = model.train_inputs[0]
    rows = x[..., :6, :] + 0.25 * torch.linspace(-1, 1, 6, dtype=x.dtype).unsqueeze(-1)
    return exact(rows).to(x).requires_grad_("inputs" in case)


def _predicted(case: dict[str, Any], mll: Any) -> tuple[Tensor, list[Tensor]]:
    """The model's own predictions, or the posterior of its latent values, at new points."""
    model, rows = mll.model, mll.model.train_inputs[0][..., :6, :]
    rows = rows + 0.25 * torch.linspace(-1, 1, 6, dtype=rows.dtype).unsqueeze(-1)
    x = exact(rows).to(rows).requires_grad_("inputs" in case)
    if case["by"] == "posterior":
        posterior = exact_posterior(model.eval(), x, "marginal" in case)
    else:
        posterior = model.predict(x, **({"grad": True} if isinstance(model, GPRegression) else {}))
    spread = posterior.variance if "marginal" in case else posterior.covariance_matrix
    return torch.cat([posterior.mean.flatten(), spread.flatten()]), [x] if "inputs" in case else []


def _episodes(case: dict[str, Any], mll: Any) -> tuple[Tensor, list[Tensor]]:
    """Tasks that share what is learned: of classes, or of numbers where there are no ``ways``."""
    n, ways, tasks = case["n"], case.get("ways", 0), 3
    generator, like = torch.Generator().manual_seed(n), next(mll.model.parameters())
    x = torch.randn(tasks, n, case["d"], generator=generator, dtype=torch.float64)
    y = torch.arange(n).expand(tasks, n) % ways if ways else exact(x.sum(-1).sin()).to(like)
    x, support = exact(x).to(like), n // 2
    episodes = Episodes(x[:, :support], y[:, :support], x[:, support:], y[:, support:], ways=ways)
    return mll.model.objective(mll, episodes), []


EVALUATIONS = {
    "call": _called, "custom": _custom, "fixed": _fixed, "loo": _leave_one_out,
    "sequential": _sequential, "posterior": _predicted, "predict": _predicted, "tasks": _episodes,
}  # fmt: skip


def evaluate(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The value of a case and its gradients, flat and in float64.

    Args:
        case: A value of ``CASES``, evaluated by: a ``call`` of the objective, ``custom`` loss, the
            ``fixed`` loss of a line search, moments of leave-one-out predictions, ``sequential``
            densities, the ``posterior`` and what a model ``predict``s at new points, an objective
            of few-shot ``tasks``. With ``inputs`` there is a gradient with respect to these.
        dtype: Of the model and its data.

    Returns:
        ``"value"``, and a gradient for each trainable parameter by its name, of the sum of the
        values, with weights from 1 to 2 where there are several.
    """
    mask = gpytorch.settings.observation_nan_policy("mask")
    with mask if "nan" in case else contextlib.nullcontext():
        mll = build(case, dtype)
        model = mll.model
        value, inputs = EVALUATIONS[case["by"]](case, mll)
        if value.requires_grad:
            weights = torch.linspace(1.0, 2.0, value.numel(), dtype=value.dtype)
            (value.flatten() * weights).sum().backward()
    gradients = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients |= {f"inputs[{i}]": x for i, x in enumerate(inputs)}
    result = {"value": value}
    for name, tensor in gradients.items():
        result[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    return {name: values.detach().double().flatten() for name, values in result.items()}


_ZERO = 1e-12  # of the largest number of all tensors


def differences(result: dict[str, Tensor], stored: list[list[float]]) -> dict[str, float]:
    """How far each tensor is from the stored one, as a share of the latter's largest number.

    That number is at least a hundredth of the largest in all tensors, and is the largest for a
    gradient that is zero, as of a bias before a stationary kernel: the small difference of large
    terms has their rounding errors.

    Args:
        result: What :func:`evaluate` gives.
        stored: Its tensors, in the same order.
    """
    if [len(values) for values in result.values()] != [len(values) for values in stored]:
        return {"shapes": math.inf}
    expected = [torch.tensor(values, dtype=torch.float64) for values in stored]
    largest = [float(values.abs().max()) for values in expected]
    most = max(largest)
    together = zip(result.items(), expected, largest, strict=True)
    return {
        name: float((values - other).abs().max())
        / (max(scale, 0.01 * most) if scale > _ZERO * most else most)
        for (name, values), other, scale in together
    }


def tolerance(case: dict[str, Any]) -> float:
    """How near values in float64 have to be."""
    return ITERATIVE if "cg" in case else FLOAT64


def _entry(case: dict[str, Any]) -> dict[str, Any]:
    tensors = evaluate(case)
    assert all(bool(values.isfinite().all()) for values in tensors.values()), case
    stored = [values.tolist() for values in tensors.values()]
    single = None
    if "cg" not in case:  # whose tolerance float32 cannot meet
        error = max(differences(evaluate(case, torch.float32), stored).values())
        single = float(f"{error:.2g}") if error < ILL_CONDITIONED else None
    return {"float32": single, "tensors": stored}


def main() -> None:
    """Writes the record anew, a line for each case, and prints what changes."""
    old = read()
    lines = []
    for name, case in CASES.items():
        entry = _entry(case)
        if old[name] is None:
            print(f"{name}: new")
        elif (change := max(differences(evaluate(case), old[name]["tensors"]).values())) > (
            tolerance(case)
        ):
            print(f"{name}: changes by {change:.2g}")
        else:
            entry = old[name]  # so that the file changes only where values do
        lines.append(f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
