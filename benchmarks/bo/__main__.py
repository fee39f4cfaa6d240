"""``python -m benchmarks.bo``."""

from benchmarks.bo.commands import app

if __name__ == "__main__":
    app(prog_name="python -m benchmarks.bo")
