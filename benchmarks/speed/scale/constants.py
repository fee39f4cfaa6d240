"""What a machine computes in a second: matrix products, Cholesky factors, kernel entries."""

from __future__ import annotations

from collections.abc import Callable

import gpytorch
import pandas as pd
import torch
from torch import Tensor

from benchmarks.speed.timing import interleaved_times

__all__ = ["machine_constants"]

_INPUTS = 8


def machine_constants(
    n: int, dtype: torch.dtype, device: str = "cpu", columns: int = 257, rounds: int = 5
) -> pd.DataFrame:
    """Rates at one size, medians of rounds.

    Args:
        n: Rows of the matrices.
        dtype: Of the numbers; TF32 is whatever torch's setting says, off by default.
        device: Where.
        columns: Of the matrix that the covariance is multiplied with: a block and the targets.
        rounds: In which each is timed once.

    Returns:
        One row: 10⁹ floating-point operations a second of n x n times n x n and of n x n times
        n x columns, of a Cholesky factor; and 10⁹ entries a second of an RBF kernel of 8 inputs.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, _INPUTS, generator=generator).to(device, dtype)
    kernel = gpytorch.kernels.RBFKernel(ard_num_dims=_INPUTS).to(device, dtype)
    with torch.no_grad():
        K = kernel(x).to_dense()
        definite = K + torch.eye(n, dtype=dtype, device=device)
        wide = K[:, :columns].contiguous()
        steps: dict[str, Callable[[], Tensor]] = {
            "product": lambda: K @ K,
            "tall product": lambda: K @ wide,
            "Cholesky": lambda: torch.linalg.cholesky(definite),
            "kernel": lambda: kernel(x, x + 1).to_dense(),
        }
        seconds = interleaved_times(steps, rounds, device).median()
    work = {
        "product": 2 * n**3, "tall product": 2 * n**2 * columns, "Cholesky": n**3 / 3,
        "kernel": n**2,
    }  # fmt: skip
    rates = {name: work[name] / seconds[name] / 1e9 for name in steps}
    kind = str(dtype).removeprefix("torch.")
    return pd.DataFrame([{"n": n, "dtype": kind, "columns": columns, **rates}])
