"""Times of steps taken in turn, their ratios round by round, and how tables of them are told.

Every round takes each step once, so that whatever slows the machine for a while slows all
methods alike; a ratio is formed within its round only.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args

import pandas as pd
import torch
from typer import Option

from benchmarks._options import errors_as_text, options_of, with_options
from benchmarks._tables import command_lines
from gpclml.errors import ArgumentError, UnknownNameError

__all__ = [
    "Csv",
    "Device",
    "Rounds",
    "Threads",
    "cpu_name",
    "interleaved_times",
    "print_tables",
    "ratio_table",
    "ratios",
    "sweep_command",
    "wait_for",
]  # fmt: skip

Csv = Annotated[Path | None, Option(help="Write the table there as well.")]
Device = Annotated[str, Option(help="cpu, cuda or cuda:1")]
Rounds = Annotated[int, Option(min=1, help="Rounds.")]
Threads = Annotated[int, Option(min=1, help="CPU threads.")]


def print_tables(
    program: str,
    tables: Iterable[pd.DataFrame],
    *,
    device: str = "cpu",
    threads: int | None = None,
    csv: Path | None = None,
    digits: str = ".2f",
    joined: bool = False,
) -> None:
    """Prints tables as they come, below the command, the versions and the machine.

    The CSV file is written after each table, so that a long run that is stopped keeps what it has.
    ``joined`` tables are further rows of the first.
    """
    if threads:
        torch.set_num_threads(threads)
    machine = f"# {_device_name(device)}, {torch.get_num_threads()} CPU threads"
    header = f"{command_lines(program)}\n{machine}"
    print(header, flush=True)
    done: list[pd.DataFrame] = []
    for table in tables:
        shown = table.to_string(
            index=False, header=not (joined and done), float_format=lambda x: format(x, digits)
        )
        print(shown if joined else f"\n{shown}", flush=True)
        done.append(table)
        if csv:
            csv.write_text(f"{header}\n{pd.concat(done).to_csv(index=False)}")


def sweep_command(
    program: str,
    measure: Callable[..., pd.DataFrame],
    over: Mapping[str, Sequence[object]],
    about: str,
    *,
    digits: str = ".2f",
    threads: int | None = 1,
    **defaults: object,
) -> Callable[..., None]:
    """A command that prints the tables of every combination of some arguments.

    Arguments of ``measure`` with a ``typer.Option`` are options. Those of ``over`` may be given
    several times, the outermost first; their values and ``defaults`` count where none are given.
    """

    def main(csv: Csv = None, **options: Any) -> None:
        threads = options.pop("threads")
        values = itertools.product(*(options.pop(name) for name in over))
        tables = (measure(**dict(zip(over, some, strict=True)), **options) for some in values)
        device = options.get("device", "cpu")
        with errors_as_text():
            print_tables(program, tables, device=device, threads=threads, csv=csv, digits=digits)

    parameters = []
    for name, one in options_of(measure).items():
        kind, option = get_args(one.annotation)
        default = defaults.get(name, one.default)
        if name in over:
            kind, default = list[kind], list(over[name])
        parameters.append(one.replace(annotation=Annotated[kind, option], default=default))
    kind = Annotated[int | None, Option(min=1, help="CPU threads; torch's if not given.")]
    of_threads = Parameter("threads", Parameter.KEYWORD_ONLY, default=threads, annotation=kind)
    main.__doc__ = about
    return with_options(main, [*parameters, of_threads])


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        name, precision = torch.cuda.get_device_name(device), torch.get_float32_matmul_precision()
        return f"{name}, precision of float32 products: {precision} (TF32 if high)"
    return cpu_name()


def cpu_name() -> str:
    """The name of the processor, as the system gives it."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def interleaved_times(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str | torch.device = "cpu",
    warm_up: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> pd.DataFrame:
    """Time of every step in every round, in seconds, by the wall's clock unless another is given.

    A first round that is not kept warms up allocators and libraries. The order is rotated by
    one each round. The table has a row a round and a column a step.
    """
    if rounds < 1:
        raise ArgumentError("rounds", rounds, "an integer of at least 1")
    names = list(steps)
    for name in names if warm_up else []:
        _seconds(steps[name], device, clock)
    rows = []
    for turn in range(rounds):
        start = turn % len(names)
        times = {
            name: _seconds(steps[name], device, clock) for name in names[start:] + names[:start]
        }
        rows.append(times)
    return pd.DataFrame(rows, columns=names)


def _seconds(
    step: Callable[[], object], device: str | torch.device, clock: Callable[[], float]
) -> float:
    wait_for(device)
    start = clock()
    step()
    wait_for(device)
    return clock() - start


def wait_for(device: str | torch.device) -> None:
    """Until all that is queued on a GPU is done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def ratios(times: pd.DataFrame, base: str) -> pd.DataFrame:
    """Each step's time over the base's in the same round: median and quartiles over rounds."""
    if base not in times:
        raise UnknownNameError("base", base, times.columns)
    quantiles = times.div(times[base], axis=0).quantile([0.5, 0.25, 0.75]).T
    return quantiles.set_axis(["median", "low", "high"], axis=1)


def ratio_table(
    times: pd.DataFrame, base: str, *, ratio: str, name: str, more: Mapping[str, object]
) -> pd.DataFrame:
    """A row a step: what is said of it (``more``), then ratios to a base with their quartiles."""
    table = ratios(times, base).rename(columns={"median": ratio})
    for place, (column, values) in enumerate(more.items()):
        table.insert(place, column, values)
    return table.rename_axis(name).reset_index()
