"""Helpers of every package: checks of arguments, files, checkpoints, memory."""
