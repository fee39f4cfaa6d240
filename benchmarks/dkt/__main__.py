"""``python -m benchmarks.dkt``."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks._options import errors_as_text, names
from benchmarks.dkt.examples import draw_examples
from benchmarks.dkt.study import STUDY

app = STUDY.make_app()


@app.command()
def examples(
    figure: Annotated[Path, typer.Option(help="The PNG file to draw.")],
    study: Annotated[str, typer.Option(help="Studies of images, comma-separated.")],
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of the tasks.")] = 0,
) -> None:
    """Draw a test task of each study: the images to learn from and some to predict."""
    with errors_as_text():
        draw_examples(names(study, "study"), figure, seed)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.dkt")
