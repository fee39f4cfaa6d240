"""``python -m benchmarks.bo``."""

from benchmarks.bo.study import STUDY

if __name__ == "__main__":
    STUDY.make_app()(prog_name="python -m benchmarks.bo")
