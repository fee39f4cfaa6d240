"""The conditional log marginal likelihood as a GPyTorch objective, and those it is at its ends."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.models import ExactGP, IndependentModelList
from torch import Tensor

from gpclml._utils.arguments import all_finite, checked, reads_are_free, seeded
from gpclml._utils.resuming import ResumableDraws
from gpclml.conditioning import (
    Conditioning,
    KFold,
    LastPoints,
    LeaveOneOut,
    NearestNeighbors,
    RandomHoldout,
    RandomOrderings,
    Split,
)
from gpclml.errors import NonFiniteError, UnsupportedError
from gpclml.inference import Observations, Road, Solver, training_observations
from gpclml.inference.neighbours import mean_log_density, neighbors_road, training_metric
from gpclml.inference.observations import approximated_as, missing_targets, observations
from gpclml.linalg import IterativeReport
from gpclml.mlls._terms import check_train_mode, plus_priors

if TYPE_CHECKING:
    from gpclml.inference.laplace import Starts

_DEFAULT = RandomHoldout(0.1)

# A checker that does not read upstream's source knows this base.
assert issubclass(gpytorch.mlls.ExactMarginalLogLikelihood, torch.nn.Module)


class ConditionalMarginalLogLikelihood(ResumableDraws, gpytorch.mlls.ExactMarginalLogLikelihood):
    r"""The log density of held-out training points given the others, in nats per point.

    .. math:: \frac{1}{|B|} \sum_B \log p(y_B \mid y_{-B}, X)
        + \frac{1}{n} \left(\log p(\theta) + \text{added losses}\right)

    over the held-out blocks B of a :class:`~gpclml.conditioning.Conditioning`, |B| the number
    of observed targets held out in all blocks and n the number observed (Lotfi et al. 2022,
    Section 4.3). Priors weigh 1/n, as in ``gpytorch.mlls.ExactMarginalLogLikelihood``. With
    every point held out, ``LastPoints(m=0)``, this is the log marginal likelihood; with
    ``LeaveOneOut()`` it is ``gpytorch.mlls.LeaveOneOutPseudoLikelihood``.

    By default a fresh random tenth is held out at each call, which is what a stochastic
    optimizer wants. A line search needs a fixed function: BoTorch's ``fit_gpytorch_mll`` asks
    for :meth:`compute_custom_loss`, which uses ten folds of one seeded partition instead. A
    strategy that you pass is used for both. It draws anew at each call of the objective, unless
    it has its own seed, and once for a line search.

    Train kernels and means with a network by it, and plain kernels by ``LastPoints(m=0)``: first
    points are not scored, which leaves the scale of the prior open.

    Under ``gpytorch.settings.observation_nan_policy("mask")`` missing (NaN) targets are neither
    scored nor conditioned on nor counted, in each batch member on its own. The rows held out are
    the same in all members; a member in which all targets of a redrawn block are missing scores 0
    in that call.

    In eval mode the output of a model is its posterior. As in
    ``gpytorch.mlls.ExactMarginalLogLikelihood``, the objective is then the joint log density of the
    targets under that posterior, divided by their number, plus the priors; the conditioning has no
    effect.

    Args:
        likelihood: A Gaussian likelihood of GPyTorch: homoskedastic, fixed noise, multitask; or
            that of a :class:`~gpclml.models.LatentGP`, by the model's approximation.
        model: An exact GP: of GPyTorch, or BoTorch's SingleTaskGP, MultiTaskGP,
            KroneckerMultiTaskGP. For a ModelListGP use
            :class:`~gpclml.mlls.SumMarginalLogLikelihood`. Or a ``LatentGP``, under whose
            likelihood the density of a held-out block is the difference of two evidences, each by
            an approximation of its own.
        conditioning: Which points are held out; see above for the default.
        seed: Seed of all draws of held-out points. The state of the generator is part of
            ``state_dict()``, so that a resumed training draws the same points.
        solver: "cholesky" is exact; "cg" or :class:`~gpclml.linalg.ConjugateGradients` needs memory
            only for n times the size of a block, and checks a tolerance; "auto" is Cholesky where
            it fits into memory, else conjugate gradients with a warning.

    Attributes:
        last_solve: How well conjugate gradients solved for each block of the last call, a
            :class:`~gpclml.linalg.IterativeReport` each; empty after Cholesky.

    Raises:
        UnsupportedError: If the model is not an exact GP, the likelihood not Gaussian or the
            conditioning is not a strategy.
        NonFiniteError: If the model's training inputs hold NaN or infinite values.

    Note:
        Value and gradient cost n³/3 + 3 n² b for one block of b points, about 2.3 n³ for folds
        and leave-one-out; a gradient of the log marginal likelihood is about n³. Batch shapes
        carry through. Second derivatives are refused.

    Examples:
        >>> import torch
        >>> from gpclml import ConditionalMarginalLogLikelihood, GPRegression
        >>> x = torch.rand(50, 3, dtype=torch.float64)
        >>> model = GPRegression(x, x.sum(-1).sin(), "deep_bottleneck")
        >>> mll = ConditionalMarginalLogLikelihood(model.likelihood, model)
        >>> loss = -mll(model(*model.train_inputs), model.train_targets)
        >>> loss.backward()
    """

    @checked
    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP | IndependentModelList,  # the latter is refused by the name of what takes it
        conditioning: Conditioning | None = None,
        *,
        seed: int = 0,
        solver: Solver = "auto",
    ) -> None:
        if isinstance(model, IndependentModelList):
            suggestion = "Use gpclml.mlls.SumMarginalLogLikelihood(model.likelihood, model)."
            raise UnsupportedError("model", type(model).__name__, "one ExactGP", suggestion)
        is_latent = not isinstance(likelihood, _GaussianLikelihoodBase)
        if is_latent:
            _check_latent(likelihood, model, conditioning)
        for x in model.train_inputs or ():
            if bad := int((~torch.isfinite(x)).sum()):
                got = f"{bad} non-finite of {x.numel()} values (shape {tuple(x.shape)})"
                suggestion = "Remove or impute those rows before building the model."
                raise NonFiniteError("model.train_inputs", got, "finite inputs", suggestion)
        self._fixed_neighbors: Split | None = None
        if is_latent:  # which GPyTorch's own constructor refuses
            super(gpytorch.mlls.ExactMarginalLogLikelihood, self).__init__(likelihood, model)
        else:
            super().__init__(likelihood, model)
        self.solver: Solver = solver
        self.last_solve: tuple[IterativeReport, ...] = ()
        # Neighbours are those of this model's points.
        is_own = isinstance(conditioning, NearestNeighbors)
        self.conditioning = copy.deepcopy(conditioning) if is_own else conditioning
        self.seed = seed
        self._generator = seeded(seed)
        self._starts: Starts = {}  # of the modes or sites that a line search goes through
        self._approximation: str | None = None  # in place of the model's

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
            NotConvergedError: If conjugate gradients do not reach their tolerance, or targets are
                not Gaussian and scales of their model too large for its approximation.
            ArgumentError: If more points are asked for than there are, or more memory; if the
                model standardizes its targets and these are not standardized.
        """
        if hasattr(self.model, "check_targets"):  # it refuses targets in original units
            cast(Any, self.model).check_targets(target)
        checked = reads_are_free(target.device)
        data = observations(
            self.likelihood, function_dist, target, *params, checked=checked, **kwargs
        )
        if not data.is_gaussian:
            data = approximated_as(self.model, data, self._approximation)
        conditioning = self.conditioning or _DEFAULT
        # In eval mode the output is a posterior, of which all targets are scored.
        if not self.model.training:
            conditioning = LastPoints(m=0)
        split = data.split(conditioning, self._generator)
        # Redrawn blocks count their targets otherwise only where some are missing.
        redrawn = data.missing is not None and conditioning.redraws
        return self.objective_at(data, split, redrawn=redrawn)

    def redrawn_objective(self) -> Tensor:
        """The objective at points drawn by ``NearestNeighbors``, ``()``, of these rows alone.

        It is what ``mll(model(x), y)`` gives where the prior of some points is that of all points
        restricted to them, at a cost that does not depend on their number but where neighbours are
        looked up in a new metric.
        """
        return self._objective_of_few(self._drawn_neighbors(self._generator))

    def fixed_objective(self) -> Tensor:
        """The same at points that stay fixed, drawn by the seed in the metric of the first call."""
        if self._fixed_neighbors is None:
            cast(NearestNeighbors, self.conditioning).look_again()
            self._fixed_neighbors = self._drawn_neighbors(seeded(self.seed))
        return self._objective_of_few(self._fixed_neighbors)

    def _drawn_neighbors(self, generator: torch.Generator) -> Split:
        model, conditioning = cast(ExactGP, self.model), cast(NearestNeighbors, self.conditioning)
        targets = cast(Tensor, model.train_targets)
        transform: Any = getattr(model, "input_transform", None)
        observed = metric = None
        if conditioning.needs_points:
            if getattr(transform, "learn_coefficients", False):  # from all rows
                transform(cast(Any, model.train_inputs)[0])
            missing = missing_targets(targets)
            observed = None if missing is None else ~missing
            metric = partial(training_metric, model)
        with _without_learning(model):
            return conditioning.split(len(targets), generator, observed, metric)

    def _objective_of_few(self, split: Split) -> Tensor:
        """The objective of the rows of a split, for which alone the model is asked."""
        targets = cast(Tensor, self.model.train_targets)
        rows, local = split.restricted()
        rows = rows.to(targets.device)
        data = observations(self.likelihood, self._prior_at(rows), targets[rows])
        num_rows = cast(NearestNeighbors, self.conditioning).num_rows
        return plus_priors(mean_log_density(data, local), self.model, num_rows, data.params)

    def _prior_at(self, rows: Tensor) -> MultivariateNormal:
        """The model's output at some of its training points."""
        model = cast(Any, self.model)
        with _without_learning(model):
            return model.forward(*(x.index_select(-2, rows) for x in model.train_inputs))

    def compute_custom_loss(self, **kwargs: Any) -> Tensor:
        """What a line search minimizes: the negative objective at held-out points that stay fixed.

        BoTorch's ``fit_gpytorch_mll`` calls this in place of the objective: a line search
        compares values of one function. Where first points are not scored, the scale, mean and
        lengthscales of a ``GPRegression`` have the weak priors that :func:`~gpclml.fit.fit_mll`
        gives them; they are part of this loss, and not of the objective.

        Args:
            **kwargs: Passed on to the likelihood.

        Returns:
            The loss, ``(*batch,)``.
        """
        weak_priors = getattr(self.model, "weak_priors", nullcontext)
        with nullcontext() if self.scores_first_points else weak_priors():
            return self._fixed_loss(**kwargs)

    def _fixed_loss(self, **kwargs: Any) -> Tensor:
        """The negative objective on the model's own data with held-out points that stay fixed."""
        model = cast(ExactGP, self.model)
        check_train_mode(model)
        data: Any = training_observations(model, self.likelihood, **kwargs)
        if not data.is_gaussian:  # a line search finds modes near those of its last step
            data = approximated_as(model, data, self._approximation)
            data = replace(cast(Any, data), starts=self._starts)
        return -self.objective_at(data, self._fixed_split(data))

    def train(self, mode: bool = True) -> Self:
        """As of any module; neighbours are looked up anew after it, and dropped in eval mode."""
        self._fixed_neighbors = None
        self._starts.clear()
        if not mode and isinstance(self.conditioning, NearestNeighbors):
            self.conditioning = copy.deepcopy(self.conditioning)
        return super().train(mode)

    def _fixed_split(self, data: Observations) -> Split:
        if isinstance(self.conditioning, NearestNeighbors):
            # A search needs one function: neighbours stay those of the metric at its start.
            if self._fixed_neighbors is None:
                self.conditioning.look_again()
                self._fixed_neighbors = data.split(self.conditioning, seeded(self.seed))
            return self._fixed_neighbors
        return data.split(self.conditioning or KFold(10), seeded(self.seed))

    def road(self) -> Road:
        """Which way a step goes on the model's own data, and why not a faster one.

        Returns:
            For the model and settings as they are now, such as "closed form, Cholesky", or
            "GPyTorch's kernel, Cholesky" for the reason "MyKernel is a subclass of RBFKernel".

        Raises:
            ModelModeError: The model is in eval mode.
            ArgumentError: A step would need more memory than there is.

        Examples:
            >>> import torch
            >>> from gpclml import ConditionalMarginalLogLikelihood, GPRegression
            >>> x = torch.rand(50, 3, dtype=torch.float64)
            >>> model = GPRegression(x, x.sum(-1).sin())
            >>> ConditionalMarginalLogLikelihood(model.likelihood, model).road().way
            'closed form, Cholesky'
        """
        model = cast(ExactGP, self.model)
        check_train_mode(model)
        if isinstance(self.conditioning, NearestNeighbors):
            targets = cast(Tensor, model.train_targets)
            size = min(self.conditioning.k + 1, targets.shape[-1])
            prior = self._prior_at(torch.arange(1, device=targets.device))
            return neighbors_road(prior.lazy_covariance_matrix, size)
        with torch.no_grad():
            data = training_observations(model, self.likelihood)
            data = approximated_as(model, data, self._approximation)
            split = data.split(copy.deepcopy(self.conditioning or _DEFAULT), seeded(self.seed))
            observed, blocks = data.at(split)
            return observed.road(self.solver, blocks)

    def draw_split(self, data: Observations) -> Split:
        """Flat target indices of the next call's held-out blocks, drawn afresh unless seeded."""
        return data.split(self.conditioning or _DEFAULT, self._generator)

    @property
    def scores_first_points(self) -> bool:
        """Whether every point is scored, also the first, given no other."""
        given = self.conditioning
        if isinstance(given, NearestNeighbors):
            return given.order == "joint"
        return isinstance(given, LastPoints | RandomOrderings) and given.m == 0

    def objective_at(self, data: Observations, split: Split, *, redrawn: bool = False) -> Tensor:
        """The objective at given held-out points, flat target indices, ``(*batch,)``.

        With ``redrawn`` blocks, which the next call has others of, a batch member that has no
        observed target in these scores 0.
        """
        if split.has_neighbors:
            value, self.last_solve = mean_log_density(data, split), ()
        else:
            observed, blocks = data.at(split)
            value, self.last_solve = _held_out_density(
                observed, blocks, self.solver, redrawn=redrawn
            )
        return plus_priors(value, self.model, data.num_observed(), data.params)


