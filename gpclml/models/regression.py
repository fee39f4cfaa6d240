"""Exact Gaussian process regression, ready to train with any objective."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import ConstantMean, Mean
from gpytorch.mlls import LeaveOneOutPseudoLikelihood, MarginalLogLikelihood
from gpytorch.priors import LogNormalPrior, NormalPrior, Prior
from torch import Tensor

from gpclml._utils.arguments import checked, reads_are_free
from gpclml._utils.arrays import checked_training_data, points_as_tensor
from gpclml._utils.environment import load_botorch
from gpclml._utils.files import read_checkpoint, write_checkpoint
from gpclml.errors import ArgumentError, DataError, ShapeError, UnsupportedError
from gpclml.inference import IterativePosterior, PosteriorNormal, evaluating, exact_posterior
from gpclml.inference.neighbours import (
    count_neighbors,
    joint_posterior_given_neighbors,
    posterior_given_neighbors,
)
from gpclml.inference.observations import Solver
from gpclml.inference.posterior import (
    checked_points,
    choose_posterior_solver,
    has_constant_caches,
    observed_posterior,
    refuse_gradient,
)
from gpclml.kernels import DeepKernel
from gpclml.models.base import StandardizedGP
from gpclml.models.standardize import Standardizer

if TYPE_CHECKING:
    from botorch.acquisition.objective import PosteriorTransform
    from botorch.posteriors import Posterior

    from gpclml._utils.arrays import ArrayLike

_FORMAT = "gpclml.GPRegression"
_REQUIRED = {"config": dict, "state_dict": dict, "train_x": Tensor, "train_targets": Tensor}
_LOG_SCALE = 1.5  # deviation of a weak prior of the logarithm of a scale; targets have variance 1
_LOG_LENGTHSCALE = 1.0  # of a lengthscale's, around the root of the number of standardized inputs


class GPRegression(StandardizedGP):
    r"""An exact GP on standardized data: :math:`y = m(x) + f(x) + \epsilon`.

    It trains in a plain GPyTorch loop and with BoTorch's ``fit_gpytorch_mll``, under any objective.
    ``train_inputs`` are in original units. ``train_targets`` are in standardized units, and so are
    an objective's value, the likelihood's noise and what ``model(x)`` gives in eval mode;
    :meth:`predict` and :meth:`posterior` give original units. A log density in original units is
    the standardized one less ``log(model.target_scale)`` for each observed point. In a loop of your
    own pass ``model.train_targets`` to the objective; with original targets it raises an error.

    Kernels by name, each inside a ``ScaleKernel`` unless said otherwise:

    - ``"rbf"``, ``"rq"``, ``"matern"`` (smoothness 5/2), with a lengthscale for each column if
      ``ard``;
    - ``"spectral_mixture"``: ``num_mixtures`` components, started from the data, unscaled;
    - ``"deep"``: RBF on the inputs plus RQ on the features of a linear map and a network with
      ``num_features`` outputs, which start near zero. Train it by :func:`gpclml.fit.fit_networks`.
      Before a loop of your own call :func:`gpclml.fit.warm_start`, which makes it the fitted ARD
      GP, as fits of this package do;
    - ``"deep_bottleneck"``: RBF on the features alone (Wilson et al. 2016);
    - ``"deep_joint"``: Matern on inputs and features together, with a lengthscale for each, whose
      distances both can only lengthen. Meant for thousands of rows, trained with
      :class:`~gpclml.conditioning.NearestNeighbors`; ``num_features=d`` and wide layers pay there.

    Lengthscales of standardized inputs start at the root of the number of columns and stay above
    0.001; without standardization they start where GPyTorch has them. Means by name:
    ``"constant"``, ``"zero"``, ``"mlp"`` (a network of standardized inputs).

    In a batch every element has hyperparameters of its own and networks are shared. Targets may be
    NaN where missing; train under ``gpytorch.settings.observation_nan_policy("mask")``. Kernel,
    mean and likelihood given as objects work in standardized units and are cast to the data's dtype
    and device in place.

    Tensors of float32 or float64 are not converted. Arrays, pandas objects and integers take the
    type and device of the tensor that they come with, and are otherwise float64 on the CPU.
    ``print(model)`` says what was converted, and a warning is given if integers lose digits. The
    names of a data frame's columns are kept: new points in a data frame must have the same names in
    the same order.

    Args:
        train_x: Inputs. Shape ``(*batch, n, d)``, or ``(n,)`` for one column. A tensor, a numpy
            array, or a data frame of numbers.
        train_y: Targets in original units. Shape ``(*batch, n)``. A tensor, an array, or a series,
            whose index must be that of the inputs if these have one.
        kernel: A name, in which a hyphen is an underscore, or a GPyTorch kernel. The Matern kernel
            is the default because its predictions of public tables have a lower CRPS and RMSE
            than those of ``"rbf"`` (``python -m benchmarks.tables``).
        mean: A name, or a GPyTorch mean.
        likelihood: A Gaussian likelihood; GPyTorch's ``GaussianLikelihood`` if None, its noise at
            least 1e-4. It starts at 0.69 (targets have variance 1): a network trained from a
            small noise fits the noise first.
        standardize: Whether to standardize inputs and targets to mean 0, deviation 1.
        ard: Whether named kernels have a lengthscale for each column.
        num_features: Outputs of a deep kernel's network.
        hidden: Widths of the hidden layers of networks.
        num_mixtures: Components of the spectral mixture.
        seed: Seed of networks and of the spectral mixture's start.
        warm_start: Whether a fit of ``"deep"`` starts from fitted ARD hyperparameters. The
            constructor fits nothing.

    Attributes:
        column_names: Names of the inputs' columns, if they came in a data frame; else None.
        neighbors: None, as at first, or how many of their nearest training points :meth:`predict`
            and :meth:`posterior` condition new points on: a number, or ``"auto"``, for models of
            too many points to factor.

    Raises:
        ShapeError: Inputs and targets do not match, or hold no points.
        NonFiniteError: An input is not finite, or a target infinite.
        ArgumentError: The dtype cannot be factorized, columns are not numbers, indices of inputs
            and targets differ, no target is observed, or the dtype cannot hold the square of the
            spread (targets near 1e20 in float32, 1e155 in float64).
        UnknownNameError: A kernel or mean name that is not known.

    Examples:
        >>> from botorch.fit import fit_gpytorch_mll
        >>> from gpytorch.mlls import ExactMarginalLogLikelihood
        >>> from sklearn.datasets import load_diabetes
        >>> from gpclml import GPRegression
        >>> x, y = load_diabetes(return_X_y=True, scaled=False)
        >>> model = GPRegression(x[:100], y[:100])
        >>> mll = fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> mean = model.predict(x[100:]).mean
    """

    likelihood: _GaussianLikelihoodBase
    neighbors: int | Literal["auto"] | None = None

    @checked
    def __init__(
        self,
        train_x: ArrayLike,
        train_y: ArrayLike,
        kernel: str | Kernel = "matern",
        mean: str | Mean = "constant",
        likelihood: _GaussianLikelihoodBase | None = None,
        *,
        standardize: bool = True,
        ard: bool = True,
        num_features: int = 2,
        hidden: Sequence[int] = (50, 50),
        num_mixtures: int = 4,
        seed: int = 0,
        warm_start: bool = True,
    ) -> None:
        data = checked_training_data(train_x, train_y)
        make = Standardizer.fit if standardize else Standardizer.identity
        inputs, targets = make(data.x, dim=-2), make(data.y, dim=-1)
        inputs.check_representable("train_x", power=1)
        targets.check_representable("train_y", power=2)
        # A constant column and a single value have scale one, and stay what they are less the mean.
        train_targets = targets.transform(data.y)
        modules = {"kernel": kernel, "mean": mean, "likelihood": likelihood or "default"}
        if likelihood is None:
            likelihood = GaussianLikelihood(batch_shape=data.x.shape[:-2])
        super().__init__(data.x, train_targets, likelihood.to(data.x))
        self.input_standardizer: Standardizer = inputs
        self.target_standardizer: Standardizer = targets
        self._targets_checked = False
        self.column_names: list[str] | None = data.columns
        self._given = data.given
        build: dict[str, Any] = {
            "standardize": bool(standardize),
            "ard": bool(ard),
            "num_features": int(num_features),
            "hidden": [int(width) for width in hidden],
            "num_mixtures": int(num_mixtures),
        }
        self._make_modules(kernel, mean, train_targets, seed, **build)
        names = {name: value if isinstance(value, str) else None for name, value in modules.items()}
        self._config = {**names, **build, "seed": int(seed), "warm_start": bool(warm_start)}

    @property
    def starts_warm(self) -> bool:
        """Whether a fit of the kernel ``"deep"`` begins with :func:`gpclml.fit.warm_start`."""
        return self._config["warm_start"]

    @property
    def target_scale(self) -> Tensor:
        """Original units in one standardized unit of the targets. Shape ``batch_shape``."""
        return self.target_standardizer.scale.squeeze(-1)

    @checked(late=True)
    def check_targets(self, target: Tensor) -> None:
        """Refuses the targets in original units in place of ``train_targets``.

        Objectives call this before they compute the density of targets under ``model(train_x)``,
        which is in standardized units. Other targets of the same points are accepted. On a GPU
        values are compared only until some have passed.

        Args:
            target: Shape ``(*batch, n)``.

        Raises:
            ArgumentError: They are the targets that the model was made with, and it has
                standardized these.
        """
        ours = self._training_data()[1]
        alike = (target.shape, target.dtype, target.device) == (ours.shape, ours.dtype, ours.device)
        if target is ours or not alike:  # what is placed elsewhere is refused by the objective
            return
        if self._targets_checked and not reads_are_free(ours.device):
            return
        ours, target = ours.detach(), target.detach()
        original = self.target_standardizer.inverse(ours)
        rounding = 64 * torch.finfo(ours.dtype).eps
        largest = original.nan_to_num().abs().amax() + self.target_standardizer.offset.abs().amax()
        tolerance = rounding * float(largest)
        is_original = torch.allclose(target, original, 0.0, tolerance, equal_nan=True)
        # Targets of mean 0 and deviation 1 are the same in both units.
        if is_original and not torch.allclose(
            ours, original, 0.0, max(tolerance, rounding), equal_nan=True
        ):
            expected = "model.train_targets, which are standardized as the model's output is"
            fix = "Pass model.train_targets, or make the model with standardize=False."
            raise ArgumentError("target", "the targets in original units", expected, fix)
        self._targets_checked = True

    @checked
    def predict(
        self,
        x: ArrayLike,
        observation_noise: bool | Tensor = True,
        marginal: bool = False,
        solver: Solver = "auto",
        progress: bool | None = None,
        grad: bool | None = None,
        *,
        neighbors: int | Literal["auto"] | None = None,
    ) -> PosteriorNormal:
        """The posterior at x in original units.

        The posterior is computed by a dense factorization and is exact under any settings; missing
        targets are left out. Every module keeps its mode, so it can be called during training. Of
        up to 10,000 float32 points it is computed in float64 and then rounded, so that a model
        predicts the same in both types. The factor, n³/3 operations, is kept for further calls
        until the model changes, if it has at most half a GiB; then a point costs n².

        If the factorization does not fit into memory, each call solves by conjugate gradients to a
        checked tolerance, without gradients. An :class:`~gpclml.inference.IterativePosterior` keeps
        its solve from call to call.

        Args:
            x: Points in original units. Shape ``(*batch, m, d)``, or ``(m,)`` for one column. A
                tensor, array or data frame as the training inputs; arrays and integers are
                converted to their type and device.
            observation_noise: Predict new observations, the default as everywhere in gpclml, or
                the noise-free function; or noise variances of the points, ``(*batch, m)``, in
                standardized units, which a likelihood with fixed noise needs.
            marginal: Give a diagonal covariance: O(m) memory in place of O(m^2).
            solver: "cholesky", "cg" or :class:`~gpclml.linalg.ConjugateGradients`; "auto" takes
                Cholesky where it fits, else conjugate gradients with a warning.
            progress: Whether to show a bar while the variances of many points are computed from a
                factor; None shows it on terminals and in notebooks.
            grad: Whether gradients flow to ``x`` and the parameters, at twice the memory. None
                means only if ``x`` requires a gradient.
            neighbors: Predict each point from so many of its nearest training points: marginals,
                in memory that is linear in the number of training points, for models trained with
                :class:`~gpclml.conditioning.NearestNeighbors`. ``"auto"`` doubles 32 up to 512 as
                long as log densities of training points given their neighbours gain: seconds,
                until the model changes. As ``model.neighbors`` says if None.

        Returns:
            A normal with mean ``(*batch, m)`` and covariance ``(*batch, m, m)``, without GPyTorch's
            absolute floor of variances: in other units its numbers are the same, scaled.

        Raises:
            ShapeError: The columns or the batch do not match the training inputs.
            NonFiniteError: x is not finite.
            ArgumentError: x has another dtype or device than the training inputs, or memory does
                not suffice; the error gives both figures; or the likelihood has fixed noise and
                that of the new points is not given.
            UnknownNameError: The solver is not known.
            UnsupportedError: x asks for a gradient of conjugate gradients or of predictions from
                neighbours, or neighbours are asked for in a batch.
            NotConvergedError: Conjugate gradients do not reach their tolerance.

        Warns:
            SolverWarning: "auto" takes conjugate gradients.
        """
        train_x = self._training_data()[0]
        x = checked_points(x, train_x, self.column_names)
        neighbors = self.neighbors if neighbors is None else neighbors
        if neighbors is not None:
            refuse_gradient(x)
            if max(train_x.ndim, x.ndim) > 2:
                raise UnsupportedError("neighbors", "a batch", "one model, and points (m, d)")
            with evaluating(self), torch.no_grad():
                count = count_neighbors(self, neighbors)
                posterior = posterior_given_neighbors(self, x, count, progress)
                return self._observed(posterior, x, observation_noise, marginal=True)
        # A graph takes twice the memory, so that there is one only where somebody asks for it.
        wanted = x.requires_grad if grad is None else grad
        return self._predict(x, observation_noise, marginal, solver, progress, grad=wanted)

    def _predict(
        self,
        x: Tensor,
        noise: bool | Tensor,
        marginal: bool = False,
        solver: Solver = "auto",
        progress: bool | None = None,
        *,
        grad: bool = True,
        constant: bool = False,
    ) -> PosteriorNormal:
        """The posterior given all training points; ``constant`` as in :func:`exact_posterior`."""
        chosen = choose_posterior_solver(solver, *self._training_data(), x, marginal)
        if chosen is not None:
            return IterativePosterior(self, chosen).predict(x, noise, marginal).distribution
        with evaluating(self), torch.set_grad_enabled(torch.is_grad_enabled() and grad):
            posterior = exact_posterior(self, x, marginal, progress, constant=constant)
            return self._observed(posterior, x, noise, marginal)

    def _observed(
        self, latent: PosteriorNormal, x: Tensor, noise: bool | Tensor, marginal: bool
    ) -> PosteriorNormal:
        """A latent posterior at x with the noise of observations, in original units."""
        posterior = observed_posterior(self.likelihood, latent, x, noise)
        units = self.target_standardizer
        return posterior.in_units(units.scale, units.offset, marginal)

    @property
    def num_outputs(self) -> int:
        """Number of outputs, one, as BoTorch asks for it."""
        return 1

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of models, as BoTorch asks for it."""
        return self._training_data()[0].shape[:-2]

    @checked
    def compute_custom_loss(self, mll: MarginalLogLikelihood, **kwargs: Any) -> Tensor:
        """The loss that BoTorch minimizes under an objective that brings none of its own.

        Under GPyTorch's leave-one-out, which does not score first points, scale, mean and
        lengthscales have weak priors.
        """
        is_open = isinstance(mll, LeaveOneOutPseudoLikelihood)
        with self.weak_priors() if is_open else nullcontext():
            return super().compute_custom_loss(mll, **kwargs)

    @contextmanager
    def weak_priors(self) -> Iterator[bool]:
        """Within the block the hyperparameters have weak priors, if the data are standardized.

        Objectives that do not score first points need them: the density of a point given others
        hardly depends on the prior's variance and mean, so that a line search can raise the scale
        of a kernel together with its lengthscales for as long as it likes. Predictions between the
        points stay, and those beside them are lost. Parts with priors of their own keep these
        alone.

        Yields:
            Whether there are any.
        """
        added, standardizes = [], self._config["standardize"]
        try:
            for module, name, prior in _weak_priors(self) if standardizes else ():
                parameter = cast(Tensor, getattr(module, f"raw_{name}"))
                if parameter.requires_grad and not module._priors:
                    module.register_prior("weak_prior", prior.to(parameter), name)
                    added.append(module)
            yield bool(added)
        finally:
            for module in added:
                del module._modules["weak_prior"], module._priors["weak_prior"]

    def posterior(
        self,
        X: ArrayLike,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Posterior:
        """The posterior at X in original units, as BoTorch's models give it.

        It is what :meth:`predict` computes, for acquisition functions: gradients are those of X;
        hyperparameters are constants, as in GPyTorch, unless the training data require a gradient
        or ``gpytorch.settings.detach_test_caches`` is off. As in BoTorch, and unlike everywhere
        else in gpclml, the noise of observations is left out by default. With ``model.neighbors``
        up to 32 points are predicted together, given the training points that are nearest to any of
        them, and more one by one, with a diagonal covariance.

        Args:
            X: Points in original units. Shape ``(*batch, q, d)``.
            output_indices: None or ``[0]``: there is one output.
            observation_noise: Whether to add the likelihood's noise, of a likelihood with fixed
                noise the mean over the training points, as in BoTorch; or noise variances to add,
                ``(*batch, q, 1)``, in standardized units as BoTorch's outcome transforms have it.
            posterior_transform: Applied to the posterior, if given.

        Returns:
            A ``GPyTorchPosterior`` of mean ``(*batch, q, 1)``, the joint distribution of each q
            points; or what the transform makes of it.

        Raises:
            ArgumentError: Another output is asked for, or as :meth:`predict`.
            ShapeError, NonFiniteError: As :meth:`predict`.

        Examples:
            >>> import torch
            >>> from gpclml import GPRegression
            >>> x = torch.rand(20, 2, dtype=torch.float64)
            >>> GPRegression(x, x.sum(-1).sin()).posterior(x[:3]).mean.shape
            torch.Size([3, 1])
        """
        load_botorch()
        from botorch.posteriors import GPyTorchPosterior

        if output_indices not in (None, [0]):
            raise ArgumentError("output_indices", output_indices, "None or [0]")
        X = points_as_tensor(X, self._training_data()[0], self.column_names, "X")
        noise = observation_noise
        if isinstance(noise, Tensor):
            if noise.shape[-2:] != (X.shape[-2], 1):
                expected = f"(*batch, {X.shape[-2]}, 1)"
                raise ShapeError("observation_noise", tuple(noise.shape), expected)
            noise = noise.squeeze(-1)
        elif noise and isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            noise = cast(Any, self.likelihood.noise_covar).noise.mean(-1, keepdim=True)
            noise = noise.expand(*noise.shape[:-1], X.shape[-2])
        X = checked_points(X, self._training_data()[0], self.column_names)
        if self.neighbors is None:
            distribution = self._predict(X, noise, constant=has_constant_caches(self))
        else:
            with evaluating(self):
                count = count_neighbors(self, self.neighbors)
                distribution = joint_posterior_given_neighbors(self, X, count)
                distribution = self._observed(distribution, X, noise, marginal=False)
        posterior = GPyTorchPosterior(distribution)
        return posterior if posterior_transform is None else posterior_transform(posterior, X=X)

    @checked
    def condition_on_observations(self, X: Tensor, Y: Tensor) -> GPRegression:
        """The model of its own and further observations, with the same hyperparameters and units.

        Args:
            X: Points in original units. Shape ``(*batch, q, d)``.
            Y: Their targets in original units. Shape ``(*batch, q, 1)``, as BoTorch has them.

        Returns:
            A model with the batch shapes of X, Y and the training data broadcast. It shares all
            parameters with this one; gradients flow to X and Y.

        Raises:
            ShapeError: X has other columns than the training inputs, or Y does not fit X.
            UnsupportedError: A likelihood with fixed noise, which the new points have none of.
        """
        inputs, targets = self._training_data()
        if X.ndim < 2 or X.shape[-1] != inputs.shape[-1]:
            raise ShapeError("X", tuple(X.shape), f"(*batch, q, {inputs.shape[-1]})")
        if Y.shape[-2:] != (X.shape[-2], 1):
            raise ShapeError("Y", tuple(Y.shape), f"(*batch, {X.shape[-2]}, 1)")
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            got = "fixed noise variances, for the training points only"
            fix = "Make a GPRegression of all points with their noise."
            raise UnsupportedError("model", got, "a learned noise", fix)
        new_targets = self.target_standardizer.transform(Y.squeeze(-1))
        batch = torch.broadcast_shapes(X.shape[:-2], new_targets.shape[:-1], inputs.shape[:-2])
        every_x = [x.expand(*batch, *x.shape[-2:]) for x in (inputs, X)]
        every_y = [y.expand(*batch, y.shape[-1]) for y in (targets, new_targets)]
        model = copy.copy(self)
        model.set_train_data(torch.cat(every_x, -2), torch.cat(every_y, -1), strict=False)
        return model

    @checked
    def fantasize(
        self, X: Tensor, sampler: Any, observation_noise: bool | Tensor | None = None, **kwargs: Any
    ) -> GPRegression:
        """Models of draws of observations at X, as look-ahead acquisition functions ask for them.

        Args:
            X: Points in original units. Shape ``(*batch, q, d)``.
            sampler: BoTorch's ``MCSampler`` of the draws.
            observation_noise: As for :meth:`posterior`; None means with the likelihood's noise.
            **kwargs: Further arguments of BoTorch's models; not used.

        Returns:
            A model whose batch shape begins with the shape of the draws.

        Raises:
            ShapeError, UnsupportedError: As :meth:`condition_on_observations`.

        Examples:
            >>> import torch
            >>> from botorch.acquisition import qKnowledgeGradient
            >>> from gpclml import GPRegression
            >>> x = torch.rand(20, 2, dtype=torch.float64)
            >>> acquisition = qKnowledgeGradient(GPRegression(x, x.sum(-1).sin()), num_fantasies=8)
        """
        noise = True if observation_noise is None else observation_noise
        draws = sampler(self.posterior(X, observation_noise=noise))
        return self.condition_on_observations(X, draws)

    @checked
    def with_kernel(self, kernel: str | Kernel) -> GPRegression:
        """A model of the same data in the same units, made anew with another kernel.

        Args:
            kernel: A name, or a GPyTorch kernel.

        Returns:
            The untrained model. A mean or likelihood that was given as an object is copied with its
            current values.
        """
        given = self._config["likelihood"] is None
        config: dict[str, Any] = {
            **self._config,
            "kernel": kernel,
            "mean": self._config["mean"] or copy.deepcopy(self.mean_module),
            "likelihood": copy.deepcopy(self.likelihood) if given else None,
        }
        inputs, targets = self._training_data()
        # Made of targets in original units, then given these, which are the same up to rounding.
        original = self.target_standardizer.inverse(targets)
        model = type(self)(inputs, original, **config)
        for name in ("input_standardizer", "target_standardizer"):
            model.get_submodule(name).load_state_dict(self.get_submodule(name).state_dict())
        model.set_train_data(targets=targets, strict=False)
        model.column_names, model._given = self.column_names, self._given
        model.neighbors = self.neighbors
        return model

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model and its training data to one file.

        Args:
            path: File to write; replaced if it is there.

        Raises:
            DataError: The file cannot be written.
            UnsupportedError: A part given as an object has a state that could not be read back.
        """
        train_x, train_targets = self._training_data()
        content = {
            "config": {**self._config, "columns": self.column_names, "neighbors": self.neighbors},
            "state_dict": dict(self.state_dict()),
            "train_x": train_x.detach(),
            "train_targets": train_targets,
        }
        write_checkpoint(path, _FORMAT, content)

    @classmethod
    @checked
    def load(
        cls,
        path: str | os.PathLike[str],
        kernel: Kernel | None = None,
        mean: Mean | None = None,
        likelihood: _GaussianLikelihoodBase | None = None,
        map_location: Any = None,
    ) -> GPRegression:
        """Reads a model that :meth:`save` wrote; its predictions are the same bit for bit.

        Args:
            path: File to read.
            kernel: The kernel, of the same build, if the model was made with a kernel object.
            mean: The mean, if the model was made with a mean object.
            likelihood: The likelihood, if it was not the default one.
            map_location: Where the model goes, as for ``torch.load``.

        Returns:
            The model, in train mode.

        Raises:
            DataError: The file is missing, damaged or not such a checkpoint.
            ArgumentError: An object that the model was made with is missing or does not fit.
        """
        content = read_checkpoint(path, _FORMAT, map_location, _REQUIRED)
        config, state = content["config"], content["state_dict"]
        given = {"kernel": kernel, "mean": mean, "likelihood": likelihood}
        for name, module in given.items():
            if module is None and config.get(name, "") is None:
                expected = f"the {name} object the model was made with"
                fix = f"Call load(path, {name}=...) with one built as when the model was made."
                raise ArgumentError(name, None, expected, fix)
        try:
            options = {name: config[name] or given[name] for name in ("kernel", "mean")}
            options = {**config, **options, "likelihood": likelihood}
            columns, neighbors = options.pop("columns"), options.pop("neighbors")
            # Networks are made before their state is loaded, as large as the file asks for.
            widths = [content["train_x"].shape[-1], *options["hidden"]]
            name, asked = str(options["kernel"]), 0
            is_deep = name.startswith("deep")
            if is_deep or options["mean"] == "mlp":
                asked += sum(a * b for a, b in pairwise(widths))
            asked += options["num_features"] if is_deep else 0
            asked += options["num_mixtures"] if name.startswith("spectral") else 0
            if asked > (stored := sum(entry.numel() for entry in state.values())):
                raise KeyError(f"{asked} parameters, of which it holds {stored}")
            scale, offset = (state[f"target_standardizer.{name}"] for name in ("scale", "offset"))
            model = cls(content["train_x"], content["train_targets"] * scale + offset, **options)
            # An entry that is not there would have been replaced by a default.
            if unlike := model._config.keys() ^ (config.keys() - {"columns", "neighbors"}):
                raise KeyError(*unlike)
            model.load_state_dict(state)
        except (ArgumentError, AttributeError, KeyError, RuntimeError, TypeError) as error:
            got = str(error).splitlines()[-1].strip()
            if any(module is not None for module in given.values()):
                name, expected = "kernel, mean or likelihood", "the saved state"
                fix = "Pass objects of the same classes and sizes as when the model was made."
                raise ArgumentError(name, got, expected, fix) from error
            raise DataError(
                f"path: {path} does not hold all of one model ({got}). Restore a copy of it, or "
                "save the model again."
            ) from error
        model.set_train_data(targets=content["train_targets"], strict=False)
        model.column_names, model.neighbors = columns, neighbors
        return model

    def _in_original_units(self, path: str, value: Tensor) -> Tensor:
        scale, offset = self.target_standardizer.scale, self.target_standardizer.offset
        if path == "likelihood.noise_covar.noise" and value.shape == scale.shape:
            return value * scale.square()
        scale, offset = scale.squeeze(-1), offset.squeeze(-1)
        if path == "covar_module.outputscale" and value.shape == scale.shape:
            return value * scale.square()
        if path == "mean_module.constant" and value.shape == scale.shape:
            return value * scale + offset
        return super()._in_original_units(path, value)

    def extra_repr(self) -> str:
        """The training data, and what they were converted from."""
        shape, dtype = (x := self._training_data()[0]).shape, x.dtype
        given = f"; {self._given}" if self._given else ""
        return f"train_x: {' x '.join(map(str, shape))}, {str(dtype).removeprefix('torch.')}{given}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "prediction_strategy": None}  # which may hold autograd graphs


def _weak_priors(model: GPRegression) -> Iterator[tuple[Any, str, Prior]]:
    """Modules, names of their hyperparameters, and priors."""
    if isinstance(model.mean_module, ConstantMean):
        yield model.mean_module, "constant", NormalPrior(0.0, 1.0)
    for kernel in scales_of(model.covar_module):
        if isinstance(kernel, SpectralMixtureKernel):
            share = -math.log(cast(int, kernel.num_mixtures))
            yield kernel, "mixture_weights", LogNormalPrior(share, _LOG_SCALE)
        else:
            yield kernel, "outputscale", LogNormalPrior(0.0, _LOG_SCALE)
    kernels = list(model.covar_module.modules())
    if any(isinstance(kernel, DeepKernel) for kernel in kernels):
        return  # distances between features have no scale that is known
    dimensions = cast(Any, model.train_inputs)[0].shape[-1]
    for kernel in kernels:
        if isinstance(kernel, RBFKernel | MaternKernel | RQKernel):
            start = 0.5 * math.log(kernel.ard_num_dims or dimensions)
            yield kernel, "lengthscale", LogNormalPrior(start, _LOG_LENGTHSCALE)


def scales_of(kernel: Kernel) -> Iterator[Kernel]:
    """The outermost parts of a kernel that have a scale."""
    if isinstance(kernel, ScaleKernel | SpectralMixtureKernel):
        yield kernel
    elif isinstance(kernel, AdditiveKernel | ProductKernel):
        for summand in cast(Any, kernel.kernels):
            yield from scales_of(summand)
