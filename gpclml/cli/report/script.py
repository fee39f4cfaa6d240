"""A Python file that rebuilds a model of a report from the same table."""

from __future__ import annotations

from pathlib import Path

from gpclml._utils.arguments import checked
from gpclml.cli.report.recipes import Recipe

__all__ = ["script_of"]

_IMPORTS = {
    "gpclml.conditioning": ("KFold", "LastPoints", "LeaveOneOut"),
    "gpclml.fit": ("fit_mll", "fit_networks"),
    "gpclml.kernels": ("FeatureKernel", "IdentityFeatures", "initialize_spectral_mixture"),
    "gpclml.mlls": ("ConditionalMarginalLogLikelihood",),
    "gpclml.models": ("GPRegression",),
    "gpclml.cli.report": ("predicted", "prediction_scores"),
    "gpclml.evaluation": ("leave_one_out", "log_marginal_likelihood"),
    "gpclml.cli.tables": ("TableEncoding", "read_table", "split_rows"),
}


@checked
def script_of(
    recipe: Recipe, data: Path, most_rows: int, split_seed: int, version: str, one_thread: bool
) -> str:
    """The text of the file.

    It reads the table and ``table.json`` beside itself, takes the same rows, encodes and fits
    them alike, and prints LML and LOO of the training rows and the scores of the test rows.

    Args:
        recipe: Of the model.
        data: The table; another one may be named when the file is run.
        most_rows: Rows to train on, at most.
        split_seed: Of the rows.
        version: Of gpclml.
        one_thread: Whether the model was fitted on one thread; so is this one then, which rounds
            alike.
    """
    body = [
        "HERE = Path(__file__).resolve().parent",
        f"DATA = sys.argv[1] if len(sys.argv) > 1 else {str(data)!r}",
        "",
        'encoding = TableEncoding.load(HERE / "table.json")',
        "table = read_table(DATA, missing=encoding.missing)",
        f"rows = split_rows(encoding.targets(table), seed={split_seed}, most_rows={most_rows})",
        "x, y = encoding.tensors(table.iloc[rows.train])",
        "test_x, test_y = encoding.tensors(table.iloc[rows.test])",
        "",
        *(["torch.set_num_threads(1)  # as in the report: rounds alike"] if one_thread else []),
        *recipe.lines(),
        "",
        "print(f\"lml {log_marginal_likelihood(model, units='original'):.4f}\")",
        "print(f\"loo {leave_one_out(model, units='original').sum():.4f}\")",
        "scores = prediction_scores(test_y, *predicted(model, test_x))",
        'print(f"test_rmse {scores.rmse:.6g}")',
        'print(f"test_nll {scores.nll:.4f}")',
        'print(f"test_coverage {scores.coverage:.3f}")',
    ]
    return "\n".join([*_head(recipe, version), *_imports("\n".join(body)), "", *body, ""])


def _head(recipe: Recipe, version: str) -> list[str]:
    return [
        f'"""Rebuilds the model {recipe.model!r} of the report beside it (gpclml {version}).',
        "",
        "Run it, with the path of the table if that has moved: it prints the report's scores.",
        '"""',
        "",
    ]


def _imports(body: str) -> list[str]:
    lines = ["import sys", "from pathlib import Path", ""]
    if "torch." in body:
        lines += ["import torch", ""]
    for module, names in _IMPORTS.items():
        used = [name for name in names if f"{name}(" in body or f"{name}." in body]
        if used:
            lines.append(f"from {module} import {', '.join(used)}")
    return lines