class ExactMarginalLogLikelihood(ConditionalMarginalLogLikelihood):
    r"""The log marginal likelihood of an exact GP, in nats per point.

    .. math:: \frac{1}{n} \left(\log \mathcal{N}(y; m, K + \Sigma) + \log p(\theta)
        + \text{added losses}\right)

    (Rasmussen and Williams 2006, Equation 2.30). It is that of GPyTorch, with its signature, by one
    factorization with a gradient in closed form, and the same as
    :class:`~gpclml.mlls.ConditionalMarginalLogLikelihood` with ``LastPoints(m=0)``, which says
    what models are taken, what is raised and what a step costs.

    Args:
        likelihood: A Gaussian likelihood of GPyTorch.
        model: An exact GP of GPyTorch or BoTorch.

    Examples:
        >>> import torch
        >>> from gpclml import ExactMarginalLogLikelihood, GPRegression
        >>> x = torch.rand(50, 3, dtype=torch.float64)
        >>> model = GPRegression(x, x.sum(-1).sin())
        >>> mll = ExactMarginalLogLikelihood(model.likelihood, model)
        >>> (-mll(model(*model.train_inputs), model.train_targets)).backward()
    """

    @checked
    def __init__(self, likelihood: Likelihood, model: ExactGP) -> None:
        if not isinstance(likelihood, _GaussianLikelihoodBase):
            suggestion = "Use LaplaceMarginalLogLikelihood(likelihood, model), an approximation."
            kind, expected = type(likelihood).__name__, "a Gaussian likelihood of GPyTorch"
            raise UnsupportedError("likelihood", kind, expected, suggestion)
        super().__init__(likelihood, model, LastPoints(m=0))


