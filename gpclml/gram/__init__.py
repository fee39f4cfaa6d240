"""Kernels in closed form: the matrix at points and its vector-Jacobian product, on any device.

:func:`closed_form` says which kernels of GPyTorch are known here, and gives them as a
:class:`Gram`, a function of points; of any other kernel it says why it is evaluated by GPyTorch.
Nothing here knows of factorizations or densities.
"""

from gpclml.gram.autograd import Evaluated, Gradients, matrix_node, precomputed
from gpclml.gram.kernels import (
    DOUBLE_UP_TO,
    PROFILES,
    Gram,
    Hyperparameter,
    Reason,
    Transform,
    closed_form,
    has_hooks,
    transform_of,
)

__all__ = [
    "DOUBLE_UP_TO",
    "PROFILES",
    "Evaluated",
    "Gradients",
    "Gram",
    "Hyperparameter",
    "Reason",
    "Transform",
    "closed_form",
    "has_hooks",
    "matrix_node",
    "precomputed",
    "transform_of",
]
