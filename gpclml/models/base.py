"""The base classes of models, and the networks in them."""

from __future__ import annotations

import html
import itertools
from typing import TYPE_CHECKING, Any, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor
from torch.nn import Module

from gpclml._utils.arguments import checked, seeded
from gpclml.errors import MissingError
from gpclml.kernels import DeepKernel, NetworkMean
from gpclml.models.named_parts import make_kernel, make_mean
from gpclml.models.standardize import Standardizer

if TYPE_CHECKING:
    import pandas


@checked
def find_networks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The networks of a model's deep kernels and network means, each once.

    ``gpclml.kernels.networks.reset_network`` draws one anew, e.g. for a restart.

    Args:
        model: Any module, e.g. an ``ExactGP``.

    Returns:
        The networks, in the order of ``model.modules()``.
    """
    networks = (
        module.feature_extractor if isinstance(module, DeepKernel) else module.network
        for module in model.modules()
        if isinstance(module, DeepKernel | NetworkMean)
    )
    return list(dict.fromkeys(networks))


# A checker that does not read upstream's source knows this base.
assert issubclass(ExactGP, Module)


class RegressionGP(ExactGP):
    """An exact GP with ``mean_module`` and ``covar_module`` that BoTorch's optimizers fit."""

    mean_module: Any
    covar_module: Any

    def __getattr__(self, name: str) -> Any:
        """A MissingError for what acquisition functions ask BoTorch's models for."""
        if name in ("num_outputs", "posterior", "fantasize"):
            got = f"a {type(self).__name__}, which has none"
            fix = "Use GPRegression or DeepKernelGP, or call the model in eval mode."
            if name == "fantasize":  # as look-ahead acquisition functions, qKnowledgeGradient, do
                fix = "Take SingleTaskGP, or DeepKernelGP of gpclml.models.botorch."
            raise MissingError(f"model.{name}", got, "a model of BoTorch", fix)
        return cast(Any, super()).__getattr__(name)

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
            >>> import torch
            >>> from gpclml import GPRegression
            >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)
            >>> noise = GPRegression(x, 9 * x).summary().loc["GaussianLikelihood.noise", "original"]
        """
        import pandas

        weights = {p for network in find_networks(self) for p in network.parameters()}
        columns = list(map(str, getattr(self, "column_names", None) or ()))
        rows: list[tuple[str, float, float]] = []
        for raw_path, parameter, constraint in self.named_parameters_and_constraints():
            if parameter in weights:
                continue
            value = parameter.detach() if constraint is None else constraint.transform(parameter)
            path = raw_path.replace("raw_", "")
            prefix, _, name = path.rpartition(".")
            # A likelihood keeps its noise in a module whose class says nothing to a user.
            is_noise = prefix.startswith("likelihood.")
            owner = self.likelihood if is_noise else self.get_submodule(prefix)
            original = self._in_original_units(path, value)
            labels = [list(map(str, range(size))) for size in value.squeeze().shape]
            if name == "lengthscale" and labels and len(labels[-1]) == len(columns):
                labels[-1] = columns
            numbers = zip(value.flatten().tolist(), original.flatten().tolist(), strict=True)
            for index, pair in zip(itertools.product(*labels), numbers, strict=True):
                end = f"[{', '.join(index)}]" if index else ""
                rows.append((f"{type(owner).__name__}.{name}{end}", *pair))
        if weights:
            count = sum(p.numel() for p in weights)
            rows.append((f"{count} weights of networks", torch.nan, torch.nan))
        frame = pandas.DataFrame(rows, columns=["parameter", "value", "original"])
        return frame.set_index("parameter")

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


class StandardizedGP(RegressionGP):
    """A GP whose mean and kernel, objects or made by name, see standardized inputs."""

    input_standardizer: Standardizer

    def _make_modules(
        self, kernel: str | Kernel, mean: str | Mean, targets: Tensor, seed: int, **build: Any
    ) -> None:
        """Mean and kernel by name, or as they are given; see :func:`make_kernel` for the rest."""
        inputs = self.input_standardizer.transform(self._training_data()[0])
        generator = seeded(seed)
        self.covar_module = make_kernel(kernel, inputs, targets, generator, **build)
        self.mean_module = make_mean(mean, inputs, generator, build["hidden"])

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at points in original units, ``(*batch, n, d)``."""
        return super().forward(self.input_standardizer.transform(x))

    def _in_original_units(self, path: str, value: Tensor) -> Tensor:
        columns = self.input_standardizer.scale
        deep = [kernel for kernel in self.covar_module.modules() if isinstance(kernel, DeepKernel)]
        if path.endswith(".lengthscale") and value.shape[:-1] == columns.shape[:-1]:
            features = value.shape[-1] - columns.shape[-1]
            # A residual kernel has the features of its network, which have no units, behind inputs.
            known = all(kernel.residual and kernel.active_dims is None for kernel in deep)
            if known and (features > 0 if deep else features == 0):
                return value * torch.nn.functional.pad(columns, (0, features), value=torch.nan)
        return torch.full_like(value, torch.nan)
