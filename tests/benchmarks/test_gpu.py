"""The commands for a machine with a GPU, tried on a CPU at tiny sizes, and what keeps them safe."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.gpu.__main__ import app
from benchmarks.gpu.graphs import density_step, graph_rows
from benchmarks.gpu.machine import check_machine
from benchmarks.gpu.page import all_rows, write_page
from benchmarks.gpu.profiles import profile_rows
from benchmarks.gpu.records import LostDeviceError, Records
from benchmarks.gpu.timing import timed
from gpclml.errors import DataError

PARTS = ("speed", "studies", "large")


@pytest.fixture(autouse=True)
def _settings():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results of all parts, on a CPU."""
    results = tmp_path_factory.mktemp("results")
    for part in PARTS:
        done = CliRunner().invoke(
            app, [part, "--results", str(results), "--device", "cpu", "--small"]
        )
        assert done.exit_code == 0, done.output
        assert "# torch: " in done.output
    return results


def test_every_part_runs_and_a_page_tells_of_it(folder):
    done = CliRunner().invoke(app, ["page", "--results", str(folder)])
    assert done.exit_code == 0, done.output
    rows = pd.read_csv(folder / "gpu.csv", comment="#")
    assert set(rows["part"]) == set(PARTS)
    assert rows["error"].isna().all() if "error" in rows else True
    page = (folder / "gpu.md").read_text()
    for heading in ("Rates", "Gradient steps", "Whole fits", "Many models", "Exact fits"):
        assert f"## {heading}" in page
    assert "this machine has no GPU" in page
    assert "CUDA graph: needs a CUDA device" in page
    steps = rows[(rows["study"] == "step") & (rows["dtype"] == "float64")]
    product = rows[(rows["method"] == "product") & (rows["dtype"] == "float64")].iloc[0]
    rate = steps["Gflop"] / (1e-3 * steps["ms"])
    assert (steps["of product"] * product["Gflop/s"]).tolist() == pytest.approx(rate, rel=1e-4)


