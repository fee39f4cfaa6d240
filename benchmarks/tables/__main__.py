"""``python -m benchmarks.tables``."""

from benchmarks.tables.study import STUDY

if __name__ == "__main__":
    STUDY.make_app()(prog_name="python -m benchmarks.tables")
