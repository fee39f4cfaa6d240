"""A BoTorch model with a deep kernel."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import botorch.models
import torch
from botorch.models.gpytorch import BatchedMultiOutputGPyTorchModel
from botorch.models.transforms import Normalize
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.posteriors import GPyTorchPosterior, TransformedPosterior
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import checked, seeded
from gpclml.errors import ArgumentError, ShapeError, UnknownNameError, UnsupportedError
from gpclml.inference import PosteriorNormal, exact_posterior
from gpclml.inference.neighbours import count_neighbors, joint_posterior_given_neighbors
from gpclml.inference.posterior import has_constant_caches
from gpclml.kernels.networks import StackedNetwork, reset_network
from gpclml.models.named_parts import make_kernel

__all__ = ["DeepKernelGP"]

# The bases of SingleTaskGP that a checker needs, since it cannot know all of them without reading
# GPyTorch's source.
SingleTaskGP: Any = cast(Any, botorch.models.SingleTaskGP)
assert issubclass(SingleTaskGP, BatchedMultiOutputGPyTorchModel)
assert issubclass(SingleTaskGP, ExactGP)

_KERNELS = ("deep", "deep_bottleneck", "deep_joint")


class DeepKernelGP(SingleTaskGP):
    r"""BoTorch's ``SingleTaskGP`` with a deep kernel.

    - ``kernel="deep"`` is :math:`(1 - s)\, k(x, x') + s\, \mathrm{RQ}(g(x), g(x'))`, k being the
      ARD kernel of ``SingleTaskGP`` with its prior and g a linear map and a network, which start
      near zero. The part s of the variance is a parameter; from its default it starts as the
      ``SingleTaskGP`` of the same data, to about four digits.
    - ``kernel="deep_bottleneck"`` is a scaled RBF on the outputs of a network alone (Wilson et
      al. 2016), without priors on its hyperparameters.
    - ``kernel="deep_joint"`` is a scaled Matern kernel on inputs and outputs of a network together,
      without priors, which starts with the lengthscales of ``SingleTaskGP``.

    Everything else is ``SingleTaskGP``'s: noise, mean, outcome transform, posteriors,
    conditioning, fantasies. So ``model.posterior`` leaves out the noise of observations by default,
    as BoTorch has it; everything else in gpclml includes it by default.

    Outputs are independent, and so are the members of a batch: each has hyperparameters *and
    networks of its own*, from one start, so that it equals a model of its data alone and BoTorch
    may fit each separately. For a network shared by the outputs, or one of your own, give
    ``SingleTaskGP`` a :class:`~gpclml.kernels.DeepKernel` as ``covar_module`` and fit it with
    :func:`gpclml.fit.fit_mll`. Such a network must see points one by one: batch normalization and
    dropout make conditioning and fantasies wrong.

    ``fit_gpytorch_mll`` fits everything by L-BFGS, under any objective. From the default share the
    model mostly stays the ``SingleTaskGP``; from a larger one, e.g. 0.3, it uses its features, and
    overfits tens of points in six dimensions or more. Under Adam (``fit_mll(mll, "adam")``) the
    noise moves by about the learning rate in each step, because BoTorch's likelihood stores it
    untransformed: fit it by L-BFGS and freeze it for Adam.

    Args:
        train_X: Inputs. Shape ``(*batch, n, d)``.
        train_Y: Outcomes. Shape ``(*batch, n, m)``.
        train_Yvar: Known noise variances, of the same shape; the noise is inferred if None.
        likelihood: As for ``SingleTaskGP``.
        kernel: ``"deep"``, ``"deep_bottleneck"`` or ``"deep_joint"``.
        mean_module: As for ``SingleTaskGP``.
        outcome_transform: As for ``SingleTaskGP``: ``Standardize`` by default.
        input_transform: By default ``Normalize`` to the unit cube, with the bounds of all inputs of
            the batch; None for inputs that are in the unit cube.
        num_features: Outputs of the network.
        hidden: Widths of its hidden layers.
        feature_share: Initial value of the part s, for the kernel ``"deep"``.
        seed: Seed of the network.

    Attributes:
        neighbors: As of :class:`~gpclml.models.GPRegression`, for models of one output of too many
            points to factor: ``posterior`` is given so many nearest training points.

    Raises:
        UnknownNameError: A kernel name that is not known.
        ArgumentError: A width that is not a positive integer, or a share outside (0, 1).
        BotorchTensorDimensionError: Shapes that do not fit.
        InputDataError: NaN values, or different dtypes.

    Examples:
        >>> import torch
        >>> from botorch.fit import fit_gpytorch_mll
        >>> from gpclml import ConditionalMarginalLogLikelihood
        >>> from gpclml.models.botorch import DeepKernelGP
        >>> X = torch.rand(20, 2, dtype=torch.float64)
        >>> model = DeepKernelGP(X, X.sum(-1, keepdim=True).sin())
        >>> mll = fit_gpytorch_mll(ConditionalMarginalLogLikelihood(model.likelihood, model))
        >>> mean = model.posterior(X[:3]).mean
    """

    neighbors: int | Literal["auto"] | None = None
    _is_fantasy = False  # GPyTorch extends the factor of a model for its fantasies

    @checked
    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        likelihood: Likelihood | None = None,
        kernel: str = "deep",
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | _DefaultType | None = DEFAULT,
        *,
        num_features: int = 2,
        hidden: Sequence[int] = (50, 50),
        feature_share: float = 1e-4,
        seed: int = 0,
    ) -> None:
        kernel = kernel.replace("-", "_")
        if kernel not in _KERNELS:
            raise UnknownNameError("kernel", kernel, _KERNELS)
        if train_X.ndim < 2 or 0 in train_X.shape:
            expected = "(*batch, n, d), nothing of size zero"
            raise ShapeError("train_X", tuple(train_X.shape), expected)
        if not 0 < feature_share < 1:
            raise ArgumentError("feature_share", feature_share, "a number between 0 and 1")
        if isinstance(input_transform, _DefaultType):
            input_transform = Normalize(train_X.shape[-1])
        cast(Any, super()).__init__(
            train_X, train_Y, train_Yvar, likelihood, None, mean_module, outcome_transform,
            input_transform,
        )  # fmt: skip
        base: Any = self.covar_module
        with torch.no_grad():
            inputs = self.transform_inputs(cast(Any, self.train_inputs)[0])
        build = {"hidden": hidden, "num_features": num_features}
        targets = cast(Tensor, self.train_targets)
        whole: Any = make_kernel(kernel, inputs, targets, seeded(seed), **build)
        deep = whole.base_kernel
        # From one start for all, so that each member is what a model of its data alone would be.
        if self._aug_batch_shape:
            deep.feature_extractor = NetworkBatch(deep.feature_extractor, self._aug_batch_shape)
        if kernel == "deep":
            # BoTorch's ARD kernel becomes the first part of the sum, of variance one in all.
            second = deep.base_kernel.kernels[1]
            base.active_dims = torch.arange(inputs.shape[-1], device=inputs.device)
            deep.base_kernel = base + second
            second.outputscale = feature_share / (1 - feature_share)
            # As in SingleTaskGP no factor of the whole is fitted: outcomes are standardized.
            whole.outputscale = 1 - feature_share
            whole.raw_outputscale.requires_grad_(False)
        if kernel == "deep_joint":
            lengthscale = deep.base_kernel.lengthscale.detach().clone()
            lengthscale[..., : inputs.shape[-1]] = base.lengthscale.detach()
            deep.base_kernel.lengthscale = lengthscale
        self.covar_module = whole
        # Where ``subset_output`` finds the outputs' dimension of each parameter, from the end.
        shape = self._aug_batch_shape
        self._subset_batch_dict = {
            name: len(shape) - 1 - parameter.ndim
            for name, parameter in self.named_parameters()
            if parameter.shape[: len(shape)] == shape
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The prior in train mode; in eval mode the posterior, given neighbours if so wanted."""
        if self.training or self._is_fantasy or settings.prior_mode.on():
            return super().__call__(*args, **kwargs)
        model, (x,) = cast(ExactGP, self), args
        if self.neighbors is not None:
            count = count_neighbors(model, self.neighbors)
            return joint_posterior_given_neighbors(model, x, count)
        # GPyTorch runs the network over all training points again for each group of points.
        x = x.unsqueeze(-1) if x.ndim == 1 else x
        return exact_posterior(model, x, marginal=False, constant=has_constant_caches(model))

    def get_fantasy_model(self, *args: Any, **kwargs: Any) -> Any:
        """As BoTorch's models, which condition on further observations by a factor of all."""
        if self.neighbors is not None:
            suggestion = "GPRegression takes further observations with neighbors."
            raise UnsupportedError("neighbors", self.neighbors, "None", suggestion)
        if self.prediction_strategy is None:  # what GPyTorch makes when it predicts
            with settings.debug(False):  # which warns of training points
                super().__call__(cast(Any, self.train_inputs)[0][..., :1, :])
        model = super().get_fantasy_model(*args, **kwargs)
        model._is_fantasy = True
        return model

    def posterior(self, *args: Any, **kwargs: Any) -> GPyTorchPosterior | TransformedPosterior:
        """As ``SingleTaskGP.posterior``, without GPyTorch's absolute floor of variances.

        BoTorch standardizes outcomes, but applies this floor to predictions in original units.
        Without it the deviations of a single output do not depend on its units. The training points
        are factored, and seen by the network, once until the model changes, whatever the batch of
        points is.

        Args:
            *args: As for ``SingleTaskGP.posterior``.
            **kwargs: The same.
        """
        posterior = super().posterior(*args, **kwargs)
        normal = getattr(posterior, "distribution", None)
        if type(posterior) is not GPyTorchPosterior or type(normal) is not MultivariateNormal:
            return posterior
        return GPyTorchPosterior(PosteriorNormal(normal.mean, normal.lazy_covariance_matrix))


