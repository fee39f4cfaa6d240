"""Deep Kernel Transfer: against explicit Gaussians of each way of each task, in any units."""

import math

import pytest
import torch
from gpytorch.kernels import LinearKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel

import reference
from gpclml.conditioning import KFold, LastPoints, RandomHoldout
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnknownNameError
from gpclml.kernels.networks import MLP
from gpclml.meta import (
    DeepKernelTransfer,
    Episodes,
    PeriodicTasks,
    evaluate_tasks,
    train_on_tasks,
)
from gpclml.mlls import ConditionalMarginalLogLikelihood

WAYS, SHOTS, QUERIES = 4, 2, 3
KERNELS = {
    **{name: name for name in (
        "batch-norm-cosine", "cosine", "linear", "matern", "polynomial", "polynomial_1", "rbf",
        "spectral_mixture",
    )},
    "sum": ScaleKernel(PeriodicKernel(ard_num_dims=6)) + ScaleKernel(LinearKernel(ard_num_dims=6)),
    "product": ScaleKernel(RBFKernel(ard_num_dims=6)) * RQKernel(),
}  # fmt: skip


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def classes(tasks=3, seed=0):
    source = generator(seed)

    def points(shots):
        labels = torch.arange(WAYS).repeat_interleave(shots).expand(tasks, -1)
        noise = torch.randn(tasks, WAYS * shots, 5, generator=source, dtype=torch.float64)
        return torch.nn.functional.one_hot(labels, 5) + 0.5 * noise, labels

    return Episodes(*points(SHOTS), *points(QUERIES), ways=WAYS)


def regression(tasks=3):
    source = generator()
    x = torch.randn(tasks, 12, 5, generator=source, dtype=torch.float64)
    y = 7 + x[..., 0].sin() + 0.1 * torch.randn(tasks, 12, generator=source, dtype=torch.float64)
    return Episodes(x[:, :7], y[:, :7], x[:, 7:], y[:, 7:])


def transfer(kernel="rbf", dtype=torch.float64):
    """With parameters away from their start."""
    network = MLP([5, 8, 6], torch.nn.Tanh)
    model = DeepKernelTransfer(network, kernel, num_features=6).to(dtype)
    with torch.no_grad():
        source = generator(3)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
            parameter.add_(0.2 * noise.to(dtype) * parameter.requires_grad)
    return model


def objective(model, conditioning=None, m=0, **options):
    conditioning = LastPoints(m=m) if conditioning is None else conditioning
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, **options)


def explicit(model, data, targets):
    """Noisy covariance and residual of each way of each task, by the kernel on the features."""
    for features, ys in zip(model.features(data.inputs()), targets, strict=True):
        noise = model.likelihood.noise * torch.eye(len(features[0]), dtype=torch.float64)
        covariance = model.covar_module(features[0]).to_dense() + noise
        for y in ys:
            yield covariance, y - model.mean_module.constant


def standardized(data):
    y = torch.cat([data.support_y, data.query_y], 1)
    if data.ways:
        return torch.stack([torch.where(y == way, 1.0, -1.0).double() for way in range(WAYS)], 1)
    return ((y - y.mean()) / y.std(correction=0)).unsqueeze(1)


@pytest.mark.parametrize(("data", "m"), [(classes(), WAYS * SHOTS), (regression(), 0)])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_objectives_and_gradients_are_those_of_explicit_gaussians(kernel, data, m):
    model, targets = transfer(kernel), standardized(data)
    weights = torch.linspace(-1.0, 2.0, targets.shape[1], dtype=torch.float64)
    value = model.objective(objective(model, m=m), data)
    held_out = torch.arange(m, targets.shape[-1])
    densities = [
        reference.conditional_log_density(*gaussian, held_out) / len(held_out)
        for gaussian in explicit(model, data, targets)
    ]
    scale = 1.0 if data.ways else torch.cat([data.support_y, data.query_y], 1).std(correction=0)
    expected = torch.stack(densities).view(value.shape) - math.log(scale)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours, theirs = (
        torch.autograd.grad((result * weights).sum(), parameters, allow_unused=True)
        for result in (value, expected)
    )
    largest = max(float(gradient.abs().max()) for gradient in theirs if gradient is not None)
    for gradient, other in zip(ours, theirs, strict=True):
        assert (gradient is None) == (other is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, other, rtol=1e-6, atol=1e-9 * max(1, largest))


