"""The mean of the objectives of several models, as one objective."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import gpytorch
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import GP
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import UnsupportedError
from gpclml.mlls.conditional_marginal_log_likelihood import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import training_loss

# A checker that does not read upstream's source knows this base.
assert issubclass(gpytorch.mlls.SumMarginalLogLikelihood, torch.nn.Module)


class SumMarginalLogLikelihood(gpytorch.mlls.SumMarginalLogLikelihood):
    """GPyTorch's ``SumMarginalLogLikelihood``, with held-out points that stay fixed on request.

    The value is the mean of the objectives of independent models: of BoTorch's ``ModelListGP`` or
    GPyTorch's ``IndependentModelList``. In GPyTorch's class an objective of this package redraws
    its held-out points at every call, also where BoTorch optimizes the sum itself
    (``get_loss_closure``, ``fit_gpytorch_mll_scipy``, ``fit_gpytorch_mll_torch``). A line search on
    such a changing function ends after a few steps without an error. This class therefore has
    :meth:`compute_custom_loss`, which BoTorch calls instead.

    Args:
        likelihood: The likelihood of the list of models.
        model: The list of models, with ``models`` and ``likelihood``.
        mll_cls: Makes the objective of each model from its likelihood and the model: a class, or a
            function such as ``functools.partial(ConditionalMarginalLogLikelihood,
            conditioning=LeaveOneOut())``.

    Attributes:
        mlls: The objectives of the models.

    Raises:
        UnsupportedError: ``mll_cls`` is an objective itself.

    Examples:
        >>> import torch
        >>> from botorch.fit import fit_gpytorch_mll
        >>> from botorch.models import ModelListGP, SingleTaskGP
        >>> from gpclml import SumMarginalLogLikelihood
        >>> x = torch.rand(20, 2, dtype=torch.float64)
        >>> models = ModelListGP(*(SingleTaskGP(x, (k * x).sum(-1, True).sin()) for k in (1, 2)))
        >>> _ = fit_gpytorch_mll(SumMarginalLogLikelihood(models.likelihood, models))
    """

    @checked
    def __init__(
        self,
        likelihood: Likelihood,
        model: GP,
        mll_cls: Callable[[Any, Any], MarginalLogLikelihood] = ConditionalMarginalLogLikelihood,
    ) -> None:
        if isinstance(mll_cls, torch.nn.Module):
            got = f"an object of {type(mll_cls).__name__}"
            raise UnsupportedError("mll_cls", got, "a class of objectives, or a function")
        super().__init__(likelihood, model, cast(Any, mll_cls))

    def compute_custom_loss(self, **kwargs: Any) -> Tensor:
        """The mean negative objective of the models on their own data, with fixed held-out points.

        Args:
            **kwargs: Passed on to the objectives.

        Returns:
            The loss, ``(*batch,)``.

        Raises:
            ModelModeError: If a model is in eval mode.
        """
        losses = [
            getattr(mll, "compute_custom_loss", partial(training_loss, mll))(**kwargs)
            for mll in cast(Any, self.mlls)
        ]
        return torch.stack(losses).mean(0)
