"""The command ``gpclml``: compare, fit and predict, for people with a table."""

from gpclml.command_line.app import app, main

__all__ = ["app", "main"]
