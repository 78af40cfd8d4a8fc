"""Which weights responses were sampled from, against those that were pushed last."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.data.trajectory import Trajectory


def others(trajectories: Sequence[Trajectory], version: str) -> list[str]:
    """A line for each trajectory with tokens that are not known to come from weights `version`: its prompt, and theirs."""
    lines = []
    for t in trajectories:
        spans = [span for span in t.weight_spans if span.version != version]
        if spans:
            named = ", ".join(f"tokens {span.start} to {span.end} from '{span.version}'" for span in spans)
            lines.append(f"that to prompt '{t.prompt_id}' has {named}")
        elif not t.weight_spans and bool(t["loss_mask"].any()):
            lines.append(f"that to prompt '{t.prompt_id}' does not say")
    return lines


def staleness(trajectories: Sequence[Trajectory], step: int) -> list[int]:
    """Steps between the oldest weights that each trajectory has tokens of and those that train on it, of `step`."""
    versions = [[int(span.version) for span in t.weight_spans if span.version.isdecimal()] for t in trajectories]
    return [step - min(found, default=step) for found in versions]
