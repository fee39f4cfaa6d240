"""Deep Kernel Transfer: a Gaussian process on learned features that all tasks share."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Callable
from typing import Any, Literal, Self, cast

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import (
    Kernel,
    LinearKernel,
    MaternKernel,
    PolynomialKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor
from torch.distributions import Normal

from gpclml._utils.arguments import check_counts, check_placement, checked
from gpclml._utils.files import read_checkpoint, write_checkpoint
from gpclml._utils.resuming import check_state
from gpclml.conditioning import HeldOut, LastPoints
from gpclml.errors import (
    ArgumentError,
    DataError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from gpclml.inference import evaluating, exact_posterior
from gpclml.inference.observations import missing_targets
from gpclml.kernels import CosineSimilarityKernel, JointSpectralMixtureKernel
from gpclml.kernels.networks import check_finite_output
from gpclml.meta.tasks import Episodes
from gpclml.mlls import ConditionalMarginalLogLikelihood

CHECKPOINT = "gpclml.DeepKernelTransfer"

_FIRST_NOISE = 0.1
_TASKS = 100  # whose targets are standardized
_ROUNDING = 1e-12
_BATCH_NORM = "batch_norm_cosine"


class DeepKernelTransfer(ExactGP):
    r"""Deep Kernel Transfer: few-shot learning by a GP on features learned over many tasks.

    Features :math:`g(x)` and the kernel on them are learned over many tasks by an objective of
    exact GPs; a new task is learned in closed form, by conditioning on its few points
    (Patacchiola et al. 2020, Section 3). Classification is regression of one target a class,
    1 for its members and -1 for all others; the classes of a task share the kernel, and so
    its one factorization.

    All tasks of a batch and all classes of a task form one batched GP, with features ``(tasks, 1,
    n, q)`` and targets ``(tasks, ways, n)``. The objective decides which points of a task are
    conditioned on: ``LastPoints(m=0)`` is the log marginal likelihood of support and query points
    together, ``LastPoints(m=num_support)`` the conditional one of the query points given the
    support points (Lotfi et al. 2022, Section 8.2).

    In regression the GP is of standardized targets: less the mean of the targets of the first 100
    tasks that it is trained on, and divided by their standard deviation, which
    ``state_dict`` contains. So training does not depend on the units of the targets, nor on their
    zero. Predictions and objectives are in the units of the targets; hyperparameters, such as the
    noise, and :meth:`prior` in standard deviations.

    Args:
        backbone: Maps inputs ``(n, *event)`` to features ``(n, q)``.
        kernel: A kernel on features, or one of ``"batch_norm_cosine"`` (the cosine after a batch
            normalization of the features, which is trained with the network, from a shift of one),
            ``"cosine"``, ``"linear"``, ``"matern"``, ``"polynomial"`` (of degree 2),
            ``"polynomial_1"`` (of degree 1: linear with an offset), ``"rbf"``,
            ``"spectral_mixture"``.
        num_features: Number q of features; used by ``"batch_norm_cosine"`` and
            ``"spectral_mixture"``.
        standardize: Whether the targets of regression are standardized. False takes them as they
            are, as the published method does. ``"task"`` is for tasks of very different offsets or
            scales: it takes mean and deviation of each task's support targets; the deviation is a
            geometric mean with that of the first 100 tasks, which weighs as one point. Objectives
            are then densities given the support targets: use ``LastPoints(m=num_support)``.

    Attributes:
        targets: Mean and standard deviation of the targets in regression; by task, of the logarithm
            of the deviations of tasks.

    Raises:
        UnknownNameError: The name of the kernel is not known.
        ArgumentError: ``num_features`` is below 1.

    Examples:
        >>> from gpclml import MLP, ConditionalMarginalLogLikelihood, DeepKernelTransfer, LastPoints
        >>> from gpclml.meta import PeriodicTasks
        >>> model = DeepKernelTransfer(MLP([1, 40, 40]), "rbf")
        >>> mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=10))
        >>> episodes = PeriodicTasks(support=10, queries=5).draw(range(8))
        >>> loss = -model.objective(mll, episodes).mean()
    """

    @checked
    def __init__(
        self,
        backbone: torch.nn.Module,
        kernel: str | Kernel = "cosine",
        num_features: int = 64,
        *,
        standardize: bool | Literal["task"] = True,
    ) -> None:
        check_counts(num_features=num_features)
        likelihood = GaussianLikelihood()
        likelihood.initialize(noise=_FIRST_NOISE)
        super().__init__(None, None, likelihood)
        name = kernel.replace("-", "_") if isinstance(kernel, str) else None
        if name is not None and name not in KERNELS:
            raise UnknownNameError("kernel", name, KERNELS)
        standardize = "task" if standardize == "task" else bool(standardize)
        options = {"num_features": int(num_features), "standardize": standardize}
        self._config = {"kernel": name, **options}
        self.backbone = backbone
        self.normalization: torch.nn.Module = torch.nn.Identity()
        if name == _BATCH_NORM:
            # Cosines of centred features vary about zero: no part of the kernel would stand for
            # the mean of one-vs-rest targets. With a shift of one they vary about a half.
            self.normalization = torch.nn.BatchNorm1d(num_features)
            torch.nn.init.ones_(self.normalization.bias)
        is_fixed = name in (_BATCH_NORM, "spectral_mixture")
        self.num_features: int | None = num_features if is_fixed else None
        self.targets: TargetScale = TargetScale(_TASKS if standardize else 0, standardize == "task")
        self.mean_module: ConstantMean = ConstantMean()
        self.covar_module: Kernel = (
            kernel if isinstance(kernel, Kernel) else _MAKERS[str(name)](num_features)
        )

    def features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Features of the points of all tasks, ``(tasks, n, *event)``, by one pass of the backbone.

        Args:
            x: Inputs.
            mask: Which points are no padding, as :meth:`Episodes.mask` gives it. The backbone is
                given these alone; padding has the features of the point before it.

        Returns:
            Features, ``(tasks, 1, n, q)``: shared by the classes of a task.

        Raises:
            NonFiniteError: A feature is not finite.
            ShapeError: The backbone does not give one row of features for each point, or not
                ``num_features`` of them where the kernel needs that.
            ArgumentError: The points are on another device than the backbone, or of another type.
        """
        flat = x.flatten(0, 1)
        places = None
        if mask is not None:
            present = mask.flatten()
            places = (present.cumsum(0) - 1).clamp_min(0).to(x.device)
            flat = flat[present.nonzero().squeeze(-1).to(x.device)]
        for parameter in itertools.islice(self.backbone.parameters(), 1):
            check_placement("episodes", x, parameter, "the backbone")
        values = self.backbone(flat)
        if values.ndim != 2 or len(values) != len(flat):
            got = f"features of shape {tuple(values.shape)} for {len(flat)} points"
            raise ShapeError("backbone", got, "one row of features a point, (n, q)")
        if self.num_features is not None and values.shape[1] != self.num_features:
            got = f"{values.shape[1]} features of points of shape {tuple(flat.shape[1:])}"
            expected = f"the {self.num_features} of num_features"
            suggestion = "Give their number as num_features, or points of another size."
            raise ShapeError("backbone", got, expected, suggestion)
        values = self.normalization(values)
        check_finite_output(values)
        values = values if places is None else values[places]
        return values.unflatten(0, x.shape[:2]).unsqueeze(1)

    def forward(self, features: Tensor) -> MultivariateNormal:
        """The prior of the latent function at features ``(*batch, n, q)``."""
        mean = cast(Tensor, self.mean_module(features))
        return MultivariateNormal(mean, self.covar_module(features))

    def prior(self, episodes: Episodes) -> tuple[MultivariateNormal, Tensor]:
        """The prior at all points of the tasks and their targets, as an objective takes them.

        Support points come first. The points become the model's training data. In regression
        targets are standardized; in train mode the first tasks count for that. Targets of padding
        are NaN, missing under ``gpytorch.settings.observation_nan_policy("mask")``, which
        :meth:`objective` sets.

        Args:
            episodes: The tasks.

        Returns:
            A Gaussian with batch ``(tasks, 1)``, and targets ``(tasks, ways, n)``; in
            regression ``(tasks, 1, n)``.
        """
        (x, y), mask = episodes.points(), episodes.mask()
        if not episodes.ways:
            if mask is not None:
                present = mask.to(y.device)
                missing_targets(y[present])  # refuses NaN targets of points, as without padding
                y = torch.where(present, y, math.nan)
            if self.training:
                self.targets.count(y)
            offset, scale = self.targets.offset_and_scale(y[:, : episodes.num_support])
            y = (y - offset) / scale
        # One row of features a point: the classes of a task share its kernel and factorization.
        features = self.features(x, mask)
        targets = _one_vs_rest(y, episodes.ways, features.dtype, mask)
        self.set_train_data(features, targets, strict=False)
        return self(features), targets

    @checked
    def objective(self, mll: MarginalLogLikelihood, episodes: Episodes) -> Tensor:
        """An objective of the tasks: the values of ``mll(*model.prior(episodes))``.

        In regression the logarithm of the targets' standard deviation is subtracted, so that it is
        the density of targets in their own units. In train mode the first tasks count for their
        mean and deviation. Padding is left out of the density and of the number of targets; of
        ``LastPoints(m)`` it counts among the first m.

        Args:
            mll: An objective of this model.
            episodes: The tasks.

        Returns:
            Nats per held-out target, ``(tasks, ways)``; in regression ``(tasks, 1)``.

        Raises:
            ArgumentError: Targets of query points are not known.
            UnsupportedError: Tasks have different sizes, and it is no objective of
                :mod:`gpclml.mlls`.
        """
        output, targets = self.prior(episodes)
        if episodes.mask() is None:
            value = cast(Tensor, cast(Any, mll)(output, targets))
        else:
            with settings.observation_nan_policy("mask"):
                value = cast(Tensor, cast(Any, _held_out_by_place(mll, targets))(output, targets))
        # The density of y is that of (y - mean) / deviation, divided by the deviation.
        return value if episodes.ways else value - self._scale(episodes)[1].log().to(value)

    def _scale(self, episodes: Episodes) -> tuple[Tensor, Tensor]:
        """Mean and deviation by which targets of regression tasks are standardized."""
        y, mask = episodes.support_y, episodes.mask()
        if mask is not None:
            y = torch.where(mask[:, : episodes.num_support].to(y.device), y, math.nan)
        return self.targets.offset_and_scale(y)

    @torch.no_grad()
    @checked
    def predict(self, episodes: Episodes) -> Normal:
        """The predictive marginals at the query points given the support points, with noise.

        The query targets are not used, and may be None. The cost is one factorization for each
        task. During the call the modules are in eval mode.

        Args:
            episodes: The tasks.

        Returns:
            Means and standard deviations, ``(tasks, ways, q)``, with one way in regression, where
            they are in the units of the targets.
        """
        s, mask = episodes.num_support, episodes.mask()
        with evaluating(self):
            features = self.features(episodes.inputs(), mask)
            y, ways = episodes.support_y, episodes.ways
            offset, scale = (y, y) if ways else self._scale(episodes)
            given = y if ways else (y - offset) / scale
            given_mask = None if mask is None else mask[:, :s]
            targets = _one_vs_rest(given, ways, features.dtype, given_mask)
            self.set_train_data(features[..., :s, :], targets, strict=False)
            latent = exact_posterior(self, features[..., s:, :], marginal=True)
            noise = cast(GaussianLikelihood, self.likelihood).noise
            mean, deviation = latent.mean, (latent.variance + noise).sqrt()
            if ways:
                return Normal(mean, deviation)
            dtype = torch.promote_types(y.dtype, mean.dtype)  # an offset needs the targets' digits
            mean, deviation = (scale.unsqueeze(-1) * moment for moment in (mean, deviation))
            return Normal((offset.unsqueeze(-1) + mean).to(dtype), deviation.to(dtype))

    @checked
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model to one file, without pickled objects.

        Args:
            path: File to write; replaced if it is there.

        Raises:
            DataError: The file cannot be written.
        """
        content = {"config": self._config, "best_state": dict(self.state_dict())}
        write_checkpoint(path, CHECKPOINT, content)

    @classmethod
    @checked
    def load(
        cls, path: str | os.PathLike[str], backbone: torch.nn.Module, kernel: Kernel | None = None
    ) -> Self:
        """Reads a model that :meth:`save` wrote; its predictions are the same bit for bit.

        Args:
            path: File to read.
            backbone: A backbone of the same architecture, which gets the stored weights and their
                type, and on whose device the model is.
            kernel: The kernel, of the same build, if the model was made with a kernel object.

        Returns:
            The model, in eval mode.

        Raises:
            DataError: The file is missing, damaged, no such file, or of another architecture.
            ArgumentError: The kernel object that the model was made with is missing, or one is
                given and it was made with a name.

        Examples:
            >>> import os, tempfile
            >>> from gpclml import MLP, DeepKernelTransfer
            >>> model = DeepKernelTransfer(MLP([1, 20, 20]), "matern", num_features=20)
            >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
            >>> model.save(path)
            >>> same = DeepKernelTransfer.load(path, MLP([1, 20, 20]))
        """
        device = next((p.device for p in backbone.parameters()), torch.device("cpu"))
        needed = {"config": dict, "best_state": dict}
        content = read_checkpoint(path, CHECKPOINT, device, needed)
        config, state = dict(content["config"]), content["best_state"]
        if (config.get("kernel") is None) != (kernel is not None):
            got = "none" if kernel is None else type(kernel).__name__
            expected = f"the kernel object it was made with, or none for {config.get('kernel')!r}"
            raise ArgumentError("kernel", got, expected)
        try:
            model = cls(backbone, **(config if kernel is None else {**config, "kernel": kernel}))
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"path: {path} does not hold such a model ({error}).") from error
        check_state(path, model, state)
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            tensor.data = tensor.data.to(state.get(name, tensor))  # type and device as stored
        model.load_state_dict(state)
        return model.eval()


class TargetScale(torch.nn.Module):
    """Mean and standard deviation of all targets of the first tasks of a training.

    Its state is in double precision, whatever the type of the model. With ``most`` 0 no task counts
    and targets are taken as they are. With ``per_task`` it is that of the logarithm of the standard
    deviation of each task.
    """

    def __init__(self, most: int, per_task: bool = False) -> None:
        super().__init__()
        self._most, self._per_task = most, per_task
        self._tasks = self._points = self._squares = self.mean = 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation; 1 before the first task and of constant targets."""
        deviation = math.sqrt(self._squares / max(1.0, self._points))
        return deviation if deviation > _ROUNDING * abs(self.mean) else 1.0

    def count(self, y: Tensor) -> None:
        """Takes finite targets of tasks, ``(tasks, n)``, unless there are enough tasks."""
        left = self._most - int(self._tasks)
        if left <= 0:
            return
        values = y[:left].detach().cpu().double()
        self._tasks += len(values)
        if self._per_task:
            values = _mean_and_deviation(values)[1].log()
        values = values[values.isfinite()]
        if len(values):
            # Sums of squares about each mean are joined, which loses no digits far from zero.
            points, mean = self._points + len(values), float(values.mean())
            distance = mean - self.mean
            self._squares += float((values - mean).square().sum())
            self._squares += distance**2 * self._points * len(values) / points
            self.mean += distance * len(values) / points
            self._points = points

    def offset_and_scale(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Offset and scale of tasks with support targets ``(tasks, s)``, NaN where missing.

        Both in double precision, ``(tasks, 1)`` by task, else ``(1, 1)``.
        """
        if not self._per_task:
            common = torch.tensor([[self.mean], [self.deviation]], dtype=torch.float64)
            offset, scale = common.to(y.device).split(1)
            return offset, scale
        (mean, deviation), count = _mean_and_deviation(y.double()), y.isfinite().sum(-1, True)
        share = torch.where(deviation > 0, 1 - 1 / count, 0.0)
        logarithm = share * deviation.clamp_min(1e-300).log() + (1 - share) * self.mean
        return mean.nan_to_num(), logarithm.exp()

    def get_extra_state(self) -> Tensor:
        """Its numbers, for ``state_dict``."""
        numbers = [self._tasks, self._points, self.mean, self._squares]
        return torch.tensor(numbers, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Takes the numbers of :meth:`get_extra_state`."""
        self._tasks, self._points, self.mean, self._squares = state.tolist()


def _mean_and_deviation(y: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the finite targets of each task, ``(tasks, 1)``; 0 where all are one number."""
    mean = y.nanmean(-1, keepdim=True)
    squares = (y - mean).square().nansum(-1, keepdim=True)
    deviation = (squares / (y.isfinite().sum(-1, keepdim=True) - 1).clamp_min(1)).sqrt()
    return mean, torch.where(deviation > _ROUNDING * mean.abs(), deviation, 0.0)


def _one_vs_rest(labels: Tensor, ways: int, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
    """Targets ``(tasks, ways, n)``: 1 for members of a class, else -1; in regression one way.

    NaN where the mask ``(tasks, n)`` is False.
    """
    targets = labels.to(dtype).unsqueeze(-2)
    if ways:
        classes = torch.arange(ways, device=labels.device).unsqueeze(-1)
        targets = torch.where(labels.unsqueeze(-2) == classes, 1.0, -1.0).to(dtype)
    if mask is None:
        return targets
    return targets.masked_fill(~mask.to(targets.device).unsqueeze(-2), math.nan)


def _held_out_by_place(mll: MarginalLogLikelihood, targets: Tensor) -> MarginalLogLikelihood:
    """The objective in which the first m points of ``LastPoints`` are those in the first m places.

    By itself it counts rows in which some task has a target. GPyTorch's own objectives would leave
    out what is missing in any task.
    """
    if not isinstance(mll, ConditionalMarginalLogLikelihood):
        expected = "an objective of gpclml.mlls for tasks of different sizes"
        raise UnsupportedError("mll", type(mll).__name__, expected)
    conditioning, n = mll.conditioning, targets.shape[-1]
    if isinstance(conditioning, LastPoints) and conditioning.m < n:
        mll = copy.copy(mll)
        mll.conditioning = HeldOut(range(conditioning.m, n))
    return mll


def _scaled(kernel: Kernel, outputscale: float = 1.0, /, **start: float) -> Kernel:
    """A kernel with parameters started so, in a kernel of this scale."""
    scaled = ScaleKernel(kernel.initialize(**start))
    scaled.outputscale = outputscale
    return scaled


def _linear(features: int) -> Kernel:
    kernel = LinearKernel()
    kernel.raw_variance.requires_grad_(False)  # the scale around it is the same parameter
    return _scaled(kernel, 1 / features, variance=1.0)


# Kernels start with a variance and correlations of order one on q features of order one.
_MAKERS: dict[str, Callable[[int], Kernel]] = {
    _BATCH_NORM: lambda q: _scaled(CosineSimilarityKernel()),
    "cosine": lambda q: _scaled(CosineSimilarityKernel()),
    "linear": _linear,
    "matern": lambda q: _scaled(MaternKernel(2.5), lengthscale=math.sqrt(q)),
    "polynomial": lambda q: _scaled(PolynomialKernel(2), q**-2),
    "polynomial_1": lambda q: _scaled(PolynomialKernel(1), 1 / q),
    "rbf": lambda q: _scaled(RBFKernel(), lengthscale=math.sqrt(q)),
    "spectral_mixture": lambda q: JointSpectralMixtureKernel(4, q),
}
KERNELS = tuple(sorted(_MAKERS))
