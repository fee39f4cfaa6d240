"""Command line: ``python -m benchmarks.speed.linear``: learning curves, and memory of bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import gpytorch
import pandas as pd
import torch
import typer
from gpytorch.models import ExactGP
from torch import Tensor

from benchmarks.speed.memory import growth_of_peak, in_fresh_process
from benchmarks.speed.runs import Threads, interleaved_times, print_tables
from gpclml.errors import UnknownNameError
from gpclml.evaluation import learning_curve
from gpclml.kernels import FourierFeatures, RandomFourierFeatures
from gpclml.linalg.gaussians import DiagonalFamily, FullFamily, GaussianFamily, LowRankFamily
from gpclml.mlls import LinearEvidenceLowerBound
from gpclml.models import BayesianLinearModel, GPRegression

__all__ = ["FAMILIES", "bound_memory", "measure_curves", "measure_memory"]

_NOISE = 0.1

FAMILIES: dict[str, GaussianFamily] = {
    "diagonal": DiagonalFamily(), "rank-1": LowRankFamily(1), "rank-10": LowRankFamily(10),
    "full": FullFamily(),
}  # fmt: skip


def _data(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
    noise = _NOISE**0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    return x, x.squeeze(-1).sin() + noise


def _linear(n: int) -> ExactGP:
    x, y = _data(n)
    return BayesianLinearModel(x, y, FourierFeatures(9), noise=_NOISE)


def _dense(n: int) -> ExactGP:
    x, y = _data(n)
    return GPRegression(x, y, kernel="rbf", mean="zero", standardize=False)


MODELS: dict[str, Callable[[int], ExactGP]] = {"18 features": _linear, "RBF kernel": _dense}


def measure_curves(name: str, n: int, orderings: int, rounds: int) -> pd.DataFrame:
    """Learning curves of all orderings in one call, and of one by refitting each prefix.

    A refit is the least there is to do: with features the precision of the weights of i points
    is summed and factored, with a kernel the covariance of i points; then point i + 1 is
    predicted. Its ratio is that of one ordering times their number.
    """
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    model = MODELS[name](n)
    refit = _refits_of_weights(model) if name == "18 features" else _refits_of_kernel(model)
    steps = {"call": lambda: learning_curve(model, orderings), "refits": refit}
    with torch.no_grad():
        times = interleaved_times(steps, rounds)
    ratio = orderings * times["refits"] / times["call"]
    row = {
        "model": name, "n": n, "orderings": orderings, "one call, s": times["call"].median(),
        "refits of one, s": times["refits"].median(), "ratio": ratio.median(),
        "low": ratio.quantile(0.25), "high": ratio.quantile(0.75),
    }  # fmt: skip
    return pd.DataFrame([row])


def _refits_of_weights(model: ExactGP) -> Callable[[], Tensor]:
    assert isinstance(model, BayesianLinearModel)
    phi, y = model.features(model.train_inputs[0]).detach(), model.train_targets
    noise, prior = model.noise.item(), model.prior_variance.detach()

    def refits() -> Tensor:
        terms = []
        for i in range(len(y)):
            L = torch.linalg.cholesky(phi[:i].mT @ phi[:i] / noise + torch.diag(1 / prior))
            right = torch.stack([phi[:i].mT @ y[:i] / noise, phi[i]], -1)
            mean, v = torch.cholesky_solve(right, L).unbind(-1)
            normal = torch.distributions.Normal(phi[i] @ mean, (noise + phi[i] @ v).sqrt())
            terms.append(normal.log_prob(y[i]))
        return torch.stack(terms)

    return refits


def _refits_of_kernel(model: ExactGP) -> Callable[[], Tensor]:
    x, y = model.train_inputs[0], model.train_targets
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        K = model.likelihood(model.forward(x)).covariance_matrix

    def refits() -> Tensor:
        terms = [torch.distributions.Normal(0.0, K[0, 0].sqrt()).log_prob(y[0])]
        for i in range(1, len(y)):
            L = torch.linalg.cholesky(K[:i, :i])
            right = torch.stack([y[:i], K[:i, i]], -1)
            z, v = torch.linalg.solve_triangular(L, right, upper=False).unbind(-1)
            normal = torch.distributions.Normal(v @ z, (K[i, i] - v @ v).sqrt())
            terms.append(normal.log_prob(y[i]))
        return torch.stack(terms)

    return refits


def measure_memory(
    num_features: int,
    num_data: int,
    families: Iterable[str] = tuple(FAMILIES),
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.float64),
) -> pd.DataFrame:
    """Peak memory in GiB of the bound of families, each in a process of its own."""
    rows = []
    for family in families:
        for dtype in dtypes:
            value, both = (
                bound_memory(family, num_features, num_data, dtype, gradient) / 2**30
                for gradient in (False, True)
            )
            kind = str(dtype).removeprefix("torch.")
            rows.append(
                {
                    "family": family, "dtype": kind, "R": num_features, "n": num_data,
                    "value": value, "with gradient": both,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def bound_memory(
    family: str, num_features: int, num_data: int, dtype: torch.dtype, gradient: bool
) -> int:
    """Highest memory in use by the bound less that before it, in bytes, in a process of its own.

    Random Fourier features of inputs with two columns. Features, (n, R), are made within.
    """
    if family not in FAMILIES:
        raise UnknownNameError("family", family, FAMILIES)
    kind = str(dtype).removeprefix("torch.")
    return in_fresh_process(_peak, family, num_features, num_data, kind, gradient)


def _peak(family: str, num_features: int, num_data: int, kind: str, grad: bool) -> int:
    dtype = getattr(torch, kind)
    _bound(family, 50, 20, dtype, grad)  # loads what libraries load at their first use
    return growth_of_peak(lambda: _bound(family, num_features, num_data, dtype, grad))


def _bound(family: str, num_features: int, num_data: int, dtype: torch.dtype, grad: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 2, generator=generator, dtype=dtype)
    features = RandomFourierFeatures(2, num_features, seed=0)
    model = BayesianLinearModel(x, x[:, 0].sin(), features, noise=0.1)
    mll = LinearEvidenceLowerBound(model.likelihood, model, FAMILIES[family])
    with torch.set_grad_enabled(grad):
        value = mll(model(x), model.train_targets)
        if grad:
            value.backward()


def main(
    n: Annotated[int, typer.Option(min=2, help="Points of the learning curves.")] = 2000,
    orderings: Annotated[int, typer.Option(min=1, help="Orderings of one call.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the learning curves.")] = 3,
    features: Annotated[int, typer.Option(min=1, help="Features of the bounds.")] = 100_000,
    points: Annotated[int, typer.Option(min=1, help="Points of the bounds.")] = 1000,
    threads: Threads = 1,
    csv: Annotated[
        Path | None, typer.Option(help="Write the learning curves' table there as well.")
    ] = None,
) -> None:
    """Learning curves in one call against refits, and peak memory of lower bounds."""
    curves = (measure_curves(name, n, orderings, rounds) for name in MODELS)
    print_tables("benchmarks.speed.linear", curves, threads=threads, csv=csv, digits=".3f")
    memory = measure_memory(features, points)
    print(f"\n{memory.to_string(index=False, float_format='%.2f')}")


if __name__ == "__main__":
    typer.run(main)
