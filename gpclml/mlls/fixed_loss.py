"""Losses that optimizers minimize: an objective on its own training data, at fixed points or fresh.

A line search evaluates one function many times. What stays the same is done once: the held-out
points are drawn, the modules are searched for priors, the kernel is recognized. An evaluation then
computes the density and its gradient by the hyperparameters from one factor
(:meth:`gpclml.linalg.Covariance.value_and_gradients`); autograd goes on from there to the
parameters, where these are not the hyperparameters themselves.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import gpytorch
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from gpytorch.means import ConstantMean
from gpytorch.mlls import (
    ExactMarginalLogLikelihood,
    MarginalLogLikelihood,
    SumMarginalLogLikelihood,
)
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import seeded
from gpclml.conditioning import KFold, LastPoints
from gpclml.inference.covariances import has_one_noise
from gpclml.inference.kernel_covariances import covariance_of
from gpclml.inference.known_kernels import has_features, is_known
from gpclml.inference.observations import Observations, likelihood_parameters, training_observations
from gpclml.linalg import Covariance
from gpclml.linalg.covariance import ClosedForm, Pairs
from gpclml.mlls._arrays import ArrayDensity
from gpclml.mlls._terms import FixedTerms, has_hooks
from gpclml.mlls.conditional_marginal_log_likelihood import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = [
    "FixedLoss",
    "fixed_loss",
    "fresh_loss",
    "has_shared_parameters",
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
    return fresh_loss(mll) if custom is None else custom().sum()


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

    Raises:
        NonFiniteError, NotPSDError: If the objective cannot be evaluated.
    """

    def __init__(self, mll: MarginalLogLikelihood) -> None:
        self._mll = mll
        self._known = _KnownLoss.of(mll)

    @property
    def by_arrays(self) -> bool:
        """Whether it is computed in NumPy alone, one member of a batch after the other."""
        return self._known is not None and self._known._arrays is not None

    def __call__(self, member: int | None = None) -> float:
        """The loss, summed over a batch; :attr:`by_arrays` also of one member, and all priors."""
        if self._known is not None:
            return self._known(member)
        loss = fixed_loss(self._mll)
        loss.backward()
        return loss.item()


class _KnownLoss:
    """Loss of the conditional and of GPyTorch's marginal likelihood.

    Missing targets are left out, unless members of a batch may miss different ones.
    """

    @staticmethod
    def of(mll: MarginalLogLikelihood) -> _KnownLoss | None:
        model, kind = mll.model, type(mll)
        if kind is ConditionalMarginalLogLikelihood:
            known = _KnownLoss(cast(ConditionalMarginalLogLikelihood, mll))
            return known if known.applies else None
        if kind is not ExactMarginalLogLikelihood or mll.likelihood is not model.likelihood:
            return None
        if not isinstance(model, ExactGP) or _has_own_loss(model):
            return None
        mll = ConditionalMarginalLogLikelihood(mll.likelihood, model, LastPoints(m=0))
        known = _KnownLoss(mll)
        # Missing targets, kernels with structure and priors that a batch shares GPyTorch treats in
        # its own ways.
        if not known.applies or known.places is not None or known.prior is None:
            return None
        return known if known._arrays is not None or not known.batch else None

    def __init__(self, mll: ConditionalMarginalLogLikelihood) -> None:
        self._mll = mll
        self._model = cast(ExactGP, mll.model)
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
        self._per_target = 1.0 / sum(group.numel() for group in self._blocks)
        self._per_row = 1.0 / float(data.num_observed())
        self.batch = covariance.shape[:-2]
        self._terms = FixedTerms(self._model, self.batch, data.params)
        # Conjugate gradients take the covariance as the model gives it.
        by_factor = isinstance(self._density, ClosedForm)
        self.prior = None
        if by_factor:
            self.prior = _KnownPrior.of(self._model, mll.likelihood, self.places)
        self._arrays = None
        self._recorded = None
        if self.prior is not None:
            self._arrays = self.prior.arrays(cast(ClosedForm, self._density), self._terms)
        if self.prior is not None and not self.batch:
            on_gpu = data.residual.is_cuda and data.residual.shape[-1] <= _RECORDED_UP_TO
            if on_gpu and self.prior.has_fixed_inputs and self._terms.plain:
                self._recorded = _Recorded(data.residual.device)

    def __call__(self, member: int | None = None) -> float:
        if self._arrays is not None:
            loss = self._arrays(-self._per_target, -self._per_row, member)
            if loss is not None:
                self._mll.last_solve = ()
                return loss
        if self._recorded is not None:
            value, of_parameters = self._recorded(self._unchecked)
            if math.isfinite(total := value.item()):
                self._mll.last_solve = ()
                return self._with_terms(total, of_parameters)
        if self.prior is None:
            data = training_observations(self._model, self._mll.likelihood)
            part, _ = data.observed_at(self._split)
            covariance, residual = self._covariance(part), part.residual
        else:
            covariance, residual = self.prior()
        values, pairs = covariance.value_and_gradients(residual, self._density)
        if self.prior is not None:
            pairs = self.prior.by_constant(pairs, residual)
        self._mll.last_solve = covariance.reports
        total = (values.sum() if member is None else values[member]).item()
        if not math.isfinite(total):
            training_observations(self._model, self._mll.likelihood).check_density(values)
        return self._with_terms(total, pairs)

    def _with_terms(self, total: float, pairs: Pairs) -> float:
        terms, slopes = self._terms()
        _accumulate([(pairs, -self._per_target), (slopes, -self._per_row)])
        return -(total * self._per_target + terms * self._per_row)

    def _unchecked(self) -> tuple[Tensor, Pairs]:
        """The density, and its gradients by parameters; NaN if there is no factor.

        No value is read meanwhile, for which a GPU would finish all that is queued.
        """
        prior = cast(_KnownPrior, self.prior)
        covariance, residual = prior()
        density = replace(cast(Any, self._density), checked=False)
        value, pairs = covariance.value_and_gradients(residual, density)
        pairs = prior.by_constant(pairs, residual)
        of_parameters = [(tensor, gradient) for tensor, gradient in pairs if tensor.is_leaf]
        inner = [(tensor, gradient) for tensor, gradient in pairs if not tensor.is_leaf]
        if inner:
            leaves = [one for one in self._mll.parameters() if one.requires_grad]
            tensors, gradients = zip(*inner, strict=True)
            found = torch.autograd.grad(tensors, leaves, gradients, allow_unused=True)
            pairs = zip(leaves, found, strict=True)
            of_parameters += [(leaf, gradient) for leaf, gradient in pairs if gradient is not None]
        return value, of_parameters

    def _covariance(self, data: Observations) -> Covariance:
        mll = self._mll
        return data.covariance_by(mll.solver, self._blocks, mll.factor_dtype)


