"""``python -m benchmarks.dkt.published``: the published method beside ours, on the same tasks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, cast

import pandas as pd
import torch
import typer
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, LinearKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, LikelihoodList
from gpytorch.means import ConstantMean
from gpytorch.mlls import SumMarginalLogLikelihood
from gpytorch.models import ExactGP, IndependentModelList
from torch import Tensor
from torch.nn.functional import normalize
from typer import Option

from benchmarks._options import Csv, check_known, errors_as_text, names
from benchmarks._tables import print_tables
from benchmarks.dkt.studies import study_named
from gpclml.conditioning import LastPoints
from gpclml.inference import evaluating
from gpclml.meta import Conv4, DeepKernelTransfer, Episodes, Tasks, evaluate_tasks, train_on_tasks
from gpclml.mlls import ConditionalMarginalLogLikelihood

_FEATURES, _NOISE = 64, 0.1
_STEPS_OF_AN_OPTIMIZER = 100  # the tasks of an epoch


class _OfAClass(ExactGP):
    """The GP of one class, with hyperparameters of its own; its noise stays."""

    def __init__(self, kernel: Kernel) -> None:
        likelihood = GaussianLikelihood()
        likelihood.initialize(noise=_NOISE)
        # Their code keeps the noise at .1.
        likelihood.raw_noise.requires_grad_(False)
        super().__init__(torch.ones(1, _FEATURES), torch.ones(1), likelihood)
        self.mean_module, self.covar_module = ConstantMean(), kernel

    def forward(self, features: Tensor) -> MultivariateNormal:
        mean = cast(Tensor, self.mean_module(features))
        return MultivariateNormal(mean, self.covar_module(features))


class ClassModels(torch.nn.Module):
    """A GP for each class of a task on features of one network (Patacchiola et al. 2020).

    So their public code has it, by GPyTorch's own lists of models.

    Args:
        network: Maps images to features; with whatever normalization has parameters.
        ways: Number of classes.
        make_kernel: Makes the kernel of a class.
        unit_length: Whether features are divided by their length.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        ways: int,
        make_kernel: Callable[[], Kernel],
        unit_length: bool = False,
    ) -> None:
        super().__init__()
        self.network, self.unit_length = network, unit_length
        self._members = [_OfAClass(make_kernel()) for _ in range(ways)]
        self.gps = IndependentModelList(*self._members)
        self.likelihood = LikelihoodList(*[member.likelihood for member in self._members])
        self.mll = SumMarginalLogLikelihood(self.likelihood, self.gps)

    def features(self, images: Tensor) -> Tensor:
        """Features of images."""
        values = self.network(images).flatten(1)
        return normalize(values, dim=1) if self.unit_length else values

    def loss(self, task: Episodes, *, clml: bool = False) -> Tensor:
        """The negative log likelihood of a task's points, per point, mean over classes.

        Args:
            task: One task.
            clml: Whether of the query points given the support points (the way of Lotfi et al.
                2022), in place of all points.
        """
        x, y = (values[0] for values in task.points())
        features, m, n = self.features(x), task.num_support if clml else 0, len(y)
        value = n * self._log_likelihood(features, y)
        if clml:  # support points come first
            value = value - m * self._log_likelihood(features[:m], y[:m])
        return -value / (n - m)

    def _log_likelihood(self, features: Tensor, labels: Tensor) -> Tensor:
        self._learn_from(features, labels)
        return cast(Tensor, self.mll(self.gps(*self.gps.train_inputs), self.gps.train_targets))

    def condition(self, task: Episodes) -> None:
        """Takes the support points of a task as data."""
        self._learn_from(self.features(task.support_x[0]), task.support_y[0])

    def classes(self, images: Tensor) -> Tensor:
        """The class of the largest predictive mean of each image."""
        features = self.features(images)
        predicted = self.likelihood(*self.gps(*[features] * len(self._members)))
        return torch.stack([distribution.mean for distribution in predicted]).argmax(0)

    def _learn_from(self, features: Tensor, labels: Tensor) -> None:
        for way, member in enumerate(self._members):
            targets = torch.where(labels == way, 1.0, -1.0)
            member.set_train_data(features, targets, strict=False)


def train_class_models(model: ClassModels, tasks: Tasks, steps: int, *, clml: bool = False) -> None:
    """Adam steps on the first tasks of a source, a new optimizer every 100 steps.

    Rates are 0.001 for the network and 0.0001 for the GPs; ``clml`` is that of
    :meth:`ClassModels.loss`.
    """
    model.train()
    for step in range(steps):
        # Their code makes Adam anew each epoch, which forgets its moments.
        if step % _STEPS_OF_AN_OPTIMIZER == 0:
            groups = [(model.gps, 1e-4), (model.network, 1e-3)]
            rates = [{"params": list(module.parameters()), "lr": lr} for module, lr in groups]
            optimizer = torch.optim.Adam(rates)
        optimizer.zero_grad()
        model.loss(tasks.draw([step]), clml=clml).backward()
        optimizer.step()


