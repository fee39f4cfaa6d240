"""One run of an optimizer on an objective's own training data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from gpytorch.mlls import MarginalLogLikelihood, SumMarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError

from gpclml._losses import fixed_loss, fresh_loss, has_shared_parameters
from gpclml._upstream_settings import load_botorch
from gpclml.errors import NonFiniteError

__all__ = ["StoppedError", "line_search", "stochastic"]

_RESUMES = 3  # of a line search that met covariances it could not factor

OptimizerFactory = Callable[..., torch.optim.Optimizer]
Record = Callable[[Any, Any], None]


def line_search(mll: MarginalLogLikelihood, steps: int | None, record: Record) -> str:
    """Minimizes the fixed loss by L-BFGS-B, each member of a sum or batch on its own.

    Steps that lead where a covariance cannot be factored count as too long.

    Args:
        mll: Any objective, in train mode.
        steps: Most iterations; SciPy's limit if None.
        record: Called with BoTorch's parameters and ``OptimizationResult`` at each iteration.

    Returns:
        Why it ended early; empty if it converged.

    Raises:
        StoppedError: If the start cannot be evaluated.
    """
    load_botorch()
    from botorch.exceptions.warnings import OptimizationWarning
    from botorch.models.gpytorch import BatchedMultiOutputGPyTorchModel
    from botorch.optim.fit import fit_gpytorch_mll_scipy

    if isinstance(mll, SumMarginalLogLikelihood):
        members = cast(Iterable[MarginalLogLikelihood], mll.mlls)
        return "; ".join(filter(None, [line_search(member, steps, record) for member in members]))
    options = {} if steps is None else {"maxiter": steps}
    model = mll.model
    batch_shape = getattr(model, "_aug_batch_shape", torch.Size())
    independent = (
        isinstance(model, BatchedMultiOutputGPyTorchModel)
        and batch_shape.numel() > 1
        and not has_shared_parameters(model, batch_shape)
    )
    with warnings.catch_warnings():
        # A line search that cannot improve further keeps its point; the result says so.
        warnings.simplefilter("ignore", OptimizationWarning)
        if independent:
            result = fit_gpytorch_mll_scipy(mll, options=options)
            record(None, result)
        else:
            closure = _Tracked(mll, fixed_loss, _trainable(mll), keep_best=True)
            result = _line_search_from_best(mll, closure, options, record)
    return "" if result.status.name == "SUCCESS" else str(result.message)


def _line_search_from_best(
    mll: MarginalLogLikelihood, closure: _Tracked, options: dict[str, Any], record: Record
) -> Any:
    from botorch.optim.fit import fit_gpytorch_mll_scipy

    with closure.stopping():
        closure()  # BoTorch takes an error for a step too far: the start must raise
        resumes = 0
        while True:
            failures = closure.failures
            result = fit_gpytorch_mll_scipy(
                mll, closure.parameters, closure=closure, options=options, callback=record
            )
            # SciPy may end at a point it could not evaluate: go on from the best one.
            closure.restore()
            if closure.failures == failures or resumes == _RESUMES:
                return result
            resumes += 1


def stochastic(
    mll: MarginalLogLikelihood, factory: OptimizerFactory, steps: int, lr: float, record: Record
) -> None:
    """Takes steps of a torch optimizer on the loss with fresh held-out points.

    Args:
        mll: Any objective, in train mode.
        factory: Makes the optimizer from parameters and ``lr``.
        steps: How many.
        lr: Learning rate.
        record: Called with BoTorch's parameters and ``OptimizationResult`` at each step.

    Raises:
        StoppedError: If value or gradient stops being finite; the parameters are then those of
            the last step at which they were.
    """
    load_botorch()
    from botorch.optim.fit import fit_gpytorch_mll_torch

    parameters = _trainable(mll)
    closure = _Tracked(mll, fresh_loss, parameters, keep_best=False)
    with closure.stopping():
        fit_gpytorch_mll_torch(
            mll,
            parameters,
            closure=closure,
            step_limit=steps,
            stopping_criterion=None,
            optimizer=lambda params: factory(params, lr=lr),
            callback=record,
        )


class StoppedError(Exception):
    """A fit met values it cannot go on from; parameters are the last good ones."""

    def __init__(self, error: Exception, nothing_done: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.nothing_done = nothing_done


class _Tracked:
    """A loss with gradients that remembers the parameters to go back to."""

    def __init__(
        self,
        mll: MarginalLogLikelihood,
        loss: Callable[[MarginalLogLikelihood], torch.Tensor],
        parameters: dict[str, torch.Tensor],
        keep_best: bool,
    ) -> None:
        from botorch.optim.closures import ForwardBackwardClosure

        self._closure = ForwardBackwardClosure(lambda: loss(mll), parameters)
        self.parameters = parameters
        self.failures = 0
        self._keep_best = keep_best
        self._kept: list[torch.Tensor] | None = None
        self._lowest = float("inf")
        self._last: tuple[list[torch.Tensor], tuple[torch.Tensor, Any]] | None = None

    def __call__(self) -> tuple[torch.Tensor, Any]:
        if not self._keep_best:
            return self._evaluate()
        # BoTorch asks again for the value at each iteration's end, where it has just been.
        if self._last is not None and self._is_at(self._last[0]):
            return self._last[1]
        answer = self._evaluate()
        self._last = self._copies(), answer
        return answer

    def _evaluate(self) -> tuple[torch.Tensor, Any]:
        try:
            value, gradients = self._closure()
            value = value.detach()
            self._check(value, gradients)
        except (NanError, NotPSDError) as error:
            self.failures += 1
            if self._kept is None or not self._keep_best:
                raise
            raise NanError(str(error)) from error  # a line search steps back from it
        if not self._keep_best or float(value) < self._lowest:
            self._lowest = float(value)
            self._kept = self._copies()
        return value, gradients

    def _copies(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters.values()]

    def _is_at(self, point: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, self.parameters.values(), point))

    def _check(self, value: torch.Tensor, gradients: Any) -> None:
        names = [
            name
            for name, gradient in zip(self.parameters, gradients, strict=True)
            if gradient is not None and not bool(torch.isfinite(gradient).all())
        ]
        if names or not bool(torch.isfinite(value)):
            raise NonFiniteError(
                "objective",
                f"value {float(value)}, non-finite gradients of {names[:4] or 'none'}",
                "finite values",
                "Lower the learning rate, or look for degenerate hyperparameters.",
            )

    def restore(self) -> None:
        """Goes back to the kept parameters, if there are any."""
        if self._kept is not None:
            with torch.no_grad():
                for parameter, kept in zip(self.parameters.values(), self._kept, strict=True):
                    parameter.copy_(kept)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Within the block numerical failures go back to the kept parameters and stop."""
        try:
            yield
        except (NanError, NotPSDError) as error:
            self.restore()
            raise StoppedError(error, nothing_done=self._kept is None) from error


def _trainable(mll: MarginalLogLikelihood) -> dict[str, torch.Tensor]:
    return {name: p for name, p in mll.named_parameters() if p.requires_grad}
