"""Conjugate gradients on hard systems: whether they end, and whether their bounds are true."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import gpytorch
import numpy as np
import pandas as pd
import torch
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from benchmarks.robustness.accuracy import cholesky, extended, forward, log_density_of_last
from benchmarks.robustness.problems import KERNELS
from gpclml.errors import ArgumentError
from gpclml.linalg import ConjugateGradients, IterativeCovariance, RowProducts

__all__ = ["HardSystem", "draw_system", "run_solver", "summarize_solver"]


@dataclass(frozen=True)
class HardSystem:
    """A covariance, residuals and a block that is held out.

    The kernel is evaluated and systems are solved in ``dtype``; some rows of ``x`` are copies.
    """

    index: int
    kernel: str
    dtype: torch.dtype
    x: Tensor
    y: Tensor
    held_out: Tensor
    lengthscale: float
    outputscale: float
    noise: float

    def covariance(self) -> tuple[IterativeCovariance, Tensor]:
        """By its products; and the latent covariance as the kernel evaluates it, ``(n, n)``."""
        kernel = gpytorch.kernels.ScaleKernel(KERNELS[self.kernel](ard_num_dims=1))
        kernel.base_kernel.lengthscale = self.lengthscale
        kernel.outputscale = self.outputscale
        kernel = kernel.to(self.dtype).requires_grad_(False)
        x = self.x.to(self.dtype)
        n = len(x)

        def rows(start: int, stop: int, columns: int) -> Tensor:
            return kernel(x[start:stop], x[:columns]).to_dense()

        diagonal = kernel(x, diag=True)
        assert isinstance(diagonal, Tensor)
        latent = RowProducts(rows, diagonal, kept_bytes=10**9)
        noise = torch.full((n,), self.noise, dtype=self.dtype)
        return IterativeCovariance(latent, noise, ConjugateGradients()), rows(0, n, n)


def draw_system(seed: int, index: int, most: int = 1500) -> HardSystem:
    """One system, the same for the same seed and index.

    Log-uniform: n from 20 to ``most``, the lengthscale from 0.05 to 10, the noise from 1e-6 to
    1e2, outputscale over noise from 1 to 1e9. Uniform: 1 to 5 features, the kernel, float32 or
    float64, blocks of 1, 5, 20 or a tenth of the points; half of the systems have copies among
    their rows. Inputs are standard normal. Residuals are of the scale of the prior with its noise,
    or in a third of the systems noise of that scale, which the model does not expect.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)

    def uniform() -> float:
        return float(torch.rand(1, generator=generator, dtype=torch.float64))

    def log_uniform(low: float, high: float) -> float:
        return low * (high / low) ** uniform()

    n, d = int(log_uniform(20, most + 1)), 1 + int(5 * uniform())
    kernel = list(KERNELS)[int(len(KERNELS) * uniform())]
    copies = int(max(0.0, 1.6 * uniform() - 0.8) * n)
    x = normal(n - copies, d)
    picked = torch.randint(len(x), (copies,), generator=generator)
    x = torch.cat([x, x[picked]])[torch.randperm(n, generator=generator)]
    lengthscale, noise = log_uniform(0.05, 10), log_uniform(1e-6, 1e2)
    outputscale = noise * log_uniform(1.0, 1e9)
    dtype = (torch.float32, torch.float64)[int(2 * uniform())]
    b = (1, 5, 20, max(1, n // 10))[int(4 * uniform())]
    waves = normal(d, 10) * log_uniform(0.1, 3.0)
    y = (x @ waves + 2 * math.pi * normal(10)).cos().sum(-1) * (outputscale / 10) ** 0.5
    y = y + noise**0.5 * normal(n)
    if uniform() < 1 / 3:
        y = outputscale**0.5 * normal(n)
    held_out = torch.randperm(n, generator=generator)[: min(b, n - 1)]
    return HardSystem(
        index, kernel, dtype, x.float(), y.float(), held_out, lengthscale, outputscale, noise
    )


def run_solver(systems: int = 1000, seed: int = 0, most: int = 1500) -> Iterator[dict]:
    """The density of a block on hard systems with the default settings, against a reference.

    The reference is in extended precision, on the covariance as the kernel evaluates it, its lower
    triangle. ``rounding`` is what the rounding of the covariance's entries may change in the
    density, to first order, with the working type's epsilon times the value; the bound is not
    meant to include it. ``raised`` is with ``on_failure="error"``; of the same system with
    ``on_failure="warn"``, per held-out point, come ``error``, ``bound`` and ``excess``, the error
    above it in roundings.
    """
    if systems < 1:
        raise ArgumentError("systems", systems, "an integer of at least 1")
    for index in range(systems):
        system = draw_system(seed, index, most)
        yield {
            "index": index, "kernel": system.kernel,
            "dtype": str(system.dtype).removeprefix("torch."), "n": len(system.x),
            "d": system.x.shape[-1], "b": len(system.held_out), "lengthscale": system.lengthscale,
            "ratio": system.outputscale / system.noise,
        } | _outcome(system)  # fmt: skip


def _outcome(system: HardSystem) -> dict:
    covariance, latent = system.covariance()
    residual, b = system.y.to(system.dtype), len(system.held_out)
    began, raised = time.process_time(), ""
    try:
        covariance.conditional_log_density(residual, system.held_out)
    except (ArgumentError, NotPSDError) as error:
        raised = type(error).__name__
    found: dict = {"seconds": time.process_time() - began, "raised": raised}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            iterative = replace(covariance, settings=ConjugateGradients(on_failure="warn"))
            value = iterative.conditional_log_density(residual, system.held_out)
    except NotPSDError:
        return found | {"excess": math.nan}
    [report] = iterative.reports
    reference, rounding = _reference(system, latent)
    error = abs(float(value) / b - reference)
    rounding += torch.finfo(system.dtype).eps * max(abs(reference), 1.0)
    bound = report.error_bound
    assert bound is not None
    excess = (error - bound) / rounding
    if reference != reference:  # there is no density to be near to: any finite bound is wrong
        excess = -math.inf if bound == math.inf else math.inf
    return found | {
        "iterations": report.iterations, "value": float(value) / b, "reference": reference,
        "error": error, "bound": bound, "rounding": rounding, "excess": excess,
    }  # fmt: skip


def _reference(system: HardSystem, latent: Tensor) -> tuple[float, float]:
    """The density per held-out point, and what rounding of the kernel changes in it.

    Each entry may change by epsilon times itself, and by how far it is from its mirror image.
    """
    n, b = len(system.x), len(system.held_out)
    kept = torch.ones(n, dtype=torch.bool)
    kept[system.held_out] = False
    order = torch.cat([kept.nonzero().flatten(), system.held_out])
    lower = latent.double().tril()
    lower = (lower + lower.tril(-1).mT)[order][:, order]
    matrix = extended(lower)
    matrix[np.diag_indices(n)] += extended(torch.tensor(system.noise, dtype=system.dtype))
    factor = cholesky(matrix)
    if factor is None:
        return math.nan, math.nan
    residual = extended(system.y[order])
    value = log_density_of_last(factor, residual, b) / b
    # d log p = (u' dK (2 a + u) - tr(T' dK T)) / 2, with T, u and a the whitened directions, their
    # combination by z, and the weights of the points conditioned on.
    z = forward(factor, residual[:, None])[:, 0]
    double = torch.from_numpy(factor.astype(np.float64))
    ends = torch.eye(n, dtype=torch.float64)[:, n - b :]
    whitened = torch.linalg.solve_triangular(double.mT, ends, upper=True).abs()
    weights = torch.from_numpy(z.astype(np.float64))
    u = torch.linalg.solve_triangular(double.mT, (ends @ weights[n - b :])[:, None], upper=True)
    weights[n - b :] = 0
    a = torch.linalg.solve_triangular(double.mT, weights[:, None], upper=True)
    epsilon = torch.finfo(system.dtype).eps
    change = ((latent - latent.mT).abs() + epsilon * latent.abs()).double()[order][:, order]
    u, a = u.abs(), a.abs()
    form = (u.mT @ change @ (2 * a + u)).item() + (whitened * (change @ whitened)).sum().item()
    return value, 0.5 * form / b


def summarize_solver(results: pd.DataFrame) -> pd.DataFrame:
    """What came of the systems, a row a type.

    ``untrue``: errors above their bound by more than twice their ``rounding``; medians and
    ``error_max`` are of those that raise nothing, ``error_max`` as a share of the value where that
    is above one nat.
    """
    rows = []
    for dtype, group in results.groupby("dtype"):
        passed = group[group["raised"] == ""]
        rows.append({
            "dtype": dtype, "systems": len(group), "raised": int((group["raised"] != "").sum()),
            "bounded": int(np.isfinite(group["bound"]).sum()),
            "untrue": int((group["excess"] > 2).sum()), "most_roundings": group["excess"].max(),
            "slowest": group["seconds"].max(), "error_median": passed["error"].median(),
            "bound_median": passed["bound"].median(),
            "error_max": (passed["error"] / passed["reference"].abs().clip(lower=1)).max(),
        })  # fmt: skip
    return pd.DataFrame(rows)
