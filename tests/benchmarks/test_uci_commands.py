import os
import shlex
from itertools import cycle

import matplotlib
import pytest
import torch
from table_files import register, smooth_rows, write_table
from typer.testing import CliRunner

from benchmarks.runner import load_results
from benchmarks.uci.__main__ import app
from benchmarks.uci.cells import run_cell
from benchmarks.uci.study import STUDY
from gpclml.errors import DataError

# Of a fit to 40 rows whose noise ends at its bound.
pytestmark = pytest.mark.filterwarnings("ignore::gpclml.fit.FitWarning")

SWEEP = (
    "run --datasets diabetes --n 40 --seeds 2 --objectives lml,clml --kernel rbf,deep-bottleneck "
    "--steps 5"
)


def invoke(line, *more):
    return CliRunner().invoke(STUDY.make_app(), [*shlex.split(line), *map(str, more)])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("uci") / "results.sqlite"
    answer = invoke(SWEEP, "--quiet", "--results", path)
    assert (answer.exit_code, answer.output) == (0, "")
    return path


@pytest.mark.slow
def test_the_sweep_is_complete_and_resumes_with_nothing_to_do(path):
    cells = load_results(path)
    assert len(cells) == 8
    assert set(cells["num_steps"][cells["kernel"] == "deep-bottleneck"]) == {5.0}
    answer = invoke(SWEEP, "--results", path)
    assert answer.exit_code == 0
    assert answer.stdout.startswith("8 of 8 cells done: ")


@pytest.mark.slow
def test_report_names_what_made_it(path):
    header = invoke("report", "--results", path).stdout.partition("```\n")[2].splitlines()
    command = header[0].removeprefix("python -m benchmarks.uci ")
    assert invoke(command).stdout.startswith("8 of 8 cells done: ")  # it asks for the same cells
    assert "8 cells done" in header[1]
    assert "0 failed" in header[1]
    assert f"torch {torch.__version__}" in header[2]
    assert "device cpu" in header[3]


@pytest.mark.slow
def test_figure_is_an_image(path, tmp_path):
    backend = matplotlib.rcParams._get_backend_or_none()
    file = tmp_path / "figure.png"
    assert invoke("report", "--results", path, "--figure", file).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert file.stat().st_size > 20_000
    assert matplotlib.rcParams._get_backend_or_none() == backend


@pytest.mark.slow
def test_differences_of_rows_are_printed_and_drawn(path, tmp_path):
    rows, figure = tmp_path / "rows.csv", tmp_path / "differences.png"
    assert invoke("report", "--results", path, "--csv", rows).exit_code == 0
    line = ["differences", str(rows), "--kernel", "deep-bottleneck", "--figure", str(figure)]
    answer = CliRunner().invoke(app, line)
    assert answer.exit_code == 0, answer.output
    done = load_results(path).query("kernel == 'deep-bottleneck'").set_index("seed")
    clml, lml = (done[done["objective"] == name]["rmse"] for name in ("clml", "lml"))
    assert f"| 40 | deep-bottleneck | clml | {(clml - lml).mean():.3f} ±" in answer.stdout
    assert "| rbf |" not in answer.stdout
    assert figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert CliRunner().invoke(app, ["differences", str(figure)]).exit_code == 2


@pytest.fixture
def _boston(tmp_path, monkeypatch):
    """A made table of as many rows."""
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    register(monkeypatch, [write_table(tmp_path, "boston", smooth_rows(506, 13))])


HOUSES = "rooms,street,built,price\n" + "".join(
    f"{k % 7},{street},{'' if k == 3 else f'{1950 + k}-05-31'},{'' if k == 5 else k}\n"
    for k, street in zip(range(60), cycle(("Elm", "Oak")), strict=False)
)


