"""What models share: kernels and means by name, a base class, networks, and how they are stored."""

from __future__ import annotations

import html
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import (
    Kernel,
    MaternKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.means import ConstantMean, Mean, ZeroMean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor
from torch.nn import Module

from gpclml._utils.annotations import fits
from gpclml._utils.arguments import checked
from gpclml._utils.files import read_checkpoint
from gpclml.errors import (
    ArgumentError,
    DataError,
    MissingError,
    UnknownNameError,
    UnsupportedError,
)
from gpclml.kernels import DeepKernel, NetworkMean, SkipFeatures, initialize_spectral_mixture
from gpclml.kernels.networks import MLP

if TYPE_CHECKING:
    import pandas

_STATIONARY: dict[str, type[Kernel]] = {"matern": MaternKernel, "rbf": RBFKernel, "rq": RQKernel}
# Near zero, so that the deep kernel starts as its base kernel; at zero it has no gradient.
_FEATURE_START = 1e-3
# Below it, in deviations of a column, squared distances are rounding; values of a column that it
# tells apart are uncorrelated already.
_LEAST_LENGTHSCALE = 1e-3
_SHAPE_START = 3.0  # of the rational quadratic: near the RBF, which it becomes as its shape grows
_RESIDUAL_START = 1e-4  # of the residual's variance to that of the ARD part
KERNELS = ("deep", "deep_bottleneck", "matern", "rbf", "rq", "spectral_mixture")
MEANS = ("constant", "mlp", "zero")


@dataclass(frozen=True)
class PartOptions:
    """What named kernels and means are made with; the fields are GPRegression's arguments."""

    standardize: bool
    ard: bool
    hidden: Sequence[int]
    num_features: int
    num_mixtures: int


def make_kernel(
    kernel: str | Kernel, x: Tensor, y: Tensor, options: PartOptions, generator: torch.Generator
) -> Kernel:
    """The kernel of that name for standardized data, or the kernel itself, as ``x`` is placed."""
    if isinstance(kernel, Kernel):
        return kernel.to(x)
    batch_shape, d, q = x.shape[:-2], x.shape[-1], options.num_features

    def scaled(base: Kernel) -> Kernel:
        return ScaleKernel(base, batch_shape=batch_shape).to(x)

    def of_inputs(cls: type[Kernel], active_dims: tuple[int, ...] | None = None) -> Kernel:
        """Distances grow with the root of the number of columns, and so do lengthscales."""
        made = cls(
            ard_num_dims=d if options.ard else None,
            batch_shape=batch_shape,
            active_dims=active_dims,
            # Of one class in both cases, so that one's parameters can be loaded into the other.
            lengthscale_constraint=GreaterThan(_LEAST_LENGTHSCALE if options.standardize else 0.0),
        )
        if options.standardize:
            made.initialize(lengthscale=math.sqrt(d))
            if isinstance(made, RQKernel):
                made.initialize(alpha=_SHAPE_START)
        return made

    if kernel in _STATIONARY:
        return scaled(of_inputs(_STATIONARY[kernel]))
    if kernel == "deep":
        features = SkipFeatures([d, *options.hidden, q], _FEATURE_START, generator=generator)
        inputs, outputs = range(d), range(d, 2 * d + q)  # of what the sum sees
        base = of_inputs(RBFKernel, tuple(inputs))
        rational = RQKernel(batch_shape=batch_shape, active_dims=tuple(outputs))
        residual = ScaleKernel(rational, batch_shape=batch_shape)
        residual.outputscale = _RESIDUAL_START
        return scaled(DeepKernel(features, base + residual, residual=True))
    if kernel == "deep_bottleneck":
        network = MLP([d, *options.hidden, q], generator=generator)
        base = RBFKernel(ard_num_dims=q if options.ard else None, batch_shape=batch_shape)
        return scaled(DeepKernel(network, base, residual=False))
    if kernel == "spectral_mixture":
        mixture = SpectralMixtureKernel(
            options.num_mixtures, ard_num_dims=d, batch_shape=batch_shape
        ).to(x)
        # Its weights are the scale: no ScaleKernel around it.
        spacing = "smallest" if d == 1 else "grid"
        return initialize_spectral_mixture(mixture, x, y, generator, spacing)
    raise UnknownNameError("kernel", kernel, KERNELS)


def make_mean(
    mean: str | Mean, x: Tensor, options: PartOptions, generator: torch.Generator
) -> Mean:
    """The mean of that name for standardized data, or the mean itself, as ``x`` is placed."""
    if isinstance(mean, Mean):
        return mean.to(x)
    if mean == "constant":
        return ConstantMean(batch_shape=x.shape[:-2]).to(x)
    if mean == "zero":
        return ZeroMean(batch_shape=x.shape[:-2])
    if mean == "mlp":
        return NetworkMean(MLP([x.shape[-1], *options.hidden, 1], generator=generator)).to(x)
    raise UnknownNameError("mean", mean, MEANS)


@checked
def find_networks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The networks of a model's deep kernels and network means, each once.

    ``gpclml.kernels.networks.reset_network`` draws one anew, e.g. for a restart.

    Args:
        model: Any module, e.g. an ``ExactGP``.

    Returns:
        The networks, in the order of ``model.modules()``.
    """
    networks: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        if isinstance(module, DeepKernel):
            networks.setdefault(id(module.feature_extractor), module.feature_extractor)
        elif isinstance(module, NetworkMean):
            networks.setdefault(id(module.network), module.network)
    return list(networks.values())


# A checker that does not read upstream's source knows this base.
assert issubclass(ExactGP, Module)


class RegressionGP(ExactGP):
    """An exact GP with ``mean_module`` and ``covar_module`` that BoTorch's optimizers fit."""

    mean_module: Any
    covar_module: Any

    def __getattr__(self, name: str) -> Any:
        """A MissingError for what acquisition functions ask BoTorch's models for."""
        if name in ("num_outputs", "posterior"):
            raise MissingError(
                f"model.{name}", f"a {type(self).__name__}, which has none", "a model of BoTorch",
                "Use GPRegression or DeepKernelGP, or call the model in eval mode.",
            )  # fmt: skip
        return cast(Any, super()).__getattr__(name)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at points, ``(*batch, n, d)``."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def compute_custom_loss(self, mll: MarginalLogLikelihood, **kwargs: Any) -> Tensor:
        """The loss that BoTorch minimizes under an objective that brings none of its own."""
        x, y = self._training_data()
        return -cast(Tensor, mll(self(x), y, x, **kwargs))

    def fantasize(
        self, X: Tensor, sampler: Any, observation_noise: bool | Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Refuses what look-ahead acquisition functions, ``qKnowledgeGradient``, ask for.

        Raises:
            UnsupportedError: Always.
        """
        suggestion = "Take GPRegression, SingleTaskGP, or DeepKernelGP of gpclml.models.botorch."
        raise UnsupportedError("fantasize", type(self).__name__, "a model of BoTorch", suggestion)

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


CHECKPOINT = "gpclml.GPRegression"
_REQUIRED = {"config": dict, "state_dict": dict, "train_x": Tensor, "train_targets": Tensor}


_CONFIG: dict[str, Any] = {
    "kernel": str | None, "mean": str | None, "likelihood": str | None, "standardize": bool,
    "ard": bool, "num_features": int, "hidden": Sequence[int], "num_mixtures": int, "seed": int,
    "warm_start": bool, "columns": Sequence[str] | None,
}  # fmt: skip
_UNITS = ("target_standardizer.scale", "target_standardizer.offset")


def _check_stored(
    path: str | os.PathLike[str], config: dict[str, Any], state: dict[str, Any], train_x: Tensor
) -> None:
    """Raises where a stored ``GPRegression`` is not complete, or larger than its own state."""
    unlike = [
        name for name, hint in _CONFIG.items() if name not in config or not fits(config[name], hint)
    ]
    unlike += [name for name in _UNITS if not isinstance(state.get(name), Tensor)]
    unlike += ["train_x"] if train_x.ndim < 2 else []
    if unlike:
        raise DataError(
            f"path: {path} lacks {', '.join(unlike)}, or has something else in their place. "
            "Restore a copy of it, or save the model again."
        )
    # Networks and mixtures are made before their state is loaded, as large as the file asks for.
    d, widths = train_x.shape[-1], [train_x.shape[-1], *config["hidden"]]
    asked = 0
    if config["kernel"] in ("deep", "deep_bottleneck"):
        asked += sum(a * b for a, b in pairwise([*widths, config["num_features"]]))
    if config["kernel"] == "spectral_mixture":
        asked += d * config["num_mixtures"]
    if config["mean"] == "mlp":
        asked += sum(a * b for a, b in pairwise([*widths, 1]))
    stored = sum(entry.numel() for entry in state.values() if isinstance(entry, Tensor))
    if asked > stored:
        raise DataError(
            f"path: {path} describes a model of at least {asked} parameters and holds {stored}. "
            "Save the model again."
        )


def load_stored(
    cls: Any, path: str | os.PathLike[str], map_location: Any, parts: dict[str, Module | None]
) -> Any:
    """The model in a file, of this class, with the parts that it was given as objects."""
    content = read_checkpoint(path, CHECKPOINT, map_location, _REQUIRED)
    config, state, train_x = content["config"], content["state_dict"], content["train_x"]
    _check_stored(path, config, state, train_x)
    columns = config.pop("columns")
    for name, value in parts.items():
        if value is None and config[name] is None:
            expected = f"the {name} object the model was made with"
            suggestion = f"Call load(path, {name}=...) with one built as when the model was made."
            raise ArgumentError(name, None, expected, suggestion)
    for name in ("kernel", "mean"):
        config[name] = parts[name] if config[name] is None else config[name]
    config["likelihood"] = parts["likelihood"]
    scale, offset = (state[name] for name in _UNITS)
    model = cls(train_x, content["train_targets"] * scale + offset, **config)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        got = str(error).splitlines()[-1].strip()
        if any(part is not None for part in parts.values()):
            name, expected = "kernel, mean or likelihood", "the saved state"
            suggestion = "Pass objects of the same classes and sizes as when the model was made."
            raise ArgumentError(name, got, expected, suggestion) from error
        raise DataError(
            f"path: {path} holds the state of another model than it describes ({got}). "
            "Restore a copy of it, or save the model again."
        ) from error
    model.set_train_data(targets=content["train_targets"], strict=False)
    model.column_names = columns
    return model
