"""Fits of many small models at once, as one batch in which each has its own parameters."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import gpytorch
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.models import ExactGP
from gpytorch.priors import Prior
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpclml._utils.arguments import callers_level, check_counts, check_positive, checked
from gpclml.conditioning import NearestNeighbors, Split
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.fit.deep_kernel import warm_start_fresh_models
from gpclml.fit.mll import stopped_after
from gpclml.fit.result import FitResult, FitWarning
from gpclml.fit.search import objective
from gpclml.fit.train import STEPS, Training, limits_of, non_finite, optimizer_factory
from gpclml.inference.observations import Observations, training_observations
from gpclml.kernels.networks import StackedNetwork
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.conditional_marginal_log_likelihood import member_objectives
from gpclml.mlls.fixed_loss import fixed_loss

# Largest n and models in a batch; beyond, memory traffic costs more than overhead saves.
_ON_CPU = ((150, 10), (250, 5))
_GPU_ENTRIES = 10**8  # of one covariance (k, n, n); a step holds some twenty arrays of its size
_MOST_ON_GPU = 256

_ONE_BY_ONE = "Fit such models one by one with fit_mll."


@checked
def suggest_batch_size(num_data: int, device: torch.device | str = "cpu") -> int:
    """How many models of a size it pays to fit together; 1: fit them one by one.

    On a CPU the number follows measurements on one core (``python -m benchmarks.speed run --study
    batches``). On a GPU it is limited by memory and by 256 models; from a hundred on, larger
    batches hardly fit more models per second (``benchmarks/gpu/results``).

    Args:
        num_data: Number of data points n of each model.
        device: Where they are.

    Raises:
        ArgumentError: If ``num_data`` is below 1, or there is no such kind of device.
    """
    check_counts(num_data=num_data)
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ArgumentError("device", repr(device), "a device, such as 'cpu' or 'cuda'") from error
    if kind != "cpu":
        return max(1, min(_MOST_ON_GPU, _GPU_ENTRIES // num_data**2))
    return next((size for most, size in _ON_CPU if num_data <= most), 1)


@checked
def fit_batch(
    mlls: Sequence[ConditionalMarginalLogLikelihood],
    optimizer: str | type[torch.optim.Optimizer] = "adam",
    *,
    steps: int | None = None,
    lr: float = 0.01,
    progress: bool | None = None,
) -> list[FitResult]:
    """Fits each model as :func:`gpclml.fit.fit_mll` would alone, all in the same steps.

    The models are stacked: one covariance of shape ``(k, n, n)``, one pass through k networks. They
    may differ in data, start, seed and conditioning, but not in kind or size. Each gets the result
    of its single fit, up to rounding. A batch is faster while a step is mostly overhead;
    :func:`suggest_batch_size` says for how many models. Line searches, which take as many steps as
    each model needs, are those of ``fit_mll``, one after the other.

    A model whose objective or gradient is not finite keeps its last good parameters and leaves the
    batch with a :class:`FitWarning`; this does not change the others.

    Args:
        mlls: Objectives of distinct models, each with its model's own likelihood.
        optimizer: ``"adam"``, or a ``torch.optim`` class that treats numbers one by one (no line
            search, no norms over parameters).
        steps: Number of steps; 300 if None.
        lr: Learning rate.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        A result for each objective, in order; ``seconds`` is an equal share of the wall time.
        One that could not be evaluated at all has no history, a NaN objective and the reason
        as its message.

    Raises:
        ArgumentError: If there is no objective, one comes twice, or an option is out of range.
        UnsupportedError: If the models cannot be stacked, if their stack computes other values, if
            an objective asks for conjugate gradients, or the optimizer is ``"lbfgs"``.

    Note:
        A step has the overhead of one single step, and k times the floating-point operations.

    Examples:
        >>> import torch
        >>> from gpclml import ConditionalMarginalLogLikelihood, GPRegression, fit_batch
        >>> x = torch.rand(30, 2, dtype=torch.float64)
        >>> models = [GPRegression(x, (k * x).sum(-1).sin(), "deep_bottleneck") for k in (1, 2, 3)]
        >>> mlls = [ConditionalMarginalLogLikelihood(model.likelihood, model) for model in models]
        >>> [len(result.history) for result in fit_batch(mlls, steps=20)]
        [20, 20, 20]
    """
    check_counts(steps=steps)
    check_positive(lr=lr)
    factory = optimizer_factory(optimizer)
    if factory is None:
        raise UnsupportedError("optimizer", optimizer, "one that takes steps", _ONE_BY_ONE)
    _check_members(mlls)
    start = time.perf_counter()
    faults: dict[int, Exception] = {}  # of members that are stopped
    histories: dict[int, list[float]] = {}
    for index, mll in enumerate(mlls):
        warm_start_fresh_models(mll)
        mll.train()
        try:
            with torch.no_grad():
                fixed_loss(mll)
        except (NanError, NotPSDError) as error:
            faults[index] = error
    able = [index for index in range(len(mlls)) if index not in faults]
    # One that cannot be evaluated at its start would take the whole stack along.
    if able:
        batch = _Batch([mlls[index] for index in able], partial(factory, lr=lr))
        try:
            Training().run(
                batch.step, steps or STEPS, callback=lambda _: {"models": len(batch.active)},
                desc="fit", progress=progress,
            )  # fmt: skip
            batch.evaluate()  # what the last step led to must be usable too
        finally:
            batch.write_back()
        faults |= {able[row]: error for row, error in batch.faults.items()}
        histories = dict(zip(able, batch.histories, strict=True))
    seconds = (time.perf_counter() - start) / len(mlls)
    results = []
    for index, mll in enumerate(mlls):
        history, fault = histories.get(index, []), faults.get(index)
        message = stopped_after(len(history), fault) if fault else ""
        result = FitResult(
            objective=objective(mll), history=history, seconds=seconds, message=message,
            problem="stopped" if message else "",
        )  # fmt: skip
        results.append(result)
        mll.eval()
        if message:
            warnings.warn(message, FitWarning, stacklevel=callers_level())
    return results


def _conditioned_on_a_part() -> UnsupportedError:
    got = "held-out points conditioned on a part of the others"
    return UnsupportedError("mlls", got, "on all others", _ONE_BY_ONE)


def _check_members(mlls: Sequence[ConditionalMarginalLogLikelihood]) -> None:
    if not mlls:
        raise ArgumentError("mlls", "none", "at least one objective")
    if len({id(mll.model) for mll in mlls}) < len(mlls):
        raise ArgumentError("mlls", "one model twice", "objectives of distinct models")
    for mll in mlls:
        if isinstance(mll.conditioning, NearestNeighbors):
            raise _conditioned_on_a_part()  # before anything is computed from all points
        if mll.solver not in ("auto", "cholesky"):
            suggestion = f"{_ONE_BY_ONE[:-1]}; conjugate gradients are for large ones."
            got, expected = f"solver={mll.solver!r}", "'cholesky', or 'auto' where that fits"
            raise UnsupportedError("mlls", got, expected, suggestion)
        if mll.likelihood is not cast(ExactGP, mll.model).likelihood:
            suggestion = "Pass model.likelihood to the objective."
            raise UnsupportedError(
                "mlls", "a likelihood that is not the model's", "model.likelihood", suggestion
            )


class _Batch:
    """Objectives of models, in train mode, that are stacked and stepped together.

    A member that cannot be evaluated stays in the stack, at its last good parameters, and takes no
    further steps: ``faults`` has the reasons, by rows. ``histories`` are the objectives of each.
    """

    def __init__(
        self,
        mlls: Sequence[ConditionalMarginalLogLikelihood],
        make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._mlls = mlls
        self.histories: list[list[float]] = [[] for _ in mlls]
        self.faults: dict[int, Exception] = {}
        self._blocks: dict[int, list[Tensor]] = {}
        self._model, self._pairs = _stacked_model([cast(ExactGP, mll.model) for mll in mlls])
        self._check_stack()
        names, limits = {id(p): name for name, p in mlls[0].named_parameters()}, limits_of(mlls[0])
        trained = {stacked: tensors for stacked, tensors in self._pairs if stacked.requires_grad}
        self._parameters = list(trained)
        self._names = [names[id(tensors[0])] for tensors in trained.values()]
        self._limits = [limits.get(name) for name in self._names]
        # Those that a member keeps if it fails at once.
        self._last_good = [p.detach().clone() for p in self._parameters]
        self._optimizer = make_optimizer(self._parameters)

    @property
    def active(self) -> list[int]:
        """Rows of the members that go on."""
        return [row for row in range(len(self._mlls)) if row not in self.faults]

    def step(self, number: int) -> float:
        """A step of the optimizer, noted in the histories; the mean objective before it."""
        self.evaluate()
        active = self.active
        if not active:
            return math.nan
        values = self._values.tolist()
        for row in active:
            self.histories[row].append(values[row])
        self._optimizer.step()
        with torch.no_grad():
            for parameter, limits in zip(self._parameters, self._limits, strict=True):
                if limits is not None:
                    parameter.clamp_(*limits)
        self._put_back()
        return sum(values[row] for row in active) / len(active)

    def evaluate(self) -> None:
        """Value and gradient of every member at fresh points; those that are not finite stop."""
        # A member that was stopped draws no more, as it would alone.
        self._blocks = {row: self._blocks[row] for row in self.faults if row in self._blocks}
        while self.active:
            try:
                self._optimizer.zero_grad()
                data = training_observations(self._model)
                blocks = [self._draw(row, data.member(row)) for row in range(len(self._mlls))]
                values = member_objectives(self._model, data, blocks)
                (-values.sum()).backward()
            except (NanError, NotPSDError):
                if not self._find_faults_alone():
                    raise
                continue
            self._values = values.detach()
            self._find_non_finite()
            self._last_good = [p.detach().clone() for p in self._parameters]
            return

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies the parameters of all members to their models."""
        self._put_back()
        for stacked, tensors in self._pairs:
            for tensor, value in zip(tensors, stacked, strict=True):
                tensor.copy_(value)

    @torch.no_grad()
    def _put_back(self) -> None:
        """Sets the parameters of stopped members to their last good ones."""
        rows = list(self.faults)
        for parameter, good in zip(self._parameters, self._last_good, strict=True):
            parameter[rows] = good[rows]

    def _draw(self, row: int, data: Observations) -> list[Tensor]:
        """Held-out blocks of a member, drawn once in an evaluation, and no more once it stopped."""
        if row not in self._blocks:
            split = self._mlls[row].draw_split(data)
            if split.conditioned_on is not None:
                raise _conditioned_on_a_part()
            self._blocks[row] = split.held_out
        return self._blocks[row]

    def _find_non_finite(self) -> None:
        """Stops the members of which a value or an entry of a gradient is not finite."""
        # A member's numbers depend on its own alone, so that those of the others stand.
        named = zip(self._names, (p.grad for p in self._parameters), strict=True)
        finite = {
            name: grad.reshape(len(self._mlls), -1).isfinite().all(-1)
            for name, grad in named if grad is not None
        }  # fmt: skip
        good = torch.stack([self._values.isfinite(), *finite.values()]).all(0).tolist()
        for row in self.active:
            if not good[row]:
                names = [name for name, is_finite in finite.items() if not is_finite[row]]
                self.faults[row] = non_finite(float(self._values[row]), names)
        self._put_back()

    def _find_faults_alone(self) -> bool:
        """Stops the members whose objective cannot be evaluated alone either, if there are any."""
        self.write_back()
        before = len(self.faults)
        for row in self.active:
            mll = self._mlls[row]
            try:
                with torch.no_grad():
                    data = training_observations(cast(ExactGP, mll.model))
                    mll.objective_at(data, Split(self._draw(row, data)))
            except (NanError, NotPSDError) as error:
                self.faults[row] = error
        self._put_back()
        return len(self.faults) > before

    @torch.no_grad()
    def _check_stack(self) -> None:
        """A stack must be the same models: modules of others may not take a batch so."""
        expected = "models that GPyTorch can batch"
        try:
            together = training_observations(self._model)
        except RuntimeError as error:
            raise UnsupportedError("mlls", str(error), expected, _ONE_BY_ONE) from error
        for row, mll in enumerate(self._mlls):
            member, alone = together.member(row), training_observations(cast(ExactGP, mll.model))
            for name, stacked, single in (
                ("covariance", member.covariance.to_dense(), alone.covariance.to_dense()),
                ("residual", member.residual, alone.residual),
            ):
                # Batched products round otherwise than single ones.
                atol = 1e3 * torch.finfo(stacked.dtype).eps * float(single.abs().max())
                same = stacked.shape == single.shape
                if not same or not torch.allclose(stacked, single, rtol=0.0, atol=atol):
                    got = f"another {name} in the stack than alone"
                    raise UnsupportedError("mlls", got, expected, _ONE_BY_ONE)


