from __future__ import annotations

import pytest
import torch

from gpclml.linalg import permute, take, take_rows

N, BATCH = 5, (2, 3)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("b", [1, 3, N])
def test_as_by_plain_indexing(own, b):
    orders = [torch.randperm(N)[:b] for _ in range(6)] if own else [torch.randperm(N)[:b]] * 6
    order = torch.stack(orders).reshape(*BATCH, b) if own else orders[0]
    vector, matrix = torch.randn(*BATCH, N), torch.randn(*BATCH, N, N)
    rectangle = torch.randn(*BATCH, N, 2)
    members = zip(orders, vector.reshape(6, N), matrix.reshape(6, N, N), strict=True)
    for place, (one, v, M) in enumerate(members):
        member = divmod(place, BATCH[1])
        assert torch.equal(take(vector, order)[member], v[one])
        assert torch.equal(permute(matrix, order)[member], M[one][:, one])
        assert torch.equal(take_rows(rectangle, order)[member], rectangle[member][one])
