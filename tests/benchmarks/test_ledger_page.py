"""The page of the ledger: its headline, its order, and what stands below a negative verdict."""

import dataclasses
import math
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pandas
import pytest
import torch

from benchmarks import evidence
from benchmarks.evidence.ledger import elbo, gaussian_processes, training_speed_kernel
from benchmarks.evidence.ledger.claims import AtLeast, Claim, together
from benchmarks.evidence.ledger.elbo import learned_bound
from benchmarks.evidence.ledger.out_of_reach import INDEX, OUT_OF_REACH, REASONS
from benchmarks.evidence.ledger.page import (
    EXPERIMENTS,
    PAPERS,
    _cells_of,
    _section,
    _summary,
    _tried,
    headline,
    ledger_cells,
    write_page,
    write_rows,
)
from benchmarks.evidence.study import intervals, posterior_scales, report
from benchmarks.runner import run_grid
from gpclml.errors import DataError


def _claim(verdict, **options):
    return Claim("A 2020, Figure 1", "It is so.", "1", "2", verdict, rule="within 1", **options)


def test_the_headline_counts_claims_of_papers():
    tried = [
        (_claim("reproduced"), []), (_claim("partly"), ["n 5 (paper: 9)"]), (_claim("not"), None),
        (_claim("reproduced", kind="question"), None), (_claim("not", kind="identity"), None),
        (_claim("reproduced", kind="identity"), []),
    ]  # fmt: skip
    line = headline(tried, ["occam"])
    assert "3 claims of papers, their main results included: 1 reproduced, 1 partly, 1 not" in line
    assert "1 of them are tried at the paper's size: 1 reproduced, 0 partly, 0 not" in line
    assert "for 1 the paper states no size" in line
    assert "2 theorems and identities are checked apart: 1 hold" in line
    assert "1 questions are our own" in line
    assert "Without a verdict, for want of rows: occam." in line


def test_a_negative_verdict_says_whose_fault_it_is():
    claims = [_claim("partly", doubt="Ours."), _claim("reproduced", doubt="Nobody's.")]
    tried = [(claims[0], ["n 5 (paper: 9)"]), (claims[1], [])]
    cells = pandas.DataFrame({"_seconds": [90.0, 60.0]})
    text = _section(EXPERIMENTS["density"], tried, cells, Path("a.png"))
    assert "Time: 2.5 minutes of one core, 2 cells." in text
    assert "*Partly: It is so.* Ours." in text
    assert "n 5 (paper: 9)" in text
    assert "partly (other settings)" in text
    assert "Nobody's" not in text
    unknown = _section(EXPERIMENTS["density"], [(_claim("not"), None)], cells, Path("a.png"))
    assert "Not examined" in unknown
    assert "within 1" in text


def test_the_size_of_a_claim_is_read_off_the_cells():
    experiment = dataclasses.replace(
        EXPERIMENTS["density"],
        paper={"A 2020": {"n": 5}, "A 2020, Figure 1": {"n": 50, "orders": AtLeast(20), "l": 0.5}},
        constants={"l": 0.3},
    )
    cells = pandas.DataFrame({"n": [50, 50], "orders": [20, 1000]})
    assert experiment.differences(_claim("not"), cells) == ["l 0.3 (paper: 0.5)"]
    other = dataclasses.replace(_claim("not"), source="A 2020, Figure 2")
    assert experiment.differences(other, cells) == ["n 50 (paper: 5)"]
    none = dataclasses.replace(_claim("not"), source="B 2020")
    assert experiment.differences(none, cells) is None
    few = pandas.DataFrame({"n": [40, 50], "orders": [10, 10]})
    differences = experiment.differences(_claim("not"), few)
    assert differences[:2] == ["n 40, 50 (paper: 50)", "orders 10 (paper: 20)"]


def test_one_claim_on_several_data_sets_is_reproduced_if_it_is_on_each():
    first, second = _claim("reproduced"), _claim("not", doubt="Ours.")
    assert together({"a": first, "b": first}).verdict == "reproduced"
    assert together({"a": second, "b": second}).verdict == "not"
    both = together({"a": first, "b": second})
    assert (both.verdict, both.doubt) == ("partly", "Ours.")
    assert both.ours == "a: 2 (reproduced); b: 2 (not)"


@pytest.mark.parametrize("paper", INDEX)
def test_every_table_and_figure_has_a_row(paper):
    tried = [label for experiment in PAPERS[paper] for label in experiment.items]
    left = [label for items, *_ in OUT_OF_REACH[paper] for label in items]
    assert set(tried) | set(left) == set(INDEX[paper])
    assert not set(tried) & set(left)
    assert len(left) == len(set(left))
    assert {reason for _, reason, *_ in OUT_OF_REACH[paper]} <= set(REASONS)


@pytest.fixture
def results(tmp_path):
    """Two of the three cells of an experiment."""
    experiment = EXPERIMENTS["deep-kernels"]
    path = tmp_path / "results.sqlite"
    run_grid(experiment.cells()[:2], experiment.run, path, progress=False)
    return path


@pytest.mark.slow
def test_an_incomplete_experiment_has_no_verdict(results, tmp_path):
    experiment, page = EXPERIMENTS["deep-kernels"], tmp_path / "page.md"
    line = write_page(results, page).splitlines()[0]
    assert "0 claims" in line
    assert "Without a verdict, for want of rows: deep-kernels." in line
    assert "No verdict. Of 3 cells: 1 missing." in page.read_text()
    failing = [{"experiment": "deep-kernels", "benchmark": "uci", "rows": "none"}]
    run_grid(failing, experiment.run, results, progress=False)
    run_grid(experiment.cells(), experiment.run, results, progress=False)
    assert "Of 3 cells: 1 failed." in ledger_cells(results)["deep-kernels"].problem


@pytest.mark.slow
def test_the_page_can_be_made_of_the_rows(results, tmp_path):
    experiment, rows = EXPERIMENTS["deep-kernels"], tmp_path / "rows.csv.gz"
    run_grid(experiment.cells(), experiment.run, results, progress=False)
    write_rows(results, rows)
    first = rows.read_bytes()
    write_rows(results, rows)
    assert rows.read_bytes() == first
    pages = [tmp_path / "a.md", tmp_path / "b.md"]
    summaries = [write_page(*pair) for pair in zip((results, rows), pages, strict=True)]
    assert summaries[0] == summaries[1]
    assert "4 claims" in summaries[0]
    assert pages[0].read_text() == pages[1].read_text()
    for path in ("rows.csv", "missing/rows.csv.gz"):
        with pytest.raises(DataError, match=r"rows\.csv"):
            write_rows(results, tmp_path / path)
    rows.write_bytes(b"something")
    with pytest.raises(DataError, match="no rows of the ledger"):
        write_page(rows, pages[0])


@pytest.mark.slow
def test_the_committed_page_is_that_of_the_committed_rows():
    folder = Path(evidence.__file__).parent
    cells = ledger_cells(folder / "results" / "ledger.csv.gz")
    page = (folder / "RESULTS.md").read_text()
    tried = _tried(cells)
    assert _summary(tried) in page
    line = page.splitlines()[2]
    count = sum(claim.kind == "claim" for pairs in tried.values() for claim, _ in pairs)
    assert line.startswith(f"**{count} claims of papers")
    # The README's figures are those of the first line.
    readme = (folder.parents[1] / "README.md").read_text()
    verdicts = re.search(r"(\d+) reproduced, (\d+) partly, (\d+) not", line)
    assert f"Of {count} claims of five papers" in readme
    assert "{} were reproduced, {} partly, {} not".format(*verdicts.groups()) in readme


@pytest.mark.slow
def test_results_named_like_a_setting_of_a_study_are_the_experiments(tmp_path):
    experiment, path = EXPERIMENTS["few-shot"], tmp_path / "results.sqlite"
    run_grid(experiment.cells(), experiment.run, path, progress=False)
    page, rows = tmp_path / "page.md", tmp_path / "rows.csv.gz"
    with redirect_stdout(StringIO()) as shown:
        report(path, rows, page)
    assert "Evidence of networks" not in shown.getvalue()
    assert rows.exists()
    assert "2 claims" in page.read_text()


