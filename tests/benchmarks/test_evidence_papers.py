"""Networks and studies of papers: small runs of each, and what is refused."""

import dataclasses
import math
import sys

import image_files
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.data.files import data_files
from benchmarks.evidence import cells
from benchmarks.evidence.cells import STUDIES, make_grid, run_cell
from benchmarks.evidence.study import STUDY, report
from benchmarks.evidence.training import (
    RECIPES,
    STRUCTURES,
    Recipe,
    evidence_of_all,
    images,
    mirrored_and_shifted,
    network,
    objective,
    recipe_of,
    train,
)
from benchmarks.runner import load_results
from gpclml.errors import ArgumentError

PAPERS = sorted(name for name, settings in STUDIES.items() if settings.kind)


@pytest.fixture
def data_of_papers(tmp_path, monkeypatch):
    """Archives of 40 images to train on and 20 to test on, and 20 of each of CIFAR-100."""
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    image_files.cifar(monkeypatch, tmp_path, "cifar10", [*range(10)] * 2)
    image_files.cifar(monkeypatch, tmp_path, "cifar100", [*range(80, 100)])


@pytest.fixture
def few_steps(monkeypatch):
    """Hyperparameters make two steps where papers have up to a hundred."""
    for name, recipe in RECIPES.items():
        monkeypatch.setitem(RECIPES, name, recipe._replace(steps=min(recipe.steps, 2)))


def command(*arguments):
    return CliRunner().invoke(STUDY.make_app(report), [*map(str, arguments)])


def small(study, results, *more, architecture="resnet-8-2", seeds=1):
    return command(
        "run", study, "--architectures", architecture, "--num-train", 16, "--epochs", 1,
        "--precisions", 1, "--seeds", seeds, "--results", results, "--quiet", *more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "size", "channels", "parameters"),
    [
        ("lenet", 32, 3, 62_006),  # Lotfi et al. 2022, Table 1
        ("lenet", 28, 1, 61_706),
        ("resnet-20-16", 32, 3, 272_000),  # He et al. 2016: .27 million
        ("wrn-16-4", 32, 3, 2_750_000),  # Zagoruyko and Komodakis 2016: 2.7 million
        ("resnet-8-4", 28, 1, None),
        ("convnet-4x5", 32, 3, None),
    ],
)
def test_networks_of_papers(name, size, channels, parameters):
    model = network(name, channels, size, 10, 0)
    assert model(torch.randn(2, channels, size, size)).shape == (2, 10)
    if parameters is not None:
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.02)
    for first, second in zip(
        model.parameters(), network(name, channels, size, 10, 0).parameters(), strict=True
    ):
        assert torch.equal(first, second)


def test_depths_are_those_of_the_papers():
    for name, blocks in (("resnet-20-2", 9), ("resnet-8-4", 3), ("wrn-16-1", 6)):
        layers = [type(layer).__name__ for layer in network(name, 3, 32, 10, 0)]
        assert layers.count("FixupBlock") == blocks
    convnet = network("convnet-4x3", 3, 32, 10, 0)
    assert sum(isinstance(layer, torch.nn.MaxPool2d) for layer in convnet) == 2
    assert not isinstance(convnet[2], torch.nn.MaxPool2d)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet18", 11_173_962), ("vgg19", 20_040_522), ("densenet121", 6_956_298),
     # Branches of 5 x 5 are 3 x 3 in torchvision.
     ("googlenet", 6_166_250)],
)  # fmt: skip
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.slow
def test_networks_of_torchvision_are_trained_and_have_an_evidence(name, parameters, structure):
    """Their numbers of parameters are those of Lotfi et al. (2022), Table 1."""
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    model = network(name, 3, 32, 10, 0)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.1)
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    mll = objective(model, 4, 1.0, "layer", STRUCTURES[structure])
    before = [p.clone() for p in model.parameters()]
    train(mll, x, y, Recipe(1e-3), 1, 0)
    assert not any(layer.training for layer in model.modules())
    assert not all(map(torch.equal, before, model.parameters()))
    assert model(x).shape == (4, 10)
    assert math.isfinite(float(evidence_of_all(mll, x, y)().detach()))


