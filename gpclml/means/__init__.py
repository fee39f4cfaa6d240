"""Mean functions, as GPyTorch means."""

from gpclml.means.network import NetworkMean

__all__ = ["NetworkMean"]
