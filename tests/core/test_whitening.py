"""Whitening: golden values, the textbook formula in float64, and groups that must not touch each other."""

from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_ebft.core.gram import group_gram
from openrlhf_ebft.core.rewards import compute_rewards, compute_rewards_from_embeddings
from openrlhf_ebft.core.whitening import whiten_embeddings_batched, whitened_products
from tests.live_bytes import LiveBytes

GOLDEN = Path(__file__).parents[1] / "golden"


def load(name: str) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(np.asarray(value)) for key, value in np.load(GOLDEN / f"{name}.npz").items()}


def textbook_feature(phi: torch.Tensor, gt: torch.Tensor, tol: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One group in float64 with an explicit D x D matrix, as algorithms.md section 5 writes it."""
    u, s, _ = torch.linalg.svd(phi.double().T, full_matrices=False)
    inverse = torch.where(s > tol * s.max(), 1 / s, 0.0)
    w = u @ torch.diag(inverse) @ u.T
    return phi.double() @ w, gt.double() @ w


def textbook_sample(phi: torch.Tensor, gt: torch.Tensor, tol: float) -> tuple[torch.Tensor, torch.Tensor]:
    u, s, _ = torch.linalg.svd(phi.double(), full_matrices=False)
    inverse = torch.where(s > tol * s.max(), 1 / s, 0.0)
    w = u @ torch.diag(inverse) @ u.T
    return w @ phi.double(), w @ gt.double().expand(len(phi), -1)


TEXTBOOK = {"feature": textbook_feature, "sample": textbook_sample}


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
@pytest.mark.parametrize("normalize", [False, True])
def test_feature_space_golden(name, normalize):
    golden = load(f"whiten_feature_{name}")
    suffix = "_normalized" if normalize else ""
    phi, gt = whiten_embeddings_batched(golden["phi"], golden["phi_gt"], normalize=normalize)
    torch.testing.assert_close(phi, golden[f"whitened{suffix}"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gt, golden[f"whitened_gt{suffix}"], atol=1e-5, rtol=1e-4)


def test_sample_space_golden():
    golden = {key: value.transpose(1, 2) for key, value in load("whiten_sample_a").items()}
    phi, gt = whiten_embeddings_batched(golden["phi"], golden["phi_gt"], space="sample")
    torch.testing.assert_close(phi, golden["whitened"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gt, golden["whitened_gt"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("space", "expected"), [("feature", [0.707107, 0.707107]), ("sample", [3 / 13, 4 / 13])])
def test_case_b02_axis(space, expected):
    phi, gt = torch.tensor([[3.0, 0, 0], [0, 4, 0]]), torch.tensor([[3.0, 4, 12], [3, 4, 12]])
    white, white_gt = whiten_embeddings_batched(phi, gt, space=space)
    cosine = torch.cosine_similarity(white, white_gt)
    torch.testing.assert_close(cosine, torch.tensor(expected), atol=1e-5, rtol=0)
    if space == "feature":
        assert (white_gt[:, 2] == 0).all()


@pytest.mark.parametrize("space", ["feature", "sample"])
@pytest.mark.parametrize(("n", "dim"), [(1, 7), (2, 5), (4, 96), (8, 5), (3, 3)])
@pytest.mark.parametrize("rows_gt", ["one", "n"])
def test_matches_textbook_with_leading_axes(space, n, dim, rows_gt):
    torch.manual_seed(0)
    phi = torch.randn(2, 3, n, dim) * torch.tensor([1e-6, 1.0, 1e6]).view(3, 1, 1)
    gt = torch.randn(2, 3, 1 if rows_gt == "one" else n, dim)
    white, white_gt = whiten_embeddings_batched(phi, gt, space=space)
    for i in range(2):
        for j in range(3):
            right, right_gt = TEXTBOOK[space](phi[i, j], gt[i, j], 1e-5)
            scale = right_gt.abs().max()
            torch.testing.assert_close(white[i, j].double(), right, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(white_gt[i, j].double() / scale, right_gt / scale, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
def test_nearly_equal_rows_keep_or_drop_the_direction(gap):
    torch.manual_seed(1)
    phi = torch.randn(4, 200, dtype=torch.float64)
    phi[1] = phi[0] + gap * torch.randn(200, dtype=torch.float64)
    gt = torch.randn(1, 200, dtype=torch.float64)
    white, white_gt = whiten_embeddings_batched(phi, gt)
    right, right_gt = textbook_feature(phi, gt, 1e-5)
    assert torch.linalg.matrix_rank(right, tol=1e-3) == (4 if gap > 1e-5 else 3)
    torch.testing.assert_close(white, right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(white_gt / right_gt.abs().max(), right_gt / right_gt.abs().max(), atol=1e-5, rtol=0)


def test_tolerance_below_what_products_resolve_uses_the_svd():
    torch.manual_seed(2)
    phi = torch.randn(3, 50, dtype=torch.float64)
    phi[1] = phi[0] + 1e-8 * torch.randn(50, dtype=torch.float64)
    gt = torch.randn(1, 50, dtype=torch.float64)
    white, _ = whiten_embeddings_batched(phi, gt, whiten_tol=1e-11)
    torch.testing.assert_close(white, textbook_feature(phi, gt, 1e-11)[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="whiten_tol"):
        whitened_products(group_gram(phi, gt[0]), space="feature", whiten_tol=1e-11)


def test_products_equal_those_of_the_whitened_rows():
    torch.manual_seed(3)
    phi, gt = torch.randn(5, 4, 60), torch.randn(5, 60)
    for space in ("feature", "sample"):
        products = whitened_products(group_gram(phi, gt), space=space, whiten_tol=1e-5)
        white, white_gt = whiten_embeddings_batched(phi.double(), gt.double().unsqueeze(1), space=space)
        white_gt = white_gt.expand(-1, 4, -1)
        torch.testing.assert_close(products.generated, white @ white.mT, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(products.cross, (white * white_gt).sum(-1), atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(products.truth, white_gt.square().sum(-1), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("space", ["feature", "sample"])
def test_sizes_beyond_the_range_of_products(space):
    """Products of 1e-160 are 0 and those of 1e160 infinite in float64; the whitened rows are those of size 1."""
    generator = torch.Generator().manual_seed(0)
    phi, gt = torch.randn(2, 3, 5, generator=generator).double(), torch.randn(2, 1, 5, generator=generator).double()
    sizes = torch.tensor([1e-160, 1e160], dtype=torch.float64).view(2, 1, 1)
    want, want_gt = whiten_embeddings_batched(phi, gt, space=space)
    for gt_sizes in (sizes, torch.ones_like(sizes)):
        got, got_gt = whiten_embeddings_batched(phi * sizes, gt * gt_sizes, space=space)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got_gt / (gt_sizes / sizes), want_gt, rtol=1e-9, atol=1e-9)
    rewards, plain = (
        compute_rewards_from_embeddings(phi * size, (gt * size)[:, 0], whitening=space) for size in (sizes, 1.0)
    )
    torch.testing.assert_close(rewards.reward, plain.reward, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rewards.cfm, plain.cfm, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("space", ["feature", "sample"])
def test_zero_group_gives_zeros_and_leaves_neighbours_alone(space):
    torch.manual_seed(4)
    phi, gt = torch.randn(3, 4, 20), torch.randn(3, 1, 20)
    alone = [whiten_embeddings_batched(phi[i], gt[i], space=space) for i in (0, 2)]
    phi[1] = 0
    white, white_gt = whiten_embeddings_batched(phi, gt, normalize=False, space=space)
    assert (white[1] == 0).all()
    assert (white_gt[1] == 0).all()
    for row, (right, right_gt) in zip((0, 2), alone, strict=True):
        assert torch.equal(white[row], right)
        assert torch.equal(white_gt[row], right_gt)


def test_truth_outside_the_span_vanishes_instead_of_becoming_noise():
    torch.manual_seed(5)
    basis = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))[0]
    phi, gt = torch.randn(4, 6, dtype=torch.float64) @ basis[:6], basis[10:11]
    _, white_gt = whiten_embeddings_batched(phi, gt, normalize=True)
    assert (white_gt == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["phi", "phi_gt"])
def test_non_finite_group_is_named(value, where):
    phi, gt = torch.ones(2, 3, 4, 5), torch.ones(2, 3, 1, 5)
    (phi if where == "phi" else gt)[1, 2, 0, 3] = value
    with pytest.raises(ValueError, match=r"\(1, 2\).*1 of 6"):
        whiten_embeddings_batched(phi, gt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtype_is_kept_and_no_graph(dtype):
    torch.manual_seed(6)
    phi = torch.randn(4, 32).to(dtype).requires_grad_()
    gt = torch.randn(4, 32).to(dtype).requires_grad_()
    white, white_gt = whiten_embeddings_batched(phi, gt)
    assert white.dtype == white_gt.dtype == dtype
    assert not white.requires_grad
    assert not white_gt.requires_grad
    right, right_gt = textbook_feature(phi.detach(), gt.detach(), 1e-5)
    tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(white.double(), right, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(white_gt.double(), right_gt, atol=tolerance, rtol=tolerance)


def test_many_groups_in_chunks_equal_single_groups():
    torch.manual_seed(7)
    phi, gt = torch.randn(70, 4, 2000), torch.randn(70, 1, 2000)
    white, white_gt = whiten_embeddings_batched(phi, gt)
    for index in (0, 33, 69):
        right, right_gt = whiten_embeddings_batched(phi[index], gt[index])
        assert torch.equal(white[index], right)
        assert torch.equal(white_gt[index], right_gt)


@pytest.mark.parametrize("space", ["feature", "sample"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("groups", "n", "m", "dim"), [(128, 4, 1, 4608), (1, 4, 4, 12288), (2, 64, 1, 12288)])
def test_memory_is_at_most_three_times_the_input(space, normalize, groups, n, m, dim):
    phi, gt = torch.randn(groups, n, dim), torch.randn(groups, m, dim)
    with LiveBytes([phi, gt]) as meter:
        whiten_embeddings_batched(phi, gt, normalize=normalize, space=space)
    assert phi.nbytes < meter.peak <= 3 * (phi.nbytes + gt.nbytes)


@pytest.mark.parametrize(("groups", "n", "dim"), [(128, 4, 4608), (2, 64, 12288)])
def test_rewards_write_nothing_of_the_size_of_the_input(groups, n, dim):
    phi, gt = torch.randn(groups, n, dim), torch.randn(groups, dim)
    with LiveBytes([phi, gt]) as meter:
        compute_rewards(group_gram(phi, gt))
    assert meter.peak <= 0.4 * phi.nbytes  # float64 copies of a sixteenth of the input at a time, and products


@pytest.mark.parametrize(
    ("phi_shape", "gt_shape", "message"),
    [((4, 5), (3, 5), "4.*3"), ((4, 5), (4, 6), "5.*6"), ((5,), (5,), "N, D"), ((2, 4, 5), (4, 5), "2, 4, 5")],
)
def test_shapes_that_do_not_fit(phi_shape, gt_shape, message):
    with pytest.raises(ValueError, match=message):
        whiten_embeddings_batched(torch.ones(phi_shape), torch.ones(gt_shape))


def test_bad_options():
    phi = torch.ones(2, 3)
    with pytest.raises(ValueError, match="whiten_tol"):
        whiten_embeddings_batched(phi, phi, whiten_tol=-1e-5)
    with pytest.raises(ValueError, match="features"):
        whiten_embeddings_batched(phi, phi, space="features")
    with pytest.raises(ValueError, match="int64"):
        whiten_embeddings_batched(phi.long(), phi)