@torch.no_grad()
def _accuracy(model: ClassModels, tasks: Tasks, count: int) -> float:
    right = []
    with evaluating(model):
        for number in range(count):
            task = tasks.draw([number])
            model.condition(task)
            right.append((model.classes(task.query_x[0]) == task.query_y[0]).double().mean())
    return float(torch.stack(right).mean())


def _network(seed: int) -> torch.nn.Module:
    """The layers of Conv4 one after the other, channels first, from the published start."""
    torch.manual_seed(seed)
    # Their network and start; ours has the same layers in another memory format.
    network = torch.nn.Sequential(*itertools.chain(*cast(Any, Conv4().blocks)), torch.nn.Flatten())
    network = network.to(memory_format=torch.contiguous_format)
    for layer in network.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.reset_parameters()
            torch.nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network


def _linear_of_unit_variance() -> Kernel:
    kernel = LinearKernel()
    kernel.initialize(variance=1.0)
    kernel.raw_variance.requires_grad_(False)
    return ScaleKernel(kernel)


KERNELS: Mapping[str, Callable[[], Kernel]] = MappingProxyType(
    {
        "batch-norm-cosine": _linear_of_unit_variance,
        "cosine": _linear_of_unit_variance,
        "linear": lambda: ScaleKernel(LinearKernel()),
        "rbf": lambda: ScaleKernel(RBFKernel()),
    }
)
"""The kernels of the published code; that of a cosine sees features of length one."""


def published_model(kernel: str, ways: int, seed: int) -> ClassModels:
    """The untrained published model of a kernel in :data:`KERNELS`, on Conv4 from a seed."""
    network = _network(seed)
    if kernel == "batch-norm-cosine":
        network = torch.nn.Sequential(network, torch.nn.BatchNorm1d(_FEATURES))
    return ClassModels(network, ways, KERNELS[kernel], "cosine" in kernel)


def _ours(kernel: str, seed: int, tasks: Tasks, steps: int, clml: bool) -> DeepKernelTransfer:
    model = DeepKernelTransfer(Conv4(generator=torch.Generator().manual_seed(seed)), kernel)
    held_out = LastPoints(m=tasks.draw([0]).num_support if clml else 0)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, held_out)
    train_on_tasks(model, mll, tasks, steps=steps, progress=False)
    return model


def compare_with_published(
    kernel: str, seed: int, shots: int, steps: int, test_tasks: int, studies: tuple[str, ...]
) -> pd.DataFrame:
    """Accuracies after as many steps on the same tasks, with the last parameters.

    Returns:
        A row a study: accuracies in % of the published method, a GP a class, and of ours, each
        under LML and CLML.

    Raises:
        UnknownNameError: The kernel or a study is not known.
    """
    check_known("kernel", [kernel], KERNELS)
    sources = [study_named(name).sources(shots, seed) for name in studies]
    tasks = sources[0].train
    theirs = {}
    for clml in (False, True):
        model = published_model(kernel, tasks.draw([0]).ways, seed)
        train_class_models(model, tasks, steps, clml=clml)
        theirs["published, CLML" if clml else "published"] = model
    ours = {f"ours, {'CLML' if clml else 'LML'}": _ours(kernel, seed, tasks, steps, clml)
            for clml in (False, True)}  # fmt: skip
    rows = []
    for name, source in zip(studies, sources, strict=True):
        scores = {way: _accuracy(model, source.test, test_tasks) for way, model in theirs.items()}
        for way, model in ours.items():
            scores[way] = float(evaluate_tasks(model, source.test, test_tasks).values.mean())
        setting = {"kernel": kernel, "seed": seed, "study": name, "shots": shots, "steps": steps}
        rows.append({**setting, **{way: 100 * score for way, score in scores.items()}})
    return pd.DataFrame(rows)


def main(
    kernel: Annotated[list[str], Option(help="Kernel on features; may be repeated.")] = [*KERNELS],  # noqa: B006
    seed: Annotated[list[int], Option(help="Seed of tasks and networks; may be repeated.")] = [0],  # noqa: B006
    shots: Annotated[int, Option(min=1, help="Images a class to learn from.")] = 1,
    steps: Annotated[int, Option(min=1, help="Steps of training, of one task each.")] = 250,
    test_tasks: Annotated[int, Option(min=1, help="Tasks to test on.")] = 600,
    study: Annotated[str, Option(help="Studies of images that train on the same, with commas.")]
    = "omniglot-part,omniglot-part-to-cyrillic,omniglot-part-to-mnist",
    csv: Csv = None,
) -> None:  # fmt: skip
    """Accuracy of the published method and of ours, after the same steps on the same tasks."""
    with errors_as_text():
        studies = names(study, "study")
        tables = (
            compare_with_published(name, start, shots, steps, test_tasks, studies)
            for start, name in itertools.product(seed, kernel)
        )
        print_tables("benchmarks.dkt.published", tables, csv=csv)


if __name__ == "__main__":
    typer.run(main)
