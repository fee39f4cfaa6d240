"""The few-shot benchmark: digits end to end, its baselines, and what it refuses."""

from __future__ import annotations

import dataclasses

import pandas
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from benchmarks.dkt import studies
from benchmarks.dkt.__main__ import app
from benchmarks.dkt.cells import nearest_neighbour_accuracy, plain_gp_scores
from benchmarks.dkt.studies import STUDIES, study_named
from benchmarks.dkt.study import make_grid
from benchmarks.runner import load_results
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.meta import Episodes

LINE = "run --study digits --shots 1 --kernels cosine,pixels --seeds 2 --steps 3 --test-tasks 5"


def invoke(line, path):
    return CliRunner().invoke(app, [*line.split(), "--results", str(path)])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("dkt") / "a.sqlite"
    answer = invoke(LINE, path)
    assert answer.exit_code == 0, answer.output
    return path


def test_digits_end_to_end(path):
    done = load_results(path)
    assert len(done) == 2 * 3
    trained = done[done["kernel"] == "cosine"]
    assert set(trained["objective"]) == {"lml", "clml"}
    assert trained["accuracy"].between(0, 1).all()
    assert trained["best_step"].tolist() == [3] * 4
    assert done[done["kernel"] == "pixels"]["accuracy"].min() > 1 / 3  # chance
    again = invoke(LINE, path)
    assert "6 of 6 cells done" in again.output
    assert "in this run" not in again.output


def test_the_report(path):
    text = invoke("report", path).stdout
    assert "digits | 1 | cosine | clml |" in text
    assert "digits | 1 | pixels | - |" in text
    assert "## CLML less LML" in text
    assert STUDIES["digits"].about in text


def test_numbers_of_ways_are_told_apart(tmp_path):
    line = "run --study digits --shots 1 --kernels pixels --seeds 1 --test-tasks 5"
    for ways in (2, 4):
        assert invoke(f"{line} --ways {ways}", tmp_path / "a.sqlite").exit_code == 0
    text = invoke("report", tmp_path / "a.sqlite").stdout
    assert "digits | 2 | 1 | pixels | - |" in text
    assert "digits | 4 | 1 | pixels | - |" in text


def test_a_table_of_all_cells(path, tmp_path):
    assert invoke(f"report --csv {tmp_path / 'a.csv.gz'}", path).exit_code == 0
    table = pandas.read_csv(tmp_path / "a.csv.gz", comment="#")
    assert len(table) == 2 * 3
    assert {"study", "seed", "accuracy", "interval", "nll"} <= set(table)


def test_what_the_conditional_objective_changes(tmp_path):
    head = "# made by a command\nstudy,shots,kernel,objective,seed,accuracy\n"
    (tmp_path / "a.csv").write_text(
        head + "".join(f"digits,1,rbf,lml,{seed},0.5\n" for seed in range(3))
        + "digits,1,pixels,,0,0.1\n"
    )  # fmt: skip
    gains = (0.51, 0.52, 0.53, 0.9)  # of a seed that the LML lacks too
    (tmp_path / "b.csv").write_text(
        head + "".join(f"digits,1,rbf,clml,{seed},{one}\n" for seed, one in enumerate(gains))
    )
    rows = [line for name in "ab" for line in (tmp_path / f"{name}.csv").read_text().split("\n")]
    of_two = [f"2,{line}" for line in rows if line.startswith("digits")]
    (tmp_path / "w.csv").write_text("\n".join([f"ways,{rows[1]}", *of_two]))
    line = f"differences {tmp_path / 'a.csv'} {tmp_path / 'b.csv'} {tmp_path / 'w.csv'}"
    text = CliRunner().invoke(app, line.split()).stdout
    half = 4.303 * 1 / 3**0.5  # Student's t of two degrees of freedom
    assert f"| digits | - | 1 | rbf | clml | +2.0 ± {half:.1f} |" in text
    assert f"| digits | 2 | 1 | rbf | clml | +2.0 ± {half:.1f} |" in text
    assert "pixels" not in text
    answer = CliRunner().invoke(app, f"differences {tmp_path / 'c.csv'}".split())
    assert answer.exit_code == 2
    assert "no rows of cells" in answer.stderr


