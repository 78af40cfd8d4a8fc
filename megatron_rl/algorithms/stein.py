"""Stein variational policy updates over experts: the experts of a MoE layer as the particles of one distribution.

VP2O, "Variational Proximal Policy Optimization" (arXiv:2606.08032), of one layer with N experts. Each has a prototype, the
top right singular vector p_i of its output projection W_i, and K = P P^T / tau says how alike two experts are. With g_j
the gradient of expert j and the weights alpha (experts that are active on the same tokens) and beta (those that are not),
expert i moves along

    phi_i = sum_j alpha_ij K_ij g_j - lambda sum_j beta_ij grad_{W_i} K_ij                            (Eq. 10, see below)

The sign of the second term is the text's, not the print's. Printed, Eq. 10 adds grad K and Section 3.2 ascends along it, which
would pull experts together; the text wants them pushed apart, as SVGD does, whose repulsion is the gradient of the kernel in
its *other* argument. Here a step of pure repulsion lowers the mean kernel over the pairs of beta.

A singular vector has no sign of its own, so K_ij has one only relative to where the power iteration started: give all experts
of a layer the same start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that hold the other slices of D_in."""
Attraction = Literal["kernel", "mean"]
"""How gradients are combined: by alpha K as Eq. 10 has it, or by a weighted mean (`mixing`)."""
OrthogonalityForm = Literal["cosine", "projection"]
"""Form of the term that `orthogonality_loss` adds up."""
MOST_NEIGHBORS = 4
"""Most neighbors, and inactive neighbors, that an expert has by default."""
TOLERANCE = 1e-10
"""Squared residual, relative to what is to be solved for, at which conjugate gradients stop."""


def _alone(tensor: Tensor) -> Tensor:
    return tensor


# -- who meets whom ---------------------------------------------------------------------------------------------------


