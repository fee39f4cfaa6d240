"""The published way of Deep Kernel Transfer: it is ours where both start and learn alike."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from benchmarks.dkt import steps, studies
from benchmarks.dkt.published import (
    ClassModels,
    compare_with_published,
    published_model,
    train_class_models,
)
from benchmarks.dkt.studies import STUDIES, Sources
from gpclml.conditioning import LastPoints
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.inference import evaluating
from gpclml.meta import DeepKernelTransfer, ImageTasks
from gpclml.mlls import ConditionalMarginalLogLikelihood

pytestmark = pytest.mark.filterwarnings("ignore:The input matches the stored training data")


def tasks():
    images = torch.rand(60, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    return ImageTasks(images, torch.arange(6).repeat_interleave(10), shots=1, queries=3)


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_from_one_start_loss_and_predictions_are_ours(kernel):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 64)).double()
    theirs = ClassModels(
        network, 5, lambda: DeepKernelTransfer(network, kernel).covar_module
    ).double()
    ours = DeepKernelTransfer(network, kernel).double()
    task = tasks().draw([0]).to(torch.float64)
    mll = ConditionalMarginalLogLikelihood(ours.likelihood, ours, LastPoints(m=0))
    assert_close(theirs.loss(task), -mll(*ours.prior(task)).mean())
    with torch.no_grad(), evaluating(theirs):
        theirs.condition(task)
        expected = ours.predict(task).mean[0].argmax(0)
        assert theirs.classes(task.query_x[0]).tolist() == expected.tolist()


@pytest.mark.parametrize("kernel", ["batch-norm-cosine", "cosine"])
def test_cosines_are_of_features_of_length_one(kernel):
    model = published_model(kernel, 5, seed=0)
    images = tasks().draw([0]).query_x[0]
    assert_close(model.features(images).norm(dim=1), torch.ones(15))
    covariance = model.gps.models[0].forward(model.features(images)).covariance_matrix
    scale = model.gps.models[0].covar_module.outputscale
    assert_close(covariance.diagonal(), scale.expand(15), atol=1e-4, rtol=0)


def test_the_noise_stays_and_everything_else_is_trained():
    model = published_model("batch-norm-cosine", 5, seed=0)
    before = {name: one.clone() for name, one in model.named_parameters()}
    train_class_models(model, tasks(), steps=2)
    still = {name for name, one in model.named_parameters() if torch.equal(one, before[name])}
    parts = [f"gps.models.{way}" for way in range(5)]
    fixed = {f"{one}.likelihood.noise_covar.raw_noise" for one in parts}
    fixed |= {f"{one}.covar_module.base_kernel.raw_variance" for one in parts}
    assert {name for name in still if name.startswith("gps")} == fixed
    assert not any(name.startswith("network") for name in still)


def test_rows_of_a_comparison(monkeypatch):
    sources = Sources(tasks(), None, tasks())
    made = dataclasses.replace(STUDIES["digits"], sources=lambda *_: sources)
    monkeypatch.setattr(studies, "STUDIES", {**STUDIES, "made": made})
    table = compare_with_published("cosine", steps=2, test_tasks=2, study="made,made")
    assert list(table["study"]) == ["made", "made"]
    scores = table[["published", "ours, LML", "ours, CLML"]].to_numpy()
    assert (scores[0] == scores[1]).all()
    assert ((scores >= 0) & (scores <= 100)).all()
    with pytest.raises(UnknownNameError, match="kernel"):
        compare_with_published("cosin")


def test_a_row_a_way_of_a_step():
    table = steps.measure_steps("cosine", shots=1, images=16, rounds=2)
    assert list(table["step"]) == [
        "way by way, with scores", "way by way", "ours, LML", "ours, CLML"
    ]  # fmt: skip
    assert (table["milliseconds"] > 0).all()
    assert table["speedup"][0] == 1
    with pytest.raises(ArgumentError, match="rounds"):
        steps.measure_steps(rounds=0)