@pytest.mark.parametrize("conditioning", [KFold(4, seed=0), RandomHoldout(0.5)])
def test_any_conditioning_can_be_the_objective(conditioning):
    model, data = transfer(), regression(2)
    first, second = (
        torch.stack([model.objective(mll, data) for _ in range(3)])
        for mll in (objective(model, conditioning, seed=4) for _ in range(2))
    )
    torch.testing.assert_close(first, second)
    assert torch.allclose(first[0], first[1]) == isinstance(conditioning, KFold)


@pytest.mark.parametrize("kernel", ["batch_norm_cosine", "rbf", "spectral_mixture"])
def test_predictions_are_those_of_explicit_conditionals_and_leave_modes_alone(kernel):
    model, data = transfer(kernel), classes()
    model.prior(data)  # one step of running statistics
    predictive = model.predict(data)
    assert model.training
    gaussians = explicit(model.eval(), data, standardized(data))
    held_out = torch.arange(WAYS * SHOTS, WAYS * (SHOTS + QUERIES))
    moments = [reference.conditional_moments(*gaussian, held_out) for gaussian in gaussians]
    means = torch.stack([mean for mean, _ in moments]) + model.mean_module.constant
    variances = torch.stack([covariance.diagonal() for _, covariance in moments])
    shape = 3, WAYS, WAYS * QUERIES
    torch.testing.assert_close(predictive.mean, means.view(shape), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(predictive.variance, variances.view(shape), rtol=1e-6, atol=1e-7)


def test_a_task_does_not_depend_on_the_others_or_on_query_targets():
    model = transfer().eval()
    for data in (classes(), regression()):
        together = model.predict(data)
        given = data.support_x[:1], data.support_y[:1], data.query_x[:1]
        for unknown in (Episodes(*given, None, data.ways), Episodes(*given, ways=data.ways)):
            for episodes in (unknown, unknown.to(torch.float64), Episodes.stack([unknown])):
                torch.testing.assert_close(model.predict(episodes).mean, together.mean[:1])
            with pytest.raises(ArgumentError, match="without targets of their query points"):
                model.objective(objective(model), unknown)
    with pytest.raises(ShapeError, match="query_y"):
        Episodes(data.support_x, data.support_y, data.query_x, data.query_y[:, :1])


@torch.no_grad()
def test_starts_of_kernels():
    model = DeepKernelTransfer(torch.nn.Identity(), "batch_norm_cosine", 200)
    x = torch.randn(1, 50, 200, generator=generator())
    cosines = model.covar_module(model.features(x)).to_dense() / model.covar_module.outputscale
    others = ~torch.eye(50, dtype=torch.bool).expand_as(cosines)
    assert float(cosines[others].mean()) == pytest.approx(0.5, abs=0.02)
    kernel = DeepKernelTransfer(torch.nn.Identity(), "polynomial_1", 200).covar_module
    expected = (x @ x.mT + kernel.base_kernel.offset) / 200
    torch.testing.assert_close(kernel(x).to_dense(), expected)


def test_what_is_not_finite_is_named():
    model, data = transfer(), regression(1)
    data.query_y[0, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="target: got 1 non-finite"):
        model.objective(objective(model, m=7), data)
    assert math.isfinite(model.targets.mean)
    data = regression(1)
    data.query_x[0, 2] = torch.inf
    for call in (lambda: model.objective(objective(model), data), lambda: model.predict(data)):
        with pytest.raises(NonFiniteError, match="network output"):
            call()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: transfer("cosin"), UnknownNameError, "mean 'cosine'"),
        (lambda: transfer(3), ArgumentError, "kernel"),
        (lambda: DeepKernelTransfer(MLP([5, 6]), "rbf", 0), ArgumentError, "num_features"),
        *((lambda name=name: waves(standardize=name), ArgumentError, "standardize: got")
            for name in ("tasks", 2, None)),
        (lambda: DeepKernelTransfer(torch.nn.Flatten(0), "rbf").prior(classes()),
            ShapeError, "backbone"),
    ],
)  # fmt: skip
def test_bad_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize("kernel", ["batch_norm_cosine", "spectral_mixture"])
def test_a_backbone_with_another_number_of_features(kernel):
    model = DeepKernelTransfer(MLP([5, 6]), kernel, 7).double()
    with pytest.raises(ShapeError, match=r"backbone: got 6 features .* the 7 of num_features"):
        model.predict(classes())


