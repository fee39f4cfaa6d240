"""``python -m benchmarks.evidence``."""

from benchmarks.evidence.commands import app

if __name__ == "__main__":
    app(prog_name="python -m benchmarks.evidence")
