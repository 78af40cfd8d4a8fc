"""Stein variational policy updates over experts: the experts of an MoE layer are the particles of one distribution.

This module implements VP2O, "Variational Proximal Policy Optimization" (arXiv:2606.08032), for one layer with N experts. Each
expert has a prototype p_i, the top right singular vector of its output projection W_i. K = P P^T / tau measures how similar two
experts are. g_j is the gradient of expert j. The weights alpha belong to experts that are active on the same tokens, the
weights beta to experts that are not. Expert i moves along

    phi_i = sum_j alpha_ij K_ij g_j - lambda sum_j beta_ij grad_{W_i} K_ij                            (Eq. 10, see below)

The sign of the second term follows the text of the paper, not its printed equation. As printed, Eq. 10 adds grad K and Section
3.2 ascends along it, which would pull experts together. The text of the paper says that repulsion pushes them apart, as SVGD
does. In SVGD the repulsion is the gradient of the kernel in its *other* argument. Here a step of pure repulsion lowers the mean
kernel over the pairs of beta.

A singular vector has no sign. The sign of K_ij therefore depends on the start vector of the power iteration: use the same start
vector for all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Function that sums a tensor over the ranks that hold the other slices of D_in."""
Attraction = Literal["kernel", "mean"]
"""Combination of the gradients: weights alpha K (Eq. 10), or a weighted mean (`mixing`)."""
OrthogonalityForm = Literal["cosine", "projection"]
"""Formula of the terms in `orthogonality_loss`."""
MOST_NEIGHBORS = 4
"""Default upper limit of an expert's number of neighbors, and of its number of inactive neighbors."""
TOLERANCE = 1e-10
"""Squared residual at which conjugate gradients stop, relative to the squared norm of the target."""


def _alone(tensor: Tensor) -> Tensor:
    return tensor


# -- co-activation ----------------------------------------------------------------------------------------------------