class LeaveOneOutPseudoLikelihood(ConditionalMarginalLogLikelihood):
    r"""The mean log density of each point given all others, in nats per point.

    .. math:: \frac{1}{n} \left(\sum_i \log p(y_i \mid y_{-i}, X) + \log p(\theta)
        + \text{added losses}\right)

    (Rasmussen and Williams 2006, Section 5.4.2). It is that of GPyTorch, with its signature, by one
    inverse with a gradient in closed form, and the same as
    :class:`~gpclml.mlls.ConditionalMarginalLogLikelihood` with ``LeaveOneOut()``, which says
    what models are taken, what is raised and what a step costs.

    Args:
        likelihood: A Gaussian likelihood of GPyTorch.
        model: An exact GP of GPyTorch or BoTorch.

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression, LeaveOneOutPseudoLikelihood
        >>> x = torch.rand(50, 3, dtype=torch.float64)
        >>> model = GPRegression(x, x.sum(-1).sin())
        >>> mll = LeaveOneOutPseudoLikelihood(model.likelihood, model)
        >>> (-mll(model(*model.train_inputs), model.train_targets)).backward()
    """

    @checked
    def __init__(self, likelihood: Likelihood, model: ExactGP) -> None:
        super().__init__(likelihood, model, LeaveOneOut())


