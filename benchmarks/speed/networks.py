"""Networks: their Laplace evidence, and steps of few-shot training."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import SoftmaxLikelihood
from torch import Tensor

from benchmarks._process import keep_freed_memory
from benchmarks.dkt.published import ClassModels, published_model
from benchmarks.evidence.training import network as make_network
from benchmarks.speed.timing import FAILED, Row, step_memory, timed
from gpclml.conditioning import LastPoints
from gpclml.curvature import Diagonal, FunctionSpace, GaussianWeightPrior, Kronecker
from gpclml.inference import evaluating
from gpclml.kernels import MLP
from gpclml.laplace import Laplace
from gpclml.meta import Conv4, DeepKernelTransfer, Episodes, ImageTasks
from gpclml.mlls import ConditionalMarginalLogLikelihood, LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

EVIDENCE_BASE = "kronecker, all points"
_CLASSES, _BATCH = 10, 250


def measure_evidence(
    network: str, n: int = 1000, memory: bool = False,
    *, device: str = "cpu", seconds: float = 2.0,
) -> list[Row]:  # fmt: skip
    """Time of the evidence with its gradient in the precisions of all parameter tensors.

    Images of 28 x 28 pixels in ten classes, a softmax, float32; curvature in batches of 250.

    Args:
        network: Its name, as for :func:`benchmarks.evidence.training.network`.
        n: Number of points.
        memory: Peak memory too, on a CPU each in a process of its own.
        device: Where.
        seconds: That the rounds may take.

    Returns:
        A row a method, laplace-torch among them where it is installed, whose ``ratio`` is to the
        Kronecker evidence of all points. ``150-1`` has 150 points and one output for all; ``passes
        alone`` are the forward and the backward pass that any such estimate needs.
    """
    steps = evidence_steps(network, n, device)
    rows = timed(steps, device, seconds, base=EVIDENCE_BASE, memory=memory)
    for row in rows:
        if memory and device == "cpu" and FAILED not in row:
            row["GiB"] = step_memory(_warm_evidence_step, network, n, row["method"])
    return rows


def _warm_evidence_step(network: str, n: int, method: str) -> Callable[[], object]:
    evidence_steps(network, 20, "cpu")[method]()
    return evidence_steps(network, n, "cpu")[method]


def evidence_steps(network: str, n: int, device: str) -> dict[str, Callable[[], object]]:
    """What is compared by :func:`measure_evidence`, whose arguments these are."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, 28, 28, generator=generator).to(device)
    y = torch.randint(_CLASSES, (n,), generator=generator).to(device)
    module = make_network(network, 1, 28, _CLASSES, seed=0).to(device)
    # Batches bound the memory of Jacobians.
    every = list(zip(x.split(_BATCH), y.split(_BATCH), strict=True))
    some = x[:150], y[:150]
    steps = {
        EVIDENCE_BASE: _evidence_step(module, n, Kronecker(), "all", every),
        "diagonal, all points": _evidence_step(module, n, Diagonal(), "all", every),
        "kronecker, 150-10": _evidence_step(module, n, Kronecker(), "all", *some),
        "kronecker, 150-1": _evidence_step(module, n, Kronecker(), "single", *some),
        "kernel, 150-1": _evidence_step(module, n, FunctionSpace(), "single", *some),
        "passes alone, 150-1": _passes_step(module, x[:150]),
    }
    if importlib.util.find_spec("laplace") is not None:
        steps |= _laplace_torch_steps(module, x, y)
    return steps


def _evidence_step(
    network: torch.nn.Module, points: int, structure: Any, outputs: Any, *data: Any
) -> Callable[[], object]:
    """The evidence of so many points by some of them, or by batches of all, with its gradient."""
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "parameter"))
    likelihood = SoftmaxLikelihood(num_classes=_CLASSES, mixing_weights=False)
    mll = LaplaceMarginalLogLikelihood(likelihood, model, points, structure, outputs=outputs)

    def step() -> None:
        value = mll.evidence_of(*data, progress=False)()
        torch.autograd.grad(value, model.prior.log_precision)

    return step


def _passes_step(network: torch.nn.Module, x: Tensor) -> Callable[[], object]:
    kinds = torch.nn.Linear, torch.nn.Conv2d
    layers = [module for module in network.modules() if isinstance(module, kinds)]

    def step() -> None:
        made: list[Tensor] = []

        def keep(_: object, __: object, output: Tensor) -> None:
            made.append(output)

        handles = [layer.register_forward_hook(keep) for layer in layers]
        outputs = network(x)
        for handle in handles:
            handle.remove()
        torch.autograd.grad(outputs[:, 0].sum(), made)

    return step


