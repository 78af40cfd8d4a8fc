"""Assignment of a step's sequences to updates and data-parallel ranks, so that ranks have equal numbers of tokens per update.

At the end of each update all ranks wait for the slowest one, and lengths of responses differ by orders of magnitude. Balancing
is always on: the loss of an update is a sum over all ranks and does not depend on the assignment. For everything else (for
example records), samples stay on the rank that sampled them.
"""

from __future__ import annotations

import heapq

from megatron_rl.config.plan import share_of
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed.parallel import Ranks


def partition(sizes: list[int], count: int) -> list[list[int]]:
    """Partition items of the given sizes into `count` bins with about equal sums. Indices ascend within a bin.

    This is Karmarkar and Karp's largest differencing method ("The differencing method of set partitioning", 1982). It starts
    with one partial solution for each item. It repeatedly merges the two solutions whose bins differ most: the fullest bin of
    one solution joins the emptiest bin of the other. No bin is empty if there are at least `count` items.
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
    """Plan a step: result[update][rank] holds the indices of the sequences that the rank trains on in the update.

    Each update gets a contiguous part of the sequences, independent of the number of ranks. The ranks of an update get about
    equal numbers of tokens.
    """
    shares = [share_of(len(sizes), update, updates) for update in range(updates)]
    return [
        [[share[i] for i in indices] for indices in partition([sizes[i] for i in share], ranks)] for share in shares
    ]


def redistribute[S: Sequence](samples: list[S], updates: int, ranks: Ranks) -> list[list[S]]:
    """Return, for each update, the sequences that this data-parallel rank trains on. Collective over all processes.

    samples: this process's sequences, if it is the leader of its copy of the model; ignored in other processes. The step's
    sequences are the samples of all leaders, in the order of ranks. A sequence is sent from leader to leader, and then to the
    other processes of the model's copy.
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
