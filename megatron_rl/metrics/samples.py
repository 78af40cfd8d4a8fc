"""Which rollouts a step keeps for the report, and which of a run's it shows first, so that a gamed reward is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

Place = tuple[int, Hashable]
"""(group, response or what stands for it): samples of one prompt share the group."""


def choose(rollouts: Sequence[tuple[int, Hashable, float]], most: int) -> dict[Place, int]:
    """{place: how many of the step's rollouts have its response} of at most `most` (group, response, reward) to keep.

    A quarter of them (rounded up) are the best-paid responses, then a quarter the most frequent ones, and the rest go from
    prompt to prompt.
    """
    counts = Counter(response for _, response, _ in rollouts)
    groups: dict[int, list[Place]] = {}
    for group, response, _ in rollouts:
        groups.setdefault(group, []).append((group, response))
    best = sorted(rollouts, key=lambda r: (-r[2], -counts[r[1]]))
    paid = {response: (group, response) for group, response, _ in reversed(best)}  # where each is paid best
    quarter = -(-most // 4)
    chosen = [paid[response] for response in list(dict.fromkeys(r[1] for r in best))[:quarter]]
    chosen += [paid[response] for response, count in counts.most_common(quarter) if count > 1]
    chosen += [place for turn in zip_longest(*groups.values()) for place in turn if place]
    return {place: counts[place[1]] for place in list(dict.fromkeys(chosen))[:most]}


def leading(samples: Iterable[dict[str, Any]], most: int = 4) -> dict[str, list[dict[str, Any]]]:
    """The best-paid and the most frequent responses among a run's samples, each with its count over their steps."""
    found: dict[str, dict[str, Any]] = {}
    counted: set[tuple[int, str]] = set()
    for sample in samples:
        step, text, reward = sample["step"], sample["response"], sample.get("reward")
        one = found.setdefault(text, {"sample": sample, "count": 0, "best": None, "first": step})
        if (step, text) not in counted:  # one response to two prompts is there twice, each with the whole count
            counted.add((step, text))
            one["count"] += sample.get("count", 1)
        if reward is not None and (one["best"] is None or reward >= one["best"]):
            one |= {"sample": sample, "best": reward}
        one["last"] = step
    scored = [one for one in found.values() if one["best"] is not None]
    paid = sorted(scored, key=lambda o: (-o["best"], -o["count"], -o["last"]))
    frequent = sorted((o for o in found.values() if o["count"] > 1), key=lambda o: -o["count"])
    return {"Best paid": paid[:most], "Most frequent": frequent[:most]}
