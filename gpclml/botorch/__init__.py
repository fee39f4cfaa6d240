"""Models for BoTorch. Importing this package imports BoTorch; ``import gpclml`` does not."""

from gpclml.botorch.deep_kernel_gp import DeepKernelGP

__all__ = ["DeepKernelGP"]
