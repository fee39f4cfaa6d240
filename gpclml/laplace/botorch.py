"""A Laplace posterior as a model of BoTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, cast

import torch
from botorch.models.model import Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.posteriors import GPyTorchPosterior, Posterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor
from typing_extensions import override

from gpclml.errors import ArgumentError, ShapeError, UnsupportedError

if TYPE_CHECKING:
    from gpclml.laplace.laplace import Laplace

# The base that a checker needs, since it cannot know all of them without reading GPyTorch's source.
assert issubclass(Model, torch.nn.Module)


class LaplaceModel(Model):
    """A fitted :class:`gpclml.Laplace` for acquisition functions of BoTorch.

    Its posteriors are joint over the points of a q-batch and differentiable in them. It is not
    conditioned on further observations: train the network, and fit the posterior, anew.

    Args:
        laplace: The posterior, of a regression for noise and outcome transforms.
        input_transform: BoTorch's, of inputs before the network.
        outcome_transform: BoTorch's, in whose units the targets of the training were.

    Attributes:
        laplace: The posterior.

    Examples:
        >>> import torch
        >>> from botorch.acquisition import LogExpectedImprovement
        >>> from gpclml import MLP, Laplace
        >>> x, network = torch.rand(20, 2), MLP([2, 20, 1])  # train the network before
        >>> laplace = Laplace(network.eval(), "regression", structure="full")
        >>> model = laplace.fit((x, x.sum(-1))).to_botorch()
        >>> value = LogExpectedImprovement(model, best_f=1.0)(torch.rand(5, 1, 2))
    """

    def __init__(
        self,
        laplace: Laplace,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> None:
        super().__init__()
        self.laplace = laplace
        self.network: torch.nn.Module = laplace.network
        outputs, _ = laplace._fitted().seen
        self._num_outputs: int = outputs.shape[-1]
        self._like = outputs.new_zeros(())
        if input_transform is not None:
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform

    @property
    def num_outputs(self) -> int:
        """Number C of outputs."""
        return self._num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        """That of one network, empty."""
        return torch.Size()

    @override
    def train(self, mode: bool = True) -> Self:
        """Sets the mode, without BoTorch's transform of training inputs, which it has not."""
        torch.nn.Module.train(self, mode)
        return self

    @override
    def eval(self) -> Self:
        """See :meth:`train`."""
        return self.train(False)

    @override
    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Posterior:
        """The joint posterior of the outputs at the q points of each batch.

        Args:
            X: Points, ``(*b, q, d)``; in the precision of the network or in another one, in which
                the posterior is returned.
            output_indices: Which outputs; all if None.
            observation_noise: Whether to add the noise of the likelihood, or noise variances that
                are added, ``(*b, q, m)``.
            posterior_transform: BoTorch's.

        Raises:
            ShapeError: X has fewer than two dimensions.
            ArgumentError: X is on another device than the network, or there is no such output.
            UnsupportedError: The likelihood has no noise that could be added.
        """
        self.eval()  # transforms of inputs apply to new points in eval mode alone
        if X.ndim < 2 or 0 in X.shape:
            raise ShapeError("X", tuple(X.shape), "(*b, q, d), nothing of size zero")
        if X.device != self._like.device:
            raise ArgumentError("X", f"points on {X.device}", f"{self._like.device}")
        count = self._num_outputs
        chosen = list(range(count)) if output_indices is None else list(output_indices)
        if not all(-count <= index < count for index in chosen):
            raise ArgumentError("output_indices", chosen, f"numbers from 0 to {count - 1}")
        points = self.transform_inputs(X)
        *batch, q, d = points.shape
        flat = points.to(self._like).reshape(-1, d)
        mean, covariance = self.laplace._normal(flat, q)
        mean = mean.reshape(*batch, q, count)[..., chosen].to(X)
        covariance = covariance.reshape(*batch, q, count, q, count)
        covariance = covariance[..., chosen, :, :][..., chosen].to(X)
        if observation_noise is not False:
            covariance = covariance + self._noise(observation_noise, mean, chosen)
        size = q * len(chosen)
        matrix = to_linear_operator(covariance.reshape(*batch, size, size))
        if len(chosen) == 1:
            normal = MultivariateNormal(mean.squeeze(-1), matrix)
        else:
            normal = MultitaskMultivariateNormal(mean, matrix)
        posterior: Posterior = GPyTorchPosterior(normal)
        if hasattr(self, "outcome_transform"):
            posterior = cast(OutcomeTransform, self.outcome_transform).untransform_posterior(
                posterior, X
            )
        return posterior if posterior_transform is None else posterior_transform(posterior, X)

    def _noise(self, given: bool | Tensor, mean: Tensor, chosen: list[int]) -> Tensor:
        """Diagonal covariances ``(*b, q, m, q, m)`` of the noise."""
        likelihood: Any = self.laplace._output_likelihood()
        if isinstance(given, Tensor):
            variance = given.expand(mean.shape)
        elif likelihood.regression and hasattr(likelihood, "noise_of"):
            noise = self.laplace.output_temperature * likelihood.noise_of(self._num_outputs)
            variance = noise[chosen].detach().to(mean).expand(mean.shape)
        else:
            kind = type(self.laplace.likelihood).__name__
            raise UnsupportedError("observation_noise", f"True with {kind}", "False")
        size = mean.shape[-2] * mean.shape[-1]
        matrix = torch.diag_embed(variance.reshape(*mean.shape[:-2], size))
        return matrix.reshape(*mean.shape, *mean.shape[-2:])
