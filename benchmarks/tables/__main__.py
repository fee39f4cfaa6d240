"""``python -m benchmarks.tables``."""

from benchmarks.tables.classes import CLASSES
from benchmarks.tables.large import LARGE
from benchmarks.tables.study import STUDY

if __name__ == "__main__":
    app = STUDY.make_app()
    app.add_typer(CLASSES.make_app(), name="classes")
    app.add_typer(LARGE.make_app(), name="large")
    app(prog_name="python -m benchmarks.tables")
