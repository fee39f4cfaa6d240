"""``python -m benchmarks.uci``."""

from benchmarks.uci.commands import app

if __name__ == "__main__":
    app(prog_name="python -m benchmarks.uci")
