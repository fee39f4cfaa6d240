"""Kernels in closed form: the matrix at points and its vector-Jacobian product, on any device.

:func:`closed_form` says which kernels of GPyTorch are known here, and gives them as a
:class:`Gram`, a function of points; of any other kernel it says why it is evaluated by GPyTorch.
Nothing here knows of factorizations or densities.
"""

from gpclml.gram.autograd import Evaluated, Gradients, as_matrix, precomputed
from gpclml.gram.closed_form import Reason, closed_form
from gpclml.gram.hyperparameters import Hyperparameter, Transform, transform_of
from gpclml.gram.kernels import DOUBLE_UP_TO, Gram
from gpclml.gram.profiles import PROFILES

__all__ = [
    "DOUBLE_UP_TO",
    "PROFILES",
    "Evaluated",
    "Gradients",
    "Gram",
    "Hyperparameter",
    "Reason",
    "Transform",
    "as_matrix",
    "closed_form",
    "precomputed",
    "transform_of",
]