def _stacked_model(
    models: Sequence[ExactGP],
) -> tuple[ExactGP, list[tuple[torch.nn.Parameter, list[Tensor]]]]:
    """Exact GPs of one build and size, in train mode, as one with a batch dimension in front.

    Hyperparameters get the shapes that GPyTorch's batch modules have, a network becomes a
    :class:`~gpclml.kernels.networks.StackedNetwork`. The stack has parameters of its own, ``(k,
    ...)``, which come with those of the models.
    """
    kinds = [{name: type(m) for name, m in model.named_modules()} for model in models]
    for kind in kinds[1:]:
        for name, module in kinds[0].items():
            if kind.get(name) is not module:
                raise _unlike(f"modules of different classes at the same place, {name}")
    pairs: list[tuple[torch.nn.Parameter, list[Tensor]]] = []
    done: dict[int, torch.nn.Module] = {}

    def stack(target: torch.nn.Module, modules: Sequence[torch.nn.Module]) -> None:
        """Puts the stacked parameters of the modules into the target, and into its children."""
        if id(target) in done:
            return
        done[id(target)] = target
        # Priors and constraints have no batch: one stands for all, and must be the same.
        if isinstance(target, (Prior, Interval)):
            state = target.state_dict()
            for other in (module.state_dict() for module in modules):
                if not all(torch.equal(value, other[name]) for name, value in state.items()):
                    raise _unlike(f"{type(target).__name__} with different values")
            return
        for name, _ in list(target.named_parameters(recurse=False)):
            tensors = [cast(Tensor, getattr(module, name)) for module in modules]
            stacked = torch.nn.Parameter(_stacked(tensors), requires_grad=_all_trainable(tensors))
            pairs.append((stacked, tensors))
            target.register_parameter(name, stacked)
        for name, buffer in list(target.named_buffers(recurse=False)):
            tensors = [cast(Tensor, getattr(module, name)) for module in modules]
            if buffer.is_floating_point():
                target.register_buffer(name, _stacked(tensors))
            elif not all(torch.equal(buffer, other) for other in tensors):
                raise _unlike(f"buffers {name} of {type(target).__name__}")
        # The registered shapes above have the batch in front, as those of a kernel made for one.
        if isinstance(target, Kernel):
            target.batch_shape = torch.Size([len(models), *target._batch_shape])
        for name, child in list(target.named_children()):
            children = [module.get_submodule(name) for module in modules]
            if not _is_network(child):
                stack(child, children)
                continue
            if id(child) not in done:  # a network may be that of kernel and mean
                named = {
                    name: [cast(Tensor, network.get_parameter(name)) for network in children]
                    for name, _ in child.named_parameters()
                }
                for tensors in named.values():
                    _stacked(tensors)  # of one shape
                network = done[id(child)] = StackedNetwork(children)
                for key, parameter in network.named_stacks():
                    parameter.requires_grad_(_all_trainable(named[key]))
                    pairs.append((parameter, named[key]))
            setattr(target, name, done[id(child)])

    model = copy.deepcopy(models[0])
    stack(model, models)
    inputs = [cast(tuple[Tensor, ...], model.train_inputs) for model in models]
    columns = tuple(_stacked(column) for column in zip(*inputs, strict=True))
    targets = _stacked([cast(Tensor, model.train_targets) for model in models])
    model.set_train_data(columns, targets, strict=False)
    return model, pairs


def _is_network(module: torch.nn.Module) -> bool:
    """Whether it is plain torch with parameters: GPyTorch's modules take a batch themselves."""
    if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
        return False
    has_gpytorch = any(isinstance(child, gpytorch.Module) for child in module.modules())
    return not has_gpytorch and any(True for _ in module.parameters())


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    if len({(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        raise _unlike("parameters of different shapes, dtypes or devices")
    return torch.stack([tensor.detach() for tensor in tensors])


def _all_trainable(tensors: Sequence[Tensor]) -> bool:
    flags = {tensor.requires_grad for tensor in tensors}
    if len(flags) > 1:
        raise _unlike("parameters frozen in some and trained in others")
    return flags.pop()


def _unlike(what: str) -> UnsupportedError:
    return UnsupportedError("models", what, "models that differ only in values", _ONE_BY_ONE)
