"""Command line: ``python -m benchmarks.gpu PART``, and ``page`` at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from typer import Option

from benchmarks._options import check_device, errors_as_text
from benchmarks.gpu import large, speed, studies
from benchmarks.gpu.machine import check_machine
from benchmarks.gpu.page import write_page
from benchmarks.gpu.records import Records
from benchmarks.gpu.timing import warm_up

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="What a machine with a GPU is asked. What is finished is kept; run again for the rest.",
)  # fmt: skip

Results = Annotated[Path, Option("--results", help="Folder of results.")]
Device = Annotated[str, Option(help="cuda, cuda:1; cpu to try the commands.")]
Small = Annotated[bool, Option("--small", help="Tiny sizes.")]
Minutes = Annotated[float | None, Option(min=0, help="Start nothing new after so many.")]
Retry = Annotated[bool, Option("--retry", help="Measure again what failed.")]
WithoutCpu = Annotated[bool, Option("--without-cpu", help="Nothing on the CPU beside the card.")]

_RESULTS = Path("gpu-results")
_MINUTES = 8.0


def _start(results: Path, device: str, part: str) -> None:
    check_device(device)
    torch.set_float32_matmul_precision("highest")  # no TF32, in convolutions neither
    torch.backends.cudnn.allow_tf32 = False
    warm_up(device)
    machine = check_machine(results, device)
    told = "".join(f"# {name}: {value}\n" for name, value in machine.items())
    print(f"# python -m benchmarks.gpu {part}\n{told}", end="", flush=True)


def _add_part(part: str, run: Callable[[Records, str, bool], None], about: str) -> None:
    """A command of a part's name, with the options that all measured parts have."""

    def command(
        results: Results = _RESULTS,
        device: Device = "cuda",
        small: Small = False,
        minutes: Minutes = _MINUTES,
        retry: Retry = False,
        without_cpu: WithoutCpu = False,
    ) -> None:
        with errors_as_text():
            _start(results, device, part)
            records = Records(
                results, part, minutes, retry, without_cpu=without_cpu and device != "cpu"
            )
            run(records, device, small)
        if records.left_out:
            print(f"\n{records.left_out} left: the time was over; run it again", flush=True)

    app.command(part, help=about)(command)


_add_part("speed", speed.run, "Steps and fits beside GPyTorch's, BoTorch's and the CPU's; memory.")
_add_part("studies", studies.run, "Batched fits, few-shot steps, the evidence of networks.")
_add_part("large", large.run, "Exact fits of up to 20,000 points, by kernel and objective.")


@app.command()
def page(results: Results = _RESULTS) -> None:
    """Writes the page and the CSV file into the folder of results."""
    with errors_as_text():
        print(write_page(results))


if __name__ == "__main__":
    app()
