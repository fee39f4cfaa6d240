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
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import gpytorch
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from gpytorch.means import ConstantMean
from gpytorch.mlls import (
    ExactMarginalLogLikelihood,
    LeaveOneOutPseudoLikelihood,
    MarginalLogLikelihood,
    SumMarginalLogLikelihood,
)
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import seeded
from gpclml.conditioning import KFold, LastPoints
from gpclml.errors import NonFiniteError
from gpclml.gram import Gradients, Gram, Reason, closed_form
from gpclml.gram.closed_form import has_hooks
from gpclml.inference.observations import (
    Observations,
    Road,
    has_one_noise,
    likelihood_parameters,
    training_observations,
)
from gpclml.linalg import Covariance, GramCovariance
from gpclml.linalg.dense import LogDensity
from gpclml.mlls._terms import FixedTerms, sum_of_priors
from gpclml.mlls.conditional_marginal_log_likelihood import ConditionalMarginalLogLikelihood
from gpclml.models import BayesianLinearModel, GPRegression

__all__ = [
    "FixedLoss",
    "fixed_loss",
    "fresh_loss",
    "has_shared_parameters",
    "scores_first_points",
    "training_loss",
]


def fresh_loss(mll: MarginalLogLikelihood) -> Tensor:
    """The negative objective, summed over a batch; held-out points are drawn anew.

    Args:
        mll: Any objective ``mll(output, target)``; for a ``SumMarginalLogLikelihood`` the mean
            over its members, as it defines itself.

    Returns:
        A scalar.
    """
    if isinstance(mll, SumMarginalLogLikelihood):
        members = cast(Any, mll.mlls)
        return torch.stack([fresh_loss(member) for member in members]).mean()
    return training_loss(mll).sum()


def training_loss(mll: MarginalLogLikelihood, **kwargs: Any) -> Tensor:
    """The negative objective on the model's own training data, as a training loop calls it.

    Args:
        mll: Any objective of one model.
        **kwargs: Passed on to the objective.

    Returns:
        The loss, ``(*batch,)``.
    """
    model = cast(Any, mll.model)
    takes_params = isinstance(mll, ExactMarginalLogLikelihood)
    params = likelihood_parameters(model, cast(Likelihood, mll.likelihood)) if takes_params else ()
    return -cast(Tensor, mll(model(*model.train_inputs), model.train_targets, *params, **kwargs))


def fixed_loss(mll: MarginalLogLikelihood) -> Tensor:
    """The negative objective, summed over a batch, as a function that stays the same.

    Weak priors, which ``compute_custom_loss`` adds for a search, are not part of it.

    Args:
        mll: Any objective; one with random held-out points says by ``compute_custom_loss``
            which ones stay.

    Returns:
        A scalar.
    """
    if isinstance(mll, SumMarginalLogLikelihood):
        members = cast(Any, mll.mlls)
        return torch.stack([fixed_loss(member) for member in members]).mean()
    custom: Callable[[], Tensor] | None = getattr(mll, "compute_custom_loss", None)
    if isinstance(mll, ConditionalMarginalLogLikelihood):
        ours = ConditionalMarginalLogLikelihood.compute_custom_loss
        if type(mll).compute_custom_loss is ours:
            custom = mll._fixed_loss
    return fresh_loss(mll) if custom is None else custom().sum()


def scores_first_points(mll: MarginalLogLikelihood) -> bool:
    """Whether every point is scored, also the first, given no other."""
    if isinstance(mll, ConditionalMarginalLogLikelihood):
        return mll.scores_first_points
    return not isinstance(mll, LeaveOneOutPseudoLikelihood)


def has_shared_parameters(model: torch.nn.Module, batch_shape: torch.Size) -> bool:
    """Whether members of a batch share a trainable parameter.

    Parameters of plain torch modules (networks) count as shared whatever their shape: a weight
    may have the batch's size by chance.

    Args:
        model: A batched model.
        batch_shape: The shape that a parameter of its own has in front for each member.
    """
    for module in model.modules():
        of_gpytorch = isinstance(module, gpytorch.Module)
        for parameter in module.parameters(recurse=False):
            leading = parameter.shape[: len(batch_shape)]
            if parameter.requires_grad and not (of_gpytorch and leading == batch_shape):
                return True
    return False


