"""``python -m benchmarks.dkt``."""

from benchmarks.dkt.commands import app

if __name__ == "__main__":
    app(prog_name="python -m benchmarks.dkt")
