"""Methods beside which the GPs stand: they learn from the same tasks by the same loop.

Each is a module with a backbone, a ``loss`` of a batch of tasks, to be minimized, and the
``log_probabilities`` of the classes of query points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy, log_softmax, normalize, one_hot

from gpclml.inference import evaluating
from gpclml.meta import Episodes, Tasks
from gpclml.meta.evaluation import batches

_SHARPNESS = 100.0  # of matching networks
_FIT_STEPS, _FIT_RATE, _MOMENTUM, _DECAY = 100, 0.01, 0.9, 0.001  # of a new linear layer
_INNER_STEPS, _INNER_RATE = 5, 0.1  # of MAML


class Baseline(torch.nn.Module):
    """Base class.

    Args:
        backbone: Maps images ``(n, *event)`` to features ``(n, q)``.
        num_features: Number q of features.
        ways: Number of classes of a task.
        num_classes: Number of classes of all training tasks.

    Attributes:
        layer: What its linear layer on the features tells apart, if it has one: classes of a
            ``"task"`` or of ``"all"``.
    """

    layer: str | None = None
    weight: Tensor
    bias: Tensor

    def __init__(
        self, backbone: torch.nn.Module, num_features: int, ways: int, num_classes: int
    ) -> None:
        super().__init__()
        self.backbone = backbone
        if self.layer is not None:
            rows = ways if self.layer == "task" else num_classes
            self.weight = torch.nn.Parameter(torch.zeros(rows, num_features))
            self.bias = torch.nn.Parameter(torch.zeros(rows))

    def loss(self, episodes: Episodes) -> Tensor:
        """What is minimized, of each task, ``(tasks,)``: here the query points' mean NLL."""
        log_p = self.log_probabilities(episodes)
        return -log_p.gather(-1, episodes.query_y.unsqueeze(-1)).mean((-2, -1))

    def log_probabilities(self, episodes: Episodes) -> Tensor:
        """Of the classes of query points given the support points, ``(tasks, q, ways)``."""
        raise NotImplementedError

    def features(self, episodes: Episodes) -> tuple[Tensor, Tensor]:
        """Features of support and query points, ``(tasks, n, q)``, by one pass of the backbone."""
        x, _ = episodes.points()
        values = self.backbone(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return values[:, : episodes.num_support], values[:, episodes.num_support :]


class PrototypicalNetwork(Baseline):
    """Softmax of negative squared distances to the means of classes (Snell et al. 2017)."""

    def log_probabilities(self, episodes: Episodes) -> Tensor:
        """As in the base class."""
        support, query = self.features(episodes)
        # Sums over the members of each class by one product.
        members = one_hot(episodes.support_y, episodes.ways).to(support).mT  # (tasks, ways, s)
        prototypes = members @ support / members.sum(-1, keepdim=True)
        distances = (query.unsqueeze(-2) - prototypes.unsqueeze(-3)).square().sum(-1)
        return log_softmax(-distances, dim=-1)


class MatchingNetwork(Baseline):
    """Attention to support points by cosine similarity (Vinyals et al. 2016, Eq. 1).

    Without full context embeddings; similarities are multiplied by 100, as in the code of Chen et
    al. (2019), since a softmax of plain cosines is nearly flat.
    """

    def log_probabilities(self, episodes: Episodes) -> Tensor:
        """As in the base class."""
        support, query = (normalize(x, dim=-1) for x in self.features(episodes))
        attention = log_softmax(_SHARPNESS * query @ support.mT, dim=-1)  # (tasks, q, s)
        members = one_hot(episodes.support_y, episodes.ways).bool().mT  # (tasks, ways, s)
        # Support points of other classes have no weight: minus infinity before the sum.
        outside = ~members.unsqueeze(-3)
        return attention.unsqueeze(-2).masked_fill(outside, -torch.inf).logsumexp(-1)


class LinearTransfer(Baseline):
    """A classifier of all training classes, whose last layer is fitted anew for each task.

    The baseline of Chen et al. (2019, Section 3.2): training is plain classification of images
    drawn from all classes, which :class:`~benchmarks.dkt.cells.ClassifiedImages` gives as query
    points; a new task is learned by :func:`fit_linear_layers` on fixed features.
    """

    layer = "all"

    def loss(self, episodes: Episodes) -> Tensor:
        """The mean NLL of the query images among all training classes."""
        x = episodes.query_x
        values = self.backbone(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        outputs = values @ self.weight.mT + self.bias.unsqueeze(-2)
        return cross_entropy(outputs.mT, episodes.query_y, reduction="none").mean(-1)

    def log_probabilities(self, episodes: Episodes) -> Tensor:
        """As in the base class."""
        support, query = self.features(episodes)
        weight, bias = fit_linear_layers(support, episodes.support_y, episodes.ways)
        return log_softmax(query @ weight.mT + bias, dim=-1)


class FirstOrderMAML(Baseline):
    """First-order model-agnostic meta-learning (Finn et al. 2017, Section 5.2).

    Backbone and linear layer take five gradient steps of rate 0.1 on the support points of a
    task; the gradient of the query points' loss at the end of them moves the start. As in the code
    of Chen et al. (2019) features are normalized over the points of a pass, query points among
    themselves, in training and afterwards: this method alone sees all query points together.
    """

    layer = "task"

    def log_probabilities(self, episodes: Episodes) -> Tensor:
        """As in the base class."""
        start = {f"backbone.{name}": p for name, p in self.backbone.named_parameters()}
        start |= {"weight": self.weight, "bias": self.bias}
        outputs = []
        tasks = zip(episodes.support_x, episodes.support_y, episodes.query_x, strict=True)
        for x, y, new_x in tasks:
            # First order: each inner step is cut from the graph of the one before.
            fast = {name: p.detach().requires_grad_() for name, p in start.items()}
            with torch.enable_grad():
                for _ in range(_INNER_STEPS):
                    loss = cross_entropy(self._outputs(fast, x), y)
                    gradients = torch.autograd.grad(loss, list(fast.values()))
                    fast = {
                        name: (p - _INNER_RATE * gradient).detach().requires_grad_()
                        for (name, p), gradient in zip(fast.items(), gradients, strict=True)
                    }
            # The start moves along the gradient at the end: their difference counts as constant.
            ends = {name: p + (fast[name] - p).detach() for name, p in start.items()}
            outputs.append(self._outputs(ends, new_x))
        return log_softmax(torch.stack(outputs), dim=-1)

    def _outputs(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Class scores, ``(n, ways)``; features are normalized over these points in any mode."""
        network = {
            name.removeprefix("backbone."): p
            for name, p in parameters.items() if name.startswith("backbone.")
        }  # fmt: skip
        # Copies of running statistics take the updates of the pass.
        network |= {name: buffer.clone() for name, buffer in self.backbone.named_buffers()}
        # Batch normalization by the points at hand needs train mode, also in evaluation.
        mode = self.backbone.training
        features = functional_call(self.backbone.train(), network, x)
        self.backbone.train(mode)
        return features @ parameters["weight"].mT + parameters["bias"]


@torch.enable_grad()
def fit_linear_layers(features: Tensor, labels: Tensor, ways: int) -> tuple[Tensor, Tensor]:
    """Weights and biases of a linear classifier of each task, from fixed features.

    100 steps of gradient descent with momentum 0.9, rate 0.01 and weight decay 0.001 from zero, as
    in Chen et al. (2019), on all support points at each step.

    Args:
        features: Features of support points, ``(tasks, s, q)``.
        labels: Their classes, ``(tasks, s)``.
        ways: Number of classes.

    Returns:
        Weights ``(tasks, ways, q)`` and biases ``(tasks, 1, ways)``.
    """
    features = features.detach()
    tasks, _, width = features.shape
    # All tasks at once: their losses are summed and do not meet.
    weight = features.new_zeros(tasks, ways, width, requires_grad=True)
    bias = features.new_zeros(tasks, 1, ways, requires_grad=True)
    optimizer = torch.optim.SGD(
        [weight, bias], lr=_FIT_RATE, momentum=_MOMENTUM, weight_decay=_DECAY
    )
    for _ in range(_FIT_STEPS):
        optimizer.zero_grad()
        outputs = features @ weight.mT + bias
        cross_entropy(outputs.mT, labels, reduction="none").mean(-1).sum().backward()
        optimizer.step()
    return weight.detach(), bias.detach()


@torch.no_grad()
def baseline_log_probabilities(model: Baseline, tasks: Tasks, count: int) -> tuple[Tensor, Tensor]:
    """Of the first tasks of a source: ``(tasks, q, ways)``, and the classes ``(tasks, q)``."""
    log_p, labels = [], []
    with evaluating(model):
        for episodes in batches(tasks, count, next(model.parameters())):
            log_p.append(model.log_probabilities(episodes))
            labels.append(episodes.query_y)
    return torch.cat(log_p), torch.cat(labels)


BASELINES: Mapping[str, Callable[..., Baseline]] = MappingProxyType(
    {
        "linear-transfer": LinearTransfer,
        "maml": FirstOrderMAML,
        "matching": MatchingNetwork,
        "prototypes": PrototypicalNetwork,
    }
)
"""The trained baselines by name, in place of a kernel."""
