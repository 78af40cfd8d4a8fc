"""Recorded trajectories in the place of an engine: read, and refused where they are not of this model or support."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.data.record import load_trajectories
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.rollout.routes import EngineFeatures, EngineRoutes, check_gates
from megatron_rl.rollout.sampling import SamplingSupport


def read_recorded(
    path: Path, support: SamplingSupport, routes: EngineRoutes | None, features: EngineFeatures | None
) -> list[Trajectory]:
    """Trajectories of a file; without routes, gates or features that are not asked for, though they were recorded.

    Errors: UserError that names file and trajectory.
    """
    trajectories = load_trajectories(path)
    for number, t in enumerate(trajectories):
        t.routes = t.routes if routes else None
        t.gates = t.gates if routes and routes.gates else None
        t.features = t.features if features else None
        try:
            support.check_recorded(t.support)
            if routes and t.routes is not None:
                routes.shape.check(t.routes, len(t.tokens) - 1)
                if routes.gates:
                    check_gates(t.gates, t.routes)
            if features and t.features is not None:
                features.check(t.features, t.response_length)
        except ValueError as error:
            raise UserError(f"rollout.load: {path}, trajectory {number}: {error}") from None
    return trajectories