@pytest.mark.slow
def test_tables_of_the_users_beside_registered_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "houses.csv").write_text(HOUSES)
    line = "run --datasets diabetes --csv houses.csv:price,houses.csv:rooms --n 20 --seeds 1 "
    line += "--kernel rbf --objectives lml,clml --results a.sqlite"
    answer = invoke(line)
    assert answer.exit_code == 0, answer.stderr
    assert "Left out: 1 row without price." in answer.stderr
    cells = load_results("a.sqlite")
    names = {"diabetes", "houses.csv:price", "houses.csv:rooms"}
    assert set(cells["dataset"]) == names
    assert cells["rmse"].notna().all()
    assert set(cells["file"].dropna()) == {str(tmp_path / "houses.csv")}
    # Another version of the file is another data set, and both stay in the report.
    (tmp_path / "houses.csv").write_text(HOUSES + "3,Elm,2020-05-31,70\n")
    assert invoke(line, "--quiet").exit_code == 0
    report = invoke("report --results a.sqlite").stdout
    assert report.count(" houses.csv:price sha256=") >= 2
    assert len(load_results("a.sqlite")) == 10
    cell = load_results("a.sqlite").query("dataset == 'houses.csv:price'").iloc[0].to_dict()
    with pytest.raises(DataError, match=r"houses\.csv: the file has changed"):
        run_cell(cell | {"sha256": "0"})


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("houses.csv", "csv: got 'houses.csv', expected file:target"),
        ("houses.csv:prices", "target: got 'prices'"),
        ("house.csv:price", "There is no file"),
        ("houses.csv:street", "target 'street': got texts, expected numbers"),
        ("mixed.csv:price", "column 'rooms': got 1 of 60 values such as 'many' (row 3)"),
    ],
)
def test_tables_of_the_users_that_cannot_be_used(table, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "houses.csv").write_text(HOUSES)
    (tmp_path / "mixed.csv").write_text(HOUSES.replace("\n2,", "\nmany,", 1))
    answer = invoke("run --csv", table, "--quiet", "--results", "a.sqlite")
    assert (answer.exit_code, len(answer.stderr.splitlines())) == (2, 1)
    assert text in answer.stderr


@pytest.mark.usefixtures("_boston")
def test_a_named_grid(tmp_path):
    line = "run --grid paper --datasets boston --n 20 --seeds 1 --objectives lml --steps 3"
    assert invoke(line, "--results", tmp_path / "a.sqlite").exit_code == 0
    [cell] = load_results(tmp_path / "a.sqlite").to_dict("records")
    assert (cell["dataset"], cell["n"], cell["kernel"]) == ("boston", 20, "deep-bottleneck")


@pytest.mark.usefixtures("_boston")
@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("run", "datasets: got none"),
        ("run --grid papre", "grid: got 'papre'"),
        ("run --grid paper --datasets boston --n 700", "n: got 700 for boston"),
        ("run --datasets diabtes", "Did you mean 'diabetes'"),
        ("run --datasets diabetes --kernel dep", "Did you mean 'deep'?"),
        ("run --datasets diabetes --objectives cml", "objectives: got 'cml'"),
        ("run --datasets diabetes --mean linear", "expected one of constant, mlp, zero"),
        ("run --datasets diabetes --n 100,ten", "expected whole numbers separated by commas"),
        ("run --datasets diabetes --n 400", "n: got 400 for diabetes, expected 2 to 398"),
        ("run --datasets diabetes --held-out 0.1,1", "held_out: got 1.0"),
        ("run --datasets diabetes --held-out 0", "held_out: got 0.0"),
        ("run --datasets diabetes --held-out 0.001", "held_out: got 0.001, which holds out 0"),
        ("run --datasets diabetes --held-out 0.999", "held_out: got 0.999, which holds out 100"),
        ("run --datasets diabetes --n 1", "n: got 1 for diabetes"),
        ("run --datasets diabetes --dtype float16", "dtype: got 'float16'"),
        ("run --datasets diabetes --steps 5,0", "steps: got 0"),
        ("run --datasets diabetes --lr 0", "lr: got 0.0"),
        ("run --datasets diabetes --held-out some", "expected numbers separated by commas"),
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
