"""The Laplace evidence of a network or a latent GP as a GPyTorch objective."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from linear_operator import to_linear_operator
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_positive, checked, seeded, tensor_like
from gpclml._utils.environment import progress_bar
from gpclml._utils.resuming import ResumableDraws, versions_of
from gpclml.conditioning import LastPoints
from gpclml.conditioning.batches import Loader, batches_of
from gpclml.curvature import Curvature, Kronecker, Structure
from gpclml.curvature.layers import outputs_and_gradients
from gpclml.curvature.output_likelihoods import gradient_columns, output_column, output_likelihood
from gpclml.curvature.structure import Precisions
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.inference import evaluating
from gpclml.inference.observations import Road
from gpclml.kernels.networks import check_finite_output
from gpclml.mlls._terms import plus_priors, registered
from gpclml.mlls.conditional_marginal_log_likelihood import ConditionalMarginalLogLikelihood
from gpclml.models.linear import Linearization, LinearizedNetwork

# A checker that does not read upstream's source knows this base.
assert issubclass(MarginalLogLikelihood, torch.nn.Module)


class LaplaceMarginalLogLikelihood(ResumableDraws, MarginalLogLikelihood):
    r"""The Laplace approximation of a network's log evidence, in nats per point.

    .. math:: \frac1N \Big[ \log p(\mathcal D \mid w_*) - \tfrac12 w_*^\top P_0 w_*
        - \tfrac12 \log \frac{|H + P_0|}{|P_0|} \Big]

    with H the generalized Gauss-Newton matrix or the empirical Fisher of the negative log
    likelihood at the current weights (Immer et al. 2021, Eq. 3). Called on all data, it returns
    this value. Called on a batch B, it multiplies the log likelihood and the log-determinant of the
    batch by N / |B|; the mean of this estimate over the batches of a partition is a lower bound
    (Immer et al. 2023, Eqs. 11-14). ``outputs="single"`` draws one output at each call and counts
    its log-determinant C times; with a softmax this is a bound in practice, but not by proof.
    ``outputs="column"`` takes one column of the root of the output Hessian at the same cost; it is
    proven to be a bound, but usually a looser one.

    Log densities of priors that are registered, as ``GaussianLikelihood(noise_prior=...)`` has one,
    are added, as GPyTorch's objectives do; a prior of the network's weights is refused.

    The log-determinant is differentiable in prior precisions, noise, temperature and what the
    points depend on, such as parameters of augmentations. It is not differentiable in the weights,
    which are trained on the first two terms, as is usual.

    Of a :class:`~gpclml.models.LatentGP` it is Laplace's approximation of the log marginal
    likelihood at the mode of the latent values, with a gradient for all hyperparameters (Rasmussen
    and Williams 2006, Sections 3.4 and 5.5):
    :class:`~gpclml.mlls.ConditionalMarginalLogLikelihood` with ``LastPoints(m=0)`` of a model
    whose ``approximation`` is ``"laplace"``. Such a model holds its data; the other arguments and
    methods are for networks.

    Args:
        likelihood: Of a network, ``GaussianLikelihood``, ``StudentTLikelihood``,
            ``MultitaskGaussianLikelihood`` (of rank 0, with ``has_global_noise=False``; ratios of
            its noises stay as they are), ``BernoulliLikelihood`` (a probit) or
            ``SoftmaxLikelihood(mixing_weights=False)`` of GPyTorch; ``LogisticLikelihood``, of one
            logit, or ``HeteroscedasticGaussianLikelihood`` of :mod:`gpclml.likelihoods`. A softmax
            of two classes takes networks of one output too, as logits. Of a latent GP, its own.
        model: A network with its prior, or a latent GP.
        num_data: Number N of points that the weights of a network are trained on; None if the
            model has its data.
        curvature: A structure of :mod:`gpclml.curvature`; ``Kronecker()`` if None.
        hessian: ``"ggn"`` or ``"ef"``.
        outputs: ``"all"``, ``"single"`` or ``"column"``. The empirical Fisher always has one
            column.
        temperature: Divisor of the log likelihood, a number or a parameter.
        seed: Seed of the drawn outputs. The state of the generator is part of ``state_dict()``.

    Raises:
        UnsupportedError: The likelihood is another one, or the model no LinearizedNetwork.
        UnknownNameError: No such Hessian or outputs.
        ArgumentError: ``num_data`` is below 1 or the temperature not positive.

    Examples:
        >>> import torch
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> from gpclml import MLP, LaplaceMarginalLogLikelihood, LinearizedNetwork
        >>> x, model = torch.rand(50, 3), LinearizedNetwork(MLP([3, 20, 1]))
        >>> mll = LaplaceMarginalLogLikelihood(GaussianLikelihood(), model, num_data=50)
        >>> loss = -mll(model(x), x.sum(-1).sin())
    """

    likelihood: Likelihood
    model: LinearizedNetwork
    _latent_mll: ConditionalMarginalLogLikelihood | None

    @checked(temperature="() | (1,)")
    def __init__(
        self,
        likelihood: Likelihood,
        model: LinearizedNetwork | ExactGP,
        num_data: int | None = None,
        curvature: Structure | None = None,
        *,
        hessian: Literal["ggn", "ef"] = "ggn",
        outputs: Literal["all", "single", "column"] = "all",
        temperature: float | Tensor = 1.0,
        seed: int = 0,
    ) -> None:
        if isinstance(model, ExactGP):
            if isinstance(likelihood, _GaussianLikelihoodBase):
                suggestion = "Use ExactMarginalLogLikelihood, which is exact."
                kind = type(likelihood).__name__
                raise UnsupportedError("likelihood", kind, "one that is not Gaussian", suggestion)
            super().__init__(likelihood, model)
            conditional = ConditionalMarginalLogLikelihood(likelihood, model, LastPoints(m=0))
            conditional._approximation = "laplace"  # whatever that of the model's posterior
            # Not a child: its parameters are those of this objective.
            object.__setattr__(self, "_latent_mll", conditional)
            self._generator = seeded(seed)
            return
        has_data = isinstance(model, LinearizedNetwork) and "train_inputs" in vars(model)
        if num_data is None and has_data:
            num_data = len(model.train_targets)
        if num_data is None:
            raise ArgumentError("num_data", None, "the number of points a network is trained on")
        check_counts(num_data=num_data)
        check_positive(temperature=temperature)
        output_likelihood(likelihood)
        super().__init__(likelihood, model)
        self._latent_mll = None
        self.num_data: int = num_data
        self.curvature: Structure = Kronecker() if curvature is None else curvature
        self.hessian = hessian
        self.outputs = outputs
        self.temperature = temperature
        self._generator = seeded(seed)
        self._known: tuple[LaplaceEvidence, list[Tensor]] | None = None
        if has_data:
            model._posterior = self._posterior

    @checked(late=True)
    def forward(
        self,
        output: Linearization | MultivariateNormal,
        target: Tensor,
        *params: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The evidence, or its stochastic bound.

        Args:
            output: The model at points: all N, or a batch of them. Of a latent GP at its training
                points.
            target: Their targets: ``(B,)`` or, of several outputs in regression, ``(B, C)``.
            *params: Inputs, as GPyTorch's objectives are given; not used.
            **kwargs: Not used.

        Returns:
            Nats per point; larger is better.

        Raises:
            ArgumentError: The batch is larger than ``num_data``, or targets are no classes.
            ShapeError: Targets, outputs and likelihood do not fit.
            UnsupportedError, ModelModeError, NonFiniteError, NotPSDError: The curvature cannot be
                computed for this network, or is not finite.
        """
        if self._latent_mll is not None:
            return cast(Tensor, self._latent_mll(output, target))
        output = cast(Linearization, output)
        # The checks of the targets come before the curvature is computed.
        output_likelihood(self.likelihood).log_density(output.mean.detach(), target)
        return self._evidence(output.points, target, output.mean)()

    def compute_custom_loss(self, **kwargs: Any) -> Tensor:
        """The negative evidence of the model's data, for line searches and ``fit_gpytorch_mll``.

        Of a network it is that at the weights as they are, in eval mode, which get no gradient.

        Raises:
            UnsupportedError: The model is a network without data.
        """
        if self._latent_mll is None:
            return -self._evidence_of_data()()
        self._latent_mll.training = self.training
        return self._latent_mll.compute_custom_loss(**kwargs)

    def _evidence_of_data(self) -> LaplaceEvidence:
        """The evidence of the network's own data, whose curvature is kept for these weights."""
        model = self.model
        if "train_inputs" not in vars(model):
            suggestion = "Fit with fit_map or fit_online, which take data or a loader."
            expected = "one with train_inputs and train_targets"
            raise UnsupportedError("model", "a network without data", expected, suggestion)
        weights = [*model.network.parameters(), *model.network.buffers()]
        if self._known is not None:
            evidence, before = self._known
            # Optimizers write parameters that they do not change.
            if all(map(torch.equal, before, weights)):
                evidence.renew()
                return evidence
        with evaluating(model.network):
            evidence = self.evidence_of(model.train_inputs[0], model.train_targets)
        self._known = evidence, [w.detach().clone() for w in weights]
        return evidence

    def _posterior(self, x: Tensor) -> MultivariateNormal:
        """The normal distribution of outputs at points, given the model's data."""
        evidence, network = self._evidence_of_data(), self.model.network
        evidence.check_whole()
        with torch.no_grad():
            precisions = self.model.prior.precisions()
            function = evidence.curvature.output_covariance(precisions, evidence.curvature_scale())
        with evaluating(network):
            mean, gradients = outputs_and_gradients(network, self.model.points(x))
        covariance = to_linear_operator(function(gradients, len(mean))[0])
        if mean.shape[-1] == 1:
            return MultivariateNormal(mean.squeeze(-1), covariance)
        return MultitaskMultivariateNormal(mean, covariance)

    def road(self) -> Road:
        """Which way an evaluation for a latent GP goes, and why not a faster one."""
        return self._latent_mll.road() if self._latent_mll else Road("Laplace's approximation")

    @checked(late=True)
    def log_joint(self, output: Linearization, target: Tensor) -> Tensor:
        r"""What the weights are trained on: the evidence without its log-determinant.

        :math:`\frac1N [\frac{N}{|B|} \log p(B \mid w) - \tfrac12 w^\top P_0 w]`.

        Args:
            output: The model at points: all N, or a batch of them.
            target: Their targets.

        Returns:
            Nats per point; larger is better.
        """
        likelihood = output_likelihood(self.likelihood)
        fit = likelihood.log_density(output.mean, target).sum() / self.temperature
        penalty = self.model.prior.penalty(self.model.network)
        value = fit / len(output.mean) - 0.5 * penalty / self.num_data
        return self.plus_log_prior(value, self.num_data)

    def plus_log_prior(self, value: Tensor, num_data: int) -> Tensor:
        """With log densities of registered priors over a number; those of weights are refused."""
        priors, _ = registered(self)
        for name, *_ in self.named_priors() if priors else ():  # a walk of the whole network
            if name.startswith("model.network."):
                raise UnsupportedError(
                    "model", f"a prior of weights, {name.removeprefix('model.')}",
                    "priors of hyperparameters alone",
                    "The weights have the prior of the model, GaussianWeightPrior.",
                )  # fmt: skip
        return plus_priors(value, self, num_data)

    @checked(late=True, passes_on="x", x="(N, *event)")
    def evidence_of(
        self, x: Tensor | Loader, target: Tensor | None = None, *, progress: bool | None = None
    ) -> LaplaceEvidence:
        """The evidence at points as a function of hyperparameters alone, as cheap as they are.

        Curvature and outputs are computed once, in one pass. The value is differentiable in prior
        precisions, noise and temperature, and once in what the points depend on; no weight gets a
        gradient.

        Args:
            x: Points, ``(N, *event)``: all of them or a batch; or a ``DataLoader`` of pairs of
                points and targets, whose evidences are added up.
            target: Their targets; None with a loader.
            progress: Whether to show a progress bar over the batches of a loader; None shows it on
                terminals and in notebooks.

        Returns:
            A function of no arguments that returns the value. ``sum(evidences)`` adds up those of
            several batches: its curvature is that of all their points.

        Raises:
            ArgumentError, ShapeError, UnsupportedError, NonFiniteError, NotPSDError:
                As :meth:`forward`, or a loader gives nothing or no pairs.
        """
        if isinstance(x, Tensor) and target is not None:
            return self._evidence(self.model.points(x), target, None)
        if isinstance(x, Tensor) or target is not None:
            got = "points without targets" if target is None else "targets beside a loader"
            raise ArgumentError("target", got, "points with targets, or a loader of both")
        device = next(self.model.network.parameters()).device
        batches = batches_of("x", x, self.num_data, device)
        bar = progress_bar(batches, desc="curvature", progress=progress)
        return cast(LaplaceEvidence, sum(self.evidence_of(*batch) for batch in bar))

    def _evidence(self, points: Tensor, target: Tensor, mean: Tensor | None) -> LaplaceEvidence:
        count = len(points)
        if count > self.num_data:
            suggestion = "Pass the number of all points that the weights are trained on."
            expected = f"at most num_data = {self.num_data}"
            raise ArgumentError("output", f"{count} points", expected, suggestion)
        likelihood = output_likelihood(self.likelihood)
        drawn: int | None = None
        copies = 1

        def cotangents(outputs: Tensor) -> Tensor:
            nonlocal mean, drawn, copies
            if mean is None:
                check_finite_output(outputs)
                likelihood.log_density(outputs.detach(), target)  # its checks come first
                mean = outputs if points.requires_grad else outputs.detach()
            columns = self.columns(outputs, target)
            if self.outputs == "all" or self.hessian == "ef":
                return columns
            # One output in place of C, drawn alike each time, counts C times (Immer et al. 2023).
            copies = outputs.shape[-1]
            if drawn is None:  # a structure that asks twice gets the same
                drawn = int(torch.randint(copies, (), generator=self._generator))
            if self.outputs == "column":
                return columns[:, [drawn]]
            return output_column(columns, drawn)

        curvature = self.curvature.of(self.model.network, points, cotangents)
        return LaplaceEvidence(self, cast(Tensor, mean), target, curvature, copies)

    def columns(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Columns of the curvature of outputs, ``(N, K, C)``, without hyperparameters."""
        likelihood = output_likelihood(self.likelihood)
        if self.hessian == "ef":
            return gradient_columns(likelihood, outputs, target)
        return likelihood.columns(outputs, target)


class LaplaceEvidence:
    """The evidence at points of known curvature, as a function of hyperparameters.

    Made by :meth:`LaplaceMarginalLogLikelihood.evidence_of`.

    Args:
        mll: The objective.
        mean: The network's outputs, ``(B, C)``.
        target: Their targets.
        curvature: Curvature of the network at these points.
        copies: Factor of its log-determinant.

    Attributes:
        mll: The objective.
        curvature: What has the log-determinants.
    """

    @checked(late=True, mean="float (B, C)")
    def __init__(
        self,
        mll: LaplaceMarginalLogLikelihood,
        mean: Tensor,
        target: Tensor,
        curvature: Curvature,
        copies: int = 1,
    ) -> None:
        self.mll: LaplaceMarginalLogLikelihood = mll
        self._mean, self._target = mean, target
        self.curvature: Curvature = curvature
        self._copies = copies
        self._versions = versions_of(mll.model.network)

    def __call__(self) -> Tensor:
        """Nats per point at the hyperparameters as they are; larger is better.

        Raises:
            ArgumentError: Weights or buffers of the network have changed since.
        """
        return (self.nats() / self.mll.num_data).to(self._mean)

    def nats(
        self, precisions: Precisions | None = None, noise: Tensor | float | None = None
    ) -> Tensor:
        """The value times the number of all points, as float64.

        Args:
            precisions: Prior precision of each parameter by name; those of the prior if None.
            noise: Noise variance of a regression, of several outputs their mean; that of the
                likelihood if None.

        Raises:
            ArgumentError: Weights or buffers of the network have changed since.
            UnsupportedError: There is a noise, and the likelihood has none.
        """
        mll = self.mll
        precisions = mll.model.prior.precisions() if precisions is None else precisions
        # Sums in double precision: a search takes their rounding for the shape of the evidence.
        precisions = {k: p if p.ndim else p.double() for k, p in precisions.items()}
        density = self._likelihood(noise).log_density(self._mean.double(), self._target).sum()
        # Of known curvature the weights are constants.
        network, constant = mll.model.network, not self._mean.requires_grad
        penalty = mll.model.prior.penalty(network, precisions, constant).double()
        ratio = self._copies * self.log_det_ratio(precisions, noise).double()
        # A batch stands for all data: its likelihood and log-determinant count N / B times.
        share = mll.num_data / len(self._mean)
        value = share * (density / mll.temperature - 0.5 * ratio) - 0.5 * penalty
        return mll.plus_log_prior(value, 1)

    def log_det_ratio(
        self, precisions: Precisions | None = None, noise: Tensor | float | None = None
    ) -> Tensor:
        r""":math:`\log |H + P_0| - \log |P_0|` of one copy, in nats; arguments as :meth:`nats`."""
        self._check_weights()
        precisions = self.mll.model.prior.precisions() if precisions is None else precisions
        return self.curvature.log_det_ratio(precisions, self.curvature_scale(noise))

    def _likelihood(self, noise: Tensor | float | None = None) -> Any:
        likelihood: Any = output_likelihood(self.mll.likelihood)
        if noise is not None:
            if not hasattr(likelihood, "noise"):
                kind = type(self.mll.likelihood).__name__
                raise UnsupportedError("noise", f"one for {kind}", "None")
            likelihood.noise = tensor_like(noise, self._mean.new_zeros((), dtype=torch.float64))
        return likelihood

    @torch.no_grad()
    def sample_weights(
        self, count: int, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        r"""Draws from the Laplace posterior :math:`\mathcal N(w_*, (H + P_0)^{-1})`.

        Args:
            count: Number of draws.
            generator: Source of the draws; seed 0 if None.

        Returns:
            Weights by name, ``(count, *shape)``.

        Raises:
            ArgumentError: If ``count`` is below 1, or the network's weights have changed.
            UnsupportedError: The curvature is of a batch or one output, or ``FunctionSpace``.
        """
        check_counts(count=count)
        self.check_whole()
        precisions = self.mll.model.prior.precisions()
        draws = self.curvature.sample(precisions, self.curvature_scale(), count, generator)
        weights = dict(self.mll.model.network.named_parameters())
        return {name: weights[name] + away for name, away in draws.items()}

    @property
    def seen(self) -> tuple[Tensor, Tensor]:
        """The outputs that it is taken at, ``(B, C)``, and their targets."""
        return self._mean, self._target

    def check_whole(self) -> None:
        """Raises where it is not of all points and outputs, or the weights have changed since."""
        self._check_weights()
        if self._copies != 1 or len(self._mean) != self.mll.num_data:
            raise UnsupportedError(
                "evidence", f"one at {len(self._mean)} of {self.mll.num_data} points, outputs "
                f"{self.mll.outputs!r}", "all points and outputs", "Add up those of all batches.",
            )  # fmt: skip

    def curvature_scale(self, noise: Tensor | float | None = None) -> Tensor | float:
        """What the curvature is multiplied by: inverse noise and temperature."""
        mll = self.mll
        scale = self._likelihood(noise).scale() / mll.temperature
        return scale**2 if mll.hessian == "ef" else scale  # gradients enter squared

    def renew(self) -> None:
        """Takes the network's tensors for those of the curvature: they have the same values."""
        self._versions = versions_of(self.mll.model.network)

    def _check_weights(self) -> None:
        if self._versions != versions_of(self.mll.model.network):
            raise ArgumentError(
                "network", "weights or buffers that changed after its curvature was computed",
                "those of the curvature", "Compute the evidence again.",
            )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """Without what tells tensors of this process alone."""
        self._check_weights()
        return {**vars(self), "_versions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The weights came with it, as they were."""
        vars(self).update(state)
        self._versions = versions_of(self.mll.model.network)

    def __add__(self, other: LaplaceEvidence) -> LaplaceEvidence:
        """At the points of both.

        Raises:
            UnsupportedError: They are of one drawn output each, or the curvature has no sums.
            ArgumentError: The other is of another objective or at other weights, or they are of
                more than N points.
        """
        if not isinstance(other, LaplaceEvidence):
            return NotImplemented
        if other.mll is not self.mll:
            suggestion = "Add up batches of one objective."
            raise ArgumentError("other", "an evidence of another one", "one objective", suggestion)
        self._check_weights()
        other._check_weights()
        if self._copies != 1:
            raise UnsupportedError(
                "outputs", repr(self.mll.outputs), "'all', to add batches up",
                "Average the values of batches instead.",
            )  # fmt: skip
        count, all_points = len(self._mean) + len(other._mean), self.mll.num_data
        if count > all_points:
            raise ArgumentError(
                "other", f"{count} points together", f"at most num_data = {all_points}",
                "Add up each batch of a partition once.",
            )  # fmt: skip
        return LaplaceEvidence(
            self.mll,
            torch.cat([self._mean, other._mean]),
            torch.cat([self._target, other._target]),
            self.curvature + other.curvature,
        )

    def __radd__(self, other: object) -> LaplaceEvidence:
        """What lets ``sum(parts)`` begin, with 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented
