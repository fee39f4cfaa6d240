"""Every experiment of the ledger end to end, at a small size; claims, verdicts and the page."""

from __future__ import annotations

import math

import numpy as np
import pandas
import pytest
import torch

from benchmarks._figures import new_figure, save_figure
from benchmarks.evidence.ledger import uci_networks
from benchmarks.evidence.ledger.claims import differs, graded, listed, mean_and_error, with_error
from benchmarks.evidence.ledger.elbo import _Run, drawn_features, learned_bound, published_run, sine
from benchmarks.evidence.ledger.page import EXPERIMENTS, chosen_experiments
from benchmarks.evidence.ledger.perturbed import run_perturbed
from benchmarks.runner.code import code_version
from gpclml.errors import UnknownNameError

BOUNDS = {
    "data": "digits", "num_train": 10, "samples": 2, "epochs": 11, "values": 2, "draws": 1,
}  # fmt: skip
SMALL = {
    "deep-kernels": {}, "few-shot": {}, "deep-kernels-published": {"dataset": "diabetes", "n": 30},
    "uci-networks": {"dataset": "diabetes", "splits": 2, "epochs": 160},
    "uci-every-epoch": {"dataset": "diabetes", "splits": 2, "epochs": 20},
    "online-curve": {"data": "stand-in", "epochs": 6},
    "banana": {"data": "stand-in", "points": 40, "epochs": 4, "weak_epochs": 4},
    "evidence-bounds": BOUNDS, "evidence-bounds-rotation": BOUNDS,
    "affine-invariance": {
        "data": "digits", "num_train": 20, "samples": 2, "epochs": 5, "num_test": 20,
    },
    "evidence-ranking": {"num_train": 60, "epochs": 12},
    "training-speed-subnetworks": {"data": "digits", "num_train": 60, "epochs": 2, "every": 1},
    "occam": {"sizes": (20, 50, 100)},
    "criteria": {"orders": 5, "draws": 50},
    "elbo-sweep": {"steps": 3, "draws": 2},
    "elbo-importance": {"steps": 3, "draws": 8, "repeats": 2, "num_features": 20},
    "density": {},
    "fourier": {"orders": 20, "curves": 4, "points": 320},
    "rational-quadratic": {"alphas": 8, "orders": 20, "curves": 2},
    "lengthscale-bias": {"sizes": (5, 10, 20), "lengthscales": 12, "orders": 5},
    "mlp-mean": {"steps": 3, "orders": 5},
    "laplace-toy": {"widths": 24, "draws": 2000},
    "learning-curves": {"points": 300, "orders": 4},
    "training-speed-linear": {"num_points": 12, "repeats": 3},
    "model-combination": {"num_points": 10, "passes": 1},
    "training-speed-ntk": {"data": "digits", "num_train": 6, "num_test": 4, "orders": 2},
    "training-speed-networks": {
        "data": "digits", "num_train": 100, "epochs": 2, "architectures": ["mlp-32x1", "cnn-4x1"],
    },
    "elbo-families": {"steps": 3},
    "elbo-tempering": {"steps": 3},
    "pac-bayes": {"data_sets": 20, "orders": 2},
}  # fmt: skip


KINDS = {"evidence-ranking": 4}  # of forty networks


def some_cells(name: str) -> list[dict]:
    """One cell of each kind (all but the seed alike), and another seed of the first."""
    every = [dict(cell) | SMALL[name] for cell in EXPERIMENTS[name].cells()]
    kinds = {str({k: v for k, v in cell.items() if k != "seed"}): cell for cell in every[::-1]}
    # Families are compared by the seed: a second one of the first alone has no others.
    again = [cell for cell in every if cell not in kinds.values() and name != "elbo-families"]
    return list(kinds.values())[-KINDS.get(name, len(kinds)) :] + again[:1]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_end_to_end(name, tmp_path, monkeypatch):
    figures = {"diabetes": ((6.0, 0.1),) * 5}  # of a set that needs no download
    monkeypatch.setattr(uci_networks, "PUBLISHED", figures)
    experiment = EXPERIMENTS[name]
    assert all(cell["experiment"] == name for cell in experiment.cells())
    chosen = some_cells(name)
    rows = [cell | experiment.run(cell) for cell in chosen]
    again = {k: v for k, v in experiment.run(chosen[0]).items() if not k.startswith("seconds")}
    np.testing.assert_equal({k: rows[0][k] for k in again}, again)  # the seed is all
    claims = list(experiment.claims(pandas.DataFrame(rows)))
    assert claims
    for claim in claims:
        assert all((claim.source, claim.statement, claim.published, claim.rule))
        assert "nan" not in claim.ours
    code_version(experiment.run)  # it can be imported
    figure = new_figure(*experiment.size, layout="constrained")
    experiment.draw(pandas.DataFrame(rows), figure)
    save_figure(figure, tmp_path / "a.png")
    assert all(axes.get_xlabel() or axes.get_ylabel() for axes in figure.axes)


