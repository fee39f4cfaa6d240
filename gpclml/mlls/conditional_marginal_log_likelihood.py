"""The conditional log marginal likelihood as a GPyTorch objective."""

from __future__ import annotations

from typing import Any, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml._utils.memory import reads_are_free
from gpclml._utils.resuming import ResumableDraws
from gpclml.conditioning import Conditioning, KFold, LastPoints, RandomHoldout, Split
from gpclml.errors import NonFiniteError, UnsupportedError
from gpclml.inference.observations import Observations, observations, training_observations
from gpclml.inference.solvers import Solver, check_solver
from gpclml.linalg import IterativeReport
from gpclml.mlls._held_out import held_out_density
from gpclml.mlls._terms import prior_and_added_loss
from gpclml.mlls._train_mode import check_targets, check_train_mode

__all__ = ["ConditionalMarginalLogLikelihood"]


class ConditionalMarginalLogLikelihood(ResumableDraws, ExactMarginalLogLikelihood):
    r"""The log density of held-out training points given the others, in nats per point.

    .. math:: \frac{1}{|B|} \sum_B \log p(y_B \mid y_{-B}, X)
        + \frac{1}{n} \left(\log p(\theta) + \text{added losses}\right)

    over the held-out blocks B of a :class:`~gpclml.conditioning.Conditioning`, |B| the number
    of observed targets held out in all blocks and n the number observed (Lotfi et al. 2022,
    Section 6). Priors weigh 1/n, as in ``gpytorch.mlls.ExactMarginalLogLikelihood``. With
    every point held out, ``LastPoints(m=0)``, this is the log marginal likelihood; with
    ``LeaveOneOut()`` it is ``gpytorch.mlls.LeaveOneOutPseudoLikelihood``.

    By default a fresh random tenth is held out at each call, which is what a stochastic
    optimizer wants. A line search needs a fixed function: BoTorch's ``fit_gpytorch_mll`` asks
    for :meth:`compute_custom_loss`, which uses ten folds of one seeded partition instead. A
    strategy that is passed serves both, redrawn at each call in the first case (unless it has
    its own seed) and drawn once in the second.

    Missing (NaN) targets are left out under
    ``gpytorch.settings.observation_nan_policy("mask")``, each batch member on its own: they
    are neither scored nor conditioned on nor counted. The rows held out are the same in all
    members; a member in which all targets of a redrawn block are missing scores 0 in that call.

    Of a model in eval mode the output is a posterior. The objective is then the joint density of
    the targets under it, per target, with the priors' share, whatever the conditioning: what
    ``gpytorch.mlls.ExactMarginalLogLikelihood`` gives there, so that validation steps need no
    change.

    Args:
        likelihood: A Gaussian likelihood of GPyTorch: homoskedastic, fixed noise, multitask.
        model: An exact GP: of GPyTorch, or BoTorch's SingleTaskGP, MultiTaskGP,
            KroneckerMultiTaskGP. For a ModelListGP use
            :class:`~gpclml.mlls.SumMarginalLogLikelihood`.
        conditioning: Which points are held out; see above for the default.
        factor_dtype: Type to factor covariances in; see
            :func:`gpclml.linalg.cholesky.factorization_dtype`.
        seed: Seed of all draws of held-out points. The state of the generator is part of
            ``state_dict()``, so that a resumed training draws the same points.
        solver: "cholesky", exact; "cg" or :class:`~gpclml.linalg.ConjugateGradients`, memory for n
            times the size of a block, with a tolerance that is checked; "auto", Cholesky where it
            fits into memory, else conjugate gradients with a warning.

    Attributes:
        last_solve: How well conjugate gradients solved for each block of the last call, a
            :class:`~gpclml.linalg.IterativeReport` each; empty after Cholesky.

    Raises:
        UnsupportedError: If the model is not an exact GP, the likelihood not Gaussian or the
            conditioning no strategy.
        NonFiniteError: If the model's training inputs hold NaN or infinite values.

    Note:
        Value and gradient cost n³/3 + 3 n² b for one block of b points, about 2.3 n³ for folds
        and leave-one-out; a gradient of the log marginal likelihood is about n³. Batch shapes
        carry through. Second derivatives are refused.

    Examples:
        >>> mll = ConditionalMarginalLogLikelihood(likelihood, model)
        >>> loss = -mll(model(train_x), train_y)
        >>> loss.backward()
    """

    @checked
    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        conditioning: Conditioning | None = None,
        *,
        factor_dtype: torch.dtype | None = None,
        seed: int = 0,
        solver: Solver = "auto",
    ) -> None:
        _check_parts(likelihood, model)
        if not isinstance(conditioning, Conditioning | None):
            raise UnsupportedError(
                "conditioning",
                repr(conditioning),
                "a strategy of gpclml.conditioning, or None",
                "The log marginal likelihood is LastPoints(m=0).",
            )
        super().__init__(likelihood, model)
        self.solver: Solver = check_solver(solver)
        self.last_solve: tuple[IterativeReport, ...] = ()
        self.conditioning = conditioning
        self.factor_dtype = factor_dtype
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    @checked(late=True)
    def forward(
        self, function_dist: MultivariateNormal, target: Tensor, *params: Any, **kwargs: Any
    ) -> Tensor:
        """The objective on freshly drawn held-out points.

        Args:
            function_dist: The model's output at its training inputs, event shape ``(n,)`` or,
                for a ``MultitaskMultivariateNormal``, ``(n, t)``; held-out indices are rows.
                In eval mode its output at any inputs.
            target: Targets of these inputs, ``(*batch, n)`` or ``(*batch, n, t)``.
            *params: Passed on to likelihood and added losses.
            **kwargs: Passed on to the likelihood.

        Returns:
            Nats per observed held-out target, ``(*batch,)``; larger is better.

        Raises:
            ShapeError: If the target does not fit the distribution.
            NonFiniteError: If targets (outside the mask policy), mean or covariance are not
                finite.
            NotPSDError: If a covariance is not positive definite even with jitter.
            NotConvergedError: If conjugate gradients do not reach their tolerance.
            ArgumentError: If more points are asked for than there are, or more memory; if the
                model standardizes its targets and these are not standardized.
        """
        if self.model.training:
            check_targets(self.model, target)
        checked = reads_are_free(target.device)
        data = observations(
            self.likelihood, function_dist, target, *params, checked=checked, **kwargs
        )
        if not self.model.training:
            every = LastPoints(m=0)
            return self.objective_at(data, data.split(every, None))
        redrawn = self._drawing.redraws
        return self.objective_at(data, self.draw_split(data), redrawn=redrawn)

    def compute_custom_loss(self, **kwargs: Any) -> Tensor:
        """The negative objective on the model's own data with held-out points that stay fixed.

        BoTorch's ``fit_gpytorch_mll`` calls this in place of the objective: a line search
        compares values of one function.

        Args:
            **kwargs: Passed on to the likelihood.

        Returns:
            The loss, ``(*batch,)``.
        """
        model = cast(ExactGP, self.model)
        check_train_mode(model)
        data = training_observations(model, self.likelihood, **kwargs)
        conditioning = KFold(10) if self.conditioning is None else self.conditioning
        generator = torch.Generator().manual_seed(self.seed)
        return -self.objective_at(data, data.split(conditioning, generator))

    def draw_split(self, data: Observations) -> Split:
        """The held-out blocks of the next call and what they are conditioned on.

        They are drawn afresh unless the strategy is seeded.

        Args:
            data: The Gaussian of the observations, which says what is observed.

        Returns:
            Flat target indices on the CPU.
        """
        return data.split(self._drawing, self._generator)

    @property
    def _drawing(self) -> Conditioning:
        """The strategy of a call of the objective."""
        return RandomHoldout(0.1) if self.conditioning is None else self.conditioning

    def objective_at(self, data: Observations, split: Split, *, redrawn: bool = False) -> Tensor:
        """The objective at given held-out points.

        Args:
            data: The Gaussian of the model's observations.
            split: Flat target indices.
            redrawn: Whether the next call has other points: a batch member without an observed
                target among these then scores 0.

        Returns:
            Nats per observed held-out target, ``(*batch,)``.
        """
        part, blocks = data.at(split)
        value, self.last_solve = held_out_density(
            part, blocks, self.solver, self.factor_dtype, redrawn=redrawn
        )
        terms = prior_and_added_loss(self.model, value.shape, data.params)
        return value + terms / data.num_observed()


def _check_parts(likelihood: Likelihood, model: ExactGP) -> None:
    if not isinstance(model, ExactGP):
        raise UnsupportedError(
            "model",
            type(model).__name__,
            "an exact GP (gpytorch.models.ExactGP or a subclass)",
            "For a ModelListGP use gpclml.mlls.SumMarginalLogLikelihood(likelihood, model); "
            "approximate GPs have no exact conditional density.",
        )
    if not isinstance(likelihood, _GaussianLikelihoodBase):
        raise UnsupportedError(
            "likelihood",
            type(likelihood).__name__,
            "a Gaussian likelihood of GPyTorch",
            "Other likelihoods have no exact conditional density.",
        )
    for x in model.train_inputs or ():
        bad = int((~torch.isfinite(x)).sum())
        if bad:
            raise NonFiniteError(
                "model.train_inputs",
                f"{bad} non-finite of {x.numel()} values (shape {tuple(x.shape)})",
                "finite inputs",
                "Remove or impute those rows before building the model.",
            )
