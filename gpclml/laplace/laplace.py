"""The Laplace posterior of a trained network: from the network to its predictions in four lines."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import (
    GaussianLikelihood,
    Likelihood,
    SoftmaxLikelihood,
)
from linear_operator import to_linear_operator
from linear_operator.operators import BlockDiagLinearOperator, DiagLinearOperator
from torch import Tensor
from torch.distributions import Distribution

from gpclml._utils.arguments import (
    callers_level,
    check_counts,
    check_finite,
    check_positive,
    checked,
    seeded,
    tensor_like,
)
from gpclml._utils.environment import progress_bar
from gpclml._utils.files import read_checkpoint, write_checkpoint
from gpclml._utils.resuming import check_state, digest, versions_of
from gpclml.conditioning.batches import batches_of, points_of
from gpclml.curvature import (
    Diagonal,
    DiagonalCurvature,
    Full,
    GaussianWeightPrior,
    Kronecker,
    Structure,
    Subnetwork,
)
from gpclml.curvature.layers import outputs_and_gradients
from gpclml.curvature.output_likelihoods import (
    OutputLikelihood,
    check_targets_belong,
    output_likelihood,
)
from gpclml.curvature.storage import (
    content_of_curvature,
    content_of_likelihood,
    curvature_of_content,
    likelihood_of_content,
)
from gpclml.curvature.structure import (
    OutputCovariance,
    call_with,
    check_mode,
    in_single,
)
from gpclml.errors import ArgumentError, DataError, ShapeError, UnsupportedError
from gpclml.evidence.sampling import linearized_outputs
from gpclml.fit import FitWarning
from gpclml.fit.evidence import (
    LogNoise,
    fit_noise_to_residuals,
    maximize_evidence,
    take_ratios,
    told_of_link,
    told_of_scales,
)
from gpclml.laplace.calibration import (
    FACTORS,
    bridged,
    calibrated,
    confident_as_the_network,
    factor_by_clml,
    scaled_outputs,
    validated_factor,
    validated_temperature,
)
from gpclml.laplace.inputs import (
    Inputs,
    NetworkData,
    NetworkPoints,
    TensorNetwork,
    network_outputs,
)
from gpclml.laplace.weights import chosen_parameters, chosen_weights, trained_only
from gpclml.likelihoods import LogisticLikelihood
from gpclml.mlls import LaplaceEvidence, LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

if TYPE_CHECKING:
    from botorch.models.model import Model

_KIND = "gpclml.Laplace"
_REQUIRED = {
    "network": dict, "curvature": dict, "log_precision": Tensor, "likelihood": dict, "names": list,
    "seen": list, "settings": dict, "numbers": dict,
}  # fmt: skip
_STRUCTURES = {"kron": Kronecker(others="diagonal"), "full": Full(), "diag": Diagonal()}
_UNKNOWN = 2**62  # points of data that have not been counted yet
_POINTS = 256  # that are predicted at a time
_GRADIENTS = 2**24  # numbers of gradients in memory at a time
_SAMPLE = 1000  # training points at which predictions are compared with the network's
_SCALES = (0.0, *(10 ** (k / 2) for k in range(-12, 3)))  # of covariances that are tried
_NUMBERS = "num_data", "log_evidence", "covariance_scale", "output_scale", "output_temperature"


class Laplace:
    r"""The Laplace posterior of a network's weights, around where they are, and its predictions.

    :meth:`fit` computes the curvature H of a trained network's log likelihood, batch by batch, and
    chooses prior precisions :math:`P_0`. Predictions are those of the network that is linear in its
    weights (Immer et al. 2021), whose outputs are normal,

    .. math:: f(x) \sim \mathcal N\big(\tfrac1T a(x) f_{w_*}(x),\; c\, V(x)\big), \qquad
        V(x) = J(x) (H + P_0)^{-1} J(x)^\top, \qquad
        a_k(x) = \min\big(a, \sqrt{1 + \tfrac\pi8 c V_{kk}(x)}\big)

    (1 in place of :math:`\pi / 8` for a probit). In regression a = 1, T is a factor of the noise,
    validation points choose c too, and intervals do not depend on the units of the targets.

    Of a classifier that is sure of its training points the plain posterior, a = c = T = 1, makes
    far too uncertain predictions (on digits a log loss 2 to 65 times the network's): a normal
    distribution extends to weights by which training points are misclassified, which the likelihood
    excludes. Therefore a is the smallest factor by which predictions of training points lose at
    most .003 nats a point to the network's. No output is then surer than the network's, and it is
    as sure where the covariance is no larger than where data are. Validation points decide how sure
    predictions of new points may be, by T, and by a larger a where they would lose to the network.

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``, each point on its own; in eval mode if it has
            dropout or batch normalization. It is not changed. It may take dictionaries of tensors,
            or their entries as arguments, as the networks of Hugging Face.
        likelihood: ``"classification"`` for a softmax, of one output ``LogisticLikelihood``;
            ``"regression"``; or one of :class:`gpclml.mlls.LaplaceMarginalLogLikelihood`, of which
            ``BernoulliLikelihood`` is a probit, not for logits.
        weights: Weights in the posterior: ``"last"`` for those of the last layer that has some that
            require a gradient (of all layers if none do), and for all of them where adapters
            (LoRA) alone do; ``"all"`` for all that require a gradient; names of parameters or
            modules; or a subnetwork, by numbers in the vector of ``network.parameters()``, as
            :meth:`largest_variances` gives them, or a mask of it.
        structure: ``"kron"``, ``"full"``, ``"diag"``, or a structure of :mod:`gpclml.curvature`;
            of a subnetwork ``"full"`` or ``"diag"``.
        by: One precision for the ``"network"``, for each ``"layer"``, ``"parameter"`` or
            ``"weight"``, the last not with ``"kron"``.
        output: Makes outputs ``(N, C)`` of what the network returns; None for the tensor itself or
            its ``logits``.
        prior_mean: Mean of the weights under the prior, as :class:`GaussianWeightPrior` takes it.

    Attributes:
        likelihood: The likelihood; after a fit an object of GPyTorch.
        log_evidence: The Laplace evidence of all data, in nats.
        num_data: Number of points that the posterior was fitted to.
        names: Names of the parameters in the posterior.
        covariance_scale: The factor c; 0 where predictions are those of the network alone.
        output_scale: The factor a, 1 in regression.
        output_temperature: The divisor T of outputs; in regression, a factor of the noise.

    Examples:
        >>> import torch
        >>> from gpclml import MLP, Laplace
        >>> x = torch.linspace(-1, 1, 100).unsqueeze(-1)
        >>> network, y = MLP([1, 20, 1]), (3 * x[:, 0]).sin()  # train the network before
        >>> posterior = Laplace(network.eval(), "regression", structure="full")
        >>> predicted = posterior.fit((x, y), validation=(x[:20], y[:20])).predict(x[:3])
        >>> mean, stddev = predicted.mean, predicted.stddev
    """

    log_evidence: float
    num_data: int
    names: list[str]
    covariance_scale: float
    output_scale: float
    output_temperature: float

    @checked
    def __init__(
        self,
        network: torch.nn.Module,
        likelihood: Likelihood | Literal["classification", "regression"],
        *,
        weights: str | Sequence[str] | Tensor = "last",
        structure: Structure | Literal["kron", "full", "diag"] = "kron",
        by: Literal["network", "layer", "parameter", "weight"] = "layer",
        output: Callable[[Any], Tensor] | None = None,
        prior_mean: float | Mapping[str, Tensor] = 0.0,
    ) -> None:
        if isinstance(likelihood, Likelihood):
            output_likelihood(likelihood)
        self.network = network
        self.likelihood: Likelihood | str = likelihood
        self.weights = weights
        self.by: Literal["network", "layer", "parameter", "weight"] = by
        self.prior_mean = prior_mean
        self._of_dictionaries = TensorNetwork(network, output)
        given = structure if isinstance(structure, Structure) else _STRUCTURES[structure]
        self.structure: Structure = given
        if isinstance(weights, Tensor) and not isinstance(self.structure, Full | Diagonal):
            got = f"{structure!r} of a subnetwork"
            raise UnsupportedError("structure", got, "'full' or 'diag'")
        noise = LogNoise.of(likelihood)
        # A noise that is not the one a likelihood is made with was set by the caller.
        self._keeps_noise = noise is not None and bool(noise.parameter.detach().any())
        self._evidence: LaplaceEvidence | None = None

    def __repr__(self) -> str:
        shown = (self.network, self.likelihood, self.structure)
        names = [value if isinstance(value, str) else type(value).__name__ for value in shown]
        fitted = f"{self.num_data} points" if self._evidence is not None else "not fitted"
        weights = "a subnetwork" if isinstance(self.weights, Tensor) else repr(self.weights)
        return f"Laplace({', '.join(names)}, weights={weights}: {fitted})"

    @checked
    def fit(
        self,
        data: NetworkData,
        *,
        validation: NetworkData | None = None,
        precision: float | Literal["evidence", "validation", "clml"] = "evidence",
        spread: Literal["validation", "both", "evidence"] = "both",
        add: bool = False,
        batch_size: int = 256,
        progress: bool | None = None,
    ) -> Self:
        """Computes the curvature at the data and chooses precisions and the scale of predictions.

        The factor a of a classifier's outputs takes a second pass, for 1,000 points of the data.
        Its temperature is the most probable one given the validation points and 60 more, whose
        labels are drawn from the predictions without validation: few points change little, and it
        needs evidence to be surer than the network.

        Args:
            data: The training data of the network: a ``DataLoader`` or other iterable of pairs
                ``(x, y)``, or two tensors. One pass over them is usually enough. Points may be
                dictionaries of tensors, and a dictionary with ``"labels"`` is a pair.
            validation: Data that the network was not trained on, by which a temperature is chosen;
                in regression also c.
            precision: The prior precision: a number, with a = c = 1 unless there are validation
                points, or how it is chosen. ``"evidence"`` maximizes the evidence, over the noise
                of a Gaussian likelihood too. The other methods multiply the result of
                ``"evidence"`` by a power of ten, with a = c = 1: ``"validation"`` maximizes the
                mean log density of validation targets, ``"clml"`` their joint density. A
                number is in units of the weights, which the targets' units change; beside it the
                noise of a Gaussian likelihood becomes the mean squared residual, unless the
                likelihood came with a noise of its own. A frozen noise always stays.
            spread: What becomes of a classifier's covariance where validation points are likelier
                under the network alone. ``"both"``: it stays, and a grows to the smallest factor
                by which their mean log density is at most a standard error below the network's;
                points with larger variances stay less sure. ``"validation"``: predictions are the
                network's, c = 0.
                ``"evidence"``: covariance and a are those without validation points.
            add: Whether the data are added to those of the fit before, at the same weights.
                Precisions and noise are chosen by all of them, a by the new ones.
            batch_size: Number of points that are processed at a time, if the data are tensors.
            progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

        Returns:
            Itself.

        Raises:
            ArgumentError: Data are missing or are not pairs of tensors; labels contradict the
                network's outputs; a precision is not positive, or needs validation data; there is
                no fit to add to, or weights have changed since.
            ShapeError: Points, outputs, likelihood and targets do not fit each other.
            ModelModeError: Dropout or batch normalization is in train mode.
            UnsupportedError: The curvature is not available for a layer, which the error names.
            NonFiniteError: Outputs or the evidence are not finite.

        Warns:
            FitWarning: The evidence still climbs, the noise ended at a bound, outputs and targets
                or residuals of outputs are of different sizes, or logits are under a probit.
        """
        check_counts(batch_size=batch_size)
        check_mode(self.network)
        if not isinstance(precision, str):
            check_positive(precision=precision)
        elif precision in ("validation", "clml") and validation is None:
            got = f"{precision!r} without validation data"
            raise ArgumentError("precision", got, "validation=(x, y) too")
        before = self._fitted() if add else None
        batches = self._batches("data", data, batch_size)
        first = next(batches)
        likelihood = self._made_likelihood(first[0])
        if before is None and not self._keeps_noise:
            again = self._batches("data", data, batch_size)
            take_ratios(likelihood, partial(network_outputs, self._module), again, False)
        mll = self._objective(likelihood, first[0]) if before is None else before.mll
        prior, evidence = mll.model.prior, before
        others = progress_bar(batches, desc="batches", progress=progress)
        try:
            mll.num_data = _UNKNOWN
            # Weights outside the posterior are constants, of which no curvature is computed.
            with trained_only(self.network, self.names):
                for x, y in itertools.chain([first], others):
                    more = mll.evidence_of(x, y)
                    evidence = more if evidence is None else evidence + more
        finally:
            mll.num_data = len(before.seen[0]) if before is not None else _UNKNOWN
        evidence = cast(LaplaceEvidence, evidence)
        self.num_data = mll.num_data = len(evidence.seen[0])
        check_targets_belong("data", *evidence.seen)
        told = told_of_link(likelihood, *evidence.seen)
        told = told or told_of_scales(likelihood, *evidence.seen)
        if isinstance(precision, str):
            told = maximize_evidence(evidence) or told
        else:
            with torch.no_grad():
                prior.log_precision.fill_(math.log(precision))
            if not self._keeps_noise:
                told = fit_noise_to_residuals(evidence) or told
        if told:
            warnings.warn(told, FitWarning, stacklevel=callers_level())
        with trained_only(self.network, self.names), torch.no_grad():
            if precision == "clml" and validation is not None:
                pairs = self._batches("validation", validation, batch_size)
                points, targets = map(torch.cat, zip(*pairs, strict=True))
                prior.log_precision.add_(math.log(factor_by_clml(evidence, (points, targets))))
            self.log_evidence = float(evidence.nats())
        check_finite("precision", prior.log_precision, "Fix it by giving a number.")
        self._take(evidence)
        if validation is not None or precision == "evidence":
            self._calibrate(data, validation, precision, spread, batch_size)
        return self

    @checked
    def fit_online(
        self,
        data: NetworkData,
        *,
        epochs: int = 100,
        batch_size: int = 256,
        validation: NetworkData | None = None,
        **training: Any,
    ) -> Self:
        """Trains the network by the evidence, and fits the posterior: one call.

        Weights are trained to their mode, and precisions and noise by the evidence between epochs
        (:func:`gpclml.fit_online`), from where the network is and in its own mode; the network is
        in eval mode at the end, and :meth:`fit` follows. With ``checkpoint=path`` the training may
        be stopped and goes on from there bit for bit at the next call.

        Args:
            data: As :meth:`fit`, to be read several times.
            epochs: Number of passes over the data.
            batch_size: Number of points of a batch, if the data are tensors.
            validation: As :meth:`fit`.
            **training: Further arguments of :func:`gpclml.fit_online`.

        Returns:
            Itself; ``training`` has the course, an :class:`~gpclml.fit.OnlineFitResult`.

        Raises:
            ArgumentError, ShapeError, UnsupportedError, NonFiniteError, DataError: As
                :func:`gpclml.fit_online` and :meth:`fit`.
        """
        from gpclml.fit import fit_online

        if isinstance(data, tuple) and len(data) == 2:
            x, training["train_y"] = self._of_dictionaries.pairs("data", data, batch_size)
            first, count = x[:2], len(x)
            training["batch_size"] = min(batch_size, count)
        else:
            x = _Again(self, data, batch_size)
            first, count = next(iter(x))[0][:2], sum(len(points) for points, _ in x)
        likelihood = self._made_likelihood(first)
        prior = GaussianWeightPrior(self._module, self.by, mean=self.prior_mean)
        mll = LaplaceMarginalLogLikelihood(
            likelihood, LinearizedNetwork(self._module, prior), count, self.structure
        )
        self.training = fit_online(mll, x, epochs=epochs, **training)
        self.network.eval()
        return self.fit(data, validation=validation, batch_size=batch_size)

    def _made_likelihood(self, x: Tensor) -> Likelihood:
        """The likelihood, made of its name and the outputs at points where it is a name."""
        if isinstance(self.likelihood, str):
            outputs = network_outputs(self._module, x)
            if self.likelihood == "regression":
                made: Likelihood = GaussianLikelihood()
            elif outputs.shape[-1] == 1:
                made = LogisticLikelihood()
            else:
                made = SoftmaxLikelihood(num_classes=outputs.shape[-1], mixing_weights=False)
            self.likelihood = made.to(outputs)
        return cast(Likelihood, self.likelihood)

    def _objective(self, likelihood: Likelihood, x: Tensor) -> LaplaceMarginalLogLikelihood:
        """The evidence of the weights that were asked for."""
        structure, chosen = self.structure, {}
        if isinstance(self.weights, Tensor):
            chosen = chosen_weights(self._module, self.weights)
            structure = Subnetwork(chosen, "full" if isinstance(structure, Full) else "diag")
        self.names = list(chosen) or chosen_parameters(self._module, cast(Any, self.weights), x)
        given, means = self.prior_mean, {}
        for name, index in chosen.items():
            # All other weights are at the mean: constants have no part in the evidence.
            whole = self._module.get_parameter(name).detach().clone()
            center = given.get(name, 0.0) if isinstance(given, Mapping) else given
            whole.view(-1)[index] = tensor_like(center, whole).expand_as(whole).flatten()[index]
            means[name] = whole
        with trained_only(self.network, self.names):
            prior = GaussianWeightPrior(self._module, self.by, mean=means or given)
            model = LinearizedNetwork(self._module, prior)
            return LaplaceMarginalLogLikelihood(likelihood, model, _UNKNOWN, structure)

    @torch.no_grad()
    def _calibrate(
        self,
        data: NetworkData,
        validation: NetworkData | None,
        precision: float | str,
        spread: str,
        batch_size: int,
    ) -> None:
        """Chooses the factors of outputs and covariances and the temperature."""
        likelihood = self._output_likelihood()
        regression = likelihood.regression
        index, held_out = 0, None
        if validation is not None:
            pairs = self._batches("validation", validation, batch_size)
            held_out = self._evaluated(pairs, FACTORS if precision == "validation" else (1.0,))
            check_finite("validation", held_out[0], "These are outputs at its points.")
            check_targets_belong("validation", *held_out[:2])
            likelihood.log_density(*held_out[:2])  # its checks
        if held_out is not None and (regression or precision == "validation"):
            # Where other points choose the precision, the covariance stays whole or goes.
            scales = (1.0,) if precision in ("clml", "validation") else _SCALES
            index, scale, temperature = calibrated(likelihood, *held_out, scales)
            if regression:
                self.covariance_scale, self.output_temperature = scale, temperature
            elif not scale:
                index = FACTORS.index(1.0)
            if precision == "validation":
                self._prior.log_precision.add_(math.log(FACTORS[index]))
                self._functions.clear()
        if regression:
            return
        outputs, target, (covariance,) = self._evaluated(self._sample(data, batch_size))
        self.output_scale = confident_as_the_network(likelihood, outputs, target, covariance)
        if held_out is None:
            return
        outputs, target, covariances = held_out
        variance = covariances[index].diagonal(dim1=-2, dim2=-1)
        scaled = scaled_outputs(likelihood, outputs, variance, self.output_scale)
        self.output_temperature, gain, error = validated_temperature(
            likelihood, scaled, target, covariances[index], outputs
        )
        if gain < -error and spread == "both":
            self.output_scale, self.output_temperature = validated_factor(
                likelihood, outputs, target, covariances[index], self.output_scale
            )
        elif gain < 0 and spread == "validation":
            self.covariance_scale, self.output_scale, self.output_temperature = 0.0, 1.0, 1.0

    def _sample(self, data: NetworkData, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """About 1,000 of the training points, at even distances."""
        # The same points whatever the size of batches.
        every, seen = max(1, self.num_data // _SAMPLE), 0
        for x, y in self._batches("data", data, batch_size):
            rows = torch.arange(-seen % every, len(x), every, device=x.device)
            seen += len(x)
            if len(rows):
                yield x[rows], y[rows]

    def _evaluated(
        self, batches: Iterator[tuple[Tensor, Tensor]], factors: Sequence[float] = (1.0,)
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Outputs, targets and covariances of outputs, for each factor of the precisions."""
        chunks = [(y, *self._at(x, factors)) for x, y in batches]
        targets, outputs, *covariances = map(torch.cat, zip(*chunks, strict=True))
        return outputs, targets, covariances

    def _at(self, x: Tensor, factors: Sequence[float] = (1.0,), together: int = 1) -> list[Tensor]:
        """Outputs, and their covariances for each factor of the precisions.

        Covariances are those of each so many points together, ``(N / q, q C, q C)``.
        """
        functions = [self._function(factor) for factor in factors]
        size = together * max(1, _GRADIENTS // (together * self._size_of_gradients(x)))
        chunks = []
        try:
            with trained_only(self.network, self.names):
                for points in x.split(size):
                    outputs, gradients = outputs_and_gradients(self._module, points, self._probed)
                    chunks.append([outputs, *(f(gradients, together) for f in functions)])
        except (RuntimeError, TypeError):
            network_outputs(self._module, x[:1])  # an error that names the argument
            raise
        return [torch.cat(values) for values in zip(*chunks, strict=True)]

    def _size_of_gradients(self, x: Tensor) -> int:
        """Numbers of the gradients of a point, which its shape decides."""
        if x.shape[1:] not in self._sizes:
            network_outputs(self._module, x[:1])  # its checks
            with trained_only(self.network, self.names):
                rows = outputs_and_gradients(self._module, x[:1].detach(), self._probed)[1].values()
            self._sizes[x.shape[1:]] = sum(
                row.numel() if isinstance(row, Tensor) else row.gradients.numel() for row in rows
            )
        return max(1, self._sizes[x.shape[1:]])

    def _function(self, factor: float) -> OutputCovariance:
        """What gives covariances of outputs with so many times the precisions."""
        if factor not in self._functions:
            evidence = self._fitted()
            precisions = {name: factor * p for name, p in self._precisions().items()}
            with torch.no_grad():
                scale = evidence.curvature_scale()
                made = evidence.curvature.output_covariance(precisions, scale)
            self._functions[factor] = made
        return self._functions[factor]

    def _normal(
        self, x: Tensor, together: int = 1, *, scaled: bool = True, mode: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Mean of outputs at points, ``(N, C)``, and covariance, ``(N / q, q C, q C)``."""
        likelihood = self._output_likelihood()
        scale = 0.0 if mode else self.covariance_scale
        if scale > 0:
            outputs, covariance = self._at(x, together=together)
            covariance = scale * covariance
            if scaled:
                variance = covariance.diagonal(dim1=-2, dim2=-1).reshape(outputs.shape)
                outputs = scaled_outputs(likelihood, outputs, variance, self.output_scale)
        else:
            network_outputs(self._module, x[:1])  # its checks
            weights = {name: p.detach() for name, p in self._module.named_parameters()}
            outputs = in_single(call_with(self._module, weights, x))
            size = together * outputs.shape[1]
            covariance = outputs.new_zeros(()).expand(len(x) // together, size, size)
        # The temperature of a regression multiplies its noise, that of classes divides outputs.
        if not (mode or likelihood.regression):
            outputs = outputs / self.output_temperature
        return outputs, covariance

    @torch.no_grad()
    @checked(x="(N, *event)")
    def predict(
        self,
        x: NetworkPoints,
        method: Literal["closed", "bridge", "draws", "mode"] = "closed",
        *,
        draws: int = 1000,
        seed: int = 0,
        progress: bool | None = None,
    ) -> Distribution:
        """The distribution of targets at points.

        Args:
            x: Any number of points, ``(N, *event)``, or a ``DataLoader`` of points or of pairs.
            method: ``"closed"`` for the closed form, which is the probit approximation of a
                softmax; ``"bridge"`` for the mean of the Dirichlet distribution by the Laplace
                bridge (Hobbhahn et al. 2022), for a softmax, with a = 1; ``"draws"`` for the mean
                over draws of outputs; ``"mode"`` for the network alone, at temperature 1.
            draws: Number of draws.
            seed: Seed of the draws.
            progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

        Returns:
            ``Categorical``, ``Bernoulli`` or ``Normal``, the last with the noise.

        Raises:
            ArgumentError: There are no points, no fit, or other weights of the network than then.
                Writes through ``.data`` into a stored tensor are not seen.
            UnsupportedError: The bridge is asked for with another likelihood than a softmax.
            ShapeError, NonFiniteError, ModelModeError: As :meth:`fit`.
        """
        check_counts(draws=draws)
        self._fitted()
        likelihood = self._output_likelihood()
        if method == "bridge" and not isinstance(
            self.likelihood, SoftmaxLikelihood | LogisticLikelihood
        ):
            got, expected = "'bridge' without a softmax", "a SoftmaxLikelihood"
            raise UnsupportedError("method", got, expected, "Use 'closed'.")
        source, mode = seeded(seed), method == "mode"
        noise_factor = self.output_temperature if likelihood.regression and not mode else 1.0
        chunks: list[Any] = []
        batches = points_of("x", self._of_dictionaries.points("x", x), _POINTS, self._device)
        for points in progress_bar(batches, desc="predictions", progress=progress):
            check_finite("x", points)
            # The bridge moderates outputs in a way that the factor does not make up for.
            outputs, covariance = self._normal(points, scaled=method != "bridge", mode=mode)
            if method == "bridge" and self.covariance_scale > 0:
                chunks.append(bridged(outputs, covariance))
                continue
            normal = None
            if method == "draws":
                shape = (draws, *outputs.shape)
                normal = torch.randn(shape, generator=source, dtype=torch.float64)
            chunks.append(likelihood.predictive(outputs, covariance, noise_factor, normal))
        kind = type(chunks[0])
        names = ("logits",) if not likelihood.regression else tuple(kind.arg_constraints)
        values = {k: torch.cat([getattr(d, k).expand(d.batch_shape) if k != "logits" else d.logits
                                for d in chunks]) for k in names}  # fmt: skip
        return kind(**values)

    @checked(x="float (N, *event)")
    def output_distribution(self, x: Inputs, joint: bool = False) -> MultivariateNormal:
        r"""The normal distribution of the outputs at points, without noise.

        It is what :meth:`predict` averages the likelihood over, :math:`\mathcal N(a f / T, c V)`.

        Args:
            x: Points, ``(N, *event)``, or a dictionary of tensors.
            joint: Whether outputs at different points covary; else each point is on its own.

        Returns:
            Of one output a ``MultivariateNormal`` of N numbers, of several a
            ``MultitaskMultivariateNormal`` of ``(N, C)``; differentiable in points that require a
            gradient.

        Raises:
            ArgumentError, ShapeError, NonFiniteError, ModelModeError: As :meth:`predict`.

        Note:
            The joint distribution takes the gradients of all points at once, N C P numbers for
            layers that are not linear, and N² C² of its own.
        """
        points = self._checked_points(x)
        mean, covariance = self._normal(points, len(points) if joint else 1)
        dense = to_linear_operator(covariance[0])
        if mean.shape[-1] == 1:
            operator = dense if joint else DiagLinearOperator(covariance.flatten())
            return MultivariateNormal(mean.squeeze(-1), operator)
        operator = dense if joint else BlockDiagLinearOperator(to_linear_operator(covariance))
        return MultitaskMultivariateNormal(mean, operator)

    @checked(x="float (N, *event)", other="float (M, *event)")
    def output_covariance(self, x: Inputs, other: Inputs) -> Tensor:
        r"""The covariance :math:`c J(x) (H + P_0)^{-1} J(x')^\top` of outputs at two sets.

        Args:
            x: Points, ``(N, *event)``.
            other: Others, ``(M, *event)``.

        Returns:
            ``(N C, M C)``, the outputs of a point next to each other; differentiable in points.

        Raises:
            ArgumentError, ShapeError, NonFiniteError, ModelModeError: As :meth:`predict`.

        Note:
            By the joint covariance of all N + M points.
        """
        points = [self._checked_points(values) for values in (x, other)]
        if points[0].shape[1:] != points[1].shape[1:]:
            expected = f"(M, {', '.join(map(str, points[0].shape[1:]))}), as x"
            raise ShapeError("other", tuple(points[1].shape), expected)
        joined = torch.cat(points)
        mean, covariance = self._normal(joined, len(joined))
        first = len(points[0]) * mean.shape[-1]
        return covariance[0, :first, first:]

    @torch.no_grad()
    @checked
    def sample_weights(self, count: int = 1, *, seed: int = 0) -> dict[str, Tensor]:
        r"""Draws of the weights from :math:`\mathcal N(w_*, c\, (H + P_0)^{-1})`.

        Args:
            count: Number of draws.
            seed: Seed of the draws; the same gives the same draws.

        Returns:
            Weights by name, ``(count, *shape)``, of those in the posterior.

        Raises:
            ArgumentError: The count is below one, or the posterior not fitted.
        """
        check_counts(count=count)
        evidence = self._fitted()
        draws = evidence.curvature.sample(
            self._precisions(), evidence.curvature_scale(), count, seeded(seed)
        )
        weights = dict(self._module.named_parameters())
        root = math.sqrt(self.covariance_scale)
        return {name: weights[name] + root * away.to(weights[name]) for name, away in draws.items()}

    @checked(x="float (N, *event)")
    def sample_outputs(self, x: Inputs, count: int = 1, *, seed: int = 0) -> Tensor:
        """Draws of the outputs, each a fixed function of the points, as for Thompson sampling.

        Weights are drawn once for a seed, and the network is linear in them: the same seed gives
        the values of the same functions at any points, whose joint distribution is that of
        :meth:`output_distribution`.

        Args:
            x: Points, ``(N, *event)``, or a dictionary of tensors.
            count: Number of functions.
            seed: Seed of the functions.

        Returns:
            ``(count, N, C)``; differentiable in points that require a gradient.

        Raises:
            ArgumentError, ShapeError, NonFiniteError, ModelModeError: As :meth:`predict`.
        """
        check_counts(count=count)
        points = self._checked_points(x)
        if self._drawn is None or self._drawn[0] != (count, seed, self.covariance_scale):
            key = (count, seed, self.covariance_scale)
            self._drawn = key, self.sample_weights(count, seed=seed)
        away = linearized_outputs(self._module, self._drawn[1], points)
        if self._output_likelihood().regression:
            return away
        # Outputs of classes are scaled, deviations from them are not.
        mean = self._normal(points)[0]
        with torch.set_grad_enabled(points.requires_grad):
            weights = {name: p.detach() for name, p in self._module.named_parameters()}
            return away - in_single(call_with(self._module, weights, points)) + mean

    @torch.no_grad()
    @checked
    def largest_variances(self, count: int) -> Tensor:
        r"""The weights of the largest posterior variances, of which a subnetwork may be made.

        These are :math:`1 / (h + \delta)` for curvature h and prior precision :math:`\delta`
        (Daxberger et al. 2021).

        Args:
            count: Number of weights.

        Returns:
            Their numbers in the vector of ``network.parameters()``, ``(count,)``, increasing.

        Raises:
            ArgumentError: The posterior has fewer weights, or is not fitted.
            UnsupportedError: Its structure is not ``"diag"``.

        Examples:
            >>> import torch
            >>> from gpclml import MLP, Laplace
            >>> x = torch.linspace(-1, 1, 100).unsqueeze(-1)
            >>> network, y = MLP([1, 20, 1]).eval(), (3 * x[:, 0]).sin()
            >>> every = Laplace(network, "regression", weights="all", structure="diag")
            >>> largest = every.fit((x, y)).largest_variances(20)
            >>> posterior = Laplace(network, "regression", weights=largest, structure="full")
            >>> posterior = posterior.fit((x, y))
        """
        check_counts(count=count)
        evidence, precisions = self._fitted(), self._precisions()
        curvature = evidence.curvature
        if not isinstance(curvature, DiagonalCurvature):
            got = f"a {type(curvature).__name__}"
            raise UnsupportedError("structure", got, "'diag', whose variances are known")
        scale = evidence.curvature_scale()
        variances = {k: 1 / (scale * h + precisions[k]) for k, h in curvature.diagonal.items()}
        total = sum(v.numel() for v in variances.values())
        if count > total:
            raise ArgumentError("count", count, f"at most {total}, the weights in the posterior")
        every = [
            variances[name].flatten() if name in variances else torch.full_like(p, -1.0).flatten()
            for name, p in self._module.named_parameters()
        ]
        return torch.cat(every).topk(count).indices.sort().values

    def to_botorch(self, input_transform: Any = None, outcome_transform: Any = None) -> Model:
        """The posterior as a BoTorch model, for acquisition functions.

        Args:
            input_transform: BoTorch's, of inputs before the network.
            outcome_transform: BoTorch's, in whose units the targets of the training were.

        Returns:
            A ``botorch.models.model.Model``: ``posterior(X)`` of points ``(*b, q, d)``.
        """
        from gpclml.laplace.botorch import LaplaceModel

        self._fitted()
        return LaplaceModel(self, input_transform, outcome_transform)

    @checked
    def log_marginal_likelihood(
        self,
        prior_precision: float | Tensor | None = None,
        noise: float | Tensor | None = None,
    ) -> Tensor:
        """The Laplace evidence of the data under other hyperparameters, at the same weights.

        Args:
            prior_precision: A number for all weights, or one for each group of ``by``, in the order
                of the parameters; None for the fitted ones.
            noise: Noise variance of a regression; None for the fitted one.

        Returns:
            Nats of all data, as float64; differentiable in the arguments.

        Raises:
            ArgumentError: A number is not positive, or the posterior is not fitted.
            ShapeError: There are neither one nor as many precisions as groups.
            UnsupportedError: There is a noise, and the likelihood has none.
        """
        evidence, precisions = self._fitted(), self._precisions()
        if prior_precision is not None:
            shape = self._prior.log_precision.shape
            values = tensor_like(prior_precision, self._prior.log_precision)
            if values.numel() != 1 and values.shape != shape:
                expected = f"a number, or {tuple(shape)}, one for each {self.by}"
                raise ShapeError("prior_precision", tuple(values.shape), expected)
            precisions = self._prior.named_precisions(values.reshape(-1).expand(shape))
        check_positive(prior_precision=prior_precision, noise=noise)
        with trained_only(self.network, []), torch.enable_grad():
            value = evidence.nats(precisions, noise)
        given = prior_precision, noise
        is_constant = not any(isinstance(v, Tensor) and v.requires_grad for v in given)
        return value.detach() if is_constant else value

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the posterior and the network's weights to one file, without pickled objects.

        Args:
            path: File to write; replaced if it is there.

        Raises:
            ArgumentError: It is not fitted, or the network's weights have changed since.
            DataError: The file cannot be written.
        """
        evidence = self._fitted()
        mean = self._prior.mean
        content = {
            "network": self.network.state_dict(),
            "curvature": content_of_curvature(evidence.curvature),
            "log_precision": self._prior.log_precision.detach(),
            "likelihood": content_of_likelihood(cast(Likelihood, self.likelihood)),
            "names": self.names,
            "seen": list(evidence.seen),
            "settings": {
                "by": self.by,
                "prior_mean": dict(mean) if isinstance(mean, Mapping) else mean,
            },
            "numbers": {name: getattr(self, name) for name in _NUMBERS},
        }
        write_checkpoint(path, _KIND, content)

    @classmethod
    @checked
    def load(
        cls,
        path: str | os.PathLike[str],
        network: torch.nn.Module,
        *,
        output: Callable[[Any], Tensor] | None = None,
    ) -> Laplace:
        """Reads a posterior that :meth:`save` wrote.

        Args:
            path: File to read.
            network: A network of the same architecture, which gets the stored weights and buffers.
            output: As of the posterior that was written.

        Raises:
            DataError: The file is missing, damaged, no such file, or of another network.
        """
        device = next(iter(network.parameters())).device
        content = read_checkpoint(path, _KIND, device, _REQUIRED)
        check_state(path, network, content["network"])
        try:
            likelihood = likelihood_of_content(content["likelihood"])
            curvature = curvature_of_content(content["curvature"])
            settings = {"weights": content["names"], "output": output, **content["settings"]}
            made = cls(network, likelihood, **settings)
            made.names = list(content["names"])
            network.load_state_dict(content["network"])
            with trained_only(network, made.names):
                prior = GaussianWeightPrior(made._module, made.by, 1.0, made.prior_mean)
                model = LinearizedNetwork(made._module, prior)
            with torch.no_grad():
                prior.log_precision.copy_(content["log_precision"])
            outputs, targets = content["seen"]
            mll = LaplaceMarginalLogLikelihood(likelihood, model, len(outputs))
            made._take(LaplaceEvidence(mll, outputs, targets, curvature))
            vars(made).update({name: content["numbers"][name] for name in _NUMBERS})
        except torch.OutOfMemoryError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise DataError(
                f"path: {path} does not hold a Laplace posterior ({error}). Write it again."
            ) from error
        return made

    @property
    def precisions(self) -> dict[str, Any]:
        """Prior precisions by the name of each parameter in the posterior: numbers, or tensors."""
        values = self._precisions().items()
        return {name: value if value.ndim else float(value) for name, value in values}

    @property
    def _module(self) -> torch.nn.Module:
        """What is differentiated: the network, or a function of one tensor that it is made."""
        return self._of_dictionaries if self._of_dictionaries.is_needed else self.network

    @property
    def _device(self) -> torch.device:
        return next(iter(self.network.parameters()), torch.zeros(())).device

    @property
    def _prior(self) -> GaussianWeightPrior:
        return self._fitted().mll.model.prior

    def _precisions(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._prior.precisions().items()}

    def _output_likelihood(self) -> OutputLikelihood:
        return output_likelihood(cast(Likelihood, self.likelihood))

    def _batches(
        self, argument: str, data: NetworkData, size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Points as tensors, and targets, on the device."""
        pairs = self._of_dictionaries.pairs(argument, data, size)
        return batches_of(argument, pairs, size, self._device)

    def _checked_points(self, x: Inputs) -> Tensor:
        self._fitted()
        points = self._of_dictionaries.points("x", x)
        if not len(points):
            raise ArgumentError("x", "no points", "at least one")
        check_finite("x", points)
        return points

    def _take(self, evidence: LaplaceEvidence) -> None:
        self._evidence = evidence
        self._digest = digest(self.network.state_dict())
        self._versions = versions_of(self.network)
        self.covariance_scale, self.output_scale, self.output_temperature = 1.0, 1.0, 1.0
        # What is computed from the rest:
        self._functions: dict[float, OutputCovariance] = {}
        self._probed: dict[Any, dict[str, str]] = {}  # what is known of the layers
        self._sizes: dict[torch.Size, int] = {}
        self._drawn: tuple[Any, dict[str, Tensor]] | None = None

    def _fitted(self) -> LaplaceEvidence:
        if self._evidence is None:
            raise ArgumentError("posterior", "one that is not fitted", "a fitted one", "Call fit.")
        check_mode(self.network)
        # Counters of changes are compared first, since a digest reads all weights.
        versions = versions_of(self.network)
        if versions != self._versions and digest(self.network.state_dict()) != self._digest:
            raise ArgumentError(
                "network", "weights or buffers that changed after fit", "those of fit",
                "Call fit again.",
            )  # fmt: skip
        if versions != self._versions:
            self._evidence.renew()
        self._versions = versions
        return self._evidence

    def __getstate__(self) -> dict[str, Any]:
        """Without what is computed from the rest, or holds in this process alone."""
        empty = {"_functions": {}, "_probed": {}, "_sizes": {}, "_drawn": None, "_versions": ()}
        return vars(self) | empty


class _Again:
    """Data as pairs of tensors, as often as they are read."""

    def __init__(self, posterior: Laplace, data: NetworkData, size: int) -> None:
        self._read = lambda: posterior._batches("data", data, size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._read()