def neighborhood(experts: int, neighbors: int | None = None, inactive: int | None = None) -> tuple[int, int]:
    """Return the number of neighbors (including the expert itself) and of inactive neighbors in a layer of `experts`.

    The default of each number is a quarter of the experts, at most MOST_NEIGHBORS, so that some pairs neither attract nor
    repel. With fewer than four experts, the default is no attraction between experts.
    """
    quarter = min(MOST_NEIGHBORS, max(1, experts // 4))
    return neighbors or (max(2, quarter) if experts >= 4 else 1), inactive or quarter


def coactivation_counts(topk: Tensor, num_experts: int, counted: Tensor) -> Tensor:
    """Return the number of tokens on which two experts are both active, `[N, N]` fp32; the diagonal counts single experts.

    topk: `[T, k]` expert ids; counted: `[T]` bool, the tokens to include. No operation waits for a GPU.
    """
    active = torch.zeros(len(topk), num_experts, device=topk.device)
    return coactivation_sums(active.scatter_(1, topk.long(), 1.0), counted)


def coactivation_sums(shares: Tensor, counted: Tensor) -> Tensor:
    """Return the sum of s_i s_j over the counted tokens, `[N, N]` (Eq. 6 before its mean).

    shares: s, `[T, N]`; counted: `[T]` bool. With hard routing s is 1 for a token's experts and 0 for the others. With soft
    routing s is the router's distribution over all experts.
    """
    shares = shares * counted[:, None]
    return shares.t() @ shares


def coactivation(topk: Tensor, num_experts: int) -> Tensor:
    """Return O_ij = E_x[s_i(x) s_j(x)] (Eq. 6) with hard routing, `[N, N]` fp32; zeros without tokens.

    topk: `[T, k]` expert ids. Errors: ValueError if an id is outside of the experts.
    """
    if topk.numel() and (int(topk.min()) < 0 or int(topk.max()) >= num_experts):
        raise ValueError(f"expert ids from {int(topk.min())} to {int(topk.max())}; there are {num_experts} experts")
    everywhere = torch.ones(len(topk), dtype=torch.bool, device=topk.device)
    return coactivation_counts(topk, num_experts, everywhere) / max(len(topk), 1)


def attraction_mask(coactivation: Tensor, neighbors: int, above: float | None = None) -> Tensor:
    """Return M^att, `[N, N]` bool: for each active expert, itself and the `neighbors` - 1 experts most often active with it.

    With `above`: itself and all other experts with O_ij >= `above`. The row of an inactive expert is empty. Experts that are
    never active on the same token are not neighbors.
    """
    others = _others(coactivation) & (coactivation > 0)
    itself = torch.diag(coactivation.diagonal() > 0)
    found = _first(-coactivation, others, neighbors - 1) if above is None else others & (coactivation >= above)
    return itself | found


def repulsion_mask(
    coactivation: Tensor, inactive_neighbors: int, below: float | None = None, *, attract: Tensor | None = None
) -> Tensor:
    """Return M^rep, `[N, N]` bool: for each active expert, the `inactive_neighbors` experts least often active with it.

    With `below`: all other experts with O_ij <= `below`. Experts in the mask `attract` are left out. The row of an inactive
    expert is empty.
    """
    others = _others(coactivation) & (coactivation.diagonal() > 0)[:, None]
    others = others if attract is None else others & ~attract
    return _first(coactivation, others, inactive_neighbors) if below is None else others & (coactivation <= below)


def _others(matrix: Tensor) -> Tensor:
    return ~torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)


def _first(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` smallest allowed scores of each row.

    Ties are broken in cyclic order that starts at the row's own index, so that rows with ties choose different experts.
    """
    size = len(scores)
    order = (torch.arange(size, device=scores.device)[:, None] + torch.arange(size, device=scores.device)) % size
    turned = scores.masked_fill(~allowed, torch.inf).gather(1, order)
    chosen = order.gather(1, turned.argsort(dim=1, stable=True)[:, :count])
    return torch.zeros_like(allowed).scatter_(1, chosen, True) & allowed


def neighbor_weights(mask: Tensor) -> Tensor:
    """Return alpha or beta of Eq. 9 from a mask `[N, N]`: mask / max(1, row sum), in fp32 (fp64 for an fp64 mask)."""
    mask = mask if mask.dtype == torch.float64 else mask.float()
    return mask / mask.sum(-1, keepdim=True).clamp(min=1)


# -- prototypes and kernel --------------------------------------------------------------------------------------------


def prototypes(weights: Tensor, steps: int, initial: Tensor, *, all_reduce: AllReduce = _alone) -> Tensor:
    """Return unit vectors `[N, D_out]` after `steps` power iterations on W^T W, near the top right singular vectors.

    weights: `[N, D_in, D_out]`; initial: `[N, D_out]`, of any norm. The result is at least fp32. An expert whose weights are
    zero keeps its initial direction. Autograd differentiates through the iterations. `kernel_gradient` computes the gradient in
    the limit of infinitely many iterations.
    """
    dtype = torch.promote_types(weights.dtype, torch.float32)
    weights, start = weights.to(dtype), torch.nn.functional.normalize(initial.to(dtype), dim=-1)
    p = start
    for _ in range(steps):
        q = all_reduce(_transposed(weights, _times(weights, p)))
        p = q / q.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
    return torch.where((p == 0).all(-1, keepdim=True), start, p)


def kernel(prototypes: Tensor, temperature: float) -> Tensor:
    """Return K = P P^T / temperature (Eq. 8), `[N, N]`; the temperature of the paper is T0 / N.

    prototypes: `[N, D_out]`, unit norm. The diagonal is exactly 1 / temperature. At temperature 1 an expert without neighbors
    therefore keeps its gradient bit for bit.
    """
    similar = prototypes @ prototypes.t() / temperature
    return torch.where(_others(similar), similar, similar.new_tensor(1.0 / temperature))


def kernel_gradient(
    weights: Tensor,
    prototypes: Tensor,
    kernel: Tensor,
    repel: Tensor,
    *,
    damping: float = 0.0,
    iterations: int = 256,
    all_reduce: AllReduce = _alone,
    experts: slice = slice(None),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (a, x, b, p) with sum_j beta_ij grad_{W_i} K_ij = a_i x_i^T + b_i p_i^T, for the converged power iteration.

    weights: `[n, D_in, D_out]` of the `experts` (all N, or those of this rank); prototypes: `[N, D_out]`; kernel and repel
    (beta): `[N, N]`. Results: a, b `[n, D_in]`; x, p `[n, D_out]`. The gradient has rank 2, so only its factors are returned.

    At p, the top eigenvector of M = W^T W with eigenvalue s, dp = (s I - M)^+ (I - p p^T) dM p. With the target
    q_i = sum_j beta_ij p_j / tau, one solve x = (s I - M)^+ (q - <q, p> p) serves the whole row:
    grad <q, p> = (W p) x^T + (W x) p^T.

    damping: damping * s I is added to (s I - M). This bounds x if the two largest singular values are nearly equal. In this
    case the direction p means little. A damping of 0 is exact. The solver runs at most `iterations` of conjugate gradients. If
    p of a row is not yet the top eigenvector, the row stops at the first direction of lower curvature than a converged p would
    allow.
    """
    dtype = torch.promote_types(weights.dtype, torch.float32)
    weights, every = weights.to(dtype), prototypes.to(dtype)
    p = every[experts]
    towards = (repel.to(dtype) * kernel.diagonal().to(dtype)[:, None])[experts] @ every  # 1 / tau is K's diagonal
    a = _times(weights, p)
    top = all_reduce(a.square().sum(-1, keepdim=True))  # s, as p has unit norm

    def across(v: Tensor) -> Tensor:
        return v - (v * p).sum(-1, keepdim=True) * p

    def apply(v: Tensor) -> Tensor:
        return across((1 + damping) * top * v - all_reduce(_transposed(weights, _times(weights, v))))

    # The tolerance is not relative to across(towards): for parallel prototypes that vector is only rounding error, partly along
    # p, and the operator maps p to zero.
    enough = towards.square().sum(-1, keepdim=True) * (TOLERANCE**2 if dtype == torch.float64 else TOLERANCE)
    x = _conjugate_gradients(apply, across(towards), iterations, enough, 0.99 * damping * top)
    return a, x, _times(weights, x), p


def _conjugate_gradients(
    apply: Callable[[Tensor], Tensor], right: Tensor, iterations: int, enough: Tensor, smallest: Tensor
) -> Tensor:
    """Solve apply(x) = right row by row, `[n, D]`.

    A row stops when its squared residual is at most `enough` `[n, 1]`. It also stops when the curvature of the operator is not
    above its `smallest` eigenvalue `[n, 1]`. In this case p is not yet the top vector, and the row keeps its current solution.
    """
    x, residual = torch.zeros_like(right), right
    direction = residual
    squared = residual.square().sum(-1, keepdim=True)
    going = squared > enough
    for _ in range(min(iterations, 4 * right.shape[-1])):
        if right.device.type == "cpu" and not bool(going.any()):  # on a GPU this check would wait for the device
            break
        applied = apply(direction)
        curvature = (direction * applied).sum(-1, keepdim=True)
        going = going & (curvature > smallest * direction.square().sum(-1, keepdim=True))
        length = torch.where(going, squared / torch.where(going, curvature, 1.0), 0.0)
        x = x + length * direction
        residual = residual - length * applied
        before, squared = squared, residual.square().sum(-1, keepdim=True)
        going = going & (squared > enough)
        direction = residual + torch.where(going, squared / torch.where(going, before, 1.0), 0.0) * direction
    return x


def _times(weights: Tensor, vectors: Tensor) -> Tensor:
    return _transposed(weights.transpose(-1, -2), vectors)  # on a CPU row times matrix is faster than the reverse


def _transposed(weights: Tensor, vectors: Tensor) -> Tensor:
    return torch.bmm(vectors.unsqueeze(-2), weights).squeeze(-2)


# -- the update -------------------------------------------------------------------------------------------------------


def mixing(attract: Tensor, kernel: Tensor, attraction: Attraction = "kernel") -> Tensor:
    """Return the weight of g_j in the attraction of expert i, `[N, N]`; attract (alpha) and kernel: `[N, N]`.

    "kernel": alpha_ij K_ij (Eq. 10). This is not a mean: the sum of a row scales with 1 / tau. With K_ii = 1 and nearly
    orthogonal prototypes the sum is 1 / neighbors.
    "mean": max(alpha_ij K_ij, 0) / sum of its row, so that each row sums to 1 and tau cancels. Negative weights are set to 0:
    a pair whose prototypes point in opposite directions is left out. The diagonal entry is always positive for an active
    expert. A row of zeros stays zero. A row whose only entry is the diagonal is bit for bit the row of the identity.
    """
    weights = attract * kernel
    if attraction == "kernel":
        return weights
    weights = weights.clamp(min=0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def untouched(mixing: Tensor) -> Tensor:
    """Return `[N]` bool: True for rows of `mixing` `[N, N]` that equal the same row of the identity."""
    identity = torch.eye(len(mixing), dtype=mixing.dtype, device=mixing.device)
    return (mixing == identity).all(-1)


def transform(
    grads: Tensor,
    weights: Tensor,
    prototypes: Tensor,
    kernel: Tensor,
    attract: Tensor,
    repel: Tensor,
    repulsion: float,
    attraction: Attraction = "kernel",
) -> Tensor:
    """Transform the loss's gradients `[N, D_in, D_out]` into VP2O's descent directions of the same shape (Eq. 10).

    The sign of the repulsion is explained in the module's docstring. weights: `[N, D_in, D_out]`; prototypes: `[N, D_out]`;
    kernel, attract (alpha) and repel (beta): `[N, N]`; repulsion: lambda. If a row of `mixing` equals the same row of the
    identity, the gradient of this expert stays the same bit for bit.
    """
    by = mixing(attract, kernel, attraction).to(grads.dtype)
    mixed = torch.einsum("ij,j...->i...", by, grads)
    mixed = torch.where(untouched(by).view(-1, *[1] * (grads.dim() - 1)), grads, mixed)
    if not repulsion:
        return mixed
    a, x, b, p = kernel_gradient(weights, prototypes, kernel, repel)
    gradient = a.unsqueeze(-1) * x.unsqueeze(-2) + b.unsqueeze(-1) * p.unsqueeze(-2)
    return mixed + repulsion * gradient.to(grads.dtype)


# -- further terms ----------------------------------------------------------------------------------------------------


def orthogonality_loss(expert_outputs: Tensor, form: OrthogonalityForm = "projection") -> Tensor:
    """Return a penalty for non-orthogonal outputs of a token's experts, summed over tokens: a scalar, at least fp32.

    expert_outputs: `[T, k, D]`, outputs of the k experts of each token, without router weights.

    "projection": L_o of Section 3.2, the sum over ordered pairs j != k of (<x_j, x_k> / (<x_k, x_k> + eps))^2. It is not
    bounded: a pair scales with the square of the ratio of its norms, and there are k (k - 1) pairs.
    "cosine" (not in the paper): the mean over pairs of cos^2(x_j, x_k), with eps = 1e-6 added to both squared norms. Each
    token's term is between 0 and 1, whatever k and the norms are.
    """
    x = expert_outputs.to(torch.promote_types(expert_outputs.dtype, torch.float32))
    return orthogonality_of_products(x @ x.transpose(-1, -2), form)


def orthogonality_of_products(inner: Tensor, form: OrthogonalityForm = "projection") -> Tensor:
    """Return `orthogonality_loss`, computed from the inner products <x_j, x_k>, `[T, k, k]`."""
    squares = inner.diagonal(dim1=-2, dim2=-1) + 1e-6
    apart = ~torch.eye(inner.shape[-1], dtype=torch.bool, device=inner.device)
    if form == "projection":
        return torch.where(apart, (inner / squares.unsqueeze(-2)).square(), 0.0).sum()
    cosines = inner.square() / (squares.unsqueeze(-1) * squares.unsqueeze(-2))
    return torch.where(apart, cosines, 0.0).sum() / apart.sum().clamp(min=1)


def barycenter_shift(gates: Tensor, prototypes: Tensor, anchor_gates: Tensor, anchor_prototypes: Tensor) -> Tensor:
    """Return the mean over tokens of ||P(x) - P_anc(x)||_2 with P(x) = sum_i gate_i(x) p_i (Section 3.3); 0 without tokens.

    gates: `[T, N]`, 0 for experts that are not chosen; prototypes: `[N, D_out]`. The anchor's tensors have the same shapes.
    """
    apart = gates @ prototypes - anchor_gates @ anchor_prototypes
    return apart.norm(dim=-1).sum() / max(len(apart), 1)
