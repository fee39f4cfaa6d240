"""Where the tasks of the few-shot benchmark come from: real files, and small made ones."""

import gzip

import numpy
import pytest
import torch
from image_files import (
    birds,
    characters,
    emnist_archive,
    head_pose_folder,
    idx,
    mini_imagenet,
    register,
    register_arrays,
)

from benchmarks.dkt.cells import run_cell
from benchmarks.dkt.studies import study_named
from benchmarks.dkt.study import make_grid

CHARACTERS = ["omniglot-part", "omniglot-part-to-cyrillic", "omniglot-part-to-mnist", "rotation"]


def check_study_of_characters(name):
    study = study_named(name)
    sources = study.sources(study.shots[-1], 0)
    for tasks in (sources.train, sources.validation, sources.test):
        assert tasks is not None
        episodes = tasks.draw([0])
        assert episodes.query_x.shape[2:] == (1, 28, 28)
    if study.classes:
        assert sources.test.draw([0]).num_support == 25


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("name", CHARACTERS)
def test_studies_of_characters(name, data_folder, monkeypatch):
    monkeypatch.setenv("GPCLML_DATA", str(data_folder))
    check_study_of_characters(name)


@pytest.fixture
def made_files(tmp_path, monkeypatch):
    """Few characters in place of the original ones, under the data folder."""
    for folder in ("omniglot", "emnist", "mnist"):
        (tmp_path / folder).mkdir()
    omniglot = tmp_path / "omniglot"
    background = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Greek", "Korean", "Latin")
    characters(omniglot / "images_background.zip", background)
    characters(omniglot / "images_evaluation.zip", ("Tibetan", "Kannada", "Atlantean"))
    characters(omniglot / "images_background_small1.zip", ("Greek", "Latin"), count=5)
    characters(omniglot / "images_background_small2.zip", ("Sanskrit", "Tagalog"), count=3)
    labels = numpy.repeat(numpy.arange(62), 20)
    images = numpy.zeros((len(labels), 28, 28), numpy.uint8)
    emnist_archive(tmp_path / "emnist" / "gzip.zip", images=images, labels=labels)
    few = labels < 10
    for file, body in (("images-idx3", images[few]), ("labels-idx1", labels[few])):
        (tmp_path / "mnist" / f"t10k-{file}-ubyte.gz").write_bytes(gzip.compress(idx(body)))
    letters = {"images": images[few], "labels": labels[few]}
    register_arrays(monkeypatch, tmp_path, "cyrillic", **letters)
    names = "emnist mnist-test omniglot omniglot-small"
    register(monkeypatch, tmp_path, [*names.split(), "omniglot-background", "omniglot-evaluation"])
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))


@pytest.mark.usefixtures("made_files")
@pytest.mark.parametrize("name", CHARACTERS)
def test_studies_of_made_characters(name):
    check_study_of_characters(name)


@pytest.mark.usefixtures("made_files")
@pytest.mark.parametrize(
    ("name", "classes"), [("omniglot", [24, 8, 6]), ("omniglot-to-emnist", [80, 31, 31])]
)
def test_studies_of_the_original_archives(name, classes):
    study = study_named(name)
    sources = study.sources(1, 0)
    counts = [tasks.num_classes for tasks in (sources.train, sources.validation, sources.test)]
    assert counts == classes  # those to learn from in four turns
    episodes = sources.test.draw([0, 1])
    assert episodes.query_x.shape == (2, 75, 1, 28, 28)


@pytest.mark.parametrize(
    ("name", "classes"),
    [("cub", [10, 5, 5]), ("mini-imagenet", [6, 5, 5]), ("mini-imagenet-to-cub", [16, 5, 5])],
)
def test_studies_of_photographs(name, classes, tmp_path, monkeypatch):
    for folder in ("cub", "mini-imagenet"):
        (tmp_path / folder).mkdir()
    birds(tmp_path / "cub" / "CUB_200_2011.tgz", species=20, each=16)
    mini_imagenet(tmp_path / "mini-imagenet" / "mini-imagenet.tar", each=16)
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    sources = study_named(name).sources(1, 0)
    counts = [tasks.num_classes for tasks in (sources.train, sources.validation, sources.test)]
    assert counts == classes
    pictures = sources.test.draw([0]).query_x[0, :2]
    study = study_named(name)
    features = study.network(generator=torch.Generator().manual_seed(0))(pictures)
    assert features.shape == (2, study.num_features)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qmul", "qmul-out-of-range"])
def test_head_poses_end_to_end(name, tmp_path, monkeypatch):
    head_pose_folder(tmp_path, ("AnnA", "BobB", "AndreeaV", "TasosH"), size=29)
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    cells = make_grid([name], kernels=["rbf", "pixels"], seeds=1, steps=2, test_tasks=3)
    scores = [run_cell(cell) for cell in cells]
    assert len(scores) == 3
    assert all(score["mse"] < 1 and numpy.isfinite(score["nll"]) for score in scores)
    sources = study_named(name).sources(5, 0)
    assert len(sources.train.images) == len(sources.test.images) == 2
