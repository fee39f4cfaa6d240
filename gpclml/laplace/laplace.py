"""The Laplace posterior of a trained network: from the network to its predictions in four lines."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Self, cast

import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, SoftmaxLikelihood
from torch import Tensor
from torch.distributions import Distribution, Normal

from gpclml._utils.arguments import (
    callers_level,
    check_counts,
    check_finite,
    check_positive,
    checked,
    seeded,
)
from gpclml._utils.environment import progress_bar
from gpclml._utils.files import read_checkpoint, write_checkpoint
from gpclml._utils.resuming import check_state, digest, versions_of
from gpclml.conditioning.batches import Data, Points, batches_of, points_of
from gpclml.curvature import (
    Curvature,
    Diagonal,
    Full,
    GaussianWeightPrior,
    Kronecker,
    Structure,
)
from gpclml.curvature.output_likelihoods import check_targets_belong, output_likelihood
from gpclml.curvature.storage import (
    content_of_curvature,
    content_of_likelihood,
    curvature_of_content,
    likelihood_of_content,
)
from gpclml.curvature.structure import OutputCovariance, check_mode, in_single, layer_of
from gpclml.errors import ArgumentError, DataError, ShapeError, UnsupportedError
from gpclml.fit import FitWarning
from gpclml.laplace.calibration import (
    FACTORS,
    bridged,
    calibrated,
    confident_as_the_network,
    factor_by_clml,
    output_covariances,
    scaled_outputs,
    validated_temperature,
)
from gpclml.mlls import LaplaceEvidence, LaplaceMarginalLogLikelihood
from gpclml.mlls.evidence_search import (
    fit_noise_to_residuals,
    maximize_evidence,
    told_of_link,
    told_of_scales,
)
from gpclml.models import LinearizedNetwork

__all__ = ["Laplace"]

_KIND = "gpclml.Laplace"
_REQUIRED = {
    "network": dict, "curvature": dict, "precisions": dict, "likelihood": dict, "names": list,
    "settings": dict, "numbers": dict,
}  # fmt: skip
_STRUCTURES = {"kron": Kronecker(others="diagonal"), "full": Full(), "diag": Diagonal()}
_UNKNOWN = 2**62  # points of data that have not been counted yet
_POINTS = 256  # that are predicted at a time
_SAMPLE = 1000  # training points at which predictions are compared with the network's
_SCALES = (0.0, *(10 ** (k / 2) for k in range(-12, 3)))  # of covariances that are tried
_NUMBERS = (
    "num_data", "log_evidence", "covariance_scale", "output_scale", "output_temperature",
    "_curvature_scale",
)  # fmt: skip


class Laplace:
    r"""The Laplace posterior of a network's weights, around where they are, and its predictions.

    The network is trained by any means. :meth:`fit` computes the curvature H of its log likelihood,
    batch by batch, and chooses prior precisions :math:`P_0`. Predictions are those of the network
    that is linear in its weights (Immer et al. 2021), whose outputs are normal,

    .. math:: f(x) \sim \mathcal N\big(\tfrac1T a(x) f_{w_*}(x),\; c\, V(x)\big), \qquad
        V(x) = J(x) (H + P_0)^{-1} J(x)^\top, \qquad
        a_k(x) = \min\big(a, \sqrt{1 + \tfrac\pi8 c V_{kk}(x)}\big)

    (1 in place of :math:`\pi / 8` for a probit). Searches of the evidence begin at hyperparameters
    that residuals and weights suggest, and go on in logarithms: intervals of a regression do not
    depend on the units of its targets. In regression a = 1, T is a factor of the noise, and
    validation points choose c too. Of a classifier that is sure of its training points the plain
    posterior, a = c = T = 1, makes far too uncertain predictions: on digits its log loss was 2 to
    65 times that of the network alone. A normal distribution extends to weights by which training
    points are misclassified, which the likelihood excludes; so its predictions of the training
    points are less likely than its evidence allows. Therefore a is the smallest factor by which
    these predictions lose at most .003 nats a point to the network's. No output is then surer than
    the network's, and it is as sure where the covariance is no larger than where data are.
    Validation points decide how sure predictions of new points may be, by T.

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``, each point on its own; in eval mode if it has
            dropout or batch normalization. It is not changed.
        likelihood: ``"classification"`` for a softmax, of one output the logistic function;
            ``"regression"``; or one of :class:`gpclml.mlls.LaplaceMarginalLogLikelihood`, of which
            ``BernoulliLikelihood`` is a probit, not for logits.
        weights: Weights in the posterior: ``"last"`` for those of the last layer that has some that
            require a gradient (of all layers if none do), ``"all"`` for all that require a
            gradient, or names of parameters or modules.
        structure: ``"kron"``, ``"full"``, ``"diag"``, or a structure of :mod:`gpclml.curvature`.
        by: One precision for the ``"network"``, for each ``"layer"`` or ``"parameter"``.

    Attributes:
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
        weights: str | Sequence[str] = "last",
        structure: Structure | Literal["kron", "full", "diag"] = "kron",
        by: Literal["network", "layer", "parameter"] = "layer",
    ) -> None:
        if isinstance(likelihood, Likelihood):
            output_likelihood(likelihood)
        self.network = network
        self.likelihood: Likelihood | str = likelihood
        self.weights = weights
        self.by: Literal["network", "layer", "parameter"] = by
        named = structure if isinstance(structure, str) else ""
        self.structure: Structure = _STRUCTURES.get(named, cast(Structure, structure))
        raw = getattr(getattr(likelihood, "noise_covar", None), "raw_noise", None)
        self._keeps_noise = isinstance(raw, Tensor) and bool(raw.detach().any())  # a number too
        self._curvature: Curvature | None = None

    def __repr__(self) -> str:
        shown = (self.network, self.likelihood, self.structure)
        names = [value if isinstance(value, str) else type(value).__name__ for value in shown]
        fitted = f"{self.num_data} points" if self._curvature is not None else "not fitted"
        return f"Laplace({', '.join(names)}, weights={self.weights!r}: {fitted})"

    @checked
    def fit(
        self,
        data: Data,
        *,
        validation: Data | None = None,
        precision: float | Literal["evidence", "validation", "clml"] = "evidence",
        spread: Literal["validation", "evidence"] = "validation",
        batch_size: int = 256,
        progress: bool | None = None,
    ) -> Self:
        """Computes the curvature at the data and chooses precisions and the scale of predictions.

        Of a classifier whose precisions climb the evidence the factor a of outputs is the smallest
        from 1 on by which predictions of training points lose at most .003 nats to the network's.
        It takes a second pass over the data, for 1,000 points of them.

        The temperature of a classifier is the most probable one given the validation points and
        60 more, whose labels are drawn from the predictions without validation. So few points
        change little, and it needs evidence to be surer than the network.

        Args:
            data: The training data of the network: a ``DataLoader`` or other iterable of pairs
                ``(x, y)``, or two tensors. One pass over them is usually enough.
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
            spread: Which covariance validation leaves to a classifier. ``"validation"``: none where
                validation points are likelier under the network alone, so that their predictions
                are never worse than the network's. ``"evidence"``: that without validation points
                in any case, which tells points unlike the training data from others.
            batch_size: Number of points that are processed at a time, if the data are tensors.
            progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

        Returns:
            Itself.

        Raises:
            ArgumentError: Data are missing or are not pairs of tensors; labels contradict the
                network's outputs; a precision is not positive, or needs validation data.
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
        batches = batches_of("data", data, batch_size, self._device)
        first = next(batches)
        if isinstance(self.likelihood, str):
            outputs = _network_outputs(self.network, first[0])
            classes = max(outputs.shape[-1], 2)  # one output is a logit
            self.likelihood = (
                GaussianLikelihood()
                if self.likelihood == "regression"
                else SoftmaxLikelihood(num_classes=classes, mixing_weights=False)
            ).to(outputs)
        # Weights outside the posterior are constants, of which no curvature is computed.
        self.names = _chosen_parameters(self.network, self.weights, first[0])
        start = 1.0 if isinstance(precision, str) else precision
        with _trained_only(self.network, self.names):
            prior = GaussianWeightPrior(self.network, self.by, start)
            model = LinearizedNetwork(self.network, prior)
            mll = LaplaceMarginalLogLikelihood(self.likelihood, model, _UNKNOWN, self.structure)
            evidence = mll.evidence_of(*first)
            for x, y in progress_bar(batches, desc="batches", progress=progress):
                evidence = evidence + mll.evidence_of(x, y)
        self.num_data = mll.num_data = len(evidence.seen[0])
        check_targets_belong("data", *evidence.seen)
        self._search(evidence, climbs=isinstance(precision, str))
        with _trained_only(self.network, self.names), torch.no_grad():
            if precision == "clml" and validation is not None:
                pairs = batches_of("validation", validation, batch_size, self._device)
                points, targets = map(torch.cat, zip(*pairs, strict=True))
                prior.log_precision.add_(math.log(factor_by_clml(evidence, (points, targets))))
            self.log_evidence = float(evidence.nats())
            precisions = {name: p.clone() for name, p in prior.precisions().items()}
            scale = float(evidence.curvature_scale())
        for p in precisions.values():
            check_finite("precision", p, "Fix it by giving a number.")
        self._take(evidence.curvature, precisions, scale)
        if validation is not None or precision == "evidence":
            self._calibrate(data, validation, precision, spread, batch_size)
        return self

    def _search(self, evidence: LaplaceEvidence, climbs: bool) -> None:
        """Climbs the evidence, or fits the noise beside a given precision; warns of what is wrong.

        A noise that the likelihood came with stays beside a number.
        """
        likelihood = cast(Likelihood, self.likelihood)
        told = told_of_link(likelihood, *evidence.seen) or told_of_scales(
            likelihood, *evidence.seen
        )
        if climbs:
            told = maximize_evidence(evidence) or told
        elif not self._keeps_noise:
            told = fit_noise_to_residuals(evidence) or told
        if told:
            warnings.warn(told, FitWarning, stacklevel=callers_level())

    @torch.no_grad()
    def _calibrate(
        self,
        data: Data,
        validation: Data | None,
        precision: float | str,
        spread: str,
        batch_size: int,
    ) -> None:
        """Chooses the factors of outputs and covariances and the temperature."""
        likelihood = output_likelihood(cast(Likelihood, self.likelihood))
        regression = isinstance(self.likelihood, GaussianLikelihood)
        index, held_out = 0, None
        if validation is not None:
            pairs = batches_of("validation", validation, batch_size, self._device)
            held_out = self._evaluated(pairs, FACTORS if precision == "validation" else (1.0,))
            check_finite("validation", held_out[0], "These are outputs at its points.")
            check_targets_belong("validation", *held_out[:2])
        if held_out is not None and (regression or precision == "validation"):
            # Where other points choose the precision, the covariance stays whole or goes.
            whole = precision in ("clml", "validation")
            index, scale, temperature = calibrated(
                likelihood, *held_out, (1.0,) if whole else _SCALES
            )
            if regression:
                self.covariance_scale, self.output_temperature = scale, temperature
            elif not scale:
                index = FACTORS.index(1.0)
            if precision == "validation":
                self._precisions = {n: FACTORS[index] * p for n, p in self._precisions.items()}
                self._output_covariance = self._function(1.0)
        if regression:
            return
        outputs, target, (covariance,) = self._evaluated(self._sample(data, batch_size))
        self.output_scale = confident_as_the_network(likelihood, outputs, target, covariance)
        if held_out is None:
            return
        outputs, target, covariances = held_out
        scaled = scaled_outputs(likelihood, outputs, covariances[index], self.output_scale)
        self.output_temperature, gain = validated_temperature(
            likelihood, scaled, target, covariances[index], outputs
        )
        if gain < 0 and spread == "validation":
            self.covariance_scale, self.output_scale, self.output_temperature = 0.0, 1.0, 1.0

    def _sample(self, data: Data, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """About 1,000 of the training points, at even distances."""
        # The same points whatever the size of batches.
        every, seen = max(1, self.num_data // _SAMPLE), 0
        for x, y in batches_of("data", data, batch_size, self._device):
            rows = torch.arange(-seen % every, len(x), every, device=x.device)
            seen += len(x)
            if len(rows):
                yield x[rows], y[rows]

    def _evaluated(
        self, batches: Iterator[tuple[Tensor, Tensor]], factors: Sequence[float] = (1.0,)
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Outputs, targets and covariances of outputs, for each factor of the precisions."""
        outputs, targets, covariances = [], [], []
        for x, y in batches:
            outputs.append(_network_outputs(self.network, x))
            targets.append(y)
            covariances.append(self._covariances(x, outputs[-1].shape[-1], factors))
        joined = [torch.cat(chunks) for chunks in zip(*covariances, strict=True)]
        return torch.cat(outputs), torch.cat(targets), joined

    def _covariances(self, x: Tensor, outputs: int, factors: Sequence[float]) -> list[Tensor]:
        """Covariances of outputs, ``(N, C, C)``, for each factor of the precisions."""
        self._output_covariance = self._output_covariance or self._function(1.0)
        functions = [self._output_covariance if f == 1 else self._function(f) for f in factors]
        with _trained_only(self.network, self.names):
            return output_covariances(self.network, functions, x, outputs)

    def _function(self, factor: float) -> OutputCovariance:
        """What gives covariances of outputs with so many times the precisions."""
        assert self._curvature is not None
        precisions = {name: factor * p for name, p in self._precisions.items()}
        return self._curvature.output_covariance(precisions, self._curvature_scale)

    @torch.no_grad()
    @checked(x="(N, *event)")
    def predict(
        self,
        x: Points,
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
        self._check_fitted()
        kind = cast(Likelihood, self.likelihood)
        likelihood = output_likelihood(kind)
        if method == "bridge" and not isinstance(self.likelihood, SoftmaxLikelihood):
            got, expected = "'bridge' without a softmax", "a SoftmaxLikelihood"
            raise UnsupportedError("method", got, expected, "Use 'closed'.")
        source = seeded(seed)
        # The temperature of a regression multiplies its noise, that of classes divides outputs.
        temperature = 1.0 if method == "mode" else self.output_temperature
        regression = isinstance(kind, GaussianLikelihood)
        scale = 0.0 if method == "mode" else self.covariance_scale
        chunks: list[Any] = []
        batches = points_of("x", x, _POINTS, self._device)
        for points in progress_bar(batches, desc="predictions", progress=progress):
            check_finite("x", points)
            outputs = _network_outputs(self.network, points)
            count, c = outputs.shape
            covariance = outputs.new_zeros(()).expand(count, c, c)
            if scale > 0:
                covariance = scale * self._covariances(points, c, (1.0,))[0]
                # The bridge moderates outputs in a way that the factor does not make up for.
                factor = 1.0 if method == "bridge" else self.output_scale
                outputs = scaled_outputs(likelihood, outputs, covariance, factor)
            if not regression:
                outputs = outputs / temperature
            if method == "bridge" and scale > 0:
                chunks.append(bridged(outputs, covariance))
                continue
            normal = None
            if method == "draws":
                normal = torch.randn((draws, count, c), generator=source, dtype=torch.float64)
            tempered = temperature if regression else 1.0
            chunks.append(likelihood.predictive(outputs, covariance, tempered, normal))
        if regression:
            means, deviations = (
                torch.cat([getattr(d, k) for d in chunks]) for k in ("loc", "scale")
            )
            return Normal(means, deviations)
        return type(chunks[0])(logits=torch.cat([distribution.logits for distribution in chunks]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the posterior and the network's weights to one file, without pickled objects.

        Args:
            path: File to write; replaced if it is there.

        Raises:
            ArgumentError: It is not fitted, or the network's weights have changed since.
            DataError: The file cannot be written.
        """
        curvature = self._check_fitted()
        content = {
            "network": self.network.state_dict(),
            "curvature": content_of_curvature(curvature),
            "precisions": self._precisions,
            "likelihood": content_of_likelihood(cast(Likelihood, self.likelihood)),
            "names": self.names,
            "settings": {"by": self.by},
            "numbers": {name: getattr(self, name) for name in _NUMBERS},
        }
        write_checkpoint(path, _KIND, content)

    @classmethod
    @checked
    def load(cls, path: str | os.PathLike[str], network: torch.nn.Module) -> Laplace:
        """Reads a posterior that :meth:`save` wrote.

        Args:
            path: File to read.
            network: A network of the same architecture, which gets the stored weights and buffers.

        Raises:
            DataError: The file is missing, damaged, no such file, or of another network.
        """
        device = next(iter(network.parameters())).device
        content = read_checkpoint(path, _KIND, device, _REQUIRED)
        check_state(path, network, content["network"])
        try:
            likelihood = likelihood_of_content(content["likelihood"])
            curvature = curvature_of_content(content["curvature"])
            made = cls(network, likelihood, weights=content["names"], **content["settings"])
            made.names = list(content["names"])
            network.load_state_dict(content["network"])
            numbers = content["numbers"]
            made._take(curvature, content["precisions"], numbers["_curvature_scale"])
            vars(made).update({name: numbers[name] for name in _NUMBERS})
        except torch.OutOfMemoryError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise DataError(
                f"path: {path} does not hold a Laplace posterior ({error}). Write it again."
            ) from error
        return made

    @property
    def precisions(self) -> dict[str, float]:
        """The prior precision of each parameter in the posterior, by name."""
        return {name: float(value) for name, value in self._precisions.items()}

    @property
    def _device(self) -> torch.device:
        return next(iter(self.network.parameters()), torch.zeros(())).device

    def _take(self, curvature: Curvature, precisions: Mapping[str, Tensor], scale: float) -> None:
        self._curvature, self._precisions = curvature, dict(precisions)
        self._curvature_scale = scale
        self._output_covariance: OutputCovariance | None = self._function(1.0)
        self._digest = digest(self.network.state_dict())
        self._versions = versions_of(self.network)
        self.covariance_scale, self.output_scale, self.output_temperature = 1.0, 1.0, 1.0

    def _check_fitted(self) -> Curvature:
        if self._curvature is None:
            raise ArgumentError("posterior", "one that is not fitted", "a fitted one", "Call fit.")
        check_mode(self.network)
        # Counters of changes are compared first, since a digest reads all weights.
        versions = versions_of(self.network)
        if versions != self._versions and digest(self.network.state_dict()) != self._digest:
            raise ArgumentError(
                "network", "weights or buffers that changed after fit", "those of fit",
                "Call fit again.",
            )  # fmt: skip
        self._versions = versions
        return self._curvature

    def __getstate__(self) -> dict[str, Any]:
        """Without what is computed from the rest, or holds in this process alone."""
        return {**vars(self), "_output_covariance": None, "_versions": ()}


@torch.no_grad()
@checked(late=True, passes_on="x", x="(N, *event)")
def _network_outputs(network: torch.nn.Module, x: Tensor) -> Tensor:
    """The network's outputs, ``(N, C)``; a typed error where it does not take the points."""
    outputs = network(x)
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(x):
        got = f"outputs {tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs)}"
        raise ShapeError("network", got, f"outputs ({len(x)}, C), a row for each point")
    return in_single(outputs)


@contextmanager
def _trained_only(network: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Within the block these parameters alone require a gradient."""
    before = {name: p.requires_grad for name, p in network.named_parameters()}
    try:
        for name, p in network.named_parameters():
            p.requires_grad_(name in names)
        yield
    finally:
        for name, p in network.named_parameters():
            p.requires_grad_(before[name])


def _chosen_parameters(
    network: torch.nn.Module, weights: str | Sequence[str], x: Tensor
) -> list[str]:
    """Names of the parameters that are meant by ``"last"``, ``"all"``, or names of modules too.

    The order of the layers is found at two of the points. An ArgumentError says that a name is not
    known, or that there is no parameter.
    """
    named = dict(network.named_parameters())
    if weights == "last":
        return _last_layer(network, x)
    if weights == "all":
        chosen = [name for name, p in named.items() if p.requires_grad]
    else:
        chosen = []
        for given in [weights] if isinstance(weights, str) else weights:
            meant = [name for name in named if name == given or name.startswith(f"{given}.")]
            if not meant:
                expected = f"'last', 'all', or some of {', '.join(named)} or of their modules"
                raise ArgumentError("weights", repr(given), expected)
            chosen += meant
        chosen = [name for name in named if name in chosen]
    if not chosen:
        raise ArgumentError("weights", "no parameter", "at least one", "Set requires_grad.")
    return chosen


def _last_layer(network: torch.nn.Module, x: Tensor) -> list[str]:
    """Names of the trainable parameters of the last layer that has some and changes the outputs.

    In a network whose parameters are all frozen, which says nothing of how it was trained, frozen
    ones count too. A layer is a module with parameters of its own or of parametrizations.
    """
    named = dict(network.named_parameters())
    trainable = [name for name, p in named.items() if p.requires_grad] or list(named)
    called: list[str] = []

    def note(layer: str, *_: Any) -> None:
        called.append(layer)

    gradients: Sequence[Tensor | None] = [None] * len(trainable)
    handles = [
        module.register_forward_pre_hook(partial(note, layer_of(f"{name}.")))
        for name, module in network.named_modules() if module._parameters
    ]  # fmt: skip
    try:
        _network_outputs(network, x[:2])  # its checks
        called.clear()
        with _trained_only(network, trainable), torch.enable_grad():
            total = network(x[:2]).sum()
            if total.requires_grad:
                parameters = [named[name] for name in trainable]
                gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    # A layer may be called last whose result the outputs do not have: an auxiliary head.
    used = {layer_of(name) for name, g in zip(trainable, gradients, strict=True) if g is not None}
    for layer in reversed(called):
        if layer in used:
            return [name for name in trainable if layer_of(name) == layer]
    suggestion = "Give names of parameters as weights."
    raise ArgumentError("network", "no layer with parameters", "at least one", suggestion)