def _check_latent(
    likelihood: Likelihood, model: ExactGP, conditioning: Conditioning | None
) -> None:
    """Refuses what approximations have no held-out densities of."""
    kind = type(likelihood).__name__
    if not isinstance(model, ExactGP) or isinstance(
        getattr(model, "likelihood", None), _GaussianLikelihoodBase
    ):
        suggestion = "Make the model a gpclml.models.LatentGP of that likelihood."
        expected = "a Gaussian likelihood of GPyTorch, or a LatentGP"
        raise UnsupportedError("likelihood", kind, expected, suggestion)
    if isinstance(conditioning, LeaveOneOut | NearestNeighbors):
        name = type(conditioning).__name__
        raise UnsupportedError(
            "conditioning", f"{name} under {kind}", "LastPoints, KFold or RandomHoldout",
            "Each point would take an approximation of its own; KFold(10) takes ten.",
        )  # fmt: skip


@contextmanager
def _without_learning(model: ExactGP) -> Iterator[None]:
    """Within the block BoTorch's transform of inputs keeps bounds that it learns from all rows."""
    transform: Any = getattr(model, "input_transform", None)
    if not getattr(transform, "learn_coefficients", False):
        yield
        return
    transform.learn_coefficients = False
    try:
        yield
    finally:
        transform.learn_coefficients = True


