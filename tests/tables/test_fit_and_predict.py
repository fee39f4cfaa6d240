"""The commands fit and predict, and the models that they fit."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch

from gpclml import ConditionalMarginalLogLikelihood, GPRegression, Regressor, fit_mll
from gpclml.evaluation import log_marginal_likelihood
from gpclml.tables.data import TableOptions, read_table_data
from gpclml.tables.fitting import MODELS, OBJECTIVES, Recipe, default_models, predicted


@pytest.fixture
def fitted(csv, gpclml, tmp_path):
    def fit(model, *words):
        out = tmp_path / "model"
        options = "--target", "progression", "--model", model, "--out", out, "--steps", 5
        result = gpclml("fit", csv, *options, *words)
        assert result.exit_code == 0, result.output
        return out, result

    return fit


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "sm", "deep"])
def test_predictions_are_those_in_memory(csv, gpclml, tmp_path, fitted, name):
    drop = ["--drop", "bmi", "--drop", "bp"] if name == "deep" else []
    folder, result = fitted(name, "--quiet", *drop)
    assert f"{name} fitted to 129 rows in" in result.stdout
    options = TableOptions(csv, "progression", 4000, drop=tuple(drop[1::2]))
    data = read_table_data(options, tests=False)
    model, *_ = Recipe(name, steps=5).fit(*data.train, progress=False)

    out = tmp_path / "predictions.csv"
    result = gpclml("predict", folder, csv, "--out", out)
    assert result.exit_code == 0
    written = pandas.read_csv(out)
    assert list(written.columns) == ["mean", "standard_deviation", "lower_90", "upper_90"]
    table = pandas.read_csv(csv)
    assert len(written) == len(table) == 130
    x = torch.from_numpy(data.encoding.encode(table))
    prediction = predicted(model, x, categories=data.encoding.categories)
    mean, deviation = prediction.mean, prediction.std
    np.testing.assert_allclose(written["mean"], mean, rtol=1e-9)
    np.testing.assert_allclose(written["standard_deviation"], deviation, rtol=1e-9)
    half = 1.6448536269514722 * deviation
    np.testing.assert_allclose(written["lower_90"], mean - half, rtol=1e-9)
    np.testing.assert_allclose(written["upper_90"], mean + half, rtol=1e-9)
    assert "130 rows predicted" in result.stderr


@pytest.mark.slow
def test_a_stack_is_fitted_unless_a_model_is_named(csv, gpclml, tmp_path):
    folder, out = tmp_path / "model", tmp_path / "predictions.csv"
    result = gpclml("fit", csv, "--target", "progression", "--quiet", "--seed", 3, "--out", folder)
    assert result.exit_code == 0, result.output
    assert "stack fitted to 129 rows in" in result.stdout
    assert "seconds: weights 0." in result.stdout
    table = pandas.read_csv(csv)
    known = table["progression"].notna().to_numpy()
    inputs = table.drop(columns=["progression", "patient", "clinic"])  # which say nothing
    regressor = Regressor(random_state=3).fit(inputs[known], table["progression"][known])
    result = gpclml("predict", folder, csv, "--out", out)
    assert result.exit_code == 0, result.output
    written = pandas.read_csv(out)
    expected = regressor.predict_distribution(inputs)
    lower, upper = expected.interval(0.9)
    columns = {
        "mean": expected.mean, "standard_deviation": expected.std,
        "lower_90": lower, "upper_90": upper,
    }  # fmt: skip
    for name, values in columns.items():
        np.testing.assert_allclose(written[name], values, rtol=1e-6)


def test_a_stack_has_no_other_objective(csv, gpclml, tmp_path):
    words = csv, "--target", "progression", "--out", tmp_path / "model"
    for wrong in (("--steps", 5), ("--objective", "loo")):
        result = gpclml("fit", *words, *wrong)
        assert result.exit_code == 2
        assert "name another --model, such as matern" in " ".join(result.stderr.split())
    assert not (tmp_path / "model").exists()


def test_a_time_budget_too_small_leaves_the_fastest_model(csv, gpclml, tmp_path):
    options = "--target", "progression", "--time-budget", 0, "--out", tmp_path / "model"
    result = gpclml("fit", csv, *options)
    assert result.exit_code == 0, result.output
    assert "weights 1.00 linear" in result.stdout
    assert "Left out of the stack: matern (the time budget of 0 seconds was spent)" in result.stderr
    single = gpclml("fit", csv, *options[:-1], tmp_path / "other", "--model", "rbf")
    assert single.exit_code == 2
    assert "time_budget: got 0.0, expected none for a single GP" in single.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_new_tables_need_no_target_and_may_have_new_levels(csv, gpclml, tmp_path, fitted, diabetes):
    folder, _ = fitted("linear")
    odd = next(name for name in diabetes.columns if name.startswith("<b>"))
    table = diabetes.head(4).drop(columns=["progression", "clinic"])
    table.loc[1, odd] = "x"
    table.loc[2, "bp"] = None
    table.to_csv(tmp_path / "new.csv", index=False)
    result = gpclml("predict", folder, tmp_path / "new.csv", "--out", tmp_path / "out.csv")
    assert result.exit_code == 0
    written = pandas.read_csv(tmp_path / "out.csv")
    assert not written.isna().any(axis=None)
    said = "2 of 4 rows have values missing, or levels, where hardly any training row has that, in "
    assert f"{said}'bp', {odd!r}. Predictions are averages" in result.stderr
    assert "4 rows predicted" in result.stderr
    complete = diabetes.head(4).drop(columns=["progression", "clinic"])
    complete.to_csv(tmp_path / "new.csv", index=False)
    gpclml("predict", folder, tmp_path / "new.csv", "--out", tmp_path / "out.csv")
    spread, known = (
        frame["standard_deviation"] for frame in (written, pandas.read_csv(tmp_path / "out.csv"))
    )
    assert (spread > 1.001 * known).tolist() == [False, True, True, False]
    few = gpclml("fit", csv, "--target", "progression", "--model", "linear", "--rows", 40,
                 "--out", tmp_path / "few")  # fmt: skip
    assert "40 random rows of 129 are fitted, the limit of --rows." in few.stderr
    assert "linear fitted to 40 rows in" in few.stdout


@pytest.mark.slow
def test_what_cannot_be_predicted(csv, gpclml, tmp_path, fitted, report):
    folder, _ = fitted("linear")
    out = tmp_path / "out.csv"
    (tmp_path / "short.csv").write_text("bmi\n1\n2\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.csv").symlink_to(out)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    shutil.copy(report[0] / "models" / "linear" / "model.pt", other / "model.pt")
    (tmp_path / "texts.csv").write_text(csv.read_text().replace("\n", "\nunknown", 1))
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "model.json").write_bytes((folder / "model.json").read_bytes())
    unlike = tmp_path / "unlike"
    shutil.copytree(folder, unlike)
    (unlike / "model.json").write_text('{"format": "gpclml.TableModel", "version": 1}')
    for words, message in (
        ((tmp_path / "absent", csv), "There is no folder"),
        ((csv, csv), "is a file. Give a folder that 'gpclml fit' wrote."),
        ((tmp_path / "empty", csv), "holds no model. Give one that 'gpclml fit' wrote."),
        ((report[0], csv), "It is a report: give one of its models"),
        ((damaged, csv), "there is no file"),
        ((other, csv), f"{other / 'model.pt'} is not the file that"),
        ((unlike, csv), "model.json was written by another release. Move the folder"),
        ((folder, tmp_path / "absent.csv"), "There is no file"),
        ((folder, tmp_path / "short.csv"), "no column 'bp', 's5', "),
        ((folder, tmp_path / "texts.csv"), "column 'bmi': got 1 of 130 values such as 'unknown"),
        ((folder, csv, "--out", csv), "is there and holds no predictions of gpclml"),
        ((folder, csv, "--out", tmp_path), f"{tmp_path} is not a regular file"),
        ((folder, csv, "--out", tmp_path / "pipe"), "pipe is not a regular file"),
        ((folder, csv, "--out", csv / "out.csv"), f"there is no folder {csv}"),
        ((folder, csv, "--out", tmp_path / "absent" / "out.csv"), "there is no folder"),
        ((folder, csv, "--out", tmp_path / "link.csv"), "link.csv is not a regular file"),
    ):
        before = sorted(tmp_path.rglob("*"))
        default = () if "--out" in words else ("--out", out)
        result = gpclml("predict", *words, *default)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("Error: ")
        assert message in result.stderr
        assert sorted(tmp_path.rglob("*")) == before


def test_models_by_size():
    names, notes = default_models(400, 8)
    assert (names, notes) == (("linear", "rbf", "rq", "matern", "sm", "deep"), ())
    names, notes = default_models(2001, 8)
    assert names == ("linear", "rbf", "deep")
    assert [note.partition(" left out")[0] for note in notes] == ["rq and matern are", "sm is"]


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(60, generator=generator, dtype=torch.float64)
    return x, 30 * torch.sin(6 * x[:, 0]) + 2 * noise + 7


RECIPES = [Recipe(model, seed=1, steps=4) for model in MODELS[:-1]] + [
    Recipe("rbf", objective, seed=1, steps=4, restarts=1) for objective in OBJECTIVES
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*RECIPES, Recipe("deep", "clml", steps=1)], ids=str)
def test_fits_are_repeatable_and_gain(data, recipe):
    x, y = data
    if recipe.model == "deep":
        x, y = x[:24], y[:24]
    (model, note, _), (again, *_) = (recipe.fit(x, y, progress=False) for _ in range(2))
    torch.testing.assert_close(model.state_dict(), again.state_dict(), rtol=0, atol=0)
    assert note == "" or note.endswith(".")
    assert ("on held-out rows" in note) == (recipe.model == "deep")
    if recipe.model == "deep" or recipe.objective != "lml":
        return
    start, *_ = replace(recipe, steps=1, restarts=0).fit(x, y, progress=False)
    assert log_marginal_likelihood(model) > log_marginal_likelihood(start)


def test_the_linear_model_is_ridge_regression(data):
    x, y = data
    model, *_ = Recipe("linear").fit(x, y, progress=False)
    phi = torch.cat([torch.ones(60, 1).to(x), model.input_standardizer.transform(x)], dim=1)
    ratio = model.likelihood.noise / model.covar_module.prior_variance
    target = model.train_targets
    weights = torch.linalg.solve(phi.mT @ phi + ratio * torch.eye(3).to(x), phi.mT @ target)
    expected = model.target_standardizer.inverse(phi @ weights)
    torch.testing.assert_close(model.predict(x).mean, expected)


def test_the_spectral_mixture_starts_where_scattered_points_can_train_it():
    """From the smallest gap it starts as white noise and stays there."""
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(60, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(60, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * x[:, 0]) * x[:, 0] + 0.3 * noise
    model, *_ = Recipe("sm", seed=1).fit(x, y, progress=False)
    between = torch.linspace(0.5, 9.5, 100, dtype=torch.float64)
    errors = predicted(model, between[:, None]).mean - torch.sin(2 * between) * between
    assert errors.square().mean().sqrt() < 1  # the function's deviation is 4


def curved_data(d, n, seed):
    """A function of two numbers that d inputs are nearly functions of."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    weights = torch.randn(2, d, generator=generator, dtype=torch.float64)
    noise = 0.01 * torch.randn(n, d, generator=generator, dtype=torch.float64)
    return torch.tanh(z @ weights) + noise, torch.sin(5 * z[:, 0]) * z[:, 1]


@pytest.mark.slow
def test_the_rational_quadratic_does_not_end_below_the_rbf_that_it_contains():
    x, y = curved_data(8, 40, 3)
    rbf, rq = (Recipe(name).fit(x, y, progress=False).model for name in ("rbf", "rq"))
    assert log_marginal_likelihood(rq) > log_marginal_likelihood(rbf) - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 20, 4))
def test_no_fit_of_sixty_columns_ends_in_the_mean(seed):
    from sklearn.datasets import load_digits

    digits = load_digits()
    columns = digits.data.std(0).argsort()[-60:]
    rows = np.random.default_rng(seed).permutation(len(digits.data))[:300]
    x = torch.from_numpy(digits.data[rows][:, columns])
    y = torch.from_numpy(digits.target[rows]).double()
    model = GPRegression(x[:200], y[:200], "rbf", ard=False)
    result = fit_mll(ConditionalMarginalLogLikelihood(model.likelihood, model), progress=False)
    assert result.problem == ""
    error = model.predict(x[200:]).mean - y[200:]
    assert float(error.square().mean()) < 0.6 * float(y.var())
