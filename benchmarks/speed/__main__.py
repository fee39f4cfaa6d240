"""Command line: ``python -m benchmarks.speed --n 1000 --dtype float32``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer

from benchmarks.speed.header import describe_run
from benchmarks.speed.study import measure


class Dtype(StrEnum):
    """A floating-point type by name."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


SIZES = [250, 500, 1000, 2000, 4000]
DTYPES = [Dtype.FLOAT32, Dtype.FLOAT64]


def main(
    n: Annotated[list[int], typer.Option(help="Number of points; may be repeated.")] = SIZES,
    dtype: Annotated[list[Dtype], typer.Option(help="Number type; may be repeated.")] = DTYPES,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds a size [default: fewer at large n]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads [default: torch's]")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    csv: Annotated[Path | None, typer.Option(help="Write the table there as well.")] = None,
) -> None:
    """Time and memory of gradient steps, relative to GPyTorch's LML step by Cholesky."""
    if threads:
        torch.set_num_threads(threads)
    header = describe_run("benchmarks.speed", device)
    print(header, flush=True)
    tables = []
    for kind in dtype:
        for size in n:
            table = measure(size, getattr(torch, kind.value), device, rounds, memory)
            print(f"\n{table.to_string(index=False, float_format='%.2f')}", flush=True)
            tables.append(table)
            if csv:  # after each size: a long run that is stopped keeps what it has
                rows = pd.concat(tables).to_csv(index=False)
                csv.write_text(f"{header}\n{rows}")


if __name__ == "__main__":
    typer.run(main)