# --- targets of regression in other units and with another zero


class Converted:
    """Sine waves whose targets are in other units."""

    def __init__(self, offset=0.0, scale=1.0, seed=0, dtype=torch.float64):
        self.source, self.dtype = PeriodicTasks(6, 8, seed=seed), dtype
        self.offset, self.scale = offset, scale

    def draw(self, indices):
        drawn = self.source.draw(indices)
        support_y, query_y = (
            (self.offset + self.scale * y.double()).to(self.dtype)
            for y in (drawn.support_y, drawn.query_y)
        )
        return Episodes(drawn.support_x, support_y, drawn.query_x, query_y)


def waves(kernel="rbf", **options):
    network = MLP([1, 12, 8], torch.nn.Tanh, generator=generator())
    return DeepKernelTransfer(network, kernel, 8, **options)


def trained(tasks, m=6, kernel="rbf", **options):
    model = waves(kernel)
    options |= {"steps": 30, "tasks_per_step": 2, "lr": 0.01, "look_every": 10, "progress": False}
    options |= {"validation": tasks, "validation_tasks": 5}
    return model, train_on_tasks(model, objective(model, m=m), tasks, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offset", "scale", "kernel", "m"),
    [
        (1000.0, 1.0, "rbf", 0), (-1e6, 1e-3, "linear", 6), (0.0, 1e5, "linear", 0),
        (3e4, 1e4, "rbf", 6), (0.0, 1e-5, "rbf", 6),
    ],
)  # fmt: skip
def test_training_and_predictions_do_not_depend_on_units_and_zero(offset, scale, kernel, m):
    plain, first = trained(Converted(), m, kernel)
    model, result = trained(Converted(offset, scale), m, kernel)
    expected = torch.tensor(first.history) - math.log(scale)
    torch.testing.assert_close(torch.tensor(result.history), expected, rtol=2e-3, atol=2e-3)
    new, same = (Converted(*units, seed=1).draw(range(4)) for units in ((offset, scale), (0, 1)))
    predicted, before = model.predict(new), plain.predict(same)
    assert predicted.mean.dtype == torch.float64  # of the targets
    units = (predicted.mean - offset) / scale
    torch.testing.assert_close(units, before.mean, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(predicted.stddev / scale, before.stddev, rtol=1e-2, atol=1e-3)
    scores = evaluate_tasks(model, Converted(offset, scale, seed=1), 20)
    others = evaluate_tasks(plain, Converted(seed=1), 20)
    torch.testing.assert_close(scores.values / scale**2, others.values, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(scores.nll - math.log(scale), others.nll, rtol=3e-2, atol=3e-2)


@pytest.mark.slow
def test_single_precision_targets_far_from_zero():
    errors = []
    for offset in (0.0, 1000.0):
        model, _ = trained(Converted(offset, dtype=torch.float32))
        unseen = Converted(offset, seed=1, dtype=torch.float32)
        errors.append(float(evaluate_tasks(model, unseen, 20).values.mean()))
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


@pytest.mark.slow
def test_files_and_interrupted_trainings_keep_the_scale(tmp_path):
    tasks, path = Converted(1000.0, 30.0), tmp_path / "model.pt"
    whole, expected = trained(tasks)

    class Ends(Converted):
        def draw(self, indices):
            if 35 in indices:
                raise KeyboardInterrupt
            return super().draw(indices)

    with pytest.raises(KeyboardInterrupt):
        trained(Ends(1000.0, 30.0), checkpoint=path)
    model, result = trained(tasks, checkpoint=path)
    assert result.history == expected.history
    data = tasks.draw(range(3))
    assert torch.equal(model.predict(data).mean, whole.predict(data).mean)
    assert model.targets.mean == pytest.approx(1000, abs=30)


def test_the_first_hundred_tasks_count_in_any_portions():
    y = 7 + 3 * torch.randn(150, 5, generator=generator()).double()
    for size in (1, 7, 150):
        model = waves()
        for tasks in y.split(size):
            model.targets.count(tasks)
        assert model.targets.mean == pytest.approx(float(y[:100].mean()), rel=1e-12)
        assert model.targets.deviation == pytest.approx(float(y[:100].std(correction=0)), rel=1e-12)
    model = waves()
    model.targets.count(torch.full((2, 3), 1e6))
    assert (model.targets.mean, model.targets.deviation) == (1e6, 1.0)


def test_targets_as_they_are_and_of_evaluation():
    model, data = waves(standardize=False), PeriodicTasks(6, 8).draw([0, 1])
    _, targets = model.prior(data)
    torch.testing.assert_close(targets[:, 0], data.points()[1])
    mll = objective(model, m=6)
    torch.testing.assert_close(model.objective(mll, data), mll(*model.prior(data)))
    model = waves()
    evaluate_tasks(model, PeriodicTasks(6, 8), 5)
    assert (model.targets.mean, model.targets.deviation) == (0.0, 1.0)


class ByTask(Converted):
    """Sine waves, each with an offset and a unit of its own."""

    def __init__(self, spread, seed=0):
        super().__init__(seed=seed)
        self.spread, self.seed = spread, seed

    def units(self, indices):
        draws = [torch.randn(2, generator=generator(1000 * self.seed + i)) for i in indices]
        offset, scale = torch.stack(draws).double().split(1, dim=1)
        return 100 * offset, (self.spread * scale).exp()

    def draw(self, indices):
        (offset, scale), drawn = self.units(indices), super().draw(indices)
        support_y, query_y = (offset + scale * y for y in (drawn.support_y, drawn.query_y))
        return Episodes(drawn.support_x, support_y, drawn.query_x, query_y)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 1.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_tasks_of_very_different_offsets_are_learned_by_their_own_scale(spread, seed):
    tasks, new = ByTask(spread, 2 * seed), ByTask(spread, 2 * seed + 1)
    errors, nlls = [], []
    for standardize in (True, "task"):
        model = waves(standardize=standardize)
        mll = objective(model, m=6)
        train_on_tasks(model, mll, tasks, steps=60, tasks_per_step=4, lr=0.01, progress=False)
        scores = evaluate_tasks(model, new, 60)
        errors.append(float((scores.values / new.units(range(60))[1][:, 0].square()).mean()))
        nlls.append(float(scores.nll.mean()))
    assert errors[1] < 0.7 * errors[0]
    assert nlls[1] < nlls[0] - 1


def test_densities_by_task_are_those_of_the_targets_in_their_units():
    model, data = waves(standardize="task").double(), ByTask(1.0).draw(range(4))
    data = data.to(torch.float64)
    value = model.objective(objective(model, m=6), data)
    targets = torch.cat([data.support_y, data.query_y], 1)
    common = targets.std(1).log().mean()
    mean, deviation = data.support_y.mean(1, keepdim=True), data.support_y.std(1, keepdim=True)
    scale = (5 / 6 * deviation.log() + 1 / 6 * common).exp()  # its own weighs as five of six points
    support_y, query_y = ((y - mean) / scale for y in (data.support_y, data.query_y))
    plain = waves(standardize=False).double()
    same = Episodes(data.support_x, support_y, data.query_x, query_y)
    expected = plain.objective(objective(plain, m=6), same) - scale.log()
    torch.testing.assert_close(value, expected)
    ours, theirs = model.predict(data), plain.predict(same)
    torch.testing.assert_close(ours.mean[:, 0], mean + scale * theirs.mean[:, 0])
    torch.testing.assert_close(ours.stddev[:, 0], scale * theirs.stddev[:, 0])


@pytest.mark.parametrize("support", [1, 3])
def test_tasks_of_one_or_of_equal_support_targets_have_the_scale_of_training(support):
    model = waves(standardize="task").double()
    model.objective(objective(model), ByTask(0.0).draw(range(10)).to(torch.float64))
    x, y = torch.rand(1, support, 1).double(), torch.full((1, support), 40.0).double()
    offset, scale = model.targets.offset_and_scale(y)
    assert offset.item() == 40.0
    assert scale.item() == pytest.approx(math.exp(model.targets.mean))
    assert bool(model.predict(Episodes(x, y, x)).stddev.isfinite().all())
