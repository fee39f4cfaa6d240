"""What needs a package that is not installed says which extra has it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gpclml import GPRegression, plot_compare


def run_without(package, *words):
    code = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        "from gpclml.__main__ import main\n"
        f"sys.argv = ['gpclml', *{list(words)!r}]\n"
        "main()\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("package", ["typer", "jinja2", "matplotlib"])
def test_the_command_without_a_package(package, csv):
    done = run_without(package, "compare", str(csv), "--target", "progression")
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: This needs {package}, which is not installed. Install it by pip install "
        "'gpclml[tables]'.\n"
    )


def test_fits_need_no_package_of_pages(csv, tmp_path):
    words = "fit", str(csv), "--target", "progression", "--model", "linear", "--quiet"
    done = run_without("jinja2", *words, "--out", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr


def test_a_plot_without_matplotlib(monkeypatch):
    x = torch.linspace(0, 1, 12, dtype=torch.float64).unsqueeze(-1)
    models = {name: GPRegression(x, x[:, 0].sin(), name) for name in ("rbf", "matern")}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib.*pip install 'gpclml\[plots\]'"):
        plot_compare(models)
