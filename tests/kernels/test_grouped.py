"""Products of groups of rows with the matrix of each group."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.kernels import ops


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 0, 0), (0, 12, 0, 0), (3, 3, 3, 3)])
def test_rows_are_multiplied_by_the_matrix_of_their_group_and_padding_gives_zero(counts):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 8)).astype(np.float32)
    w = rng.standard_normal((4, 8, 6)).astype(np.float32)
    group = np.repeat(np.arange(4), counts)
    out = np.asarray(ops.grouped(x, w, np.array(counts, np.int32)))
    right = np.einsum("tk,tkn->tn", x[: len(group)], w[group])
    np.testing.assert_allclose(out[: len(group)], right, rtol=1e-5, atol=1e-5)
    assert (out[len(group) :] == 0).all()
