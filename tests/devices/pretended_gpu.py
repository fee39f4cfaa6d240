"""A stand-in for a GPU, for machines that have none.

Inside :func:`pretended_gpu` tensors can be put on ``"cuda"``. They say that they are there, and the
CPU computes their values, so results can be compared with those of the CPU. What a GPU would refuse
raises: operations on tensors of two devices, generators of the CPU, and conversions to NumPy.
PyTorch itself takes them for tensors on its ``meta`` device, which needs no driver; everything that
Python code sees says ``cuda:0``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
_STAND_IN = torch.device("meta")
_CPU = torch.device("cpu")

_TAKE_DEVICE_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_FROM_BOTH = {"_to_copy", "copy_", "copy"}  # these copy between devices
_CPU_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_"}
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero"}


class PretendedTensor(Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    # Arguments arrive in __torch_dispatch__ below; there is nothing to do for functions.
    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendedTensor:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, layout=inner.layout, device=_STAND_IN,
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    device = property(lambda self: _Devices.gpu)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: PretendedTensor) -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.inner!r} on a pretended GPU"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, PretendedTensor)]
    device = kwargs.get("device")
    on_gpu = bool(ours) if device is None else torch.device(device).type == _STAND_IN.type
    if ours:
        _check_devices(func, name, args, tensors)
        if name in _READS or (name == "_to_copy" and not on_gpu):
            _reads[name] += 1
    generator = kwargs.get("generator")
    if on_gpu and generator is not None:
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu': {func}")
    if device is not None:
        kwargs = {**kwargs, "device": _CPU}
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if not on_gpu:
        return out
    # What was changed in place is the same object.
    known = {id(tensor.inner): tensor for tensor in ours}

    def wrap(value: Any) -> Any:
        if type(value) is not Tensor:
            return value
        return known[id(value)] if id(value) in known else PretendedTensor(value)

    return tree_map(wrap, out)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, PretendedTensor) else value


def _check_devices(func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
    """Raises where a GPU would: only numbers (no dimensions) and indices may be on the CPU."""
    if name in _FROM_BOTH:
        return
    for position, tensor in enumerate(tensors):
        is_number = tensor.ndim == 0 and torch.Tag.pointwise in func.tags
        if isinstance(tensor, PretendedTensor) or is_number:
            continue
        is_index = name in _CPU_INDICES and position > 0 and not tensor.is_floating_point()
        if is_index and isinstance(args[0], PretendedTensor):
            _reads["CPU index"] += 1
            continue
        message = "Expected all tensors to be on the same device, but"
        raise RuntimeError(f"{message} {name} got one on cpu, of shape {tuple(tensor.shape)}")


_reads: Counter[str] = Counter()


class _Factories(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})


class _Devices(TorchFunctionMode):
    """Gives PyTorch its ``meta`` device where it is asked for the GPU that is pretended."""

    gpu = GPU

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0].to(_known_device(torch.device("cuda")))
        if func is Tensor.new_tensor:
            kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
            func, args = torch.tensor, args[1:]
        if func in _TAKE_DEVICE_OF_DATA and (device := kwargs.pop("device", None)) is not None:
            return func(*args, **kwargs).to(_stand_in(device))
        if "device" in kwargs:
            kwargs["device"] = _stand_in(kwargs["device"])
        if func is Tensor.to:
            args = (args[0], *map(_stand_in, args[1:]))
        return func(*tree_map(_known_device, args), **tree_map(_known_device, kwargs))


def _stand_in(value: Any) -> Any:
    """The device to ask PyTorch for, of a device or its name."""
    return _known_device(torch.device(value)) if isinstance(value, str) else _known_device(value)


def _known_device(value: Any) -> Any:
    if not isinstance(value, torch.device) or value.type != "cuda":
        return value
    if (value.index or 0) != _Devices.gpu.index:
        raise RuntimeError(f"a tensor is put on {value}, where all others are on {_Devices.gpu}")
    return _STAND_IN


@contextlib.contextmanager
def pretended_gpu(index: int = 0) -> Iterator[Counter[str]]:
    """Lets tensors be put on a GPU that does not exist.

    Args:
        index: Which; ``"cuda"`` is the first one, and another than this one is refused.

    Yields:
        How often values were read by the host, each of which a GPU's queue would wait for.
    """
    _reads.clear()
    run_backward = torch.autograd.graph._engine_run_backward

    def run_backward_on_gpu(*args: Any, **kwargs: Any) -> Any:
        with _Devices():  # PyTorch leaves this mode for the calls that arrive here
            return run_backward(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, _Devices(), _Factories():
        patch.setattr(_Devices, "gpu", torch.device("cuda", index))
        patch.setattr(torch.autograd.graph, "_engine_run_backward", run_backward_on_gpu)
        patch.setattr(torch.autograd, "_engine_run_backward", run_backward_on_gpu)
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**34, 2**34))
        for name in ("memory_reserved", "memory_allocated"):
            patch.setattr(torch.cuda, name, lambda device=None: 0)
        patch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: None)
        patch.setattr(torch.cuda, "default_generators", (index + 1) * (torch.default_generator,))
        yield _reads
