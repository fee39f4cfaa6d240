"""``python -m benchmarks.evidence``."""

from benchmarks.evidence.study import STUDY, report

if __name__ == "__main__":
    STUDY.make_app(report)(prog_name="python -m benchmarks.evidence")