def member_objectives(
    stack: ExactGP, data: Observations, blocks: Sequence[Sequence[Tensor]]
) -> Tensor:
    """The objective of each member of a stack of models at its own held-out points, ``(k,)``.

    Runs of consecutive members with one held-out block of the same size, or with the very same
    blocks, are evaluated in one pass; others one by one. ``data`` are those of the stack.
    """

    def key(groups: Sequence[Tensor]) -> tuple[Any, ...]:
        """Equal for members that can be evaluated in one pass."""
        shapes = [group.shape for group in groups]
        is_single = len(shapes) == 1 and shapes[0][0] == 1
        # Blocks of one size are stacked, whatever their indices; several have to be the same.
        return shapes, [] if is_single else [group.numpy().tobytes() for group in groups]

    values, first = [], 0
    for (_, numbers), run in itertools.groupby(blocks, key):
        members = list(run)
        indices = slice(first, first := first + len(members))
        rows = data if len(members) == len(blocks) else data.member(indices)
        groups = members[0] if numbers else [torch.stack([group for (group,) in members])]
        values.append(_held_out_density(rows, groups)[0])
    return plus_priors(torch.cat(values), stack, data.num_observed(), data.params)


def _held_out_density(
    data: Observations,
    blocks: Sequence[Tensor],
    solver: Solver = "cholesky",
    *,
    redrawn: bool = False,
) -> tuple[Tensor, tuple[IterativeReport, ...]]:
    """The mean log density of held-out targets given all others, ``(*batch,)``; how it was solved.

    On a GPU one number is read, the density. Where it is not finite, it is computed again with
    every factorization checked, which adds jitter or raises an error that says what was wrong.
    Blocks are ``(k_i, b_i)`` a size, or ``(*batch, 1, b)`` for one of its own in each member.
    """
    # Unchecked factors hold NaN where they failed, which the density that is read then shows.
    checked = reads_are_free(data.residual.device)
    covariance = data.covariance_by(solver, blocks, checked=checked)
    value = covariance.held_out_log_density(data.residual, blocks)
    if not all_finite(value):
        if not checked:
            del value  # what it holds for the gradient
            covariance = data.covariance_by(solver, blocks)
            value = covariance.held_out_log_density(data.residual, blocks)
        data.check_density(value)
    return data.per_held_out_target(value, blocks, redrawn=redrawn), covariance.reports
