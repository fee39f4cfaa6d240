"""Command line: ``python -m benchmarks.demo``: the library on data that come with scikit-learn."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import joblib
import numpy as np
import pandas as pd
import torch
import typer
from scipy.ndimage import rotate
from sklearn.datasets import load_diabetes, load_digits
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.neural_network import MLPRegressor
from torch.distributions import Normal
from typer import Option

from benchmarks._figures import PALETTE, new_figure, save_figure
from benchmarks._options import errors_as_text
from benchmarks._tables import mean_and_error, with_error
from gpclml.conditioning import LastPoints
from gpclml.errors import DataError
from gpclml.fit import fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

METHODS = {
    "deep kernel, CLML": "deep_bottleneck",
    "deep kernel, LML": "deep_bottleneck",
    "RBF GP, LML": "rbf",
    "network (MLP)": MLPRegressor,
    "trees (boosting)": HistGradientBoostingRegressor,
}
"""What predicts the angle: a kernel of :class:`~gpclml.models.GPRegression`, or an estimator."""

_MODELS = "linear,rbf,matern,rq"  # of the table; the stack and the trees come with them
_NUM_TEST = 600
_LARGEST = 45.0  # degrees
_FONT = 10  # points, of all text in the figure


def turned_digits(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits of scikit-learn, each turned by an angle drawn from -45 to 45 degrees.

    Args:
        seed: Seed of the choice of digits and of the angles.
        n: Number of digits.

    Returns:
        The pixels, of shape ``(n, 64)``, from 0 to 1, and the angles in degrees, of shape ``(n,)``.
    """
    images = load_digits().images
    generator = np.random.default_rng(seed)
    chosen = generator.permutation(len(images))[:n]
    angles = generator.uniform(-_LARGEST, _LARGEST, n)
    turned = [
        rotate(images[k], angle, reshape=False, order=1)
        for k, angle in zip(chosen, angles, strict=True)
    ]
    return np.stack(turned).reshape(n, -1) / 16, angles


def angle_scores(seed: int, n: int = 400, steps: int = 300) -> list[dict[str, Any]]:
    """How well each method of :data:`METHODS` tells the angle of digits that it has not seen.

    Args:
        seed: Seed of digits, angles and starts.
        n: Number of digits to learn from; 600 others are predicted.
        steps: Steps of Adam for deep kernels.

    Returns:
        A row a method: the root mean square ``error`` in degrees, and of the GPs ``nll``, the
        negative log density of a test angle in nats, and ``covered``, the share of test angles in
        intervals that promise 90 %.
    """
    # Processes run beside each other, each on one thread.
    torch.set_num_threads(1)
    pixels, angles = turned_digits(seed, n + _NUM_TEST)
    x, y, new_x, new_y = pixels[:n], angles[:n], pixels[n:], angles[n:]
    rows = []
    for name, method in METHODS.items():
        if isinstance(method, str):
            scores = _gp_scores(name, method, x, y, new_x, new_y, seed, steps)
        else:
            layers = {"hidden_layer_sizes": (100, 50), "max_iter": 2000}
            options = layers if method is MLPRegressor else {}
            estimator = method(random_state=seed, **options).fit(x, y)
            error = estimator.predict(new_x) - new_y
            scores = {"error": float(np.sqrt(np.mean(error**2)))}
        rows.append({"method": name, "seed": seed, **scores})
    return rows


def _gp_scores(
    name: str, kernel: str, x: Any, y: Any, new_x: Any, new_y: Any, seed: int, steps: int
) -> dict[str, float]:
    model = GPRegression(x, y, kernel, ard=kernel != "rbf", seed=seed)
    conditioning = None if "CLML" in name else LastPoints(0)  # None: redrawn held-out points
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
    options = {} if kernel == "rbf" else {"optimizer": "adam", "steps": steps}
    fit_mll(mll, progress=False, **options)
    with torch.no_grad():
        predicted = model.predict(new_x, marginal=True)
        normal = Normal(predicted.mean, predicted.variance.sqrt())
        truth = torch.as_tensor(new_y)
        quantile = normal.cdf(truth)
        return {
            "error": float((truth - normal.mean).square().mean().sqrt()),
            "nll": -float(normal.log_prob(truth).mean()),
            "covered": float(((quantile > 0.05) & (quantile < 0.95)).double().mean()),
        }


def main(
    out: Annotated[Path, Option(help="Folder of report, figure and rows.")] = Path("demo"),
    seeds: Annotated[int, Option(min=2, help="Draws of turned digits.")] = 5,
    n: Annotated[int, Option(min=10, max=1000, help="Digits to learn from.")] = 400,
    steps: Annotated[int, Option(min=1, help="Steps of Adam for deep kernels.")] = 300,
    jobs: Annotated[int, Option(min=1, help="Processes.")] = 2,
) -> None:
    """Predicts a table by the default model, and the angle of turned digits by deep kernels.

    Writes the report page of the table, a figure, and the rows behind it, and says in five lines
    what came out.
    """
    start = time.perf_counter()
    with errors_as_text():
        out.mkdir(parents=True, exist_ok=True)
        table = _compare_table(out)
        scores = (joblib.delayed(angle_scores)(seed, n, steps) for seed in range(seeds))
        drawn = joblib.Parallel(jobs)(scores)
        angles = pd.DataFrame([row for rows in drawn for row in rows])
        angles.to_csv(out / "angles.csv", index=False)
        typer.echo(_rows(table, angles).to_string(na_rep="", index=False))
        _draw(angles, out / "demo.png")
        typer.echo("\n" + "\n".join(_closing_lines(table, angles, out)))
        typer.echo(f"({time.perf_counter() - start:.0f} seconds)")


