"""Which data-parallel rank trains on which of a step's sequences: as many tokens on each of them in every update.

A rank waits for the slowest one at the end of each update, and lengths of responses differ by orders of magnitude. It is
always done: the loss of an update is a sum over all ranks, which does not care who has which sequence, and what a rank
has sampled (and recorded) stays with it.
"""

from __future__ import annotations

import heapq

from megatron_rl.config.plan import share_of
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed.parallel import Ranks


def partition(sizes: list[int], count: int) -> list[list[int]]:
    """Share things of these sizes over `count` bins of about equal sums; indices ascend within a bin.

    Karmarkar and Karp's largest differencing method ("The differencing method of set partitioning", 1982): partial
    solutions, at first one for each thing, are merged two at a time, those of the largest differences between their bins
    first, the fullest bin of one with the emptiest of the other. No bin stays empty while there are as many things.
    """
    heap = []
    for index, size in enumerate(sizes):
        heap.append((-size, index, [(size, [index])] + [(0, [])] * (count - 1)))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        bins = [(a + b, p + q) for (a, p), (b, q) in zip(one, reversed(other), strict=True)]
        bins.sort(key=lambda filled: -filled[0])
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], first, bins))
    return [sorted(indices) for _, indices in heap[0][2]] if heap else [[] for _ in range(count)]


def plan_updates(sizes: list[int], updates: int, ranks: int) -> list[list[list[int]]]:
    """Indices [updates][ranks] of a step's sequences.

    Each update has its share of them in their order, whatever the number of ranks, and every rank about as many tokens of it.
    """
    shares = [share_of(len(sizes), update, updates) for update in range(updates)]
    return [
        [[share[i] for i in indices] for indices in partition([sizes[i] for i in share], ranks)] for share in shares
    ]


def redistribute[S: Sequence](samples: list[S], updates: int, ranks: Ranks) -> list[list[S]]:
    """Lists [updates] of the sequences that this data-parallel rank trains on. Every process calls it.

    samples: a leader's own; those of all leaders, in the order of ranks, are the whole step's. Other processes' are ignored.
    Sequences go straight from leader to leader, and from there to the other processes of the copy.
    """
    mine = samples if ranks.is_leader else []
    parts = ranks.gather_from_leaders([sample.inputs for sample in mine])
    first = sum(len(part) for part in parts[: ranks.data_rank])
    plan = plan_updates([size for part in parts for size in part], updates, ranks.data_size)
    leaving: list[list[tuple[int, int, S]]] = [[] for _ in range(ranks.data_size)]
    for update, by_rank in enumerate(plan):
        for rank, indices in enumerate(by_rank):
            own = [i for i in indices if first <= i < first + len(mine)]
            leaving[rank] += [(update, i, mine[i - first]) for i in own]
    arrived = sorted((one for part in ranks.exchange(leaving) for one in part), key=lambda one: one[:2])
    arrived = ranks.from_leader(arrived)
    return [[sample for update, _, sample in arrived if update == number] for number in range(updates)]
