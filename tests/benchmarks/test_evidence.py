"""The studies of networks: small runs of each, end to end, and what is refused."""

import math

import pandas
import pytest
import torch
from table_files import register, smooth_rows, write_table
from typer.testing import CliRunner

from benchmarks.data.files import data_files
from benchmarks.evidence.cells import make_grid, run_cell
from benchmarks.evidence.study import STUDY, report
from benchmarks.evidence.training import (
    ARCHITECTURES,
    CLASSES,
    images,
    learning_rate,
    network,
    outputs_at,
    rotated,
    trained,
)
from gpclml.errors import ArgumentError, DataError, UnknownNameError

ONLINE_TABLES = ("boston", "concrete", "energy", "yacht")
SMALL = {"architectures": ("mlp-8x1", "cnn-4x1", "resnet-4x1"), "num_train": 120, "epochs": 2}
ONE = {"architectures": ("mlp-8x1",), "precisions": (0.5,), "seeds": 1}


def command(*arguments):
    return CliRunner().invoke(STUDY.make_app(report), [*map(str, arguments)])


@pytest.mark.slow
def test_networks_and_their_starts():
    assert len(set(ARCHITECTURES)) >= 20
    for name in ARCHITECTURES:
        for channels, size in ((1, 8), (3, 32)):
            first, again, other = (network(name, channels, size, 10, seed) for seed in (0, 0, 1))
            x = torch.randn(2, channels, size, size)
            assert first(x).shape == (2, 10)
            assert torch.equal(first(x), again(x))
            if not name.startswith("resnet"):  # whose last layer starts at zero
                assert not torch.equal(first(x), other(x))