def test_what_is_finished_is_not_measured_again(folder):
    before = {part: (folder / f"{part}.jsonl").read_bytes() for part in PARTS}
    command = ["large", "--results", str(folder), "--device", "cpu", "--small"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert before == {part: (folder / f"{part}.jsonl").read_bytes() for part in PARTS}


def test_gpytorchs_objective_ends_at_the_same_fit(folder):
    large = [row for row in all_rows(folder) if row["study"] == "large fits"]
    ours, theirs = (row["LML a point"] for row in large if "LML a point" in row)
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_a_device_that_is_not_there_is_named(tmp_path):
    done = CliRunner().invoke(app, ["speed", "--results", str(tmp_path), "--device", "cuda:99"])
    assert done.exit_code == 2
    assert "cuda:99" in done.output


def test_results_of_another_machine_are_not_mixed(folder, tmp_path):
    check_machine(tmp_path, "cpu")
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch": "1.0"}))
    with pytest.raises(DataError, match=r"or other code \(torch: '1.0' there"):
        check_machine(tmp_path, "cpu")


def test_a_folder_without_results_has_no_page(tmp_path):
    with pytest.raises(DataError, match="no results"):
        write_page(tmp_path)


def test_what_was_measured_on_both_devices_is_compared(tmp_path):
    check_machine(tmp_path, "cpu")
    records = Records(tmp_path, "speed")
    for device, ms in (("cuda", 2.0), ("cpu", 30.0)):
        key = {"study": "step", "device": device, "dtype": "float64", "n": 500}
        records.measure(key, lambda ms=ms: [{"method": "LML", "ms": ms, "Gflop": 1.0}])
    only = {"study": "step", "device": "cuda", "dtype": "float64", "n": 700}
    records.measure(only, lambda: [{"method": "LML", "ms": 3.0, "Gflop": 1.0}])
    page = write_page(tmp_path).read_text()
    compared = page.partition("## Where a card begins to pay")[2].partition("##")[0]
    assert "| step | float64 | 500 | LML | 2 | 30 | 15 |" in compared
    assert "700" not in compared


def failing():
    raise RuntimeError("CUDA out of memory.\nMore of it.")


def test_what_fails_is_a_row_and_is_tried_again_if_asked(tmp_path):
    records = Records(tmp_path, "speed")
    records.measure({"n": 1}, failing)
    records.measure({"n": 2}, lambda: [{"ms": 1.0}])
    expected = [
        {"part": "speed", "n": 1, "error": "RuntimeError: CUDA out of memory."},
        {"part": "speed", "n": 2, "ms": 1.0},
    ]
    assert records.rows() == expected
    again = Records(tmp_path, "speed")
    again.measure({"n": 1}, lambda: [{"ms": 3.0}])
    assert again.rows() == expected
    retried = Records(tmp_path, "speed", retry=True)
    retried.measure({"n": 1}, lambda: [{"ms": 3.0}])
    retried.measure({"n": 2}, failing)
    assert [row["ms"] for row in Records(tmp_path, "speed").rows()] == [3.0, 1.0]


def test_a_gpu_that_is_lost_ends_the_part_and_its_measurement_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", failing)
    records = Records(tmp_path, "speed")
    with pytest.raises(LostDeviceError, match=r"out of memory.*Run the part again"):
        records.measure({"n": 1}, failing)
    assert len(Records(tmp_path, "speed").rows()) == 1


def test_a_line_that_was_cut_is_measured_again(tmp_path):
    records = Records(tmp_path, "speed")
    for n in (1, 2):
        records.measure({"n": n}, lambda: [{"ms": 1.0}])
    records.file.write_text(records.file.read_text()[:-9])
    resumed = Records(tmp_path, "speed")
    assert [row["n"] for row in resumed.rows()] == [1]
    resumed.measure({"n": 2}, lambda: [{"ms": 2.0}])
    assert [row["ms"] for row in Records(tmp_path, "speed").rows()] == [1.0, 2.0]


def test_nothing_is_started_when_the_time_is_over(tmp_path):
    records = Records(tmp_path, "speed", minutes=0.0)
    records.measure({"n": 1}, failing)
    assert records.rows() == []
    assert records.left_out == 1


def test_the_cpu_beside_a_card_is_left_out_if_asked(tmp_path):
    records = Records(tmp_path, "speed", without_cpu=True)
    for device in ("cuda", "cpu"):
        records.measure({"device": device}, lambda: [{"ms": 1.0}])
        records.skip({"device": device, "n": 1}, "no card")
    assert [row["device"] for row in records.rows()] == 2 * ["cuda"]


def test_what_was_left_out_is_measured_once_it_can_be(tmp_path):
    records = Records(tmp_path, "speed")
    for _ in range(2):
        records.skip({"n": 1}, "no card")
    assert records.file.read_text().count("\n") == 1
    records.measure({"n": 1}, lambda: [{"ms": 1.0}])
    assert records.rows() == [{"part": "speed", "n": 1, "ms": 1.0}]


def test_steps_that_fail_leave_the_others_their_times():
    calls = []
    found = timed({"a": lambda: calls.append("a"), "b": failing}, "cpu", 0.0, base="a")
    assert found["a"]["ratio"] == 1.0
    assert found["a"]["rounds"] == 1
    assert found["b"] == {"error": "RuntimeError: CUDA out of memory."}
    assert len(calls) == 2
    without_base = timed({"a": failing, "b": lambda: None}, "cpu", 1e-3, base="a")
    assert "ratio" not in without_base["b"]
    assert 1 <= without_base["b"]["rounds"] <= 31


def test_the_step_that_is_captured_computes_the_density():
    step, written = density_step("cpu", "float64", 30)
    step()
    value = written[0].clone()
    assert all(torch.isfinite(one).all() for one in written)
    assert all(one.abs().max() > 0 for one in written)
    step()
    assert written[0] == value


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_step_is_replayed_or_the_reason_is_given():
    rows = {row["method"]: row for row in graph_rows("cuda", "float64", 100)}
    assert rows["launched anew"]["ms"] > 0
    replayed = rows["replayed"]
    assert "error" in replayed or replayed["difference"] < 1e-8


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_profile_counts_kernels():
    rows = profile_rows("cuda", "float64", 100, ["LastPoints(m=0)"])
    assert rows[0]["launches"] > 10
    assert rows[0]["busy"] > 0
    assert sum(row["launches"] for row in rows[1:]) <= rows[0]["launches"]