_RECORDED_UP_TO = 4096  # points, beyond which a GPU is busy for longer than its work is launched
_WARM_UP = 2  # evaluations before the one that is recorded, in which libraries are loaded


class FixedLoss:
    """An objective's loss at held-out points that stay the same, and its gradient.

    Calling it gives :func:`fixed_loss` and adds the gradient to the ``grad`` of the parameters, as
    ``fixed_loss(mll).backward()`` does. Data, conditioning and the modules of the model have to
    stay the same between calls; parameters may change.

    Args:
        mll: Any objective, in train mode.

    Attributes:
        road: Which way an evaluation goes, and why not a faster one.

    Raises:
        NonFiniteError, NotPSDError: If the objective cannot be evaluated.
    """

    def __init__(self, mll: MarginalLogLikelihood) -> None:
        self._mll = mll
        known = _KnownLoss.of(mll)
        self._known = None if isinstance(known, Reason) else known
        self.road: Road = (
            Road("GPyTorch's evaluation", known.text) if isinstance(known, Reason) else known.road
        )

    @property
    def has_members(self) -> bool:
        """Whether members of a batch can be evaluated one by one."""
        return self._known is not None and bool(self._known.members)

    def __call__(self, member: int | None = None) -> float:
        """The loss, summed over a batch; or of one member and its priors."""
        if self._known is None:
            loss = fixed_loss(self._mll)
            loss.backward()
            return loss.item()
        return self._known() if member is None else self._known.members[member]()


