import os
import shlex

import matplotlib
import pandas
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.results import load_results
from benchmarks.uci.commands import app
from benchmarks.uci.provenance import commands_of

SWEEP = (
    "run --datasets diabetes --n 40 --seeds 2 --objectives lml,clml --kernel rbf,deep-bottleneck "
    "--steps 5"
)


def invoke(line, *more):
    return CliRunner().invoke(app, [*shlex.split(line), *map(str, more)])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("uci") / "results.sqlite"
    answer = invoke(SWEEP, "--quiet", "--results", path)
    assert (answer.exit_code, answer.output) == (0, "")
    return path


def test_the_sweep_is_complete_and_resumes_with_nothing_to_do(path):
    cells = load_results(path)
    assert len(cells) == 8
    assert set(cells["num_steps"][cells["kernel"] == "deep-bottleneck"]) == {5.0}
    answer = invoke(SWEEP, "--results", path)
    assert answer.exit_code == 0
    assert answer.stdout.startswith("8 of 8 cells done: ")
    assert load_results(path, provenance=True)["_attempts"].tolist() == [1] * 8


def test_report_shows_the_paired_differences(path):
    cells = load_results(path).set_index(["kernel", "objective", "seed"]).sort_index()
    text = invoke("report", "--results", path).stdout
    lines = [line.rstrip() for line in text.splitlines()]
    for metric in ("rmse", "nll", "coverage_95"):
        value = cells[metric]
        for kernel in ("rbf", "deep-bottleneck"):
            a, b = (value[kernel, "clml", s] - value[kernel, "lml", s] for s in (0, 1))
            # Two values: their standard error is half their distance.
            expected = f"{(a + b) / 2:.3f} ± {abs(a - b) / 2:.3f} [2]"
            assert any(kernel in line and line.endswith(f" {expected}") for line in lines)
        deep, plain = value["deep-bottleneck", "clml"], value["rbf", "lml"]
        a, b = (deep[s] - plain[s] for s in (0, 1))
        expected = f"{(a + b) / 2:.3f} ± {abs(a - b) / 2:.3f} [2]"
        assert any("deep-bottleneck" in line and expected in line for line in lines)


def test_report_names_what_made_it(path):
    header = [
        line for line in invoke("report", "--results", path).stdout.splitlines() if "# " in line
    ]
    command = header[0].removeprefix("# python -m benchmarks.uci ")
    assert invoke(command).stdout.startswith("8 of 8 cells done: ")  # it asks for the same cells
    assert "8 cells done" in header[1]
    assert "0 failed" in header[1]
    assert f"torch {torch.__version__}" in header[2]
    assert "device cpu" in header[3]


def test_report_of_some_kernels(path):
    answer = invoke("report --kernel rbf", "--results", path)
    assert answer.exit_code == 0
    assert "deep-bottleneck" not in answer.stdout
    unknown = invoke("report --kernel rbv", "--results", path)
    assert unknown.exit_code == 2
    assert "Did you mean 'rbf'?" in unknown.stderr


def test_csv_reads_back_exactly(path, tmp_path):
    assert invoke("report", "--results", path, "--csv", tmp_path / "long.csv").exit_code == 0
    long = pandas.read_csv(tmp_path / "long.csv", dtype={"value": str})
    cells = load_results(path)
    metrics = sorted(set(cells.columns) - set(long.columns))
    assert {"rmse", "nll", "coverage_95", "train_objective", "noise", "num_steps"} <= set(metrics)
    assert len(long) == len(metrics) * len(cells)
    keys = ["kernel", "objective", "seed"]
    for metric in metrics:
        read = long[long["metric"] == metric].set_index(keys)["value"].sort_index()
        assert read.map(float).tolist() == cells.set_index(keys)[metric].sort_index().tolist()


def test_figure_is_an_image(path, tmp_path):
    backend = matplotlib.rcParams._get_backend_or_none()
    file = tmp_path / "figure.png"
    assert invoke("report", "--results", path, "--figure", file).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert file.stat().st_size > 20_000
    assert matplotlib.rcParams._get_backend_or_none() == backend


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("run --datasets diabtes", "Did you mean 'diabetes'?"),
        ("run --datasets diabetes --kernel dep", "Did you mean 'deep'?"),
        ("run --datasets diabetes --objectives cml", "Did you mean 'clml' or 'lml'?"),
        ("run --datasets diabetes --mean linear", "expected one of constant, mlp, zero"),
        ("run --datasets diabetes --n 100,ten", "expected whole numbers separated by commas"),
        ("run --datasets diabetes --n 400", "n: got 400 for diabetes, expected 2 to 398"),
        ("run --datasets diabetes --jobs 2 --backend threading", "backend: got 'threading'"),
        ("run --datasets ,", "datasets: got ','"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(line, text, tmp_path):
    answer = invoke(line, "--quiet", "--results", tmp_path / "results.sqlite")
    assert answer.exit_code == 2
    assert text in answer.stderr
    assert answer.stderr.startswith("Error: ")
    assert len(answer.stderr.splitlines()) == 1
    assert not (tmp_path / "results.sqlite").exists()


@pytest.mark.parametrize("name", ["missing/results.sqlite", "", "notes.txt"])
@pytest.mark.parametrize("line", [SWEEP, "report"])
def test_files_that_are_no_results(line, name, tmp_path):
    (tmp_path / "notes.txt").write_text("Not a results file. " * 100)
    answer = invoke(line, "--results", tmp_path / name)
    assert answer.exit_code == 2
    assert answer.stderr.startswith("Error: ")
    assert "Traceback" not in answer.output


@pytest.mark.parametrize("option", ["--csv", "--figure"])
def test_outputs_that_cannot_be_written(path, option, tmp_path):
    file = tmp_path / "missing" / "file.png"
    answer = invoke("report", "--results", path, option, file)
    assert answer.exit_code == 2
    assert f"Error: {file}: cannot be" in answer.stderr


def test_a_folder_of_data_is_used_and_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("GPCLML_DATA", "elsewhere")
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci" / "boston.txt").write_text("1 2\n")
    answer = invoke(
        "run --datasets boston --quiet", "--folder", tmp_path, "--results", tmp_path / "a.sqlite"
    )
    assert answer.exit_code == 2
    assert str(tmp_path / "uci" / "boston.txt") in answer.stderr
    assert os.environ["GPCLML_DATA"] == "elsewhere"


def test_commands_of_several_sweeps():
    def cell(seed, kernel, objective, steps, held_out):
        lr = None if steps is None else 0.01
        return {
            "dataset": "yacht", "n": 50, "seed": seed, "kernel": kernel, "objective": objective,
            "mean": "constant", "steps": steps, "lr": lr, "held_out": held_out, "device": "cpu",
        }  # fmt: skip

    cells = pandas.DataFrame(
        [
            cell(0, "rbf", "lml", None, None),
            cell(0, "deep", "clml", 300, 0.1),
            cell(1, "deep", "clml", 500, 0.1),
        ]
    )
    first, second = commands_of(cells, "a b.sqlite")
    assert "--objectives clml,lml --kernel deep,rbf --seeds 1" in first
    assert "--steps 300 --lr 0.01 --held-out 0.1" in first
    assert "--objectives clml --kernel deep --seeds 2" in second
    assert "--steps 500" in second
    assert second.endswith("--results 'a b.sqlite'")
