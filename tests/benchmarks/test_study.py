"""What a study has for free: a command that is kept, options as lists, failures in its report."""

from __future__ import annotations

import gzip
from typing import Annotated

import pytest
from typer import Option
from typer.testing import CliRunner

from benchmarks._options import check_positive, names, options_of, whole_numbers
from benchmarks._tables import section
from benchmarks.runner import load_commands, load_results, run_grid
from benchmarks.study import Study, Sweep
from gpclml.errors import ArgumentError, DataError


def cell_of(cell):
    if cell["n"] == 3:
        raise ValueError("no three\nwhatever")
    return {"double": 2.0 * cell["n"]}


def other_cell(cell):
    return {"double": -1.0}


def grid(
    kinds: Annotated[tuple[str, ...], Option(help="Kinds."), names] = ("a", "b"),
    n: Annotated[tuple[int, ...] | None, Option(help="Numbers."), whole_numbers] = None,
    device: Annotated[str, Option(help="Device.")] = "cpu",
    quiet: bool = False,
):
    assert quiet
    return [{"kind": k, "n": i, "device": device} for k in kinds for i in n or (1, 2)]


def select_kind(cells, kind: Annotated[str | None, Option(help="Only these.")] = None):
    return cells if kind is None or cells.empty else cells[cells["kind"] == kind]


def draw(cells, path):
    with open(path, "w") as file:
        file.write(f"red {len(cells)}")


def tables(cells):
    yield section("Sum", str(cells["sum"].sum()))


def study(**changes):
    usual = {
        "name": "small", "about": "Small.", "title": "Small study", "running": "Doubles.",
        "reporting": "sums.", "grid": grid, "cell": cell_of, "tables": tables,
        "needed": ("kind", "double"), "label": "{kind} n={n}", "choose": select_kind,
        "prepare": lambda done: done.assign(sum=done["double"]), "figure": draw, "caption": "Sums",
    }  # fmt: skip
    return Study(**(usual | changes))


def invoke(trial, line, *more):
    return CliRunner().invoke(trial.make_app(), [*line.split(), *map(str, more)])


def test_run_and_report(tmp_path):
    path, figure, rows = tmp_path / "a b.sqlite", tmp_path / "a.png", tmp_path / "a.csv"
    ran = invoke(study(), "run --quiet --n 2,3 --jobs 1", "--results", path)
    assert (ran.exit_code, ran.stderr) == (1, "2 cells failed: the report lists them.\n")
    told = invoke(
        study(), "report --kind a", "--results", path, "--figure", figure,
        "--csv", rows,
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    command = f"python -m benchmarks.small run --n 2,3 --results '{path}'"  # without --jobs
    assert told.stdout.startswith(f"# Small study\n\n```\n{command}\n1 cells done")
    assert "\n![Sums](a.png)\n\n## Sum\n\n4.0\n" in told.stdout
    assert told.stdout.endswith("1 failed cells:\n\n- a n=3: ValueError: no three\n")
    assert figure.read_text() == "red 1"
    assert rows.read_text().splitlines()[-2:] == ["device,kind,n,double", "cpu,a,2,4"]


def test_cells_of_an_earlier_report_are_added(tmp_path):
    """Cells of the results file count, not the same ones of the earlier report."""
    trial, old, new = study(apart=("kind", "n")), tmp_path / "old.sqlite", tmp_path / "new.sqlite"
    rows = tmp_path / "old.csv.gz"
    assert invoke(trial, "run --quiet --n 1", "--results", old).exit_code == 0
    assert invoke(trial, "report", "--results", old, "--csv", rows).exit_code == 0
    assert invoke(trial, "run --quiet --n 5 --kinds b,c", "--results", new).exit_code == 0

    def told(results, rows, kind=""):
        return invoke(trial, f"report {kind}", "--results", results, "--rows", rows).stdout

    assert "\n2 cells done in" in told(new, rows)
    assert "with 2 cells of an earlier run:\npython -m benchmarks.small run" in told(new, rows)
    assert "## Sum\n\n24.0" in told(new, rows)  # 10 of each new one, 2 of each earlier one
    assert "with 1 cells" in told(new, rows, "--kind b")
    assert invoke(trial, "run --quiet --n 1 --kinds a", "--results", new).exit_code == 0
    assert "## Sum\n\n24.0" in told(new, rows)  # a n=1 is in both
    other = tmp_path / "other.csv"
    other.write_text(gzip.decompress(rows.read_bytes()).decode().replace("; code ", "; code 0"))
    assert "with 0 cells" in told(new, other)  # of another version, and of kinds that ran anew
    text = tmp_path / "text.csv"
    text.write_text("a,b\n1,2\n")
    refused = invoke(trial, "report", "--results", new, "--rows", text)
    assert (refused.exit_code, refused.stderr) == (
        2,
        f"Error: {text}: rows of another benchmark.\n",
    )
    missing = invoke(trial, "report", "--results", new, "--rows", tmp_path / "missing.csv")
    assert missing.exit_code == 2
    assert "No such option" in invoke(study(), "report", "--results", new, "--rows", rows).stderr


def test_commands_are_kept_in_the_order_of_runs(tmp_path):
    path = tmp_path / "a.sqlite"
    for line in ("run --quiet --kinds b", "run --quiet", "run --kinds b --quiet --jobs 1"):
        assert invoke(study(), line, "--results", path).exit_code == 0
    first, second = load_commands(path)
    assert first == f"python -m benchmarks.small run --kinds b --results {path}"
    assert second == f"python -m benchmarks.small run --results {path}"
    assert len(load_results(path)) == 4


def test_several_functions_of_a_study(tmp_path):
    def sweeps(cells):
        yield Sweep([cell for cell in cells if cell["kind"] == "a"], cell_of)
        yield Sweep([cell for cell in cells if cell["kind"] == "b"], other_cell)

    assert invoke(
        study(sweeps=sweeps), "run --quiet --n 1", "--results", tmp_path / "a.sqlite"
    ).exit_code == 0  # fmt: skip
    assert load_results(tmp_path / "a.sqlite")["double"].tolist() == [2.0, -1.0]


def test_a_file_of_another_study(tmp_path):
    run_grid([{"n": 1}], cell_of, tmp_path / "a.sqlite", progress=False)
    with pytest.raises(DataError, match="results of another benchmark"):
        study(choose=None).sections(tmp_path / "a.sqlite")


def test_lists_are_read_and_shown():
    assert set(options_of(grid)) == {"kinds", "n", "device"}
    help_of_run = " ".join(invoke(study(), "run --help").stdout.split())
    assert "[default: a,b]" in help_of_run
    assert "Doubles." in help_of_run
    refused = invoke(study(), "run --n one --results a.sqlite --quiet")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("Error: n: got 'one', expected whole numbers")


def test_numbers_that_are_none_to_count():
    check_positive(steps=1, lr=0.1)
    for name, value in (("steps", 0), ("lr", 0.0), ("lr", float("inf")), ("lr", float("nan"))):
        with pytest.raises(ArgumentError, match=name):
            check_positive(**{name: value})
