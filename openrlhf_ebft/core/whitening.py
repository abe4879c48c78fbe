"""Whitening of a group's embeddings without ever forming a D x D matrix.

With phi = V S U^T (V: N x N, S: singular values, U: D x N) everything is a combination of phi's own rows:
    whitened phi                = V S^+ V^T phi                        (both spaces)
    whitened gt, feature space  = gt U S^+ U^T = (gt phi^T) V S^+^3 V^T phi
    whitened gt, sample space   = V S^+ V^T gt
and V, S come from the N x N products phi phi^T. Formulas: algorithms.md section 5 of the project; "feature" is the
paper's second moment over features, "sample" is the one in the authors' code.

Shape letters: G groups, N rollouts of a group, M ground-truth rows (1 or N), D embedding size, R = min(N, D) or N.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from openrlhf_ebft.core.gram import check_gram, chunks, require_finite_groups, require_floating, scaled_to_one

WhiteningSpace = Literal["feature", "sample"]

# Rounding leaves about 1e-16 where the exact value is zero (a row or a ground truth outside the kept directions).
# Anything below this share of its natural scale is such a zero; without the floor its cosine would be noise.
ZERO_FLOOR = 1e-13
# Eigenvalues of float64 products resolve singular values down to about 3e-8 of the largest; with a margin for large N:
SMALLEST_GRAM_TOL = 1e-6


class Spectrum(NamedTuple):
    """Left singular vectors (G, N, R), zero in dropped directions, and inverse singular values (G, R), 0 if dropped."""

    vectors: Tensor
    inverse: Tensor
    largest: Tensor  # (G, 1) largest singular value


class WhitenedProducts(NamedTuple):
    """Inner products of whitened embeddings, float64."""

    generated: Tensor  # (..., N, N) between rollouts
    cross: Tensor  # (..., N) of each rollout with its ground truth
    truth: Tensor  # (..., N) squared length of the ground truth that belongs to each rollout


def check_tol(whiten_tol: float, smallest: float = 0.0) -> None:
    """Raise ValueError unless ``smallest <= whiten_tol < 1``."""
    if not smallest <= whiten_tol < 1:
        raise ValueError(f"whiten_tol must be at least {smallest} and below 1, got {whiten_tol}")


def _keep_significant(vectors: Tensor, singular: Tensor, whiten_tol: float) -> Spectrum:
    largest = singular.amax(-1, keepdim=True)
    keep = singular > whiten_tol * largest
    vectors = vectors * keep.unsqueeze(-2)
    vectors = vectors * (torch.linalg.vector_norm(vectors, dim=-1, keepdim=True) > ZERO_FLOOR)
    return Spectrum(vectors, torch.where(keep, 1 / singular, 0.0), largest)


def _spectrum_of_kernel(kernel: Tensor, whiten_tol: float) -> Spectrum:
    squared, vectors = torch.linalg.eigh(kernel)
    return _keep_significant(vectors, squared.clamp_min(0).sqrt(), whiten_tol)


def _truth_coordinates(spectrum: Spectrum, cross: Tensor, truth_length: Tensor) -> Tensor:
    """V^T (phi gt^T) per ground truth: cross (G, M, N), truth_length (G, M) -> (G, M, R), rounding noise removed."""
    coordinates = cross @ spectrum.vectors
    noise = ZERO_FLOOR * spectrum.largest.unsqueeze(-1) * truth_length.unsqueeze(-1)
    return torch.where(coordinates.abs() > noise, coordinates, 0.0)


def whitened_products(gram: Tensor, *, space: WhiteningSpace, whiten_tol: float) -> WhitenedProducts:
    """Inner products after whitening, from the raw ones alone.

    Args:
        gram: (..., N+1, N+1) raw inner products, the ground truth last (`group_gram`).
        space: "feature" or "sample".
        whiten_tol: singular values up to this share of the largest are dropped; 1e-6 or more.
    Raises:
        ValueError: shape, non-finite group (named), unknown space, or a tolerance that products cannot resolve.
    """
    check_gram(gram)
    check_tol(whiten_tol, SMALLEST_GRAM_TOL)
    check_space(space)
    gram = gram.double()
    kernel, cross, truth_squared = gram[..., :-1, :-1], gram[..., -1, :-1], gram[..., -1, -1:]
    spectrum = _spectrum_of_kernel(kernel, whiten_tol)
    vectors, inverse = spectrum.vectors, spectrum.inverse
    coordinates = _truth_coordinates(spectrum, cross.unsqueeze(-2), truth_squared.clamp_min(0).sqrt()).squeeze(-2)
    generated = vectors @ vectors.mT
    if space == "feature":
        whitened_cross = (vectors @ (coordinates * inverse.square()).unsqueeze(-1)).squeeze(-1)
        truth = (coordinates * inverse.square()).square().sum(-1, keepdim=True).expand_as(whitened_cross)
        return WhitenedProducts(generated, whitened_cross, truth)
    weights = ((vectors * inverse.unsqueeze(-2)) @ vectors.mT).sum(-1)
    projected = (vectors @ (coordinates * inverse).unsqueeze(-1)).squeeze(-1)
    return WhitenedProducts(generated, weights * projected, weights.square() * truth_squared)


def check_space(space: str) -> None:
    """Raise ValueError unless ``space`` is "feature" or "sample"."""
    if space not in ("feature", "sample"):
        raise ValueError(f'space must be "feature" or "sample", got {space!r}')


def _check_embeddings(phi: Tensor, phi_gt: Tensor) -> None:
    require_floating("phi", phi)
    require_floating("phi_gt", phi_gt)
    if phi.ndim < 2 or phi.shape[-2] < 1 or phi.shape[-1] < 1:
        raise ValueError(f"phi must be (..., N, D) with N >= 1 and D >= 1, got {tuple(phi.shape)}")
    same_frame = phi_gt.ndim == phi.ndim and phi_gt.shape[:-2] == phi.shape[:-2] and phi_gt.shape[-1] == phi.shape[-1]
    if not same_frame or phi_gt.shape[-2] not in (1, phi.shape[-2]):
        raise ValueError(
            f"phi_gt must have the shape of phi {tuple(phi.shape)}, or 1 row instead of {phi.shape[-2]}, "
            f"got {tuple(phi_gt.shape)}"
        )


def _products(phi: Tensor, phi_gt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float64 products of (G, N, D) and (G, M, D): kernel (G, N, N), cross (G, M, N), truth lengths (G, M)."""
    (groups, n, dim), m = phi.shape, phi_gt.shape[1]
    kernel, cross, squared = (
        torch.zeros(shape, dtype=torch.float64, device=phi.device)
        for shape in ((groups, n, n), (groups, m, n), (groups, m))
    )
    for part, columns in chunks(groups, n + m, dim):
        rows, truth = phi[part, :, columns].double(), phi_gt[part, :, columns].double()
        kernel[part] += rows @ rows.mT
        cross[part] += truth @ rows.mT
        squared[part] += torch.linalg.vecdot(truth, truth)
    return kernel, cross, squared.sqrt()


