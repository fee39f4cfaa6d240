"""Which kernels are known in closed form, and what is said of others."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel
from gram_kernels import network

from gpclml.gram import Gram, Reason, closed_form
from gpclml.kernels import DeepKernel


class OwnForward(RBFKernel):
    def forward(self, x1, x2, **options):
        return 2.0 * super().forward(x1, x2, **options)


def hooked():
    kernel = RBFKernel()
    kernel.register_forward_hook(lambda module, args, output: output)
    return kernel


def replaced():
    kernel = RBFKernel()
    kernel.forward = lambda x1, x2, **options: x1 @ x2.mT
    return kernel


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (OwnForward(), "OwnForward is a subclass of RBFKernel"),
        (ScaleKernel(OwnForward()), "OwnForward is a subclass of RBFKernel"),
        (RBFKernel() + OwnForward(), "OwnForward is a subclass of RBFKernel"),
        (RBFKernel() * OwnForward(), "OwnForward is a subclass of RBFKernel"),
        (hooked(), "RBFKernel has hooks, or a forward that was exchanged"),
        (replaced(), "RBFKernel has hooks, or a forward that was exchanged"),
        (ScaleKernel(replaced()), "RBFKernel has hooks, or a forward that was exchanged"),
        (gpytorch.kernels.PiecewisePolynomialKernel(), "PiecewisePolynomialKernel is not known"),
        (DeepKernel(network(), OwnForward()), "OwnForward is a subclass of RBFKernel"),
        (
            type("Own", (DeepKernel,), {})(network(), RBFKernel()),
            "Own is a subclass of DeepKernel",
        ),
    ],
)
def test_other_kernels_are_left_to_gpytorch_with_a_reason(kernel, words):
    reason = closed_form(kernel)
    assert isinstance(reason, Reason)
    assert str(reason).startswith(words)


def test_a_patched_parameter_makes_another_kernel():
    kernel = RBFKernel()
    torch.nn.utils.parametrize.register_parametrization(
        kernel, "raw_lengthscale", torch.nn.Softplus()
    )
    assert isinstance(closed_form(kernel), Reason)


def test_columns_are_selected_where_it_is_asked_for():
    kernel = LinearKernel(active_dims=(0, 2))
    called, forward = closed_form(kernel, select=True), closed_form(kernel)
    assert isinstance(called, Gram)
    assert isinstance(forward, Gram)
    assert called.rank(7) == 2
    assert forward.rank(7) == 7