def test_classes_follow_from_the_data(data_of_papers):
    data = images("cifar100", 16, 0)
    assert data.num_classes == 100
    assert data.train_x.shape == (16, 3, 32, 32)
    assert len(data.test_y) == 20  # all of the data's own
    model = network("resnet-8-2", 3, 32, data.num_classes, 0)
    mll = objective(model, 16, 1.0)
    assert mll.likelihood.num_classes == 100


def test_images_are_mirrored_and_shifted():
    x = torch.randn(200, 2, 8, 8)
    made = mirrored_and_shifted(x, torch.Generator().manual_seed(0))
    again = mirrored_and_shifted(x, torch.Generator().manual_seed(0))
    assert made.shape == x.shape
    assert torch.equal(made, again)
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    mirrored = torch.nn.functional.pad(x.flip(-1), (4, 4, 4, 4))
    counts = [0, 0]
    for index in range(len(x)):
        for which, source in enumerate((padded, mirrored)):
            windows = source[index].unfold(1, 8, 1).unfold(2, 8, 1)  # (2, 9, 9, 8, 8)
            counts[which] += bool((windows == made[index, :, None, None]).all((0, 3, 4)).any())
    assert sum(counts) == len(x)
    assert 70 < counts[0] < 130


def test_learning_rates_fall_as_papers_have_them():
    steps = RECIPES["lotfi-2022-curves"]
    shares = [steps.share(done) for done in (0, 0.49, 0.5, 0.74, 0.75, 1)]
    assert shares == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    cosine = RECIPES["immer-2023"]
    assert cosine.lr * cosine.share(1) == pytest.approx(1e-6)
    assert cosine.share(0.5) == pytest.approx(0.5, abs=1e-4)
    assert RECIPES["lotfi-2022"].share(0.9) == 1
    cell = {"recipe": "immer-2021", "architecture": "resnet-20-16"}
    assert recipe_of(cell).optimizer == "sgd"
    assert recipe_of(cell | {"architecture": "cnn-4x2"}).optimizer == "adam"
    assert recipe_of(cell | {"lr": 0.3, "batch_size": 7})[:3] == (0.3, "sgd", 7)


def test_hyperparameters_of_the_largest_evidence_are_kept():
    data = images("digits", 100, 0)
    model = network("mlp-8x1", 1, 8, 10, 0)
    mll = objective(model, 100, 1.0, "layer")
    recipe = Recipe(0.05, batch_size=25, every=2, steps=10, hyper_lr=0.3)
    seconds = train(mll, data.train_x, data.train_y, recipe, 6, 0)
    assert len(seconds) == 3 * 10
    learned = mll.model.prior.log_precision.detach()
    assert float(learned.abs().max()) > 0.1
    value = float(evidence_of_all(mll, data.train_x, data.train_y)().detach())
    fixed = objective(network("mlp-8x1", 1, 8, 10, 0), 100, 1.0, "layer")
    assert train(fixed, data.train_x, data.train_y, recipe._replace(every=0), 6, 0) == []
    assert value > float(evidence_of_all(fixed, data.train_x, data.train_y)().detach())


