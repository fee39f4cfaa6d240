"""``python -m benchmarks.speed``."""

from benchmarks.speed.study import STUDY

if __name__ == "__main__":
    STUDY.make_app()(prog_name="python -m benchmarks.speed")
