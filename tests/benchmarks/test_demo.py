"""The demonstration: turned digits, scores of each method, and what the command leaves and says."""

import numpy as np
import pandas as pd
import pytest
import typer
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from benchmarks.demo import METHODS, angle_scores, main, turned_digits


def test_digits_are_turned_by_their_angles():
    pixels, angles = turned_digits(3, 20)
    again, same = turned_digits(3, 20)
    assert np.array_equal(pixels, again)
    assert np.array_equal(angles, same)
    assert pixels.shape == (20, 64)
    assert np.abs(angles).max() <= 45
    images = load_digits().images / 16
    # Turned back, each is nearest to a digit of the set itself; turned further, it is not.
    nearest, wrong = (
        np.mean(
            [
                np.abs(images - rotate(p.reshape(8, 8), turn, reshape=False, order=1))
                .sum((1, 2))
                .min()
                for p, turn in zip(pixels, turns, strict=True)
            ]
        )
        for turns in (-angles, angles)
    )
    assert nearest < 0.8 * wrong


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_each_method_learns_the_angle():
    rows = pd.DataFrame(angle_scores(0, n=150, steps=60)).set_index("method")
    assert list(rows.index) == list(METHODS)
    spread = 90 / np.sqrt(12)  # of angles, for one who guesses the middle
    assert (rows.error < 0.6 * spread).all()
    gps = rows[rows.nll.notna()]
    assert len(gps) == 3
    assert (gps.covered > 0.7).all()
    assert (gps.nll < np.log(90)).all()  # of the uniform density


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_command_leaves_a_page_a_figure_and_rows(tmp_path):
    app = typer.Typer()
    app.command()(main)
    out = tmp_path / "demo"
    options = ["--out", str(out), "--seeds", "2", "--n", "40", "--steps", "3", "--jobs", "1"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    assert (out / "report" / "index.html").is_file()
    assert (out / "demo.png").stat().st_size > 1000
    rows = pd.read_csv(out / "angles.csv")
    assert len(rows) == 2 * len(METHODS)
    errors = rows.groupby("method").error.mean()
    assert f"{errors['deep kernel, CLML']:.2f} degrees" in done.output
    assert str(out / "report" / "index.html") in done.output.replace("\n", "")