def test_what_another_kernel_changes(tmp_path):
    lines = ["study,shots,kernel,objective,seed,accuracy"]
    for kernel, first in (("rbf", 0.5), ("linear", 0.52)):
        lines += [f"digits,1,{kernel},lml,{seed},{first + 0.01 * seed}" for seed in range(3)]
    lines += ["digits,1,linear,clml,0,0.9", "digits,1,pixels,,0,0.3", "digits,1,maml,,0,0.4"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    text = CliRunner().invoke(app, f"differences {tmp_path / 'a.csv'} --less rbf".split()).stdout
    assert text.splitlines()[2:] == ["| digits | 1 | linear | lml | +2.0 ± 0.0 |"]
    text = CliRunner().invoke(app, f"differences {tmp_path / 'a.csv'} --less pixels".split()).stdout
    assert text.splitlines()[2:] == ["| digits | 1 | maml | - | +10.0 |"]
    answer = CliRunner().invoke(app, f"differences {tmp_path / 'a.csv'} --less rfb".split())
    assert answer.exit_code == 2
    assert "rbf" in answer.stderr


def test_studies_share_a_training(tmp_path, monkeypatch):
    same = dataclasses.replace(STUDIES["digits"], about="again")
    monkeypatch.setattr(studies, "STUDIES", {**STUDIES, "again": same})
    line = LINE.replace("--study digits", "--study digits,again")
    assert invoke(f"{line} --kernels cosine", tmp_path / "a.sqlite").exit_code == 0
    done = load_results(tmp_path / "a.sqlite")
    columns = ["accuracy", "nll", "train_seconds"]
    one, two = (
        done[done["study"] == name].sort_values(["objective", "seed"])[columns].to_numpy()
        for name in ("digits", "again")
    )
    assert len(one) == 4
    assert (one == two).all()


def test_a_page_of_examples(tmp_path):
    line = f"examples --study digits --figure {tmp_path / 'a.png'}"
    answer = CliRunner().invoke(app, line.split())
    assert answer.exit_code == 0, answer.output
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 1000
    answer = CliRunner().invoke(app, line.replace("digits", "periodic").split())
    assert answer.exit_code == 2
    assert "studies of images" in answer.output


def test_nearest_neighbours_are_of_the_task():
    support = torch.tensor([[[0.0], [10.0]], [[10.0], [0.0]]])
    query = torch.tensor([[[1.0], [9.0]], [[1.0], [2.0]]])
    labels = torch.tensor([[0, 1], [0, 1]])
    episodes = Episodes(support, labels, query, torch.tensor([[0, 1], [1, 0]]), ways=2)
    assert nearest_neighbour_accuracy(episodes).tolist() == [1.0, 0.5]


def test_a_plain_gp_learns_a_task_from_its_own_points():
    x = torch.linspace(-2, 2, 20).reshape(1, 20, 1)
    y = x[..., 0].sin()
    error, nll = plain_gp_scores(Episodes(x[:, ::2], y[:, ::2], x[:, 1::2], y[:, 1::2]))
    assert float(error) < 1e-3
    assert float(nll) < -1


@pytest.mark.parametrize("name", ["digits", "periodic", "periodic-out-of-range"])
def test_studies_without_files(name):
    study = study_named(name)
    sources = study.sources(study.shots[0], 0)
    episodes = sources.test.draw([0, 1])
    assert (episodes.ways > 0) == study.classes
    x = episodes.support_x.flatten(0, 1)
    features = study.network(generator=torch.Generator().manual_seed(0))(x)
    assert features.shape == (len(x), study.num_features)
    other = study.sources(study.shots[0], 1).train.draw([0])
    assert not torch.equal(other.support_x, sources.train.draw([0]).support_x)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("run --study digit", "study: got 'digit'"),
        ("run --study digits --kernels rbg", "kernels: got 'rbg'"),
        ("run --study digits --objectives loo", "objectives: got 'loo'"),
        ("run --study digits --shots 400", "shots + queries: got 415"),
        ("run --study digits --shots one", "shots: got 'one'"),
        ("run --study digits --lr 0", "lr: got 0.0"),
        ("run --study digits --device gpu", "device: got 'gpu'"),
    ],
)
def test_bad_input_is_told_before_anything_runs(line, text, tmp_path):
    answer = invoke(line, tmp_path / "a.sqlite")
    assert answer.exit_code == 2
    assert text in answer.stderr
    assert not (tmp_path / "a.sqlite").exists()


def test_bad_numbers():
    with pytest.raises(ArgumentError, match="seeds"):
        make_grid(["digits"], seeds=0)
    with pytest.raises(UnknownNameError, match="study"):
        make_grid(["rotations"])