def _compare_table(out: Path) -> pd.DataFrame:
    """Test scores of scikit-learn's diabetes table by ``gpclml compare``, which writes a page."""
    file, report = out / "diabetes.csv", out / "report"
    load_diabetes(as_frame=True, scaled=False).frame.to_csv(file, index=False)
    command = [
        sys.executable, "-m", "gpclml", "compare", str(file), "--target", "target",
        "--models", _MODELS, "--out", str(report), "--quiet",
    ]  # fmt: skip
    # As a user would: by the command.
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"gpclml compare failed: {done.stderr.strip() or done.stdout.strip()}")
    told = json.loads((report / "report.json").read_text())
    rows = {told["chosen"]: told["models"][told["chosen"]], **told["others"]}
    return pd.DataFrame.from_dict(rows, orient="index")


def _rows(table: pd.DataFrame, angles: pd.DataFrame) -> pd.DataFrame:
    """What is printed: a row a method and task."""
    shown = []
    for name, row in table.iterrows():
        error = f"{row.test_rmse:.1f} ± {row.test_rmse_se:.1f}"
        shown.append(("diabetes", name, error, row.get("test_nll"), row.get("test_coverage")))
    for name, rows in angles.groupby("method", sort=False):
        nll, covered = rows.nll.mean(), rows.covered.mean()
        shown.append(("angle of a digit", name, with_error(rows.error, 2), nll, covered))
    table = pd.DataFrame(shown, columns=["task", "method", "typical error", "NLL", "in 90 %"])
    # Without a number for what gives no density.
    nll, covered = table["NLL"].astype(float), 100 * table["in 90 %"].astype(float)
    texts = {"NLL": nll.map("{:.2f}".format, "ignore")}
    return table.assign(**texts, **{"in 90 %": covered.map("{:.0f} %".format, "ignore")})


def _closing_lines(table: pd.DataFrame, angles: pd.DataFrame, out: Path) -> list[str]:
    errors = angles.pivot(index="seed", columns="method", values="error")
    clml, lml, *others = METHODS
    change, spread = mean_and_error(errors[clml] - errors[lml])
    best = errors[others].mean().idxmin()
    rmse, covered = table.test_rmse, table.test_coverage["stack"]
    return [
        f"Diabetes: the default model (stack) is off by {rmse['stack']:.1f}, boosted trees by "
        f"{rmse['trees']:.1f}, the mean of the targets by {rmse['mean']:.1f}.",
        f"Its 90 % intervals hold {100 * covered:.0f} % of the test rows.",
        f"Angles: a deep kernel trained by the CLML is off by {errors[clml].mean():.2f} degrees, "
        f"by the LML {errors[lml].mean():.2f}, the best of the others ({best}) "
        f"{errors[best].mean():.2f}.",
        f"CLML less LML: {change:+.2f} ± {spread:.2f} degrees, the standard error of "
        f"{len(errors)} draws.",
        f"Open {out / 'report' / 'index.html'} for the table, {out / 'demo.png'} for the angles.",
    ]


def _draw(angles: pd.DataFrame, path: Path) -> None:
    figure = new_figure(8, 2.9, layout="constrained")
    grid = figure.add_gridspec(2, 8)
    pixels, turned = turned_digits(1, 4)
    for k in range(4):
        axes = figure.add_subplot(grid[k // 2, k % 2])
        axes.imshow(pixels[k].reshape(8, 8), cmap="gray_r")
        axes.set_title(f"{turned[k]:+.0f}°", fontsize=_FONT)
        axes.set_axis_off()
    axes = figure.add_subplot(grid[:, 2:])
    for k, (_, rows) in enumerate(angles.groupby("method", sort=False)):
        mean, error = mean_and_error(rows.error)
        axes.barh(k, mean, color=PALETTE[0] if k == 0 else "0.8", height=0.7)
        axes.plot(rows.error, len(rows) * [k], "ok", markersize=4, markeredgecolor="w")
        ink = "w" if k == 0 else "k"
        label = f"{mean:.1f}° ± {error:.1f}°"
        axes.text(0.1, k, label, va="center", fontsize=_FONT, color=ink)
    axes.set_yticks(range(len(METHODS)), list(METHODS), fontsize=_FONT)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=_FONT)
    axes.set_xlabel("error on new images, degrees (root mean square; dots: draws)", fontsize=_FONT)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


if __name__ == "__main__":
    typer.run(main)
