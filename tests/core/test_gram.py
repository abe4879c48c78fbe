"""Inner products: exact where float32 would not be, in chunks as at once, and the helpers built on them."""

import pytest
import torch

from openrlhf_ebft.core.gram import CHUNK_COLUMNS, group_gram, siblings_mean, unit_gram, unit_rows


def test_products_with_the_ground_truth_last():
    phi, gt = torch.tensor([[3.0, 0, 0], [0, 4, 0]]), torch.tensor([3.0, 4, 12])
    gram = group_gram(phi, gt)
    assert gram.dtype == torch.float64
    assert gram.tolist() == [[9, 0, 9], [0, 16, 16], [9, 16, 169]]


def test_products_keep_what_float32_sums_lose():
    phi = torch.tensor([[1.0, 1e-6, 0], [1.0, 0, 1e-6]])
    smallest = torch.linalg.eigvalsh(group_gram(phi, torch.ones(3))[:2, :2])[0].item()
    assert smallest == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_chunks_equal_one_einsum(dtype):
    torch.manual_seed(0)
    dim = 2 * CHUNK_COLUMNS + 77
    phi, gt = torch.randn(3, 5, 4, dim).to(dtype).requires_grad_(), torch.randn(3, 5, dim).to(dtype)
    rows = torch.cat([phi.detach(), gt.unsqueeze(-2)], dim=-2).double()
    gram = group_gram(phi, gt)
    assert not gram.requires_grad
    torch.testing.assert_close(gram, torch.einsum("...id,...jd->...ij", rows, rows), atol=1e-9, rtol=1e-12)


def test_unit_gram_holds_cosines_and_zero_rows():
    torch.manual_seed(1)
    phi, gt = torch.randn(2, 3, 8), torch.randn(2, 8)
    phi[0, 1] = 0
    cosines = unit_gram(group_gram(phi, gt))
    rows = torch.nn.functional.normalize(torch.cat([phi, gt.unsqueeze(1)], 1).double(), dim=-1)
    torch.testing.assert_close(cosines, rows @ rows.mT, atol=1e-9, rtol=1e-9)
    assert (cosines[0, 1] == 0).all()
    assert (cosines[1].diagonal() == 1).all()


def test_unit_rows_neither_overflow_nor_vanish():
    rows = torch.tensor([[3e30, 4e30], [3e-30, 4e-30], [0, 0]])
    torch.testing.assert_close(unit_rows(rows), torch.tensor([[0.6, 0.8], [0.6, 0.8], [0, 0]]))
    assert unit_rows(rows.half()).dtype == torch.float32


def test_siblings_mean_leaves_the_diagonal_out():
    products = torch.tensor([[100.0, 1, 2], [1, 100, 4], [2, 4, 100]])
    assert siblings_mean(products).tolist() == [1.5, 2.5, 3]
    assert siblings_mean(torch.tensor([[5.0]])).tolist() == [0]


@pytest.mark.parametrize(
    ("phi_shape", "gt_shape", "message"),
    [((4, 5), (4, 5), r"\(5,\).*\(4, 5\)"), ((2, 4, 5), (3, 5), r"\(2, 5\).*\(3, 5\)"), ((5,), (5,), "N, D")],
)
def test_shapes_that_do_not_fit(phi_shape, gt_shape, message):
    with pytest.raises(ValueError, match=message):
        group_gram(torch.ones(phi_shape), torch.ones(gt_shape))


def test_integers_are_refused():
    with pytest.raises(ValueError, match="phi must be a floating-point tensor, got torch.int64"):
        group_gram(torch.ones(2, 3, dtype=torch.long), torch.ones(3))