def test_numbers_that_are_none_give_no_verdict():
    experiment = EXPERIMENTS["density"]
    row = {"configuration": experiment.cells()[0], "metrics": {"lml": [0.0, math.nan]}}
    assert _cells_of(experiment, [row]).problem == "Of 1 cells: 1 without a number."
    whole = {**row, "metrics": {"lml": [0.0, 1.0]}}
    assert not _cells_of(experiment, [whole]).problem


def test_intervals_leave_out_networks_that_learned_nothing():
    score = [float(i) for i in range(12)]
    cells = pandas.DataFrame({
        "architecture": [f"mlp-{i}x1" for i in range(12)], "precision": 1.0,
        "lml": score[::-1], "lml_layer": score, "clml": score, "validation": score,
        "log_density_bma": score, "log_density_map": score,
        "posterior_scale": [0.0001] * 3 + [0.01] * 9, "posterior_at_edge": [1.0] * 3 + [0.0] * 9,
        "accuracy_map": [0.1] * 4 + [0.5 + 0.05 * i for i in range(8)], "clml_draws": 10.0,
    })  # fmt: skip
    rows = intervals(cells)
    assert rows.loc[("1", 8, "clml"), "log_density_bma"] == "+1.00 [+1.00, +1.00]"
    assert rows.loc[("1", 8, "lml"), "log_density_bma, less validation"] == "-2.00 [-2.00, -2.00]"
    assert posterior_scales(cells).loc["1"].tolist() == [12, 3, 0.01, 0, 4]


@pytest.mark.parametrize("name", ["convolutional", "convolutional, pooled"])
def test_kernels_of_infinite_width_are_those_of_wide_networks(name):
    """Up to the factor 2 of the variance behind the last ReLU, and the error of the width."""
    x = torch.randn(3, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        finite = torch.stack([_finite_kernel(x, 96, "pooled" in name) for _ in range(6)]).mean(0)
    exact = training_speed_kernel.KERNELS[name](x)
    assert (2 * finite / exact - 1).abs().max() < 0.15
    assert training_speed_kernel.tangent_kernel(name, x).diagonal().mean() == pytest.approx(1.0)


def _finite_kernel(x, width, pooled):
    """Gradients by weights of unit variance, scaled as the recursion scales them."""
    layers, variances, channels = [], [], x.shape[1]
    for layer in range(3):
        layers += [torch.nn.Conv2d(channels, width, 3, padding=1, bias=False), torch.nn.ReLU()]
        variances.append((1 if layer == 0 else 2) / (9 * channels))
        channels = width
    inputs = width if pooled else 9 * width
    layers += [torch.nn.AvgPool2d(3)] if pooled else []
    layers += [torch.nn.Flatten(), torch.nn.Linear(inputs, 1, bias=False)]
    variances.append(1 / inputs)
    network = torch.nn.Sequential(*layers).double()
    weights = list(network.parameters())
    for weight, variance in zip(weights, variances, strict=True):
        torch.nn.init.normal_(weight, std=variance**0.5)
    rows = []
    for image in x:
        gradients = torch.autograd.grad(network(image.unsqueeze(0)).sum(), weights)
        scaled = [g.flatten() * v**0.5 for g, v in zip(gradients, variances, strict=True)]
        rows.append(torch.cat(scaled))
    jacobian = torch.stack(rows)
    return (jacobian @ jacobian.mT).detach()


def test_importance_weights_of_the_exact_posterior_are_the_evidence():
    cell = {"family": "full", "seed": 0, "steps": 3, "rates": [0.1], "num_features": 30}
    learned = learned_bound(cell)
    weights = elbo._log_weights(learned, 5, torch.Generator().manual_seed(0))
    assert weights.tolist() == pytest.approx([learned.scores()["lml"]] * 5, abs=1e-6)


def test_the_draw_of_the_network_mean_is_that_of_the_authors():
    _, y = gaussian_processes._mean_data(gaussian_processes._MEAN_SEED)
    assert y[:5].tolist() == pytest.approx([-1.0259, -1.1086, -1.1705, -0.7803, -1.0591], abs=1e-4)
