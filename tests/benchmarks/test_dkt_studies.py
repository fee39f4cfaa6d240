"""Where the tasks of the few-shot benchmark come from: real files, and small made ones."""

from __future__ import annotations

import hashlib

import numpy
import pytest
from image_files import archive, drawing, emnist_archive, head_pose_folder

from benchmarks.dkt.cells import run_cell
from benchmarks.dkt.grid import make_grid
from benchmarks.dkt.studies import study_named
from gpclml.datasets import _load_images
from gpclml.datasets.image_sources import ImageFile


@pytest.mark.data
@pytest.mark.parametrize(
    "name", ["omniglot-part", "omniglot-part-to-cyrillic", "omniglot-part-to-mnist", "rotation"]
)
def test_studies_of_characters(name, data_folder, monkeypatch):
    monkeypatch.setenv("GPCLML_DATA", str(data_folder))
    study = study_named(name)
    sources = study.sources(study.shots[-1], 0)
    for tasks in (sources.train, sources.validation, sources.test):
        assert tasks is not None
        episodes = tasks.draw([0])
        assert episodes.query_x.shape[2:] == (1, 28, 28)
    if study.classes:
        assert sources.test.draw([0]).num_support == 25


def characters(path, alphabets):
    return archive(
        path,
        {
            f"{path.stem}/{alphabet}/character{c:02d}/{c:04d}_{k:02d}.png": drawing(5 * c + k, 28)
            for alphabet in alphabets for c in (1, 2) for k in range(1, 21)
        },
    )  # fmt: skip


@pytest.fixture
def made_files(tmp_path, monkeypatch):
    """Archives of few characters in place of the original ones, under the data folder."""
    for folder in ("omniglot", "emnist"):
        (tmp_path / folder).mkdir()
    evaluation = ("Tibetan", "Kannada", "Atlantean")
    background = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Greek", "Korean", "Latin")
    labels = numpy.repeat(numpy.arange(62), 20)
    images = numpy.zeros((len(labels), 28, 28))
    paths = {
        "omniglot-background": characters(tmp_path / "omniglot" / "b.zip", background),
        "omniglot-evaluation": characters(tmp_path / "omniglot" / "e.zip", evaluation),
        "emnist": emnist_archive(tmp_path / "emnist" / "gzip.zip", images=images, labels=labels),
    }  # fmt: skip
    registry = {
        name: (
            ImageFile(
                name, path.parent.name, path.name, "", "made",
                f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}", path.stat().st_size, "",
            ),
        )
        for name, path in paths.items()
    }  # fmt: skip
    registry["omniglot"] = registry["omniglot-background"] + registry["omniglot-evaluation"]
    monkeypatch.setattr(_load_images, "image_files", lambda: registry)
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))


@pytest.mark.usefixtures("made_files")
@pytest.mark.parametrize(
    ("name", "classes"), [("omniglot", [24, 8, 6]), ("omniglot-to-emnist", [80, 31, 31])]
)
def test_studies_of_the_original_archives(name, classes):
    study = study_named(name)
    sources = study.sources(1, 0)
    found = [tasks.num_classes for tasks in (sources.train, sources.validation, sources.test)]
    assert found == classes  # those to learn from in four turns
    episodes = sources.test.draw([0, 1])
    assert episodes.query_x.shape == (2, 75, 1, 28, 28)


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