def neighborhood(experts: int, neighbors: int | None = None, inactive: int | None = None) -> tuple[int, int]:
    """How many neighbors (itself among them) and inactive neighbors an expert has in a layer of so many experts.

    What is None is a quarter of the experts, at most MOST_NEIGHBORS, so that pairs are left that do neither; below four experts
    none attract.
    """
    quarter = min(MOST_NEIGHBORS, max(1, experts // 4))
    return neighbors or (max(2, quarter) if experts >= 4 else 1), inactive or quarter


def coactivation_counts(topk: Tensor, num_experts: int, counted: Tensor) -> Tensor:
    """Number of tokens on which two experts are both active, `[N, N]` fp32; on the diagonal those of one expert.

    topk `[T, k]` ids, counted `[T]` bool. No step waits for a GPU.
    """
    active = torch.zeros(len(topk), num_experts, device=topk.device)
    return coactivation_sums(active.scatter_(1, topk.long(), 1.0), counted)


def coactivation_sums(shares: Tensor, counted: Tensor) -> Tensor:
    """Sum over the counted tokens of s_i s_j, `[N, N]` (Eq. 6 before its mean); shares s `[T, N]`, counted `[T]` bool.

    Hard routing: s is 1 for a token's experts and 0 for the others; soft routing: it is the router's distribution over all.
    """
    shares = shares * counted[:, None]
    return shares.t() @ shares


def coactivation(topk: Tensor, num_experts: int) -> Tensor:
    """O_ij = E_x[s_i(x) s_j(x)] (Eq. 6) with hard routing, `[N, N]` fp32; topk `[T, k]` expert ids. Zero without tokens.

    Errors: ValueError for an id that is no expert.
    """
    if topk.numel() and (int(topk.min()) < 0 or int(topk.max()) >= num_experts):
        raise ValueError(f"expert ids from {int(topk.min())} to {int(topk.max())}; there are {num_experts} experts")
    everywhere = torch.ones(len(topk), dtype=torch.bool, device=topk.device)
    return coactivation_counts(topk, num_experts, everywhere) / max(len(topk), 1)


def attraction_mask(coactivation: Tensor, neighbors: int, above: float | None = None) -> Tensor:
    """M^att `[N, N]` bool: an active expert, and the `neighbors` - 1 others that are most often active with it.

    With `above`: all others with O_ij >= `above`. A row without activity is empty, and experts that never meet are no
    neighbors.
    """
    others = _others(coactivation) & (coactivation > 0)
    itself = torch.diag(coactivation.diagonal() > 0)
    found = _first(-coactivation, others, neighbors - 1) if above is None else others & (coactivation >= above)
    return itself | found


def repulsion_mask(
    coactivation: Tensor, inactive_neighbors: int, below: float | None = None, *, attract: Tensor | None = None
) -> Tensor:
    """M^rep `[N, N]` bool: the `inactive_neighbors` experts that are most rarely active together with an active one.

    With `below`: all with O_ij <= `below`. Experts in the mask `attract` are left out. A row without activity is empty.
    """
    others = _others(coactivation) & (coactivation.diagonal() > 0)[:, None]
    others = others if attract is None else others & ~attract
    return _first(coactivation, others, inactive_neighbors) if below is None else others & (coactivation <= below)


def _others(matrix: Tensor) -> Tensor:
    return ~torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)


def _first(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """The `count` smallest scores of each row among those allowed.

    Equal scores go round from the row's own place on, so that not all experts choose the first ones.
    """
    size = len(scores)
    order = (torch.arange(size, device=scores.device)[:, None] + torch.arange(size, device=scores.device)) % size
    turned = scores.masked_fill(~allowed, torch.inf).gather(1, order)
    chosen = order.gather(1, turned.argsort(dim=1, stable=True)[:, :count])
    return torch.zeros_like(allowed).scatter_(1, chosen, True) & allowed


def neighbor_weights(mask: Tensor) -> Tensor:
    """The alpha or beta of Eq. 9 from a mask `[N, N]`: mask / max(1, its row's sum), fp32 (fp64 stays)."""
    mask = mask if mask.dtype == torch.float64 else mask.float()
    return mask / mask.sum(-1, keepdim=True).clamp(min=1)


# -- prototypes and kernel --------------------------------------------------------------------------------------------


def prototypes(weights: Tensor, steps: int, initial: Tensor, *, all_reduce: AllReduce = _alone) -> Tensor:
    """`steps` power iterations on W^T W: unit vectors `[N, D_out]` that tend to the top right singular vectors.

    weights `[N, D_in, D_out]`, initial `[N, D_out]` (any length). fp32 at least. An expert whose weights are zero keeps
    its initial direction. Differentiable as it is written, step by step; `kernel_gradient` is what it tends to.
    """
    dtype = torch.promote_types(weights.dtype, torch.float32)
    weights, start = weights.to(dtype), torch.nn.functional.normalize(initial.to(dtype), dim=-1)
    p = start
    for _ in range(steps):
        q = all_reduce(_transposed(weights, _times(weights, p)))
        p = q / q.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
    return torch.where((p == 0).all(-1, keepdim=True), start, p)


def kernel(prototypes: Tensor, temperature: float) -> Tensor:
    """K = P P^T / temperature (Eq. 8), `[N, N]`; the paper's temperature is T0 / N.

    prototypes `[N, D_out]`, unit norm. The diagonal is 1 / temperature exactly, so that an expert without neighbors keeps its
    gradient bit for bit at temperature 1.
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
    """(a, x, b, p) with sum_j beta_ij grad_{W_i} K_ij = a_i x_i^T + b_i p_i^T for the converged power iteration.

    weights `[n, D_in, D_out]` of the `experts` (all N, or this rank's); prototypes `[N, D_out]`, kernel and repel (beta)
    `[N, N]`. a, b `[n, D_in]`, x, p `[n, D_out]`: a gradient of rank 2 is kept as its factors.

    At p, the top eigenvector of M = W^T W with eigenvalue s, dp = (s I - M)^+ (I - p p^T) dM p. With the target
    q_i = sum_j beta_ij p_j / tau, one solve x = (s I - M)^+ (q - <q, p> p) serves the whole row:
    grad <q, p> = (W p) x^T + (W x) p^T.

    damping: (s I - M) is raised by damping * s, which bounds x where the two largest singular values meet and the direction
    means little; 0 is exact. Conjugate gradients, at most `iterations`; a row whose p is not yet the top eigenvector ends where
    it meets a direction along which the raised operator is smaller than it would be then.
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

    # Not relative to across(towards): where prototypes are parallel, that is nothing but rounding, some of it along p, and p is
    # what the operator knows nothing of.
    enough = towards.square().sum(-1, keepdim=True) * (TOLERANCE**2 if dtype == torch.float64 else TOLERANCE)
    x = _conjugate_gradients(apply, across(towards), iterations, enough, 0.99 * damping * top)
    return a, x, _times(weights, x), p


def _conjugate_gradients(
    apply: Callable[[Tensor], Tensor], right: Tensor, iterations: int, enough: Tensor, smallest: Tensor
) -> Tensor:
    """Solve apply(x) = right row by row, `[n, D]`.

    A row stops where its squared residual is `enough` `[n, 1]`, or where the operator's curvature is not above its `smallest`
    eigenvalue `[n, 1]`: there p is not yet the top vector, and the row keeps what was found so far.
    """
    x, residual = torch.zeros_like(right), right
    direction = residual
    squared = residual.square().sum(-1, keepdim=True)
    going = squared > enough
    for _ in range(min(iterations, 4 * right.shape[-1])):
        if right.device.type == "cpu" and not bool(going.any()):  # elsewhere it would wait for the device
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
    return _transposed(weights.transpose(-1, -2), vectors)  # a row times a matrix is the faster way round on a CPU


def _transposed(weights: Tensor, vectors: Tensor) -> Tensor:
    return torch.bmm(vectors.unsqueeze(-2), weights).squeeze(-2)


# -- the update -------------------------------------------------------------------------------------------------------


def mixing(attract: Tensor, kernel: Tensor, attraction: Attraction = "kernel") -> Tensor:
    """`[N, N]`: how much of g_j is in the attraction of expert i; attract (alpha) and kernel `[N, N]`.

    kernel: alpha_ij K_ij (Eq. 10). This is no mean: a row's sum scales with 1 / tau, and with K_ii = 1 and nearly orthogonal
    prototypes it is 1 / neighbors. mean: max(alpha_ij K_ij, 0) over its row's sum, so that rows sum to 1 and tau cancels. A
    mean has no negative weights: a pair whose prototypes point apart is left out of it, and not followed backwards; the row's
    own entry is positive. A row of zeros stays one. A row with but its own entry is the identity's, to the bit.
    """
    weights = attract * kernel
    if attraction == "kernel":
        return weights
    weights = weights.clamp(min=0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def untouched(mixing: Tensor) -> Tensor:
    """`[N]` bool: rows of `[N, N]` that are those of the identity."""
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
    """Gradients of the loss, `[N, D_in, D_out]`, as VP2O descends them (Eq. 10; its sign is told above), same shape.

    weights `[N, D_in, D_out]`, prototypes `[N, D_out]`, kernel, attract (alpha) and repel (beta) `[N, N]`, repulsion lambda. A
    row of the `mixing` that is the identity's leaves its expert's gradient as it is, bit for bit.
    """
    by = mixing(attract, kernel, attraction).to(grads.dtype)
    mixed = torch.einsum("ij,j...->i...", by, grads)
    mixed = torch.where(untouched(by).view(-1, *[1] * (grads.dim() - 1)), grads, mixed)
    if not repulsion:
        return mixed
    a, x, b, p = kernel_gradient(weights, prototypes, kernel, repel)
    gradient = a.unsqueeze(-1) * x.unsqueeze(-2) + b.unsqueeze(-1) * p.unsqueeze(-2)
    return mixed + repulsion * gradient.to(grads.dtype)


# -- beside the update ------------------------------------------------------------------------------------------------


def orthogonality_loss(expert_outputs: Tensor, form: OrthogonalityForm = "projection") -> Tensor:
    """How little the outputs of a token's experts are orthogonal, summed over tokens: a scalar, fp32 at least.

    expert_outputs `[T, k, D]`: what the k experts of a token put out, without their router weights.

    projection: L_o of Section 3.2, the sum over ordered pairs j != k of (<x_j, x_k> / (<x_k, x_k> + eps))^2. It has no bound: a
    pair counts by the square of the ratio of its lengths, and there are k (k - 1) of them. cosine, ours: the mean over pairs
    of cos^2(x_j, x_k), with the same eps = 1e-6 beside both squared lengths: from 0 to 1 whatever k and the lengths are.
    """
    x = expert_outputs.to(torch.promote_types(expert_outputs.dtype, torch.float32))
    return orthogonality_of_products(x @ x.transpose(-1, -2), form)


def orthogonality_of_products(inner: Tensor, form: OrthogonalityForm = "projection") -> Tensor:
    """orthogonality_loss from the inner products <x_j, x_k>, `[T, k, k]`."""
    squares = inner.diagonal(dim1=-2, dim2=-1) + 1e-6
    apart = ~torch.eye(inner.shape[-1], dtype=torch.bool, device=inner.device)
    if form == "projection":
        return torch.where(apart, (inner / squares.unsqueeze(-2)).square(), 0.0).sum()
    cosines = inner.square() / (squares.unsqueeze(-1) * squares.unsqueeze(-2))
    return torch.where(apart, cosines, 0.0).sum() / apart.sum().clamp(min=1)


def barycenter_shift(gates: Tensor, prototypes: Tensor, anchor_gates: Tensor, anchor_prototypes: Tensor) -> Tensor:
    """Mean over tokens of ||P(x) - P_anc(x)||_2 with P(x) = sum_i gate_i(x) p_i (Section 3.3), a scalar; 0 without tokens.

    gates `[T, N]` (0 where an expert is not chosen), prototypes `[N, D_out]`; the anchor's of the same shapes.
    """
    apart = gates @ prototypes - anchor_gates @ anchor_prototypes
    return apart.norm(dim=-1).sum() / max(len(apart), 1)
