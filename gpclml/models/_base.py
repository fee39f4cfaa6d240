"""What the models of this package share: one tensor of inputs, one of targets, mean and kernel."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor
from torch.nn import Module

from gpclml.models._parts import find_networks

if TYPE_CHECKING:
    import pandas

# A checker that does not read upstream's source knows this base.
assert issubclass(ExactGP, Module)


class RegressionGP(ExactGP):
    """An exact GP with ``mean_module`` and ``covar_module`` that BoTorch's optimizers fit."""

    mean_module: Any
    covar_module: Any

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at points, ``(*batch, n, d)``."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def compute_custom_loss(self, mll: MarginalLogLikelihood, **kwargs: Any) -> Tensor:
        """The loss that BoTorch minimizes under an objective that brings none of its own."""
        x, y = self._training_data()
        return -cast(Tensor, mll(self(x), y, x, **kwargs))

    def summary(self) -> pandas.DataFrame:
        """The hyperparameters, a row for each number, named by the module that has it.

        Returns:
            ``value`` as it is trained, and ``original`` in the units of the data where it has any:
            a lengthscale in those of its column, a constant mean in those of the targets, noise and
            the kernel's outputscale as variances. Weights of networks are counted, in one row.

        Examples:
            >>> model.summary().loc["GaussianLikelihood.noise", "original"] ** 0.5
        """
        import pandas

        networks = [p for network in find_networks(self) for p in network.parameters()]
        inside = {id(p) for p in networks}
        rows: list[tuple[str, float, float]] = []
        for path, parameter, constraint in self.named_parameters_and_constraints():
            if id(parameter) in inside:
                continue
            value = parameter if constraint is None else constraint.transform(parameter)
            value, name = value.detach(), path.rpartition(".")[2].removeprefix("raw_")
            label = f"{self._owner(path)}.{name}"
            original = self._in_original_units(path.replace("raw_", ""), value)
            ends = self._ends(name, value.squeeze().shape)
            numbers = zip(value.flatten().tolist(), original.flatten().tolist(), strict=True)
            rows += [(label + end, *both) for end, both in zip(ends, numbers, strict=True)]
        if networks:
            count = sum(p.numel() for p in networks)
            rows.append((f"{count} weights of networks", torch.nan, torch.nan))
        frame = pandas.DataFrame(rows, columns=["parameter", "value", "original"])
        return frame.set_index("parameter")

    def _owner(self, path: str) -> str:
        """Class of the module of a parameter; of noise, that of the likelihood."""
        module = path.rpartition(".")[0]
        owner = self.likelihood if module.startswith("likelihood.") else self.get_submodule(module)
        return type(owner).__name__

    def _ends(self, name: str, shape: Sequence[int]) -> Iterator[str]:
        """What tells the numbers of one parameter apart: names of columns, or indices."""
        columns = getattr(self, "column_names", None) or ()
        per_column = name == "lengthscale" and columns and tuple(shape[-1:]) == (len(columns),)
        for index in itertools.product(*map(range, shape)):
            parts = [str(i) for i in index]
            if per_column:
                parts[-1] = str(columns[index[-1]])
            yield f"[{', '.join(parts)}]" if parts else ""

    def _in_original_units(self, path: str, value: Tensor) -> Tensor:
        """The numbers of a parameter in the units of the data, NaN where it has none there."""
        return value

    def _repr_html_(self) -> str:
        x, _ = self._training_data()
        shape = " x ".join(map(str, x.shape))
        head = html.escape(f"{type(self).__name__}: training inputs {shape}, {x.dtype}")
        table = self.summary().to_html(float_format="{:.4g}".format, na_rep="")
        return f"<p>{head}</p>{table}"

    def _training_data(self) -> tuple[Tensor, Tensor]:
        return cast(Any, self.train_inputs)[0], cast(Tensor, self.train_targets)
