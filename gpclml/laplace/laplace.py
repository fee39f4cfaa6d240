"""The Laplace posterior of a trained network: from the network to its predictions in four lines."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self, cast

import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, SoftmaxLikelihood
from torch import Tensor
from torch.distributions import Distribution

from gpclml._utils.arguments import (
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
from gpclml.curvature.structure import OutputCovariance, check_mode
from gpclml.errors import ArgumentError, DataError, UnsupportedError
from gpclml.laplace.laplace_confidence import (
    FACTORS,
    CalibratedPosterior,
    calibrated,
    scaled_outputs,
)
from gpclml.laplace.laplace_outputs import (
    covariances_of,
    joined,
    likelihood_of_kind,
    search_hyperparameters,
)
from gpclml.laplace.laplace_parts import (
    bridged,
    chosen_parameters,
    factor_by_clml,
    factor_by_folds,
    only_trained,
    outputs_of,
)
from gpclml.mlls import LaplaceMarginalLogLikelihood
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
_SCALES = (0.0, *(10 ** (k / 2) for k in range(-12, 3)))  # of covariances that are tried


class Laplace(CalibratedPosterior):
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
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(TensorDataset(train_x, train_y), batch_size=50)
        >>> posterior = Laplace(network.eval(), "regression", structure="full")
        >>> _ = posterior.fit(loader, validation=(x[:20], y[:20]))
        >>> predicted = posterior.predict(x[:3])
        >>> predicted.mean, predicted.stddev
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
        parts = (self.network, self.likelihood, self.structure)
        names = [one if isinstance(one, str) else type(one).__name__ for one in parts]
        fitted = f"{self.num_data} points" if self._curvature is not None else "not fitted"
        return f"Laplace({', '.join(names)}, weights={self.weights!r}: {fitted})"

    @checked
    def fit(
        self,
        data: Data,
        *,
        validation: Data | None = None,
        precision: float
        | Literal["evidence", "validation", "cross-validation", "clml"] = "evidence",
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
                mean log density of validation targets, ``"clml"`` their joint density, and
                ``"cross-validation"`` the density of five folds of the batches. A Newton step of
                the linearized network leaves each fold out, with three passes over the data. A
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
        likelihood = self._likelihood_of(first[0])
        self.names = chosen_parameters(self.network, self.weights, first[0])
        with only_trained(self.network, self.names):
            start = 1.0 if isinstance(precision, str) else precision
            model = LinearizedNetwork(
                self.network, GaussianWeightPrior(self.network, self.by, start)
            )
            mll = LaplaceMarginalLogLikelihood(likelihood, model, _UNKNOWN, self.structure)
            evidence, self.num_data = mll.evidence_of(*first), len(first[0])
            for x, y in progress_bar(batches, desc="batches", progress=progress):
                evidence, self.num_data = evidence + mll.evidence_of(x, y), self.num_data + len(x)
        mll.num_data = self.num_data
        check_targets_belong("data", *evidence.seen)
        search_hyperparameters(evidence, precision, self._keeps_noise)
        if precision == "cross-validation":
            factor = self._by_folds(mll, data, batch_size)
            with torch.no_grad():
                model.prior.log_precision.add_(math.log(factor))
        elif precision == "clml" and validation is not None:
            pairs = list(batches_of("validation", validation, batch_size, self._device))
            held_out = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
            with only_trained(self.network, self.names):
                factor = factor_by_clml(evidence, held_out, FACTORS)
            with torch.no_grad():
                model.prior.log_precision.add_(math.log(factor))
        with torch.no_grad():
            self.log_evidence = float(evidence.nats())
            precisions = {name: p.clone() for name, p in model.prior.precisions().items()}
            scale = float(evidence.curvature_scale())
        for p in precisions.values():
            check_finite("precision", p, "Fix it by giving a number.")
        self._take(evidence.curvature, precisions, scale)
        held_out = None
        if validation is not None:
            pairs = batches_of("validation", validation, batch_size, self._device)
            held_out = self._evaluated(pairs, FACTORS if precision == "validation" else (1.0,))
            check_finite("validation", held_out[0], "These are outputs at its points.")
            check_targets_belong("validation", *held_out[:2])
        if isinstance(likelihood, GaussianLikelihood):
            if held_out is not None:
                whole = precision in ("clml", "cross-validation", "validation")  # c = 1 or 0
                chosen = calibrated(likelihood, *held_out, (1.0,) if whole else _SCALES)
                self._multiply_precisions(precision, chosen[0])
                self.covariance_scale, self.output_temperature = chosen[1:]
        elif held_out is not None or precision == "evidence":
            self._balance(likelihood, data, batch_size, held_out, precision, spread)
        return self

    def _by_folds(self, mll: LaplaceMarginalLogLikelihood, data: Data, batch_size: int) -> float:
        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            size = max(1, min(batch_size, self.num_data // 5))
            return batches_of("data", data, size, self._device)

        def covariances(function: OutputCovariance, x: Tensor, outputs: int) -> Tensor:
            return covariances_of(self.network, self.names, [function], x, outputs)[0]

        with only_trained(self.network, self.names):
            return factor_by_folds(mll.evidence_of, batches, covariances, FACTORS)

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
        tempered = divisor = 1.0
        if method != "mode" and isinstance(self.likelihood, GaussianLikelihood):
            tempered = self.output_temperature
        elif method != "mode":
            divisor = self.output_temperature
        parts = []
        chunks = points_of("x", x, _POINTS, self._device)
        for some in progress_bar(chunks, desc="predictions", progress=progress):
            check_finite("x", some)
            outputs = outputs_of(self.network, some)
            count, c = outputs.shape
            scale = 0.0 if method == "mode" else self.covariance_scale
            covariance = outputs.new_zeros(()).expand(count, c, c)
            if scale > 0:
                covariance = scale * self._covariances(some, c, (1.0,))[0]
                # The bridge moderates outputs in a way that the factor does not make up for.
                factor = 1.0 if method == "bridge" else self.output_scale
                outputs = scaled_outputs(kind, outputs, covariance, factor)
            outputs = outputs / divisor
            normal = None
            if method == "draws":
                normal = torch.randn((draws, count, c), generator=source, dtype=torch.float64)
            if method == "bridge" and scale > 0:
                parts.append(bridged(*cast(Any, likelihood).centred(outputs, covariance)))
                continue
            parts.append(likelihood.predictive(outputs, covariance, tempered, normal))
        return joined(parts)

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
            "numbers": {
                "num_data": self.num_data, "log_evidence": self.log_evidence,
                "covariance_scale": self.covariance_scale,
                "output_scale": self.output_scale, "output_temperature": self.output_temperature,
                "scale": self._scale,
            },
        }  # fmt: skip
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
            numbers = dict(content["numbers"])
            scale = numbers.pop("scale")
            made.names = list(content["names"])
            made.num_data, made.log_evidence = numbers.pop("num_data"), numbers.pop("log_evidence")
            network.load_state_dict(content["network"])
            made._take(curvature, content["precisions"], scale)
            made.covariance_scale = numbers["covariance_scale"]
            made.output_scale = numbers["output_scale"]
            made.output_temperature = numbers["output_temperature"]
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

    def _likelihood_of(self, x: Tensor) -> Likelihood:
        """The likelihood, made from the network's outputs where only its kind was given."""
        if isinstance(self.likelihood, str):
            self.likelihood = likelihood_of_kind(self.likelihood, outputs_of(self.network, x))
        return self.likelihood

    def _take(self, curvature: Curvature, precisions: Mapping[str, Tensor], scale: float) -> None:
        self._curvature, self._precisions, self._scale = curvature, dict(precisions), scale
        self._of_gradients = self._function(1.0)
        self._digest = digest(self.network.state_dict())
        self._versions = versions_of(self.network)
        self.covariance_scale, self.output_scale, self.output_temperature = 1.0, 1.0, 1.0

    def _check_fitted(self) -> Curvature:
        if self._curvature is None:
            raise ArgumentError("posterior", "one that is not fitted", "a fitted one", "Call fit.")
        check_mode(self.network)
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
        return {**vars(self), "_of_gradients": None, "_versions": ()}
