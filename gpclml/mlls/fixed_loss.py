"""Losses that optimizers minimize: an objective on its own training data, at fixed points or fresh.

A line search evaluates one function many times. What stays the same is done once: the held-out
points are drawn, the modules are searched for priors, the kernel is recognized. An evaluation then
computes the density and its gradient by the hyperparameters from one factor
(:meth:`gpclml.linalg.Covariance.log_density_and_vjp`); autograd goes on from there to the
parameters, where these are not the hyperparameters themselves.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import gpytorch
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import ConstantMean
from gpytorch.mlls import MarginalLogLikelihood, SumMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.conditioning import LastPoints, NearestNeighbors
from gpclml.gram import Gradients, Gram, Reason, closed_form, has_hooks
from gpclml.inference import Road, likelihood_parameters, training_observations
from gpclml.inference.observations import has_one_noise
from gpclml.linalg import Covariance, GramCovariance
from gpclml.linalg.dense import LogDensity
from gpclml.mlls._terms import log_priors, plus_priors, registered
from gpclml.mlls.conditional_marginal_log_likelihood import (
    ConditionalMarginalLogLikelihood,
    ExactMarginalLogLikelihood,
    LeaveOneOutPseudoLikelihood,
)
from gpclml.models import BayesianLinearModel, GPRegression


def fresh_loss(mll: MarginalLogLikelihood) -> Tensor:
    """The negative objective, summed over a batch, at held-out points that are drawn anew."""
    if isinstance(mll, SumMarginalLogLikelihood):
        return torch.stack([fresh_loss(member) for member in cast(Any, mll.mlls)]).mean()
    return training_loss(mll).sum()


def training_loss(mll: MarginalLogLikelihood, **kwargs: Any) -> Tensor:
    """The negative objective of one model on its training data, ``(*batch,)``, as loops call it."""
    model = cast(Any, mll.model)
    if type(mll) is ConditionalMarginalLogLikelihood and not kwargs and _takes_few_rows(mll):
        return -mll.redrawn_objective()
    takes_params = isinstance(mll, gpytorch.mlls.ExactMarginalLogLikelihood)
    params = likelihood_parameters(model, cast(Likelihood, mll.likelihood)) if takes_params else ()
    return -cast(Tensor, mll(model(*model.train_inputs), model.train_targets, *params, **kwargs))


def _takes_few_rows(mll: ConditionalMarginalLogLikelihood) -> bool:
    """Whether a step asks a model for the points drawn and their neighbours alone.

    The prior of a known kernel and mean at some points is that at all points, restricted to them,
    where inputs are transformed row by row.
    """
    model = cast(ExactGP, mll.model)
    return (
        isinstance(mll.conditioning, NearestNeighbors)
        and model.training
        and cast(Tensor, model.train_targets).ndim == 1
        and (known := _input_transform(model)) is not None
        and known[1]
        and mll.likelihood is model.likelihood
        and has_one_noise(mll.likelihood)
        and isinstance(closed_form(cast(Any, model).covar_module), Gram)
    )


def fixed_loss(mll: MarginalLogLikelihood) -> Tensor:
    """The negative objective, summed over a batch, at held-out points that stay the same.

    Weak priors, which ``compute_custom_loss`` adds for a search, are not part of it.
    """
    if isinstance(mll, SumMarginalLogLikelihood):
        return torch.stack([fixed_loss(member) for member in cast(Any, mll.mlls)]).mean()
    if type(mll) is ConditionalMarginalLogLikelihood and _takes_few_rows(mll):
        return -mll.fixed_objective()
    # A subclass may have a loss of its own, which is taken as it is.
    custom: Callable[[], Tensor] | None = getattr(mll, "compute_custom_loss", None)
    ours = ConditionalMarginalLogLikelihood.compute_custom_loss
    if getattr(type(mll), "compute_custom_loss", None) is ours:
        custom = cast(Any, mll)._fixed_loss
    return fresh_loss(mll) if custom is None else custom().sum()


def scores_first_points(mll: MarginalLogLikelihood) -> bool:
    """Whether every point is scored, also the first, given no other."""
    if isinstance(mll, ConditionalMarginalLogLikelihood):
        return mll.scores_first_points
    return not isinstance(mll, gpytorch.mlls.LeaveOneOutPseudoLikelihood)


_RECORDED_UP_TO = 4096  # points, beyond which a GPU is busy for longer than its work is launched
_WARM_UP = 2  # evaluations before the one that is recorded, in which libraries are loaded
_MOST_MEMBERS = 16  # of a batch, beyond which all are evaluated together
_NO_OTHER_LOSS = None, GPRegression.compute_custom_loss, BayesianLinearModel.compute_custom_loss
_OWN_ROAD = "the objective itself is called"  # which says its road: neighbours, latent values

_KNOWN = (
    ConditionalMarginalLogLikelihood, ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood,
)  # fmt: skip


class FixedLoss:
    """An objective's loss at held-out points that stay the same, and its gradient.

    Calling it gives :func:`fixed_loss` and adds the gradient to the ``grad`` of the parameters, as
    ``fixed_loss(mll).backward()`` does. Data, conditioning and the modules of the model have to
    stay the same between calls; parameters may change. ``road`` says which way an evaluation goes,
    and why not a faster one. A NonFiniteError or NotPSDError says that it cannot be evaluated.
    """

    def __init__(self, mll: MarginalLogLikelihood) -> None:
        self._given = mll
        self._members: list[_KnownPrior] = []
        self._recorded: _Recorded | None = None
        self.road: Road
        self._reason = self._prepare()
        if self._reason == _OWN_ROAD:
            self.road = cast(Any, mll).road()
        elif self._reason:
            self.road = Road("GPyTorch's evaluation", self._reason)

    @property
    def has_members(self) -> bool:
        """Whether members of a batch can be evaluated one by one."""
        return bool(self._members)

    def __call__(self, member: int | None = None) -> float:
        """The loss, summed over a batch; or of one member and its priors."""
        if self._reason:
            loss = fixed_loss(self._given)
            loss.backward()
            return loss.item()
        prior = self._prior if member is None else self._members[member]
        if self._recorded is None:
            value, gradients = self._density_and_gradients(prior)
        else:
            value, gradients = self._recorded(self._without_reads)
        total = value.sum().item()
        if self._recorded is not None and not math.isfinite(total):
            value, gradients = self._density_and_gradients(prior)
            total = value.item()
        if not math.isfinite(total):
            training_observations(self._model, self._mll.likelihood).check_density(value)
        terms, term_gradients = self._prior_terms(member)
        _accumulate(gradients + term_gradients)
        return terms - total / self._targets

    def _prepare(self) -> str:
        """Does once what stays the same; why the loss is left to GPyTorch, or nothing.

        Missing targets are left out, unless members of a batch may miss different ones. GPyTorch's
        marginal likelihood treats them, structure and what members share in its own ways.
        """
        mll, model = self._given, cast(ExactGP, self._given.model)
        is_upstream = type(mll) is gpytorch.mlls.ExactMarginalLogLikelihood
        if is_upstream:
            if not isinstance(model, ExactGP) or mll.likelihood is not model.likelihood:
                return "the model is not an ExactGP with the objective's likelihood"
            # BoTorch minimizes that in place of the negative objective.
            loss = getattr(type(model), "compute_custom_loss", None)
            if loss not in _NO_OTHER_LOSS or "compute_custom_loss" in vars(model):
                return f"{type(model).__name__} has a loss of its own, compute_custom_loss"
            mll = ConditionalMarginalLogLikelihood(mll.likelihood, model, LastPoints(m=0))
        elif type(mll) not in _KNOWN:
            if hasattr(mll, "road"):
                return _OWN_ROAD
            return f"{type(mll).__name__} is an objective of its own"
        self._mll, self._model = cast(ConditionalMarginalLogLikelihood, mll), model
        is_gaussian = isinstance(mll.likelihood, _GaussianLikelihoodBase)
        if isinstance(self._mll.conditioning, NearestNeighbors) or not is_gaussian:
            return _OWN_ROAD
        with torch.no_grad():
            data = training_observations(model, mll.likelihood)
            self._split = self._mll._fixed_split(data)
            observed, self._blocks = data.at(self._split)
            if is_upstream and (observed.missing is not None or observed.places is not None):
                return "targets are missing"
            if observed.missing is not None:
                return "members of the batch miss targets"
            # Which form the covariance has decides how; no number of it is kept.
            covariance = observed.covariance_by(self._mll.solver, self._blocks)
            self._density = covariance.density(self._blocks)
        self.road = observed.road(self._mll.solver, self._blocks)
        if is_upstream and not isinstance(covariance, GramCovariance):
            return self.road.reason or f"the covariance has structure ({self.road.way})"
        self._targets = sum(group.numel() for group in self._blocks)
        self._rows = int(data.num_observed())
        batch = data.residual.shape[:-1]
        self._zeros = data.residual.new_zeros(batch, dtype=torch.float64)
        self._params = data.params
        self._priors, self._added_losses = registered(model)
        self._prior = None
        if isinstance(self._density, LogDensity):  # conjugate gradients take a covariance as it is
            self._prior = _known_prior(model, mll.likelihood, observed.places)
        known = self._prior
        fixed = known is not None and known.has_fixed_inputs and not self._added_losses
        if batch:
            # A few members of a batch, each with all that it is trained by for itself.
            if known and fixed and len(batch) == 1 and 1 < batch[0] <= _MOST_MEMBERS:
                trained = [p for p in mll.parameters() if p.requires_grad]
                if (
                    len(trained) == sum(p.requires_grad for p in known.modules.parameters())
                    and all(p.shape[:1] == batch for p in trained)
                    and all(log_priors([p], batch).value.shape == batch for p in self._priors)
                ):
                    self._members = [known.member(i) for i in range(batch[0])]
            if is_upstream and not self._members:
                return "members of the batch share parameters or priors"
        elif fixed and data.residual.is_cuda and data.residual.shape[-1] <= _RECORDED_UP_TO:
            self._recorded = _Recorded(data.residual.device)
            self.road = Road(f"{self.road.way}, recorded on the GPU", self.road.reason)
        return ""

    def _density_and_gradients(
        self, prior: _KnownPrior | None, *, checked: bool = True
    ) -> tuple[Tensor, Gradients]:
        """The log density, ``(*batch,)``, and the gradients of the loss that is made of it."""
        density = self._density if checked else replace(self._density, checked=False)
        if prior is None:
            data, _ = training_observations(self._model, self._mll.likelihood).at(self._split)
            covariance = data.covariance_by(self._mll.solver, self._blocks)
            residual = data.residual
        else:
            covariance, residual = prior()
        value, _, vjp, _ = covariance.log_density_and_vjp(residual, density)
        with torch.no_grad():
            gradients = vjp(torch.full_like(value, -1.0 / self._targets))
        self._mll.last_solve = covariance.reports
        return value, gradients if prior is None else prior.through_mean(gradients, residual)

    def _without_reads(self) -> tuple[Tensor, Gradients]:
        """The density, and gradients with respect to parameters; NaN if there is no factor.

        No value is read meanwhile, for which a GPU would finish all that is queued.
        """
        value, gradients = self._density_and_gradients(self._prior, checked=False)
        leaves = [pair for pair in gradients if pair[0].is_leaf]
        inner = [pair for pair in gradients if not pair[0].is_leaf]
        if inner:
            trained = [p for p in self._mll.parameters() if p.requires_grad]
            tensors, weights = zip(*inner, strict=True)
            further = torch.autograd.grad(tensors, trained, weights, allow_unused=True)
            leaves += [(p, g) for p, g in zip(trained, further, strict=True) if g is not None]
        return value, leaves

    def _prior_terms(self, member: int | None) -> tuple[float, Gradients]:
        """What log priors and added losses add to the loss, and the gradients of that.

        They are those of the whole batch, or of one member, whose priors depend on no other's.
        """
        if self._added_losses:  # which may be others at each evaluation
            loss = -plus_priors(self._zeros, self._model, self._rows, self._params).sum()
            return loss.item(), [(loss, torch.ones_like(loss))] if loss.requires_grad else []
        if not self._priors:
            return 0.0, []
        total, _, vjp, _ = log_priors(self._priors, self._zeros.shape)
        weight, index = torch.zeros_like(self._zeros), ... if member is None else member
        weight[index] = -1.0 / self._rows
        return -total.expand_as(weight)[index].sum().item() / self._rows, vjp(weight)


def _accumulate(gradients: Gradients) -> None:
    """Adds gradients to those of leaves, and passes the others on to what they come from."""
    inner = []
    for tensor, gradient in gradients:
        if not tensor.is_leaf:
            inner.append((tensor, gradient))
        elif tensor.grad is None:
            tensor.grad = gradient.clone()
        else:
            tensor.grad.add_(gradient)
    if inner:
        torch.autograd.backward([tensor for tensor, _ in inner], [grad for _, grad in inner])


class _Recorded:
    """Work on a GPU that is recorded once, and from then on replayed as a whole.

    Kernels for small matrices take less time than their launch. Inputs and results stay in the same
    memory. Work that cannot be recorded, because it waits for the GPU or a library refuses, is done
    again each time.
    """

    # The work comes with each call: an object that kept it would be in a circle with its owner,
    # and the memory of the recording be freed only when Python looks for circles.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self, work: Callable[[], tuple[Tensor, Gradients]]) -> tuple[Tensor, Gradients]:
        """The result of the work, the same at each call, which has no arguments."""
        if self._calls == _WARM_UP:
            with suppress(RuntimeError):
                graph = torch.cuda.CUDAGraph()
                with (
                    torch.cuda.device(self._device),
                    torch.cuda.graph(graph, capture_error_mode="thread_local"),
                ):
                    self._result = work()
                self._graph = graph
        self._calls += 1
        if self._graph is None:
            return work()
        self._graph.replay()
        return self._result


@dataclass(eq=False)
class _KnownPrior:
    """Prior of a model that is its mean and a known kernel; the model need not be called.

    Attributes:
        modules: Kernel, mean, and noise of the likelihood.
        inputs: What mean and kernel are called on, or a function that transforms it each time.
        targets, batch: ``(*batch, n)``, and the batch shape of the covariance.
        shared: Parameters of a batch, and those of its member, which are to have their memory.
        index: Of the member.
    """

    modules: torch.nn.ModuleList
    inputs: Tensor | Callable[[], Tensor]
    targets: Tensor
    batch: torch.Size
    shared: Sequence[tuple[Tensor, Tensor]] = ()
    index: int = 0

    def __post_init__(self) -> None:
        kernel, mean, noise = cast(Any, tuple(self.modules))
        self._mean: Any = mean
        self._noise: Any = noise
        self._gram = cast(Gram, closed_form(kernel, select=True))

    @property
    def has_fixed_inputs(self) -> bool:
        """Whether all of kernel and mean are called on the same inputs each time."""
        return isinstance(self.inputs, Tensor) and not self._gram.has_features

    def member(self, index: int) -> _KnownPrior:
        """A member of a batch of one dimension, by copies of modules that share their memory."""
        modules, x = copy.deepcopy(self.modules), cast(Tensor, self.inputs)
        return _KnownPrior(
            modules,
            x[index : index + 1] if x.ndim > 2 else x,
            self.targets[index : index + 1],
            torch.Size([1]),
            list(zip(self.modules.parameters(), modules.parameters(), strict=True)),
            index,
        )

    def __call__(self) -> tuple[Covariance, Tensor]:
        """The covariance of the observations, and the residuals."""
        # A search moves the memory of the batch's parameters, so that views are taken each time.
        for parameter, view in self.shared:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            view.data = parameter.data[self.index : self.index + 1]
            view.grad = None
            if parameter.grad is not None:
                view.grad = parameter.grad[self.index : self.index + 1]
        x = self.inputs if isinstance(self.inputs, Tensor) else self.inputs()
        # A constant is subtracted without a graph: its gradient is minus the sum of the residuals'.
        if type(self._mean) is ConstantMean:
            constant: Any = self._mean.constant
            residual = self.targets - constant.detach().unsqueeze(-1)
            residual.requires_grad_(constant.requires_grad)
        else:
            residual = self.targets - self._mean(x)
        shape = torch.Size((*self.batch, x.shape[-2], x.shape[-2]))
        return GramCovariance(self._gram, x, self._noise, shape), residual

    def through_mean(self, gradients: Gradients, residual: Tensor) -> Gradients:
        """The gradient with respect to the residual as that to a constant mean, if there is one."""
        if type(self._mean) is not ConstantMean:
            return gradients
        constant: Any = self._mean.constant
        return [
            (constant, g.sum(-1).sum_to_size(constant.shape).neg()) if tensor is residual
            else (tensor, g) for tensor, g in gradients
        ]  # fmt: skip


def _known_prior(model: ExactGP, likelihood: Any, places: Tensor | None) -> _KnownPrior | None:
    """That at these indices of the data, or all; None where the model may compute anything else."""
    known = _input_transform(model)
    if known is None or not has_one_noise(likelihood):
        return None
    kernel, mean, noise = cast(Any, (model.covar_module, model.mean_module, likelihood.noise_covar))
    if any(map(has_hooks, (model, likelihood, mean))):
        return None
    given, (transform, is_fixed) = cast(Any, model.train_inputs)[0], known

    def inputs() -> Tensor:
        x = transform(given)
        return x if places is None else x.index_select(-2, places)

    gram = closed_form(kernel, select=True)
    x = inputs()
    # Of low rank the covariance has exact algebra that takes less than a matrix.
    if isinstance(gram, Reason) or gram.rank(x.shape[-1]) < x.shape[-2]:
        return None
    batch = torch.broadcast_shapes(x.shape[:-2], kernel.batch_shape, noise.raw_noise.shape[:-1])
    targets = cast(Tensor, model.train_targets)
    targets = targets if places is None else targets[..., places]
    modules = torch.nn.ModuleList((kernel, mean, noise))
    return _KnownPrior(modules, x if is_fixed else inputs, targets, batch)


def _input_transform(model: ExactGP) -> tuple[Callable[[Tensor], Tensor], bool] | None:
    """What maps inputs to those of mean and kernel, where that is known, and if it is fixed."""
    given, *others = cast(tuple[Tensor, ...], model.train_inputs)
    kind, botorch = cast(Any, type(model)), sys.modules.get("botorch.models")
    calls = [ExactGP.__call__]
    if ours := sys.modules.get("gpclml.models.botorch"):  # whose model differs in eval mode only
        calls.append(ours.DeepKernelGP.__call__)
    if others or not given.is_floating_point() or kind.__call__ not in calls:
        return None
    if kind.forward is GPRegression.forward:
        return cast(GPRegression, model).input_standardizer.transform, True
    if (
        botorch is not None
        and kind.forward is botorch.SingleTaskGP.forward
        and kind.transform_inputs is botorch.SingleTaskGP.transform_inputs
    ):
        units = getattr(model, "input_transform", None)
        is_normalized = type(units) is botorch.transforms.Normalize
        is_fixed = units is None or (is_normalized and not list(units.parameters()))
        return cast(Any, model).transform_inputs, is_fixed
    return None