@pytest.mark.parametrize("name", ["elbo-families", "mlp-mean"])  # of PyTorch, of SciPy
def test_starts_a_millionth_elsewhere(name):
    cell = some_cells(name)[0]
    plain = EXPERIMENTS[name].run(cell)
    away, same, other = (run_perturbed(cell | {"perturbed": seed}) for seed in (0, 0, 1))
    np.testing.assert_equal(away, same)
    assert away != other
    assert away != plain
    for key, value in plain.items():
        np.testing.assert_allclose(away[key], value, rtol=1e-2, atol=1e-3)
    np.testing.assert_equal(EXPERIMENTS[name].run(cell), plain)  # nothing of it is left


def test_every_experiment_is_tried():
    assert set(SMALL) == set(EXPERIMENTS)
    short = [experiment for experiment in EXPERIMENTS.values() if not experiment.hours]
    assert chosen_experiments("ledger") == short
    assert chosen_experiments("uci-networks") == [EXPERIMENTS["uci-networks"]]
    with pytest.raises(UnknownNameError, match="Did you mean 'fourier'"):
        chosen_experiments("fouriers")


def test_grades():
    assert graded(True, True) == "reproduced"
    assert graded(True, False) == "partly"
    assert graded(False, False) == "not"
    assert listed([("a", True), ("b", True, False)], "of ") == ("of a; b", "partly")


def test_differences():
    mean, error = mean_and_error([1.0, 2.0, 4.0])
    assert mean == pytest.approx(7 / 3)
    assert error == pytest.approx(np.std([1, 2, 4], ddof=1) / math.sqrt(3))
    assert with_error([1.0, 2.0, 4.0], 2) == "2.33 ± 0.88"
    assert with_error([1.0], 2) == "1.00"
    assert with_error([]) == "-"
    assert differs([1.0, 1.1, 0.9], 1)
    assert not differs([1.0, 1.1, 0.9], -1)
    assert not differs([1.0, -1.0, 0.5], 1)
    assert not differs([1.0], 1)


@pytest.mark.parametrize(
    ("noise", "rmse", "verdict"),
    [
        ((0.4, 0.2, 0.12), (0.48, 0.44, 0.43), "reproduced"),
        ((0.4, 0.3, 0.25), (0.48, 0.44, 0.43), "partly"),
        ((0.4, 0.5, 0.6), (0.48, 0.5, 0.6), "not"),
    ],
)
def test_the_verdict_on_tempering_is_of_q_and_its_noise(noise, rmse, verdict):
    cells = pandas.DataFrame({
        "family": "diagonal", "temperature": [4.0**-k for k in range(5)],
        "noise": [*noise, *noise[-1:] * 2], "q_rmse": [*rmse, *rmse[-1:] * 2],
        "q_test": -0.7, "elbo": -20.0, "lml": -15.0,
    })  # fmt: skip
    claims = iter(EXPERIMENTS["elbo-tempering"].claims(cells))
    caption, digits = next(claims), next(claims)
    assert (caption.verdict, digits.verdict) == (verdict, "not")
    assert "prevent" in caption.statement


@pytest.mark.slow
def test_a_cold_posterior_finds_the_noise():
    cold = {"family": "diagonal", "temperature": 1 / 16}
    learned = learned_bound({"seed": 0, "steps": 1000, "rates": [0.1]} | cold)
    scores = learned.scores() | learned.scores_of_q()
    assert scores["noise"] == pytest.approx(0.123, abs=5e-4)
    assert scores["q_rmse"] == pytest.approx(0.434, abs=5e-4)
    assert scores["q_test"] == pytest.approx(-2.651, abs=5e-3)
    assert scores["test"] == pytest.approx(-3.663, abs=5e-3)  # of the exact posterior


def test_the_authors_steps_start_from_the_same_bound():
    drawn = drawn_features(torch.Generator().manual_seed(0), 1024)
    x, y = sine(np.random.RandomState(0), 20)
    run = _Run(x, y, drawn)
    run.update(1.0)
    bound = float(run.bound(1.0).detach())
    learned = learned_bound({"family": "rank-1", "seed": 0, "steps": 1, "rates": [0.1]})
    assert bound == pytest.approx(learned.bound, abs=1e-6)


@pytest.mark.slow
def test_what_is_printed_is_of_the_features_after_the_best_epoch():
    printed = published_run({"seed": 2, "steps": 1000, "rates": [0.1], "temperature": 64.0})
    assert printed["lml"] == pytest.approx(-47.53, abs=0.01)
    assert printed["elbo"] < -6e4  # of the best epoch itself -6478


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [((-9, -5, 4, 2), "reproduced"), ((-9, 5, 4, 2), "partly"), ((-9, -5, -4, -1), "not")],
)
def test_the_verdict_on_a_crossing(gap, verdict):
    numbers = [25, 158, 251, 1000]
    rows = [
        {"family": family, "number": number, "elbo": [-n * number, -n * number - 1],
         "lml": [n * nats, n * nats + 0.1], "noise": [0.1, 0.2]}
        for number, nats in zip(numbers, gap, strict=True)
        for n, family in enumerate(["diagonal", "rank-1"])
    ]  # fmt: skip
    bounds, crossing = EXPERIMENTS["elbo-sweep"].claims(pandas.DataFrame(rows))
    assert (bounds.verdict, crossing.verdict) == ("reproduced", verdict)