def test_settings_are_those_of_the_papers(monkeypatch):
    monkeypatch.setattr(cells, "images", lambda *_: images("digits", 10, 0))
    monkeypatch.setattr(cells, "network", lambda *_: None)
    cifar10, cifar100 = make_grid("lotfi-2022-cifar10"), make_grid("lotfi-2022-cifar100")
    assert len({cell["architecture"] for cell in cifar10}) == 25
    assert (len(cifar10), len(cifar100)) == (25 * 4, 25 * 6)
    curves = make_grid("lotfi-2022-curves", architectures=("resnet18",))
    sizes = {c["num_train"]: (c["epochs"], c["batch_size"]) for c in curves}
    assert sizes[250] == (900, 32)
    assert sizes[45_000] == (300, 128)
    assert curves[-1]["precision"] == pytest.approx(5e-4 * 45_000)
    shrunk = make_grid("lotfi-2022-curves", num_train=600, epochs=3, precisions=(2.0,))
    assert {(c["num_train"], c["epochs"], c["precision"]) for c in shrunk} == {
        (250, 3, 2.0), (500, 3, 2.0),
    }  # fmt: skip
    fewest = make_grid("lotfi-2022-curves", num_train=16, architectures=("lenet",))
    assert [(c["num_train"], c["epochs"]) for c in fewest] == [(16, 900)]
    baseline, *others = make_grid("immer-2023-precision", seeds=1)
    assert (baseline["estimate"], baseline["precision"]) == ("none", 25.0)
    assert {cell["precision"] for cell in others} == {1.0}
    assert {c["recipe"] for c in make_grid("immer-2021-augmentation")} == {
        "immer-2021", "immer-2021-crops",
    }  # fmt: skip


@pytest.mark.usefixtures("data_of_papers", "few_steps")
@pytest.mark.parametrize("study", [pytest.param(p, marks=pytest.mark.slow) for p in PAPERS])
def test_a_study_of_a_paper_end_to_end(study, tmp_path):
    results = tmp_path / "a.sqlite"
    architecture = "lenet" if study == "lotfi-2022-curves" else "resnet-8-2"
    # Images of 28 x 28 have the files of the tests of data.
    data = [] if "cifar" in STUDIES[study].data else ["--data", "cifar10"]
    ran = small(study, results, *data, architecture=architecture)
    assert ran.exit_code == 0, ran.output
    told = command("report", "--results", results)
    assert told.exit_code == 0, told.output
    assert "0 failed" in told.output
    assert architecture in told.output
    assert "nan" not in told.output


@pytest.mark.usefixtures("data_of_papers", "few_steps")
def test_an_interrupted_study_goes_on(tmp_path, monkeypatch):
    results, calls = tmp_path / "a.sqlite", []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cells, "train", interrupted)
        assert small("immer-2021-augmentation", results).exit_code != 0
    [first] = load_results(results, provenance=True).to_dict("records")
    assert small("immer-2021-augmentation", results).exit_code == 0
    rows = load_results(results, provenance=True)
    assert sorted(rows["recipe"]) == ["immer-2021", "immer-2021-crops"]
    kept = rows[rows["recipe"] == first["recipe"]]
    assert kept["_finished_at"].item() == first["_finished_at"]


@pytest.mark.usefixtures("data_of_papers", "few_steps")
def test_invariances_are_learned_from_some_points():
    (cell, _) = make_grid(
        "immer-2023-invariance", architectures=("resnet-8-2",), num_train=16, epochs=2, seeds=1
    )
    scores = run_cell(cell | {"samples": 2})
    ranges = [value for name, value in scores.items() if name.startswith("range_")]
    assert len(ranges) == 6
    assert all(0 < value < 1 and value != 0.1 for value in ranges)


def test_what_is_missing_is_told_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    [file] = data_files()["cifar10"]
    monkeypatch.setitem(data_files(), "cifar10", (dataclasses.replace(file, address=""),))
    ran = small("lotfi-2022-cifar10", tmp_path / "a.sqlite")
    assert ran.exit_code == 2
    assert "cifar-10-binary.tar.gz" in ran.output
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(ArgumentError, match=r"resnet18.*pip install --no-deps torchvision=="):
        network("resnet18", 3, 32, 10, 0)
    for name in ("resnet19", "resnet-21-16", "resnet-2-16", "wrn-20-4", "wrn-16x4", "lenet-5"):
        with pytest.raises(ArgumentError, match="architecture"):
            network(name, 3, 32, 10, 0)
    with pytest.raises(ArgumentError, match="8 x 8 pixels"):
        network("lenet", 1, 8, 10, 0)
    with pytest.raises(ArgumentError, match="num_train"):
        make_grid("lotfi-2022-cifar10", data="digits")
