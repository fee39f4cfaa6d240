"""Seeds that train together: each as if it trained alone."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from benchmarks.dkt import studies, together
from benchmarks.dkt.cells import run_cell, run_together
from benchmarks.dkt.stacks import Stack
from benchmarks.dkt.studies import STUDIES, Sources
from benchmarks.dkt.study import make_grid
from benchmarks.dkt.together import label, size, train_together
from gpclml.conditioning import LastPoints, RandomHoldout
from gpclml.errors import ArgumentError, NonFiniteError, UnsupportedError
from gpclml.meta import (
    KERNELS,
    ConvBlocks,
    DeepKernelTransfer,
    Episodes,
    ImageTasks,
    PeriodicTasks,
    train_on_tasks,
)
from gpclml.mlls import ConditionalMarginalLogLikelihood


def tasks(seed, **options):
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.rand(12, 1, 1, 8, 8, generator=generator)
    images = (0.6 * pictures + 0.4 * torch.rand(12, 9, 1, 8, 8, generator=generator)).flatten(0, 1)
    labels = torch.arange(12).repeat_interleave(9)
    sizes = {"ways": 3, "shots": 1, "queries": 4, "rotations": True, "seed": seed}
    return ImageTasks(images.double(), labels, **(sizes | options))


def models(kernel, count=3):
    return [
        DeepKernelTransfer(
            ConvBlocks(2, width=4, generator=torch.Generator().manual_seed(seed)), kernel, 16
        ).double()
        for seed in range(count)
    ]


def objective(model, conditioning):
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)


@pytest.mark.parametrize("conditioning", [LastPoints(m=0), LastPoints(m=3), RandomHoldout(0.5)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_values_and_gradients_are_those_of_each_alone(kernel, conditioning):
    alone = models(kernel)
    for place, model in enumerate(alone):  # hyperparameters that differ
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * place)
    stack = Stack(alone)
    own = [tasks(seed).draw([2]) for seed in range(3)]
    value = objective(stack.module, conditioning)(*stack.module.prior(Episodes.stack(own)))
    assert value.shape == (3, 3)
    value.mean(-1).sum().backward()
    with torch.no_grad():  # a step, whose result goes back to the models
        for parameter in stack.module.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad)
    expected = models(kernel)
    for place, (model, episodes) in enumerate(zip(expected, own, strict=True)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * place)
        mean = objective(model, conditioning)(*model.prior(episodes)).mean()
        torch.testing.assert_close(value[place].mean(), mean)
        mean.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad)
    stack.write_back()
    for model, other in zip(alone, expected, strict=True):
        for name, entry in other.state_dict().items():
            if not name.endswith("num_batches_tracked"):
                torch.testing.assert_close(model.state_dict()[name], entry, msg=name)
        test = tasks(9).draw([0, 1])
        torch.testing.assert_close(model.predict(test).mean, other.predict(test).mean)


@pytest.mark.parametrize("kernel", ["rbf", "spectral-mixture"])
def test_functions_are_learned_together_too(kernel):
    cells = make_grid(["periodic"], shots=(5,), kernels=[kernel], seeds=3, steps=12, test_tasks=9)
    cells = [cell for cell in cells if cell["objective"] == "clml"]
    for together_, cell in zip(run_together(cells), cells, strict=True):
        alone = run_cell(cell)
        for name in ("mse", "nll"):
            assert together_[name] == pytest.approx(alone[name], rel=1e-3)


@pytest.fixture
def validated(monkeypatch):
    """The study of digits with its test tasks to choose a look by, and a look every third step."""

    def sources(shots, seed):
        own = STUDIES["digits"].sources(shots, seed)
        return Sources(own.train, studies.digits(shots, seed + 50).test, own.test)

    study = dataclasses.replace(STUDIES["digits"], sources=sources)
    monkeypatch.setattr(studies, "STUDIES", {**STUDIES, "validated": study, "again": study})
    monkeypatch.setattr(together, "LOOK_EVERY", 3)
    monkeypatch.setattr(together, "VALIDATION_TASKS", 10)


@pytest.mark.usefixtures("validated")
@pytest.mark.parametrize("kernel", ["batch-norm-cosine", "linear"])
def test_cells_are_those_of_the_cell_function(kernel):
    cells = make_grid(
        ["validated", "again"], shots=(1,), kernels=[kernel], seeds=2, steps=10, test_tasks=30
    )
    cells = [cell for cell in cells if cell["objective"] == "clml"]
    assert len({label(cell) for cell in cells}) == 2  # of the seeds
    answers = run_together(cells)
    for cell, answer in zip(cells, answers, strict=True):
        alone = run_cell(cell)
        assert answer.keys() == alone.keys()
        assert answer["best_step"] == alone["best_step"]
        for name in ("accuracy", "nll", "calibration_error", "interval", "tempered_nll"):
            assert answer[name] == pytest.approx(alone[name], abs=0.01)
        assert 0 < answer["temperature"] < 1  # few steps leave it unsure
        assert answer["tempered_nll"] < answer["nll"]
    assert answers[0]["nll"] != answers[1]["nll"]  # another seed
    assert answers[0]["nll"] == answers[2]["nll"]  # another study of the same tasks


def test_the_network_trains_at_the_full_rate_together_too():
    """The first step of Adam moves a parameter by its learning rate, as far as rounding allows."""
    (cell, *_) = make_grid(["digits"], shots=(1,), kernels=["batch-norm-cosine"], seeds=1, steps=1)
    members = [together._member(cell, seed) for seed in (0, 1)]
    before = [dict(copy.deepcopy(member.model).named_parameters()) for member in members]
    together._train(members, cell)
    for member, old in zip(members, before, strict=True):
        moved = {
            name: float((value - old[name]).detach().abs().max())
            for name, value in member.model.named_parameters()
        }
        # Normalization takes the biases of convolutions out again, so that they hardly move.
        moved = {name: by for name, by in moved.items() if not name.endswith(".0.bias")}
        fast = {name for name, by in moved.items() if by > 5e-4}
        network = {name for name in moved if name.startswith(("backbone.", "normalization."))}
        assert fast == network
        assert len(network) == 2 * 3 + 2  # of two blocks, and of the normalization of features
        assert sum(0 < by < 1.1e-4 for by in moved.values()) == 3  # scale, mean and noise


@pytest.mark.parametrize("kernel", ["linear-transfer", "maml", "matching", "prototypes", "pixels"])
def test_baselines_are_cells(kernel):
    cells = make_grid(["digits"], shots=(1,), kernels=[kernel], seeds=2, steps=4, test_tasks=20)
    assert len(cells) == 2
    assert all(cell["objective"] is None for cell in cells)
    together, alone = run_together(cells)[1], run_cell(cells[1])
    for name in ("accuracy", "interval"):
        assert together[name] == pytest.approx(alone[name], abs=0.01)
    assert together["accuracy"] > 0.45  # chance is a third


@pytest.mark.parametrize("kernel", ["linear", "linear-transfer", "maml", "matching"])
def test_several_tasks_a_step(kernel, monkeypatch):
    """A step of two tasks is the mean of both."""
    settings = {"shots": (1,), "kernels": [kernel], "objectives": ["lml"], "seeds": 1}
    (cell,) = make_grid(["digits"], steps=3, tasks_per_step=2, **settings)
    drawn = []
    draw = ImageTasks.draw
    monkeypatch.setattr(ImageTasks, "draw", lambda *args: drawn.append(args[1]) or draw(*args))
    member = together._member(cell, 0)
    member.validation = None
    drawn.clear()
    if kernel == "linear-transfer":
        batches = list(together._draws([member.train], range(3), 2))
        assert [len(batch.query_x) for batch in batches] == [2, 2, 2]
    together._train([member], cell)
    assert member.step == 3
    if kernel != "linear-transfer":
        assert range(6) in drawn
    if kernel == "linear":
        alone = together._member(cell, 0)
        mll = objective(alone.model, LastPoints(m=0))
        train_on_tasks(alone.model, mll, alone.train, steps=3, tasks_per_step=2, progress=False)
        test = alone.train.draw([9])
        expected = alone.model.predict(test).mean
        torch.testing.assert_close(member.model.predict(test).mean, expected, rtol=1e-3, atol=1e-4)
    other = together._member(cell, 1)
    with pytest.raises(UnsupportedError, match="tasks_per_step: got 2, expected 1 where several"):
        together._train([member, other], cell)


def test_other_numbers_of_ways():
    (cell,) = make_grid(["digits"], shots=(1,), ways=4, kernels=["matching"], seeds=1, steps=30)
    assert 0.4 < run_cell(cell)["accuracy"] < 0.95
    with pytest.raises(ArgumentError, match="ways: got 5, expected at most the 4 classes"):
        make_grid(["digits"], ways=5)


def test_what_is_computed_together():
    def cell(**settings):
        own = {"study": "digits", "shots": 1, "seed": 0, "kernel": "linear", "device": "cpu"}
        return own | {"tasks_per_step": 1} | settings

    assert label(cell()) != label(cell(seed=3))
    assert label(cell(device="cuda")) == label(cell(seed=3, device="cuda"))
    assert label(cell()) != label(cell(shots=5))
    assert label(cell(study="omniglot-part")) == label(cell(study="omniglot-part-to-mnist"))
    assert label(cell()) != label(cell(study="omniglot-part"))
    assert size(cell()) == 3
    assert size(cell(device="cuda")) == 30
    assert size(cell(study="periodic")) == 30
    assert size(cell(device="cuda", study="rotation")) == 3
    assert size(cell(device="cuda", tasks_per_step=2)) == 3
    assert size(cell(device="cuda", kernel="pixels", tasks_per_step=None)) == 30


def test_losses_that_are_not_finite_are_found():
    cells = make_grid(["digits"], shots=(1,), kernels=["prototypes"], seeds=2, steps=5, lr=1e30)
    with pytest.raises(NonFiniteError, match="at step 1 of model 0"):
        train_together(cells)


def test_what_cannot_be_stacked():
    with pytest.raises(UnsupportedError, match="backbone Sequential, expected ConvBlocks"):
        Stack([DeepKernelTransfer(torch.nn.Sequential(torch.nn.Linear(2, 3)), "rbf", 3)])
    with pytest.raises(ArgumentError, match="ways: got 4, expected none for periodic"):
        make_grid(["periodic"], ways=4)
    with pytest.raises(ArgumentError, match="kernels: got maml, expected kernels or pixels"):
        make_grid(["periodic"], kernels=["maml"])


@pytest.mark.cuda
def test_seeds_train_together_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cells = make_grid(
        ["digits"], shots=(1,), kernels=["linear"], seeds=2, steps=20, test_tasks=30, device="cuda"
    )
    cells = cells[:2]
    here = train_together([{**cell, "device": "cpu"} for cell in cells])
    for one, other in zip(train_together(cells), here, strict=True):
        assert one["accuracy"] == pytest.approx(other["accuracy"], abs=0.03)
        assert one["nll"] == pytest.approx(other["nll"], abs=0.03)


def test_of_equal_looks_the_first_is_kept():
    member = together._Member(models("linear", 1)[0], tasks(0), tasks(1))
    member.look(3)
    member.look(5)
    assert member.step == 3


def test_what_objectives_hold_out():
    half = together.conditioning("clml-half", tasks(0))
    assert isinstance(half, RandomHoldout)
    assert half.fraction == 0.5
    assert together.conditioning("lml", tasks(0)).split(9).held_out[0].numel() == 9
    held_out = together.conditioning("clml", tasks(0)).split(9).held_out[0]
    assert held_out.flatten().tolist() == [3, 4, 5, 6, 7, 8]  # all but three support points


def test_the_smallest_error_is_kept():
    model = DeepKernelTransfer(torch.nn.Identity(), "rbf", 1)
    member = together._Member(model, PeriodicTasks(), PeriodicTasks(10, 20))
    for step, noise in enumerate((1e-3, 0.1, 30.0)):  # the more noise, the less is learned
        model.likelihood.initialize(noise=noise)
        member.look(step)
    assert member.step == 1 or member.step == 0
    assert member.score < 0


def test_a_look_is_kept_where_nothing_validates():
    member = together._Member(models("linear", 1)[0], tasks(0), None)
    member.look(3)
    member.look(5)
    assert member.step == 5
