"""Mean functions, as GPyTorch means."""

from gpclml.means.linearized import LinearizedMean
from gpclml.means.network import NetworkMean

__all__ = ["LinearizedMean", "NetworkMean"]