class _KnownLoss:
    """Loss of the conditional and of GPyTorch's marginal likelihood.

    Missing targets are left out, unless members of a batch may miss different ones.
    """

    @staticmethod
    def of(mll: MarginalLogLikelihood) -> _KnownLoss | Reason:
        model, kind = mll.model, type(mll)
        if kind is ConditionalMarginalLogLikelihood:
            known = _KnownLoss(cast(ConditionalMarginalLogLikelihood, mll))
            return known if known.applies else Reason("members of the batch miss targets")
        if kind is not ExactMarginalLogLikelihood:
            return Reason(f"{kind.__name__} is an objective of its own")
        if not isinstance(model, ExactGP) or mll.likelihood is not model.likelihood:
            return Reason("the model is not an ExactGP with the objective's likelihood")
        if _has_own_loss(model):
            return Reason(f"{type(model).__name__} has a loss of its own, compute_custom_loss")
        mll = ConditionalMarginalLogLikelihood(mll.likelihood, model, LastPoints(m=0))
        known = _KnownLoss(mll)
        # What follows GPyTorch treats in its own ways.
        if not known.applies or known.places is not None:
            return Reason("targets are missing")
        if not known.in_closed_form:
            return Reason(known.road.reason or f"the covariance has structure ({known.road.way})")
        if known.batch and not known.members:
            return Reason("members of the batch share parameters or priors")
        return known

    def __init__(self, mll: ConditionalMarginalLogLikelihood) -> None:
        self._mll = mll
        self._model = cast(ExactGP, mll.model)
        self.members: list[_Member] = []
        with torch.no_grad():
            data = training_observations(self._model, mll.likelihood)
            conditioning = KFold(10) if mll.conditioning is None else mll.conditioning
            self._split = data.split(conditioning, seeded(mll.seed))
            part, self._blocks = data.observed_at(self._split)
            self.places, self.applies = part.places, part.missing is None
            if not self.applies:
                return
            covariance = self._covariance(part)
            self._density = covariance.density(self._blocks)
        self.in_closed_form = isinstance(covariance, GramCovariance)
        self.road = part.road(mll.solver, self._blocks)
        self._per_target = 1.0 / sum(group.numel() for group in self._blocks)
        self._per_row = 1.0 / float(data.num_observed())
        self.batch = data.residual.shape[:-1]
        self._terms = FixedTerms(self._model, self.batch, data.params)
        self.prior = None
        if isinstance(self._density, LogDensity):  # conjugate gradients take a covariance as it is
            self.prior = _KnownPrior.of(self._model, mll.likelihood, self.places)
        if self.prior is not None:
            self.members = _members(self, self.prior, self._terms)
        self._recorded = None
        if self.prior is not None and not self.batch:
            on_gpu = data.residual.is_cuda and data.residual.shape[-1] <= _RECORDED_UP_TO
            if on_gpu and self.prior.has_fixed_inputs and self._terms.plain:
                self._recorded = _Recorded(data.residual.device)
                self.road = Road(f"{self.road.way}, recorded on the GPU", self.road.reason)

    def __call__(self) -> float:
        if self._recorded is not None:
            value, gradients = self._recorded(self._unchecked)
            if math.isfinite(total := value.item()):
                self._mll.last_solve = ()
                return self._with_terms(total, gradients)
        if self.prior is None:
            data = training_observations(self._model, self._mll.likelihood)
            part, _ = data.observed_at(self._split)
            covariance, residual = self._covariance(part), part.residual
        else:
            covariance, residual = self.prior()
        value, gradients = self.value_and_gradients(covariance, residual, self.prior)
        total = value.sum().item()
        if not math.isfinite(total):
            training_observations(self._model, self._mll.likelihood).check_density(value)
        return self._with_terms(total, gradients)

    def value_and_gradients(
        self, covariance: Covariance, residual: Tensor, prior: _KnownPrior | None
    ) -> tuple[Tensor, Gradients]:
        """The log density, and the gradients of its sum over a batch."""
        value, _, vjp, _ = covariance.log_density_and_vjp(residual, self._density)
        with torch.no_grad():
            gradients = vjp(torch.ones_like(value))
        self._mll.last_solve = covariance.reports
        return value, gradients if prior is None else prior.of_constant(gradients, residual)

    def _with_terms(self, total: float, gradients: Gradients) -> float:
        terms, of_terms = self._terms()
        return self.add_gradients(total, gradients, terms, of_terms)

    def add_gradients(
        self, total: float, gradients: Gradients, terms: float, of_terms: Gradients
    ) -> float:
        """The loss of a log density and of log priors, whose gradients are added to ``grad``."""
        _accumulate([(gradients, -self._per_target), (of_terms, -self._per_row)])
        return -(total * self._per_target + terms * self._per_row)

    def _unchecked(self) -> tuple[Tensor, Gradients]:
        """The density, and its gradients with respect to parameters; NaN if there is no factor.

        No value is read meanwhile, for which a GPU would finish all that is queued.
        """
        prior = cast(_KnownPrior, self.prior)
        covariance, residual = prior()
        density = replace(cast(Any, self._density), checked=False)
        value, _, vjp, _ = covariance.log_density_and_vjp(residual, density)
        with torch.no_grad():
            gradients = prior.of_constant(vjp(torch.ones_like(value)), residual)
        of_parameters = [(tensor, gradient) for tensor, gradient in gradients if tensor.is_leaf]
        inner = [(tensor, gradient) for tensor, gradient in gradients if not tensor.is_leaf]
        if inner:
            leaves = [one for one in self._mll.parameters() if one.requires_grad]
            tensors, weights = zip(*inner, strict=True)
            found = torch.autograd.grad(tensors, leaves, weights, allow_unused=True)
            pairs = zip(leaves, found, strict=True)
            of_parameters += [(leaf, gradient) for leaf, gradient in pairs if gradient is not None]
        return value, of_parameters

    def _covariance(self, data: Observations) -> Covariance:
        mll = self._mll
        return data.covariance_by(mll.solver, self._blocks, mll.factor_dtype)


def _has_own_loss(model: torch.nn.Module) -> bool:
    """Whether BoTorch minimizes another loss of this model than the negative objective."""
    own = getattr(type(model), "compute_custom_loss", None)
    ours = (GPRegression.compute_custom_loss, BayesianLinearModel.compute_custom_loss)
    if own is None or own in ours:
        return "compute_custom_loss" in vars(model)
    return True


_MOST_MEMBERS = 16  # of a batch, beyond which all are evaluated together


