"""Matrix products whose result is known to be symmetric."""

from __future__ import annotations

from torch import Tensor

from gpclml._utils.arguments import checked

__all__ = ["symmetric_product"]

_PANEL = 256


@checked(late=True, left="float (*batch, n, k)", right="float (*batch, n, k)")
def symmetric_product(
    left: Tensor,  # shape: (*batch, n, k)
    right: Tensor,  # shape: (*batch, n, k)
) -> Tensor:
    """``left @ right.mT`` for a product that is symmetric: only its lower half is computed.

    Row panels stop at the diagonal and are mirrored, which saves up to half of the 2 n² k
    floating-point operations.

    Args:
        left: The left factor, ``(*batch, n, k)``.
        right: The right factor, ``(*batch, n, k)``.

    Returns:
        The product, ``(*batch, n, n)``, exactly symmetric off the diagonal panels.
    """
    n = left.shape[-2]
    if n < 2 * _PANEL:
        return left @ right.mT
    product = left.new_empty(*left.shape[:-1], n)
    for start in range(0, n, _PANEL):
        stop = min(start + _PANEL, n)
        panel = left[..., start:stop, :] @ right[..., :stop, :].mT
        product[..., start:stop, :stop] = panel
        product[..., :start, start:stop] = panel[..., :start].mT
    return product