class NetworkBatch(StackedNetwork):
    """Networks of one build and one start, each for its own member of a batch.

    Parameters have the batch's shape in front, as the hyperparameters of GPyTorch's batch modules
    have: what indexes or fits members one by one finds each member's network there.
    """

    def __init__(self, network: torch.nn.Module, batch_shape: torch.Size) -> None:
        super().__init__([network] * batch_shape.numel())
        for parameter in self.parameters():
            parameter.data = parameter.data.reshape(*batch_shape, *parameter.shape[1:])

    @property
    def members(self) -> torch.Size:
        """The shape of the batch, empty for a single network."""
        single, batched = next(self._build[0].parameters()), next(self.parameters())
        return batched.shape[: batched.ndim - single.ndim]

    def named_stacks(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters with members along one dimension, ``(k, ...)``, by their names."""
        size = len(self.members)
        for name, parameter in super().named_stacks():
            stack = parameter.reshape(-1, *parameter.shape[size:])
            yield name, cast(torch.nn.Parameter, stack)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws one start anew, for all members, in place."""
        network = copy.deepcopy(self._build[0])
        reset_network(network, generator)
        for name, stack in self.named_stacks():
            stack.copy_(network.get_parameter(name).expand_as(stack))

    def forward(self, x: Tensor) -> Tensor:
        """Each member's network at its own points, ``(*lead, n, d)`` to ``(*broadcast, n, q)``."""
        batch_shape = self.members
        shape = torch.broadcast_shapes(x.shape[:-2], batch_shape)
        x = x.expand(*shape, *x.shape[-2:])
        # A network sees points one by one: further batch dimensions are more points.
        further = list(range(len(shape) - len(batch_shape)))
        behind = [len(batch_shape) + dim for dim in further]
        x = x.movedim(further, behind)
        output = super().forward(x.reshape(batch_shape.numel(), -1, x.shape[-1]))
        return output.reshape(*x.shape[:-1], output.shape[-1]).movedim(behind, further)