class _Member:
    """The loss of one member of a batch, by copies of its modules that share their memory.

    Args:
        loss: Of the batch.
        prior: Of the batch, whose parameters are ``(members, ...)``.
        terms: Log priors, each in closed form.
        index: Of the member.
    """

    def __init__(self, loss: _KnownLoss, prior: _KnownPrior, terms: FixedTerms, index: int) -> None:
        self._loss, self._index = loss, index
        memo: dict[int, Any] = {}
        self._prior = prior.member(index, memo)
        self._priors = [term.copied(memo) for term in terms.priors]
        self._parameters = [
            (parameter, memo[id(parameter)])
            for parameter in prior.parameters() if id(parameter) in memo
        ]  # fmt: skip

    def __call__(self) -> float:
        part = slice(self._index, self._index + 1)
        for parameter, own in self._parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own.data = parameter.data[part]
            own.grad = None if parameter.grad is None else parameter.grad[part]
        covariance, residual = self._prior()
        value, gradients = self._loss.value_and_gradients(covariance, residual, self._prior)
        total = value.sum().item()
        if not math.isfinite(total):
            raise NonFiniteError("log density", total, "a finite value")
        return self._loss.add_gradients(total, gradients, *sum_of_priors(self._priors))


def _members(loss: _KnownLoss, prior: _KnownPrior, terms: FixedTerms) -> list[_Member]:
    """One by one, if members share neither a parameter nor a prior; else none."""
    if len(loss.batch) != 1 or not 1 < loss.batch[0] <= _MOST_MEMBERS:
        return []
    modules = set(prior.modules())
    if not prior.has_fixed_inputs or not all(term.is_of(modules) for term in terms.priors):
        return []
    own = (one for one in prior.parameters() if one.requires_grad)
    if any(one.shape[:1] != loss.batch for one in own):
        return []
    trainable = sum(one.requires_grad for one in loss._mll.parameters())
    if trainable != sum(one.requires_grad for one in prior.parameters()):
        return []
    return [_Member(loss, prior, terms, index) for index in range(loss.batch[0])]


class _Recorded:
    """Work on a GPU that is recorded once, and from then on replayed as a whole.

    Kernels for small matrices take less time than their launch. Inputs and results stay in the same
    memory. Work that cannot be recorded, because it waits for the GPU or a library refuses, is done
    again each time.

    Args:
        device: Where.
    """

    # The work comes with each call: an object that kept it would be in a circle with its owner,
    # and the memory of the recording be freed only when Python looks for circles.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._done = 0

    def __call__(self, work: Callable[[], tuple[Tensor, Gradients]]) -> tuple[Tensor, Gradients]:
        """The result of the work, the same at each call, which has no arguments."""
        if self._graph is None:
            if self._done != _WARM_UP:
                self._done += 1
                return work()
            self._done += 1
            if not self._record(work):
                return work()
        cast(torch.cuda.CUDAGraph, self._graph).replay()
        return self._result

    def _record(self, work: Callable[[], tuple[Tensor, Gradients]]) -> bool:
        try:
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                self._result = work()
        except RuntimeError:
            return False
        self._graph = graph
        return True


def _accumulate(weighted: list[tuple[Gradients, float]]) -> None:
    """Adds gradients to those of leaves, and passes the others on to what they come from."""
    tensors, gradients = [], []
    for pairs, weight in weighted:
        for tensor, gradient in pairs:
            if not tensor.is_leaf:
                tensors.append(tensor)
                gradients.append(gradient * weight)
            elif tensor.grad is None:
                tensor.grad = gradient * weight
            else:
                tensor.grad.add_(gradient, alpha=weight)
    if tensors:
        torch.autograd.backward(tensors, gradients)


