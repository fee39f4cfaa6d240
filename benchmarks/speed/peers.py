"""The same models by other libraries: scikit-learn, and JAX with formulas of ours or of tinygp."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy import ndarray

from benchmarks.speed.methods import Problem

__all__ = ["jax_log_density", "missing_peers", "peer_steps", "value_and_gradient_by_jax"]


def missing_peers() -> tuple[str, ...]:
    """The libraries that are not installed."""
    return tuple(one for one in ("jax", "tinygp") if importlib.util.find_spec(one) is None)


def jax_log_density(x: ndarray, y: ndarray, tinygp: bool = False) -> Callable[..., Any]:
    """The log density of targets under a GP with an ARD RBF kernel, a function that JAX traces.

    Args:
        x: Inputs ``(n, d)``, float64.
        y: Targets ``(n,)``.
        tinygp: Whether tinygp computes it; else the formulas here.

    Returns:
        A function of the noise variance, the constant mean and the lengthscales, ``(d,)``, and of
        the kernel's variance, which is 1 if it is not given.
    """
    jax = cast(Any, importlib.import_module("jax"))
    jax.config.update("jax_enable_x64", True)
    jnp, solve = jax.numpy, jax.scipy.linalg.cho_solve
    x, y = jnp.asarray(x), jnp.asarray(y)
    n = len(y)

    def by_tinygp(noise: Any, constant: Any, scales: Any, variance: Any = 1.0) -> Any:
        gp = cast(Any, importlib.import_module("tinygp"))
        kernel = variance * gp.transforms.Linear(1 / scales, gp.kernels.ExpSquared())
        return gp.GaussianProcess(kernel, x, diag=noise, mean=constant).log_probability(y)

    def by_hand(noise: Any, constant: Any, scales: Any, variance: Any = 1.0) -> Any:
        z = x / scales
        squares = (z**2).sum(-1)
        distances = squares[:, None] + squares - 2 * z @ z.T
        covariance = variance * jnp.exp(-0.5 * jnp.maximum(distances, 0.0)) + noise * jnp.eye(n)
        factor = jnp.linalg.cholesky(covariance)
        residual = y - constant
        density = -0.5 * residual @ solve((factor, True), residual)
        return density - jnp.log(jnp.diag(factor)).sum() - 0.5 * n * np.log(2 * np.pi)

    return by_tinygp if tinygp else by_hand


def value_and_gradient_by_jax(
    loss: Callable[[Any], Any], start: ndarray
) -> Callable[[ndarray], tuple[float, ndarray]]:
    """A function of JAX with its gradient, compiled by a call at the start."""
    jax = cast(Any, importlib.import_module("jax"))
    compiled = jax.jit(jax.value_and_grad(loss))
    compiled(start)[0].block_until_ready()

    def function(theta: ndarray) -> tuple[float, ndarray]:
        value, gradient = compiled(theta)
        return float(value), np.asarray(gradient)

    return function


def peer_steps(problem: Problem) -> dict[str, Callable[[], tuple[float, ndarray]]]:
    """The log marginal likelihood a point of a problem's model with its gradient, by library.

    Gradients are by logarithms of the kernel's variance, the noise variance and the lengthscales,
    and by the constant mean, which scikit-learn does not have.
    """
    x, y = problem.x.double().numpy(), problem.y.double().numpy()
    model = cast(Any, problem.model)
    kernel = model.covar_module
    positive = (kernel.outputscale, model.likelihood.noise, kernel.base_kernel.lengthscale)
    start = np.log(np.concatenate([one.detach().double().numpy().ravel() for one in positive]))
    steps = {"scikit-learn LML": _by_sklearn(x, y, start)}

    def of(tinygp: bool) -> Callable[[], tuple[float, ndarray]]:
        log_density = jax_log_density(x, y, tinygp)

        def mean_density(theta: Any) -> Any:
            positive = importlib.import_module("jax.numpy").exp(theta[1:])
            density = log_density(positive[1], theta[0], positive[2:], positive[0])
            return density / len(y)

        theta = np.concatenate([[0.0], start])
        function = value_and_gradient_by_jax(mean_density, theta)
        return lambda: function(theta)

    missing = missing_peers()
    if "jax" not in missing:
        steps["jax LML"] = of(tinygp=False)
        if "tinygp" not in missing:
            steps["tinygp LML"] = of(tinygp=True)
    return steps


def _by_sklearn(x: ndarray, y: ndarray, theta: ndarray) -> Callable[[], tuple[float, ndarray]]:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel()
    places = [0, *range(2, len(theta)), 1]  # the noise comes last
    kernel.theta = theta[places]
    # An optimizer that stays where it is: the objective is asked for one value with gradient.
    model = GaussianProcessRegressor(kernel, alpha=0.0, optimizer=None).fit(x, y)
    back = np.argsort(places)

    def step() -> tuple[float, ndarray]:
        value, gradient = model.log_marginal_likelihood(
            kernel.theta, eval_gradient=True, clone_kernel=False
        )
        return float(value) / len(y), gradient[back] / len(y)

    return step
