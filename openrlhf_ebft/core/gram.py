"""Inner products of a group's pooled embeddings: all that rewards need, (N+1) x (N+1) numbers per group.

Shape letters: G groups (any number of leading axes), N rollouts of a group, D embedding size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements converted to float64 at a time: 4 MiB stay in cache, and memory does not grow with the batch.
CHUNK_ELEMENTS = 1 << 19
# Columns of a chunk: fixed, so that a group's sums do not depend on what else is in the batch.
CHUNK_COLUMNS = 1024


def chunks(num_groups: int, rows: int, dim: int) -> Iterator[tuple[slice, slice]]:
    """Cuts (groups, rows, dim) into (slice of groups, slice of columns).

    A chunk holds at most `CHUNK_ELEMENTS` and about a sixteenth of all elements, but at least one group's columns.
    """
    columns = min(dim, CHUNK_COLUMNS)
    step = max(1, min(CHUNK_ELEMENTS, num_groups * rows * dim // 16) // (rows * columns))
    for start in range(0, num_groups, step):
        for first in range(0, dim, columns):
            yield slice(start, start + step), slice(first, first + columns)


def require_floating(name: str, value: Tensor) -> None:
    """Raise ValueError if ``value`` does not hold floating-point numbers."""
    if not value.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor, got {value.dtype}")


def scaled_to_one(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Groups (..., rows, D), each divided by the power of two that leaves its largest value in [0.5, 1).

    Only float64 is scaled: products of its numbers may leave its range, those of narrower types do not.

    Returns:
        the groups, and (..., 1, 1) int32 exponents of the powers of two.
    """
    if embeddings.dtype != torch.float64 or embeddings.numel() == 0:
        return embeddings, torch.zeros((*embeddings.shape[:-2], 1, 1), dtype=torch.int32, device=embeddings.device)
    exponent = torch.frexp(embeddings.abs().amax((-2, -1), keepdim=True)).exponent
    return torch.ldexp(embeddings, -exponent), exponent


def check_groups(phi: Tensor, phi_gt: Tensor) -> None:
    """Raise ValueError unless phi is (..., N, D) floating and phi_gt (..., D) floating, with the same leading axes."""
    require_floating("phi", phi)
    require_floating("phi_gt", phi_gt)
    if phi.ndim < 2 or phi.shape[-2] < 1 or phi.shape[-1] < 1:
        raise ValueError(f"phi must be (..., N, D) with N >= 1 and D >= 1, got {tuple(phi.shape)}")
    wanted = (*phi.shape[:-2], phi.shape[-1])
    if phi_gt.shape != wanted:
        raise ValueError(f"phi_gt must be {wanted} for phi {tuple(phi.shape)}, got {tuple(phi_gt.shape)}")


@torch.no_grad()
def group_gram(phi: Tensor, phi_gt: Tensor) -> Tensor:
    """Raw inner products of a group's pooled embeddings, generated rows first, the ground truth last.

    Products are formed in float64: whitening with ``whiten_tol=1e-5`` needs eigenvalues 1e-10 below the largest,
    and a product of two float32 numbers is exact in float64.

    Args:
        phi: (..., N, D) pooled embeddings of the rollouts, any floating dtype.
        phi_gt: (..., D) pooled embedding of the ground truth, same leading axes.
    Returns:
        (..., N+1, N+1) float64 on the device of ``phi``, without a graph.
    Raises:
        ValueError: dtypes that are not floating, or shapes that do not belong together.
    """
    check_groups(phi, phi_gt)
    n, dim = phi.shape[-2:]
    generated, truth = phi.reshape(-1, n, dim), phi_gt.reshape(-1, dim)
    gram = torch.zeros(generated.shape[0], n + 1, n + 1, dtype=torch.float64, device=phi.device)
    for part, columns in chunks(generated.shape[0], n + 1, dim):
        piece = generated[part, :, columns]
        rows = torch.empty(len(piece), n + 1, piece.shape[-1], dtype=torch.float64, device=phi.device)
        rows[:, :n] = piece
        rows[:, n] = truth[part, columns]
        gram[part] += rows @ rows.mT
    return gram.reshape(*phi.shape[:-2], n + 1, n + 1)


def check_gram(gram: Tensor) -> None:
    """Raise ValueError unless ``gram`` is (..., N+1, N+1) floating and finite; a non-finite group is named."""
    require_floating("gram", gram)
    if gram.ndim < 2 or gram.shape[-1] != gram.shape[-2] or gram.shape[-1] < 2:
        raise ValueError(f"gram must be (..., N+1, N+1) with N >= 1, got {tuple(gram.shape)}")
    require_finite_groups(gram.isfinite().flatten(-2).all(-1))


def require_finite_groups(finite: Tensor) -> None:
    """Raise ValueError that names every group whose entry in ``finite`` (...) bool is False."""
    bad = (~finite).nonzero().tolist()
    if bad:
        names = ", ".join(str(index[0] if len(index) == 1 else tuple(index)) for index in bad[:10])
        where = f"group {names}" if finite.ndim else "the group"
        raise ValueError(f"non-finite embeddings in {where} ({len(bad)} of {finite.numel()} groups)")


def unit_gram(gram: Tensor) -> Tensor:
    """Inner products after scaling every embedding to unit length; an all-zero embedding stays zero.

    Args:
        gram: (..., N+1, N+1) raw inner products.
    Returns:
        (..., N+1, N+1) float64: cosines, 1 on the diagonal (0 for an all-zero embedding).
    """
    length = gram.double().diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    inverse = torch.where(length > 0, 1 / length, 0.0)
    cosines = gram.double() * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    cosines.diagonal(dim1=-2, dim2=-1).copy_(length > 0)
    return cosines.clamp_(-1, 1)


def siblings_mean(products: Tensor) -> Tensor:
    """Mean product of each row with the other rows of its group: (..., N, N) -> (..., N); 0 when N = 1."""
    n = products.shape[-1]
    if n == 1:
        return torch.zeros_like(products[..., 0])
    others = ~torch.eye(n, dtype=torch.bool, device=products.device)
    return torch.where(others, products, 0.0).sum(-1) / (n - 1)


def unit_rows(rows: Tensor) -> Tensor:
    """Rows (..., D) scaled to unit length in at least float32; zero rows stay zero, huge rows do not overflow."""
    rows = rows if rows.dtype == torch.float64 else rows.float()
    peak = rows.abs().amax(-1, keepdim=True)
    scaled = rows / torch.where(peak > 0, peak, 1.0)
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / torch.where(length > 0, length, 1.0)