def _mix(weights: Tensor, rows: Tensor, out: Tensor, normalize: bool) -> None:
    """Writes weights (G, K, N) @ rows (G, N, D) to out (G, K, D) piece by piece, in float64 on the way."""
    size = (len(rows), rows.shape[1] + out.shape[1], rows.shape[2])
    scale = torch.ones(out.shape[:2], dtype=torch.float64, device=out.device)
    if normalize:
        squared = torch.zeros_like(scale)
        for part, columns in chunks(*size):
            piece = weights[part] @ rows[part, :, columns].double()
            squared[part] += torch.linalg.vecdot(piece, piece)
        scale = torch.where(squared > 0, squared.rsqrt(), 0.0)
    weights = weights * scale.unsqueeze(-1)
    for part, columns in chunks(*size):
        out[part, :, columns] = weights[part] @ rows[part, :, columns].double()


@torch.no_grad()
def whiten_embeddings_batched(
    phi: Tensor,
    phi_gt: Tensor,
    whiten_tol: float = 1e-5,
    normalize: bool = False,
    *,
    space: WhiteningSpace = "feature",
) -> tuple[Tensor, Tensor]:
    """Whiten the embeddings of each group with the pseudo-inverse square root of the group's second moment.

    Args:
        phi: (..., N, D) embeddings of the rollouts; one group is (N, D).
        phi_gt: (..., N, D) or (..., 1, D) ground-truth embeddings.
        whiten_tol: singular values up to this share of the group's largest are dropped; 0 <= whiten_tol < 1.
        normalize: scale every whitened row to unit length (zero rows stay zero).
        space: "feature" (default) whitens along features; "sample" multiplies by (phi phi^T)^(-1/2), and then a single
            ground-truth row is repeated N times.
    Returns:
        Whitened (phi, phi_gt) in the input dtypes, computed in float64, without a graph. An all-zero group gives zeros.
    Raises:
        ValueError: shapes that do not fit, a non-finite group (named), whiten_tol or space out of range.
    """
    _check_embeddings(phi, phi_gt)
    check_tol(whiten_tol)
    check_space(space)
    lead, (n, dim), m = phi.shape[:-2], phi.shape[-2:], phi_gt.shape[-2]
    generated, size = scaled_to_one(phi.reshape(-1, n, dim))
    truth, truth_size = scaled_to_one(phi_gt.reshape(-1, m, dim))
    kernel, cross, length = _products(generated, truth)
    finite = kernel.isfinite().flatten(1).all(-1) & cross.isfinite().flatten(1).all(-1) & length.isfinite().all(-1)
    require_finite_groups(finite.reshape(lead))
    if whiten_tol >= SMALLEST_GRAM_TOL:
        spectrum = _spectrum_of_kernel(kernel, whiten_tol)
    else:
        left, singular, _ = torch.linalg.svd(generated.double(), full_matrices=False)
        spectrum = _keep_significant(left, singular, whiten_tol)
    vectors, inverse = spectrum.vectors, spectrum.inverse.unsqueeze(-2)
    root = (vectors * inverse) @ vectors.mT
    out = torch.empty_like(generated, memory_format=torch.contiguous_format)
    out_gt = truth.new_empty(len(truth), m if space == "feature" else n, dim)
    _mix(root, generated, out, normalize)
    if space == "feature":
        _mix((_truth_coordinates(spectrum, cross, length) * inverse**3) @ vectors.mT, generated, out_gt, normalize)
    else:
        _mix(root if m == n else root.sum(-1, keepdim=True), truth, out_gt, normalize)
    if torch.float64 in (phi.dtype, phi_gt.dtype) and not normalize:
        out_gt = torch.ldexp(out_gt, truth_size - size)
    return out.reshape(phi.shape), out_gt.reshape(*lead, out_gt.shape[1], dim)
