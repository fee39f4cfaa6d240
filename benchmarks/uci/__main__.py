"""``python -m benchmarks.uci``."""

from benchmarks.uci.study import STUDY

if __name__ == "__main__":
    STUDY.make_app()(prog_name="python -m benchmarks.uci")
