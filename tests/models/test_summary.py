"""Hyperparameters as a table: names, units, batches, networks, and what notebooks show."""

import gpytorch
import pandas as pd
import pytest
import torch

from gpclml import Laplace, StackedGP
from gpclml.fit import FitResult
from gpclml.models import BayesianLinearModel, GPRegression


def frame():
    return pd.DataFrame({"age": [10.0, 20, 40, 30, 60], "height": [1.5, 1.2, 1.9, 1.6, 1.7]})


def test_lengthscales_noise_and_mean_are_also_in_the_units_of_the_data():
    y = pd.Series([3.0, 1, 4, 1, 5])
    model = GPRegression(frame(), y, "rbf")
    model.covar_module.base_kernel.lengthscale = [2.0, 3.0]
    model.likelihood.noise = 0.25
    model.covar_module.outputscale = 4.0
    model.mean_module.initialize(constant=0.5)
    table = model.summary()
    assert table.loc["RBFKernel.lengthscale[age]", "value"] == pytest.approx(2.0)
    expected = {
        "RBFKernel.lengthscale[age]": 2.0 * frame().age.std(),
        "RBFKernel.lengthscale[height]": 3.0 * frame().height.std(),
        "GaussianLikelihood.noise": 0.25 * y.var(),
        "ScaleKernel.outputscale": 4.0 * y.var(),
        "ConstantMean.constant": y.mean() + 0.5 * y.std(),
    }
    assert table.original.to_dict() == pytest.approx(expected)
    linear = BayesianLinearModel(torch.rand(9, 3), torch.rand(9), noise=0.5).summary()
    assert linear.loc["GaussianLikelihood.noise"].tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("kernel", ["deep", "deep_bottleneck"])
def test_weights_of_networks_are_counted_and_lengthscales_of_features_have_no_units(kernel):
    model = GPRegression(torch.rand(9, 2), torch.rand(9), kernel, hidden=[4], num_features=2)
    table = model.summary()
    inside = sum(p.numel() for p in model.covar_module.base_kernel.feature_extractor.parameters())
    assert f"{inside} weights of networks" in table.index
    rows = table[table.index.str.contains("lengthscale")]
    assert len(rows) >= 2
    assert rows.original.isna().all()


def test_lengthscales_of_inputs_beside_features_have_the_units_of_their_columns():
    y = pd.Series([3.0, 1, 4, 1, 5])
    model = GPRegression(frame(), y, "deep_joint", hidden=[4], num_features=3)
    summary = model.summary()
    lengthscales = summary[summary.index.str.contains("MaternKernel.lengthscale")]
    assert lengthscales.value.tolist() == pytest.approx([2**0.5] * 2 + [1.0] * 3)
    expected = (2**0.5 * frame().std()).tolist()
    assert lengthscales.original.tolist() == pytest.approx(
        [*expected, *[float("nan")] * 3], nan_ok=True
    )


def test_a_scale_inside_a_product_has_no_units():
    kernel = gpytorch.kernels.ScaleKernel(
        gpytorch.kernels.RBFKernel() * gpytorch.kernels.ScaleKernel(gpytorch.kernels.LinearKernel())
    )
    model = GPRegression(torch.rand(9, 3), 5 * torch.rand(9), kernel)
    scales = model.summary().loc["ScaleKernel.outputscale", "original"]
    assert scales.isna().tolist() == [False, True]
    assert model.summary().loc["RBFKernel.lengthscale", "original"] != 0  # of three columns: none
    assert pd.isna(model.summary().loc["RBFKernel.lengthscale", "original"])


def test_a_batch_has_a_row_for_each_element():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 8, 3, generator=generator), torch.rand(2, 8, generator=generator)
    table = GPRegression(x, y, "rbf").summary()
    for k in range(2):
        alone = GPRegression(x[k], y[k], "rbf").summary().original
        assert table.loc[f"GaussianLikelihood.noise[{k}]", "original"] == pytest.approx(
            alone["GaussianLikelihood.noise"], rel=1e-5
        )
        for j in range(3):
            assert table.loc[f"RBFKernel.lengthscale[{k}, {j}]", "original"] == pytest.approx(
                alone[f"RBFKernel.lengthscale[{j}]"], rel=1e-5
            )


def test_a_notebook_shows_it_escaped():
    x = frame().rename(columns={"age": "<b>"})
    shown = GPRegression(x, pd.Series([3.0, 1, 4, 1, 5]), "rbf")._repr_html_()
    assert "<b>" not in shown
    assert "RBFKernel.lengthscale[&lt;b&gt;]" in shown
    assert "training inputs 5 x 2" in shown


def test_fits_stacks_and_posteriors_tell_what_they_are():
    shown = FitResult(objective=-1.5, history=[0.0] * 99, seconds=2.0, message="a < b")
    assert "history" not in repr(shown) + shown._repr_html_()
    assert "<td>-1.5</td>" in shown._repr_html_()
    assert "a &lt; b" in shown._repr_html_()
    x = torch.linspace(0, 1, 12, dtype=torch.float64).unsqueeze(-1)
    stack = StackedGP(["linear"])
    assert repr(stack) == "StackedGP(linear: not fitted)"
    assert stack._repr_html_() == "<pre>StackedGP(linear: not fitted)</pre>"
    stack.fit(x, x.squeeze(-1).sin())
    assert repr(stack) == "StackedGP(1.00 linear)"
    assert "<th>linear</th>" in stack._repr_html_()
    assert repr(stack.predict(x[:3])) == "StackedPrediction(3 rows, 1 components)"
    posterior = Laplace(torch.nn.Linear(1, 1).double(), "regression", structure="full")
    assert repr(posterior) == "Laplace(Linear, regression, Full, weights='last': not fitted)"
    posterior.fit((x, x.squeeze(-1)), precision=1.0)
    assert repr(posterior).endswith("weights='last': 12 points)")
