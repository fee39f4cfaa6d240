"""The Laplace evidence of a network, and its stochastic lower bound, as a GPyTorch objective."""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol, cast

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpclml.curvature import Cotangents, Kronecker
from gpclml.errors import ArgumentError, UnknownNameError, UnsupportedError
from gpclml.mlls._outputs import OutputLikelihood, gradient_columns, output_likelihood
from gpclml.models.linearized_network import Linearization, LinearizedNetwork

__all__ = ["LaplaceMarginalLogLikelihood"]

_HESSIANS = ("ggn", "ef")
_OUTPUTS = ("all", "single")


class _Structure(Protocol):
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> Any: ...


class LaplaceMarginalLogLikelihood(MarginalLogLikelihood):
    r"""The Laplace approximation of a network's log evidence, in nats per point.

    .. math:: \frac1N \Big[ \log p(\mathcal D \mid w_*) - \tfrac12 w_*^\top P_0 w_*
        - \tfrac12 \log \frac{|H + P_0|}{|P_0|} \Big]

    with H the generalized Gauss-Newton matrix or the empirical Fisher of the negative log
    likelihood at the weights as they are (Immer et al. 2021, Eq. 3). Called on all data it is
    that; called on a batch B it is the stochastic estimate whose mean over the batches of a
    partition is a lower bound of it: the log likelihood and the log-determinant of the batch,
    each times N / |B| (Immer et al. 2023, Eqs. 11-14). With ``outputs="single"`` one output,
    drawn at each call, stands for all C, its log-determinant C times; with a softmax
    that is a bound in practice, not by proof.

    The log-determinant is differentiable in prior precisions, the noise, the temperature and
    what the points depend on, such as parameters of augmentations; not in the weights, which are
    trained on the first two terms alone, as is usual.

    Args:
        likelihood: ``GaussianLikelihood``, ``SoftmaxLikelihood(mixing_weights=False)`` or
            ``BernoulliLikelihood`` of GPyTorch.
        model: A network with its prior.
        num_data: Number N of points that the weights are trained on.
        curvature: A structure of :mod:`gpclml.curvature`; ``Kronecker()`` if None.
        hessian: ``"ggn"`` or ``"ef"``.
        outputs: ``"all"`` or ``"single"``.
        temperature: What the log likelihood is divided by, a number or a parameter.
        seed: Seed of the outputs that are drawn.

    Raises:
        UnsupportedError: The likelihood is another one, or the model no LinearizedNetwork.
        UnknownNameError: No such Hessian or outputs.
        ArgumentError: ``num_data`` is below 1 or the temperature not positive.

    Example:
        >>> mll = LaplaceMarginalLogLikelihood(likelihood, model, num_data=len(x))
        >>> loss = -mll(model(x), y)
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: LinearizedNetwork,
        num_data: int,
        curvature: _Structure | None = None,
        *,
        hessian: Literal["ggn", "ef"] = "ggn",
        outputs: Literal["all", "single"] = "all",
        temperature: float | Tensor = 1.0,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, LinearizedNetwork):
            raise UnsupportedError("model", type(model).__name__, "a LinearizedNetwork")
        if hessian not in _HESSIANS:
            raise UnknownNameError("hessian", hessian, _HESSIANS)
        if outputs not in _OUTPUTS:
            raise UnknownNameError("outputs", outputs, _OUTPUTS)
        if num_data < 1:
            raise ArgumentError("num_data", num_data, "at least 1")
        if not 0 < float(torch.as_tensor(temperature).detach()) < math.inf:
            raise ArgumentError("temperature", temperature, "a positive number")
        output_likelihood(likelihood)
        super().__init__(likelihood, model)
        self.num_data = num_data
        self.curvature = Kronecker() if curvature is None else curvature
        self.hessian = hessian
        self.outputs = outputs
        self.temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def forward(self, output: Linearization, target: Tensor, **kwargs: Any) -> Tensor:
        """The evidence, or its stochastic bound.

        Args:
            output: The model at points: all N, or a batch of them.
            target: Their targets: ``(B,)`` or, of several outputs in regression, ``(B, C)``.
            **kwargs: Not used.

        Returns:
            Nats per point; larger is better.

        Raises:
            ArgumentError: The batch is larger than ``num_data``, or targets are no classes.
            ShapeError: Targets, outputs and likelihood do not fit.
            UnsupportedError, ModelModeError, NonFiniteError, NotPSDError: The network has no
                such curvature, or it is not finite.
        """
        count = len(output.points)
        if count > self.num_data:
            mend = "Pass the number of all points that the weights are trained on."
            expected = f"at most num_data = {self.num_data}"
            raise ArgumentError("output", f"{count} points", expected, mend)
        model = cast(LinearizedNetwork, self.model)
        share = self.num_data / count
        fit = self._likelihood().log_density(output.mean, target).sum() / self.temperature
        penalty = model.prior.penalty(model.network)
        ratio = self.log_det_ratio(output, target)
        return (share * (fit - 0.5 * ratio) - 0.5 * penalty) / self.num_data

    def log_det_ratio(self, output: Linearization, target: Tensor) -> Tensor:
        r""":math:`\log |H + P_0| - \log |P_0|` of a batch, in nats.

        Args:
            output: The model at points.
            target: Their targets.
        """
        model = cast(LinearizedNetwork, self.model)
        num_outputs = output.mean.shape[-1]
        if self.hessian == "ef":
            copies, columns = 1, self._gradient_columns(target)
        elif self.outputs == "all":
            copies, columns = 1, self._columns(target)
        else:
            place = int(torch.randint(num_outputs, (), generator=self._generator))
            copies, columns = num_outputs, self._columns_of_one(target, place)
        curvature = self.curvature.of(model.network, output.points, columns)
        return copies * curvature.log_det_ratio(model.prior.precisions())

    def _gradient_columns(self, target: Tensor) -> Cotangents:
        likelihood = self._likelihood()
        return lambda outputs: gradient_columns(likelihood, outputs, target) / self.temperature

    def _columns(self, target: Tensor) -> Cotangents:
        likelihood, root = self._likelihood(), torch.as_tensor(self.temperature).sqrt()
        return lambda outputs: likelihood.columns(outputs, target) / root

    def _columns_of_one(self, target: Tensor, place: int) -> Cotangents:
        """The curvature of one output, whatever the others are: one column."""
        columns = self._columns(target)

        def of_one(outputs: Tensor) -> Tensor:
            deviation = columns(outputs)[..., place].norm(dim=-1)
            one = torch.nn.functional.one_hot(torch.tensor(place), outputs.shape[-1]).to(outputs)
            return (deviation.unsqueeze(-1) * one).unsqueeze(1)

        return of_one

    def _likelihood(self) -> OutputLikelihood:
        return output_likelihood(cast(Likelihood, self.likelihood))