class _KnownPrior:
    """Prior of a model that is its mean and a known kernel; the model need not be called.

    Args:
        kernel: Of the model.
        mean: The same.
        noise: That of the likelihood.
        inputs: What mean and kernel are called on.
        targets: ``(*batch, n)``.
        batch: Batch shape of the covariance.
    """

    @staticmethod
    def of(model: ExactGP, likelihood: Any, places: Tensor | None = None) -> _KnownPrior | None:
        """None where the model may compute anything else.

        Args:
            model: Any model.
            likelihood: Any likelihood.
            places: Indices of the points that take part; all of them if None.
        """
        inputs = _inputs(model)
        if (
            inputs is None
            or not has_one_noise(likelihood)
            or any(has_hooks(one) for one in cast(Any, (model, likelihood, model.mean_module)))
        ):
            return None
        gram = closed_form(cast(Kernel, model.covar_module), select=True)
        with torch.no_grad():
            x = inputs if isinstance(inputs, Tensor) else inputs()
        if isinstance(gram, Reason) or gram.rank(x.shape[-1]) < x.shape[-2]:
            return None
        kernel = cast(Kernel, model.covar_module)
        batch = torch.broadcast_shapes(
            x.shape[:-2], kernel.batch_shape, likelihood.noise_covar.raw_noise.shape[:-1]
        )
        targets = cast(Tensor, model.train_targets)
        if places is not None:
            targets = targets[..., places]
            inputs = _at_places(inputs, places)
        noise = likelihood.noise_covar
        return _KnownPrior(kernel, cast(Any, model.mean_module), noise, inputs, targets, batch)

    def __init__(
        self,
        kernel: Kernel,
        mean: Any,
        noise: HomoskedasticNoise,
        inputs: Tensor | Callable[[], Tensor],
        targets: Tensor,
        batch: torch.Size,
    ) -> None:
        self._gram = cast(Gram, closed_form(kernel, select=True))
        self._kernel, self._mean, self._noise = kernel, mean, noise
        self._is_constant = type(mean) is ConstantMean
        self._inputs, self._targets, self._batch = inputs, targets, batch

    @property
    def has_fixed_inputs(self) -> bool:
        """Whether all parts of kernel and mean are called on the same inputs each time."""
        return isinstance(self._inputs, Tensor) and not self._gram.has_features

    def modules(self) -> Iterator[torch.nn.Module]:
        """Kernel, mean and noise, and all parts of these."""
        for module in (self._kernel, self._mean, self._noise):
            yield from cast(torch.nn.Module, module).modules()

    def parameters(self) -> list[Tensor]:
        """Those of kernel, mean and noise."""
        return [one for part in self.modules() for one in part.parameters(recurse=False)]

    def member(self, index: int, memo: dict[int, Any]) -> _KnownPrior:
        """A member of a batch of one dimension, by copies of the modules, which ``memo`` notes."""
        kernel, mean, noise = copy.deepcopy((self._kernel, self._mean, self._noise), memo)
        part = slice(index, index + 1)
        inputs, targets = cast(Tensor, self._inputs), self._targets[part]
        inputs = inputs[part] if inputs.ndim > 2 else inputs
        return _KnownPrior(kernel, mean, noise, inputs, targets, torch.Size([1]))

    def __call__(self) -> tuple[Covariance, Tensor]:
        """The covariance of the observations, and the residuals."""
        x = self._inputs if isinstance(self._inputs, Tensor) else self._inputs()
        if self._is_constant:
            constant = self._mean.constant
            residual = self._targets - constant.detach().unsqueeze(-1)
            residual.requires_grad_(constant.requires_grad)
        else:
            residual = self._targets - self._mean(x)
        n = x.shape[-2]
        shape = torch.Size((*self._batch, n, n))
        return GramCovariance(self._gram, x, self._noise, shape), residual

    def of_constant(self, gradients: Gradients, residual: Tensor) -> Gradients:
        """The gradient with respect to the residual as that to a constant mean, if there is one."""
        if not self._is_constant:
            return gradients
        constant = self._mean.constant
        return [
            (constant, g.sum(-1).sum_to_size(constant.shape).neg()) if tensor is residual
            else (tensor, g) for tensor, g in gradients
        ]  # fmt: skip


def _at_places(
    inputs: Tensor | Callable[[], Tensor], places: Tensor
) -> Tensor | Callable[[], Tensor]:
    if isinstance(inputs, Tensor):
        return inputs.index_select(-2, places)
    return lambda: inputs().index_select(-2, places)


def _inputs(model: ExactGP) -> Tensor | Callable[[], Tensor] | None:
    """What mean and kernel are called on, for classes of which that is known; fixed if a tensor."""
    x, *others = cast(tuple[Tensor, ...], model.train_inputs)
    kind = cast(Any, type(model))
    if others or not x.is_floating_point() or kind.__call__ is not ExactGP.__call__:
        return None
    if kind.forward is GPRegression.forward:
        return cast(GPRegression, model).input_standardizer.transform(x)
    models = sys.modules.get("botorch.models")
    if models is None or kind.forward is not models.SingleTaskGP.forward:
        return None
    if kind.transform_inputs is not models.SingleTaskGP.transform_inputs:
        return None
    transform = getattr(model, "input_transform", None)
    if transform is None:
        return x
    if type(transform) is models.transforms.Normalize and not any(
        True for _ in transform.parameters()
    ):
        return cast(Any, model).transform_inputs(x)
    return lambda: cast(Any, model).transform_inputs(x)
