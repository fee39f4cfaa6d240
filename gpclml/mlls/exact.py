"""The objectives of exact GPs by GPyTorch's names: conditional likelihoods of all points."""

from __future__ import annotations

from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP

from gpclml._utils.arguments import checked
from gpclml.conditioning import LastPoints, LeaveOneOut
from gpclml.mlls.conditional_marginal_log_likelihood import ConditionalMarginalLogLikelihood

__all__ = ["ExactMarginalLogLikelihood", "LeaveOneOutPseudoLikelihood"]


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
        >>> model = GPRegression(train_x, train_y)
        >>> mll = ExactMarginalLogLikelihood(model.likelihood, model)
        >>> loss = -mll(model(*model.train_inputs), model.train_targets)
        >>> loss.backward()
    """

    @checked
    def __init__(self, likelihood: Likelihood, model: ExactGP) -> None:
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
        >>> model = GPRegression(train_x, train_y)
        >>> mll = LeaveOneOutPseudoLikelihood(model.likelihood, model)
        >>> loss = -mll(model(*model.train_inputs), model.train_targets)
        >>> loss.backward()
    """

    @checked
    def __init__(self, likelihood: Likelihood, model: ExactGP) -> None:
        super().__init__(likelihood, model, LeaveOneOut())