def _laplace_torch_steps(
    network: torch.nn.Module, x: Tensor, y: Tensor, structure: str = ""
) -> dict[str, Callable[[], object]]:
    """Fits with the evidence and its gradient; of one structure fits alone."""
    import laplace
    from laplace.curvature import asdl, backpack, curvlinops
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(x, y), batch_size=_BATCH)
    backends = {
        "laplace-torch, Asdl": (asdl.AsdlGGN, "kron"),
        "laplace-torch, Curvlinops": (curvlinops.CurvlinopsGGN, "kron"),
        "laplace-torch, BackPACK": (backpack.BackPackGGN, "kron"),
        "laplace-torch, Asdl, diagonal": (asdl.AsdlGGN, "diag"),
    }
    if structure:
        backends = {k: (backend, structure) for k, (backend, s) in backends.items() if s == "kron"}

    def step_of(backend: Any, kind: str) -> Callable[[], object]:
        # Backends leave hooks behind, which would slow the next one.
        module = copy.deepcopy(network)

        def step() -> None:
            fitted: Any = laplace.Laplace(
                module, "classification", subset_of_weights="all", hessian_structure=kind,
                backend=backend,
            )  # fmt: skip
            fitted.fit(loader)
            if structure:
                return
            count = len(list(module.parameters()))
            log_precision = torch.zeros(count, device=x.device, requires_grad=True)
            value = fitted.log_marginal_likelihood(log_precision.exp())
            torch.autograd.grad(value, log_precision)

        return step

    return {name: step_of(*backend) for name, backend in backends.items()}


PASSES = "forward and gradient"
"""Of an output with respect to the weights in the posterior."""


def measure_posteriors(
    problem: str = "prediction", points: int = 1000,
    *, device: str = "cpu", seconds: float = 2.0,
) -> list[Row]:  # fmt: skip
    """Time of a prediction, and of fits with the full curvature of a last layer, in float32.

    Args:
        problem: ``"prediction"`` at one point of a network of 2.4e7 weights, whose last layer has
            the posterior; or fits of a linear layer, such as ``"10 x 64"`` of 10 classes and 64
            features.
        points: Number of training points.
        device: Where.
        seconds: That the rounds may take.
    """
    generator = torch.Generator().manual_seed(0)
    predicts = problem == "prediction"
    sizes = [1000, 4000, 4000, 1000, 1] if predicts else [*map(int, problem.split(" x "))][::-1]
    network = MLP(sizes, generator=generator).to(device).eval()
    x = torch.randn(points, sizes[0], generator=generator).to(device)
    if predicts:
        posterior = Laplace(network, "regression").fit((x[:50], x[:50, :1]), precision=1.0)
        last = list(network.parameters())[-2:]
        steps: dict[str, Callable[[], object]] = {
            PASSES: lambda: torch.autograd.grad(network(x[:1]).sum(), last),
            "prediction": lambda: posterior.predict(x[:1]),
        }
        return timed(steps, device, seconds, base=PASSES)
    with torch.no_grad():  # labels drawn from the softmax of outputs
        noise = -(-torch.rand(points, sizes[-1], generator=generator).log()).log()
        y = (10 * network(x) + noise.to(device)).argmax(1)

    def fit(**options: Any) -> None:
        Laplace(network, "classification", structure="full").fit((x, y), **options)

    given = "precisions given"
    steps = {given: lambda: fit(precision=1.0), "precisions by the evidence": fit}
    # At 100 x 100 its matrix of 10,100 columns, summed over points, takes minutes.
    if sizes[0] * sizes[-1] < 5000 and importlib.util.find_spec("laplace") is not None:
        steps |= _laplace_torch_steps(network, x, y, "full")
    return timed(steps, device, seconds, base=given)


_FEATURES, _WAYS = 64, 5
PLAIN = "way by way, LML"
"""The step by GPyTorch's classes."""


