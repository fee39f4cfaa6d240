"""The command ``gpclml``: compares models of a table, fits one of them, predicts with it."""

from gpclml.cli.app import app, main

__all__ = ["app", "main"]
