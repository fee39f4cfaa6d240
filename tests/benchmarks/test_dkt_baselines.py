"""The few-shot baselines: their formulas by hand, and that they learn what tasks have in common."""

import pytest
import torch

from benchmarks.dkt.baselines import (
    BASELINES,
    FirstOrderMAML,
    MatchingNetwork,
    PrototypicalNetwork,
    baseline_log_probabilities,
    fit_linear_layers,
)
from benchmarks.dkt.cells import ClassifiedImages
from gpclml.meta import ConvBlocks, Episodes, ImageTasks
from gpclml.meta.evaluation import class_scores

TASKS, WAYS, SHOTS, QUERIES = 2, 3, 2, 4


def points(seed=0):
    """Tasks whose inputs are features themselves, with support points out of order."""
    generator = torch.Generator().manual_seed(seed)
    support_y = torch.tensor([[2, 0, 1, 1, 0, 2], [0, 1, 2, 0, 1, 2]])
    query_y = torch.randint(WAYS, (TASKS, QUERIES), generator=generator)
    support, query = (
        torch.randn(TASKS, n, 5, generator=generator, dtype=torch.float64)
        for n in (WAYS * SHOTS, QUERIES)
    )
    return Episodes(support, support_y, query, query_y, ways=WAYS)


def made(kind, num_classes=WAYS):
    return kind(torch.nn.Identity(), 5, WAYS, num_classes)


def test_prototypes_are_means_of_classes():
    data = points()
    log_p, loss = made(PrototypicalNetwork).log_probabilities(data), 0.0
    for task in range(TASKS):
        for row in range(QUERIES):
            query = data.query_x[task, row]
            scores = torch.stack([
                -((query - data.support_x[task][data.support_y[task] == way].mean(0)) ** 2).sum()
                for way in range(WAYS)
            ])  # fmt: skip
            expected = scores - scores.exp().sum().log()
            torch.testing.assert_close(log_p[task, row], expected)
            loss = loss - expected[data.query_y[task, row]] / QUERIES
    torch.testing.assert_close(made(PrototypicalNetwork).loss(data).sum(), loss)


def test_matching_is_attention_to_support_points():
    data = points()
    log_p = made(MatchingNetwork).log_probabilities(data)
    for task in range(TASKS):
        for row in range(QUERIES):
            cosines = torch.cosine_similarity(data.query_x[task, row], data.support_x[task], -1)
            attention = torch.softmax(100 * cosines, 0)
            expected = [attention[data.support_y[task] == way].sum().log() for way in range(WAYS)]
            torch.testing.assert_close(log_p[task, row], torch.stack(expected))


def test_linear_layers_are_fitted_task_by_task():
    data = points()
    weight, bias = fit_linear_layers(data.support_x, data.support_y, WAYS)
    for task in range(TASKS):
        layer = torch.nn.Linear(5, WAYS).double()
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        optimizer = torch.optim.SGD(layer.parameters(), 0.01, momentum=0.9, weight_decay=0.001)
        for _ in range(100):
            optimizer.zero_grad()
            outputs = layer(data.support_x[task])
            torch.nn.functional.cross_entropy(outputs, data.support_y[task]).backward()
            optimizer.step()
        torch.testing.assert_close(weight[task], layer.weight.detach())
        torch.testing.assert_close(bias[task, 0], layer.bias.detach())


def test_maml_takes_its_steps_on_the_support_points():
    data = images(seed=0).draw([0, 1])
    data = data.to(torch.float64)
    backbone = ConvBlocks(2, width=4).double()
    model = FirstOrderMAML(backbone, 16, data.ways, 0).double()
    log_p = model.log_probabilities(data)
    model.loss(data).sum().backward()
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for task in range(2):
        network = ConvBlocks(2, width=4).double()
        layer = torch.nn.Linear(16, data.ways).double()
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.zero_()
        learner = torch.nn.Sequential(network, layer)
        optimizer = torch.optim.SGD(learner.parameters(), 0.1)
        for _ in range(5):
            optimizer.zero_grad()
            outputs = learner(data.support_x[task])
            torch.nn.functional.cross_entropy(outputs, data.support_y[task]).backward()
            optimizer.step()
        outputs = learner(data.query_x[task])
        torch.testing.assert_close(log_p[task], torch.log_softmax(outputs, -1))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(outputs, data.query_y[task]).backward()
        # The head's parameters come first in the model.
        ends = [*layer.parameters(), *network.parameters()]
        gradients = [gradient + end.grad for gradient, end in zip(gradients, ends, strict=True)]
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def images(seed, classes=30, each=12):
    """Images of a class are one random picture and noise."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.rand(classes, 1, 1, 8, 8, generator=generator)
    noise = torch.rand(classes, each, 1, 8, 8, generator=generator)
    mask = torch.rand(8, 8, generator=torch.Generator().manual_seed(5)) < 0.4
    mixed = mask * pictures + ~mask * noise
    labels = 3 * torch.arange(classes).repeat_interleave(each)
    return ImageTasks(mixed.flatten(0, 1), labels, ways=4, shots=1, queries=4, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", BASELINES)
def test_each_learns_what_tasks_have_in_common(name):
    """From images that are mostly noise, chance being a quarter."""
    source, unseen = images(seed=0), images(seed=1)
    backbone = ConvBlocks(2, width=16, generator=torch.Generator().manual_seed(0))
    model = BASELINES[name](backbone, 64, 4, source.num_classes)
    tasks = ClassifiedImages(source) if name == "linear-transfer" else source
    before = class_scores(*baseline_log_probabilities(model, unseen, 100))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for step in range(60):
        optimizer.zero_grad()
        model.train().loss(tasks.draw(range(4 * step, 4 * step + 4))).mean().backward()
        optimizer.step()
    scores = class_scores(*baseline_log_probabilities(model, unseen, 100))
    assert float(scores.values.mean()) > max(0.8, float(before.values.mean()) + 0.1)
    assert float(scores.nll.mean()) < 0.7 * float(before.nll.mean())
    assert model.training


def test_classified_images_are_those_of_the_classes():
    pictures = torch.arange(12.0).reshape(6, 1, 1, 2).expand(6, 1, 2, 2)
    labels = torch.tensor([7, 7, 7, 3, 3, 3])
    source = ImageTasks(pictures, labels, ways=2, shots=1, queries=2, rotations=True)
    drawn = ClassifiedImages(source).draw(range(40))
    assert drawn.query_x.shape == (40, 6, 1, 2, 2)
    assert drawn.num_support == 0
    images, places = drawn.query_x.flatten(0, 1), drawn.query_y.flatten()
    turns = places // 2
    for image, turn, parity in zip(images, turns.tolist(), (places % 2).tolist(), strict=True):
        original = torch.rot90(image, -turn, (-2, -1))[0]
        assert (
            original.flatten().tolist()
            in pictures[(labels == (7 if parity else 3))][:, 0].flatten(1).tolist()
        )
    assert set(places.tolist()) == set(range(8))
    assert torch.equal(ClassifiedImages(source).draw([39]).query_x, drawn.query_x[39:])