def measure_few_shot(
    kernel: str = "rbf", tasks: int = 1, ways: int = 5, images: int = 17,
    *, device: str = "cpu", seconds: float = 2.0,
) -> list[Row]:  # fmt: skip
    """Time of value and gradient on given features, and of a Conv4 step on the same images.

    The base is a GPyTorch ``ExactGP`` for each way of each task in an ``IndependentModelList``
    under a ``SumMarginalLogLikelihood``.
    """
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tasks, ways * images, _FEATURES, generator=generator).to(device)
    labels = torch.arange(ways).repeat(images).expand(tasks, -1).to(device)  # support first
    episodes = Episodes(x[:, :ways], labels[:, :ways], x[:, ways:], labels[:, ways:], ways)
    pictures = torch.rand(tasks * ways * images, 1, 28, 28, generator=generator).to(device)
    conv4 = Conv4().to(device)
    steps = {
        PLAIN: _plain_step(episodes, kernel, device),
        "ours, LML": _density_step(episodes, kernel, 0, device),
        "ours, CLML": _density_step(episodes, kernel, ways, device),
        "Conv4": lambda: conv4(pictures).sum().backward(),
    }
    return timed(steps, device, seconds, base=PLAIN)


def _density_step(episodes: Episodes, kernel: str, m: int, device: str) -> Callable[[], object]:
    model = DeepKernelTransfer(torch.nn.Identity(), kernel, _FEATURES).to(device)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=m))
    mll.train()
    support, query = (x.requires_grad_() for x in (episodes.support_x, episodes.query_x))
    given = Episodes(support, episodes.support_y, query, episodes.query_y, episodes.ways)

    return lambda: model.objective(mll, given).mean().neg().backward()


def _plain_step(episodes: Episodes, kernel: str, device: str) -> Callable[[], object]:
    """A model of the published kind for each task, of features that are given."""
    features, labels = episodes.points()
    features = features.detach().requires_grad_()

    def make() -> Kernel:
        return DeepKernelTransfer(torch.nn.Identity(), kernel, num_features=_FEATURES).covar_module

    models = [ClassModels(torch.nn.Identity(), episodes.ways, make) for _ in features]
    models = [model.to(device).train() for model in models]

    def step() -> None:
        for model, x, y in zip(models, features, labels, strict=True):
            # All points are query points: the LML holds every one out.
            nothing = x[:0].unsqueeze(0), y[:0].unsqueeze(0)
            task = Episodes(*nothing, x.unsqueeze(0), y.unsqueeze(0), episodes.ways)
            model.loss(task).backward()

    return step


def measure_training_steps(
    kernel: str = "linear", shots: int = 1, images: int = 28,
    *, device: str = "cpu", seconds: float = 2.0,
) -> list[Row]:  # fmt: skip
    """Time of a step of Conv4 on one 5-way task: drawing, forward, backward and Adam.

    ``way by way`` is a GPyTorch ``ExactGP`` for each class in an ``IndependentModelList`` under a
    ``SumMarginalLogLikelihood``, as in the code of Patacchiola et al. (2020), which after each step
    also predicts support and query points, ``with scores``; ours under LML and CLML.

    Args:
        kernel: Kernel on features.
        shots: Images a class to learn from.
        images: Pixels a side.
        device: The CPU.
        seconds: That the rounds may take.
    """
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (800, 1, images, images), generator=generator, dtype=torch.uint8)
    labels = torch.arange(40).repeat_interleave(20)
    tasks = ImageTasks(pictures, labels, ways=_WAYS, shots=shots, rotations=True)
    base = "way by way, with scores"
    steps = {
        base: _published_step(tasks, kernel, scores=True),
        "way by way": _published_step(tasks, kernel, scores=False),
        "ours, LML": _training_step(tasks, kernel, 0),
        "ours, CLML": _training_step(tasks, kernel, _WAYS * shots),
    }
    return timed(steps, device, seconds, base=base)


def _training_step(tasks: ImageTasks, kernel: str, m: int) -> Callable[[], object]:
    model = DeepKernelTransfer(Conv4(), kernel)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=m))
    return _adam_step(model, tasks, lambda task: -model.objective(mll, task).mean())


def _adam_step(model: Any, tasks: ImageTasks, loss_of: Any, after: Any = None) -> Any:
    """A step of Adam on the loss of a new task, and what is done with that task after it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> float:
        model.train()
        task = tasks.draw([0])
        optimizer.zero_grad()
        loss = loss_of(task)
        loss.backward()
        optimizer.step()
        if after is not None:
            after(task)
        return float(loss.detach())

    return step


def _published_step(tasks: ImageTasks, kernel: str, scores: bool) -> Callable[[], object]:
    model = published_model(kernel, _WAYS, seed=0)

    def predict(task: Episodes) -> None:
        with torch.no_grad(), evaluating(model):
            for x in (task.support_x[0], task.query_x[0]):
                model.classes(x)

    return _adam_step(model, tasks, model.loss, predict if scores else None)