def test_images_are_parted_and_scaled():
    data = images("digits", 1000, 0)
    assert data.train_x.shape == (1000, 1, 8, 8)
    assert len(data.test_y) == 797
    assert float(data.train_x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(data.train_x.std()) == pytest.approx(1, abs=1e-5)
    assert not torch.equal(data.train_y, images("digits", 1000, 1).train_y)


def test_turned_images():
    x = images("digits", 50, 0).train_x
    assert torch.allclose(rotated(x, 0.0, 0), x, atol=1e-5)
    turned = rotated(x, math.pi / 2, 0)
    assert torch.equal(turned, rotated(x, math.pi / 2, 0))
    assert float((turned - x).abs().mean()) > 0.1
    assert float(turned.min()) >= float(x.min()) - 1e-5


def run_small(study, results, *more, names=SMALL["architectures"], num_train=120):
    ran = command(
        "run", study, "--architectures", ",".join(names), "--num-train", num_train, "--epochs", 2,
        "--precisions", 0.5, "--results", results, "--quiet", *more,
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output


def report_of(results, *more):
    told = command("report", "--results", results, *more)
    assert told.exit_code == 0, told.output
    return told.output


@pytest.mark.slow
@pytest.mark.parametrize("study", ["architectures", "bounds", "training-speed"])
def test_a_study_end_to_end(study, tmp_path):
    results, rows = tmp_path / "a.sqlite", tmp_path / "a.csv.gz"
    names = SMALL["architectures"] if study != "bounds" else ("mlp-8x1",)
    run_small(study, results, "--seeds", 1, names=names)
    told = report_of(results, "--csv", rows)
    assert f"run {study} --architectures" in told
    assert "--num-train 120 --epochs 2" in told
    assert "0 failed" in told
    assert "nan" not in told
    assert len(pandas.read_csv(rows, comment="#")) == len(
        make_grid(study, **(SMALL | {"architectures": names, "seeds": 1, "precisions": (0.5,)}))
    )


@pytest.mark.slow
def test_two_networks_have_no_correlations_and_more_images_rows_of_their_own(tmp_path):
    options = ("architectures", tmp_path / "a.sqlite", "--members", 1, "--seeds", 1)
    run_small(*options, names=("mlp-8x1", "cnn-4x1"), num_train=40)
    told = report_of(tmp_path / "a.sqlite")
    assert "## The networks" in told
    assert "correlation" not in told
    run_small(*options)
    told = report_of(tmp_path / "a.sqlite")
    assert "| images | precision | architecture |" in told
    assert "## What one network and averages reach" in told
    assert "| images | precision | networks | score |" in told
    assert told.index("| 40 | 0.5 | cnn-4x1 |") < told.index("| 120 | 0.5 | cnn-4x1 |")


@pytest.mark.slow
def test_an_ensemble_adds_scores_and_learned_precisions_have_the_larger_evidence():
    (cell,) = make_grid("architectures", **(SMALL | ONE | {"epochs": 12}))
    alone, together = (run_cell(cell | {"members": members}) for members in (1, 2))
    added = together.keys() - alone.keys()
    results = ("clml", "accuracy", "log_density", "calibration_error")
    assert added == {f"{name}_ensemble" for name in results}
    assert {name: together[name] for name in alone} == alone
    assert together["log_density_ensemble"] != alone["log_density_map"]
    assert alone["lml_online"] > alone["lml"]
    assert alone["accuracy_online"] > 0.1
    assert alone["log_density_online"] < 0.0


@pytest.mark.slow
def test_bounds_are_below_the_full_evidence():
    cells = make_grid("bounds", **(SMALL | {"architectures": ("mlp-8x1",)}))
    keep = ("full", "block", "block-parameter", "diagonal")
    whole = [cell for cell in cells if cell["batch_size"] is None and cell["hessian"] == "ggn"]
    values = {cell["structure"]: run_cell(cell)["evidence"] for cell in whole}
    ordered = [values[name] for name in keep]
    assert ordered == sorted(ordered, reverse=True)
    for cell in cells:
        if cell["structure"] == "kernel" and cell["batch_size"] < 120:
            # One output bounds the evidence in the mean over draws only.
            assert cell["outputs"] == "single" or run_cell(cell)["evidence"] < values["full"]


@pytest.fixture
def _made_tables(tmp_path, monkeypatch):
    """Made tables in place of the data sets of the study."""
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    sizes = {name: data_files()[name][0].num_features for name in ONLINE_TABLES}
    tables = [write_table(tmp_path, name, smooth_rows(120, d)) for name, d in sizes.items()]
    register(monkeypatch, tables)


@pytest.mark.slow
@pytest.mark.usefixtures("_made_tables")
def test_invariance_and_online_cells():
    small = SMALL | {"architectures": ("cnn-4x1",), "epochs": 5}
    learned, plain = make_grid("invariance", data="digits", seeds=1, **small)[:2]
    scores = run_cell(learned)
    assert 0 < scores["rotation"] < 90
    assert set(run_cell(plain)) < set(scores)
    online = make_grid("online", seeds=1, **(SMALL | {"architectures": ("mlp-8x1",), "epochs": 10}))
    for by in ("grid", "layer"):
        cell = next(cell for cell in online if cell.get("by") == by)
        assert math.isfinite(run_cell(cell)["evidence"])


def check_regression(largest_error):
    scores = run_cell(make_grid("online")[0] | {"epochs": 150, "data": "yacht"})
    assert scores["rmse"] < largest_error
    assert math.isfinite(scores["nll_laplace"])


@pytest.mark.slow
@pytest.mark.usefixtures("_made_tables")
def test_networks_on_made_tables():
    check_regression(2)  # the spread of the targets is 4


@pytest.mark.slow
@pytest.mark.data
def test_networks_on_real_tables(data_folder, monkeypatch):
    monkeypatch.setenv("GPCLML_DATA", str(data_folder))
    check_regression(12)  # the spread of the targets is 15


@pytest.mark.slow
def test_residual_network_is_trained():
    """At its family's rate a residual network fits nine tenths of the digits in 500 steps.

    At a rate of .03 this network, of seed 1, ends as a constant function.
    """
    data = images("digits", 1000, 1)
    x, y = data.train_x, data.train_y
    start = network("resnet-8x1", x.shape[1], x.shape[-1], CLASSES, 1)
    cell = {"precision": 0.1, "epochs": 50, "seed": 1, "lr": learning_rate("resnet-8x1")}
    trained(start, x, y, cell)
    assert (outputs_at(start, x).argmax(-1) == y).double().mean() > 0.9


def test_bad_arguments(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'bounds'"):
        make_grid("bound")
    with pytest.raises(UnknownNameError, match="data"):
        make_grid("bounds", data="digit")
    for name, value in (("num_train", 5000), ("seeds", 0), ("precisions", (0.0,))):
        with pytest.raises(ArgumentError, match=name):
            make_grid("bounds", **{name: value})
    for name in ("mlp", "mlp-0x1", "vit-3x3", "cnn-4x"):
        with pytest.raises(ArgumentError, match="architecture"):
            make_grid("bounds", architectures=(name,))
    with pytest.raises(DataError, match="no "):
        STUDY.sections(tmp_path / "none.sqlite")
    ran = command("run", "bounds", "--num-train", 99999, "--results", tmp_path / "a.sqlite")
    assert ran.exit_code == 2
    assert "num_train" in ran.output
