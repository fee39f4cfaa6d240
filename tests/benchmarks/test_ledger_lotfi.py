"""Toy models of Lotfi et al. (2022): what experiments of the ledger compute of them."""

import math

import numpy as np
import pytest
import torch

from benchmarks.evidence.ledger import fourier, gaussian_processes, laplace_toy


@pytest.fixture(scope="module")
def reference_folder(data_folder):
    folder = data_folder.parent / "reference" / "data"
    if not folder.is_dir():
        pytest.skip("no folder of reference arrays beside GPCLML_DATA")
    return folder


@pytest.mark.slow
def test_fourier_evidence_is_that_of_the_reference():
    cell = fourier.FOURIER.cells()[0] | {"orders": 20}
    row = fourier.run_fourier(cell | {"points": 500, "curves": 200})
    lml = {"M3": 53.803669, "M9": 28.918961, "M9c": 54.233923}
    for name, expected in lml.items():
        assert row[f"{name}_lml"] == pytest.approx(expected, abs=2e-6)
    crossing, _ = fourier._overtakes(np.array(row["gain"]), np.array(row["gain_error"]))
    assert 280 < crossing < 320


@pytest.mark.data
def test_fourier_data_are_those_of_the_paper(reference_folder):
    known = np.load(reference_folder / "fourier_all500_regenerated.npz", allow_pickle=False)
    for name, values in zip("xyf", fourier.fourier_data(15, 6, 500), strict=True):
        np.testing.assert_allclose(values, known[name], rtol=0, atol=1e-15)


@pytest.mark.data
def test_the_draw_of_the_rational_quadratic_kernel_is_that_of_the_authors(reference_folder):
    known = np.load(reference_folder / "gp_rq" / "data.npz", allow_pickle=False)
    x, y, function = gaussian_processes._published_data()
    np.testing.assert_allclose(x[:50, 0], known["x_train"], atol=1e-7)
    np.testing.assert_allclose(y[:50], known["y_train"], atol=3e-3)
    order = x[50:, 0].argsort()
    np.testing.assert_allclose(function[50:][order], known["f_test"], atol=3e-3)


@pytest.mark.parametrize("width", [0.3, 2.0, math.pi, 50.0])
def test_evidence_of_a_uniform_prior(width):
    data = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 0.8
    weights = torch.linspace(-width, width, 400001, dtype=torch.float64)
    squares = (data.unsqueeze(-1) - weights[::10].sin()).square().sum(0)
    log_density = -0.5 * squares - 25 * math.log(2 * math.pi)
    peak = log_density.max()
    expected = peak + torch.trapezoid((log_density - peak).exp(), weights[::10]).log()
    got = laplace_toy.true_evidence(data, width)
    assert got == pytest.approx(float(expected) - math.log(2 * width), abs=1e-6)


def test_laplace_evidence_beyond_the_mode():
    data = torch.full((50,), -0.5, dtype=torch.float64)
    assert math.isnan(laplace_toy.laplace_evidence(data, 0.5))  # the mode is at -pi / 6
    first, other = (laplace_toy.laplace_evidence(data, width) for width in (1.0, math.e))
    assert first - other == pytest.approx(1.0, abs=1e-12)
    # With many points the posterior within one period is two normals.
    many = torch.full((10**6,), -0.5, dtype=torch.float64)
    two = laplace_toy.laplace_evidence(many, math.pi) + math.log(2)
    assert laplace_toy.true_evidence(many, math.pi) == pytest.approx(two, abs=1e-4)


@pytest.mark.data
def test_laplace_curves_are_those_of_the_paper(reference_folder):
    known = np.load(reference_folder / "laplace.npz", allow_pickle=False)
    spread = torch.linspace(-1, 1, 50, dtype=torch.float64)
    data = spread - 0.968982  # only the mean of the data is known: curves up to a constant
    widths = [float(width) for width in known["alphas"]]
    lml = np.array([laplace_toy.true_evidence(data, width) for width in widths])
    laplace = np.array([laplace_toy.laplace_evidence(data, width) for width in widths])
    offset = np.median(known["lmls"] - lml)
    np.testing.assert_allclose(known["lmls"] - offset, lml, atol=0.15)  # theirs are sampled
    there = ~np.isnan(laplace)
    np.testing.assert_allclose(known["laplace_lmls"][there] - offset, laplace[there], atol=0.05)


def test_first_terms_hold_the_loss_of_a_vague_prior():
    cell = fourier.CURVES.cells()[0] | {"points": 600, "orders": 4}
    row = fourier.run_curves(cell)
    loss = np.array(row["true"]) - np.array(row["vague"])
    assert loss[:60].sum() > 0.8 * loss.sum() > 50
    assert abs(loss[-60:].sum()) < 2
