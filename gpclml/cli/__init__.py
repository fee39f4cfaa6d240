"""The command ``gpclml``: compare, fit and predict, for people with a table."""

from gpclml.cli.app import app, main

__all__ = ["app", "main"]