def _has_own_loss(model: torch.nn.Module) -> bool:
    return getattr(model, "compute_custom_loss", None) is not None


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

    def __call__(self, work: Callable[[], tuple[Tensor, Pairs]]) -> tuple[Tensor, Pairs]:
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

    def _record(self, work: Callable[[], tuple[Tensor, Pairs]]) -> bool:
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


def _accumulate(weighted: list[tuple[Pairs, float]]) -> None:
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
        model: Of which this is known.
        likelihood: With one noise.
        inputs: What mean and kernel are called on.
        places: Indices of the points that take part; all of them if None.
    """

    @staticmethod
    def of(model: ExactGP, likelihood: Any, places: Tensor | None = None) -> _KnownPrior | None:
        """None where the model may compute anything else."""
        inputs = _inputs(model)
        if (
            inputs is None
            or not has_one_noise(likelihood)
            or any(has_hooks(one) for one in cast(Any, (model, likelihood, model.mean_module)))
        ):
            return None
        with torch.no_grad():
            x = inputs if isinstance(inputs, Tensor) else inputs()
        kernel = cast(Kernel, model.covar_module)
        dims = kernel.active_dims
        num_dims = x.shape[-1] if dims is None else len(cast(Tensor, dims))
        if not is_known(kernel, num_dims):
            return None
        return _KnownPrior(model, likelihood, inputs, places)

    def __init__(
        self,
        model: ExactGP,
        likelihood: GaussianLikelihood,
        inputs: Tensor | Callable[[], Tensor],
        places: Tensor | None,
    ) -> None:
        self._kernel = cast(Kernel, model.covar_module)
        self._mean = cast(Any, model.mean_module)
        self._is_constant = type(self._mean) is ConstantMean
        self._likelihood = likelihood
        self._targets = cast(Tensor, model.train_targets)
        if places is not None:
            self._targets = self._targets[..., places]
            inputs = _at_places(inputs, places)
        self._inputs = inputs
        batches = [part.batch_shape for part in self._kernel.modules() if isinstance(part, Kernel)]
        self._has_batch = any(batches) or cast(Tensor, model.train_targets).ndim > 1
        self._has_features = has_features(self._kernel)

    @property
    def has_fixed_inputs(self) -> bool:
        """Whether all parts of kernel and mean are called on the same inputs each time."""
        return isinstance(self._inputs, Tensor) and not self._has_features

    def arrays(self, density: ClosedForm, terms: FixedTerms) -> ArrayDensity | None:
        """Everything in NumPy, where that is known."""
        if not isinstance(self._inputs, Tensor) or self._has_features:
            return None
        return ArrayDensity.of(
            self._kernel, self._mean, self._likelihood, self._inputs, self._targets, density, terms
        )

    def __call__(self) -> tuple[Covariance, Tensor]:
        """The covariance of the observations, and the residuals."""
        x = self._inputs if isinstance(self._inputs, Tensor) else self._inputs()
        if self._is_constant:
            constant = self._mean.constant
            residual = self._targets - constant.detach().unsqueeze(-1)
            residual.requires_grad_(constant.requires_grad)
        else:
            residual = self._targets - self._mean(x)
        dims = self._kernel.active_dims
        if dims is not None:
            x = x.index_select(-1, cast(Tensor, dims))
        noise = cast(HomoskedasticNoise, self._likelihood.noise_covar)
        return covariance_of(self._kernel, x, noise, batch=self._has_batch), residual

    def by_constant(self, pairs: Pairs, residual: Tensor) -> Pairs:
        """The gradient by the residual as that by a constant mean, where there is one."""
        if not self._is_constant:
            return pairs
        constant = self._mean.constant
        return [
            (constant, g.sum(-1).sum_to_size(constant.shape).neg()) if tensor is residual
            else (tensor, g) for tensor, g in pairs
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
