"""Samples of a step, saved to disk as they finish, so that a run that ends within a step does not request them again.

The run's folder `pending/` has one file per step and data-parallel rank. The records of a file follow each other, each with its
length and checksum. If the last record was cut off, the records before it are still valid. The file name holds a digest of the
requests, so that a run with other prompts, seeds or settings does not read the file.

A sample is reused if the digest of its weights (`WeightsDigest`) shows that this run pushed these weights. Either this process
pushed them, or the checkpoint from which the run resumed holds their digest.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.data.engine_routes import EngineFeatures, EngineRoutes, check_gates
from megatron_rl.data.trajectory import Trajectory, load_trajectories, read_trajectories, write_trajectories
from megatron_rl.errors import UserError

log = logging.getLogger(__name__)

PENDING = "pending"
"""Folder, within the run's folder, for samples of steps that are not in a checkpoint yet."""

_HEAD = struct.Struct("<QI")
"""Length and CRC-32 of the record that follows."""
Samples = dict[int, list[Trajectory]]
"""Sequences of each sample, by index of the request."""


def key_of(asked: Mapping[str, Any]) -> str:
    """Return a short digest of all settings of a set of requests. The repr of each value must describe it completely."""
    return hashlib.sha256(repr(sorted(asked.items())).encode()).hexdigest()[:16]


class SampleJournal:
    """Files of one step's samples. A process reads the files of all ranks and writes its own file."""

    def __init__(self, folder: Path, step: int, data_rank: int, key: str) -> None:
        self._folder, self._step, self._stem = folder, step, f"step_{step:06d}.{key}.rank"
        self._own = folder / f"{self._stem}{data_rank}"
        self._lock = threading.Lock()

    def read(self, wanted: Collection[int], pushed: Mapping[str, str]) -> Samples:
        """Return samples of the wanted requests whose weights belong to this run, whichever process wrote them.

        pushed: digests of the run's weights, by version.
        """
        found: Samples = {}
        files = self._folder.iterdir() if self._folder.is_dir() else ()
        for file in sorted(file for file in files if file.name.startswith(self._stem)):
            for samples, digests in _records(file):
                for request, sample in samples.items():
                    if request in wanted and all(
                        _same(span.version, digests, pushed) for t in sample for span in t.weight_spans
                    ):
                        found[request] = sample
        return found

    def add(self, samples: Samples, digests: Mapping[str, str]) -> None:
        """Append samples. digests: digests of the weights, by version."""
        body = io.BytesIO()
        trajectories = [t for sample in samples.values() for t in sample]
        versions = {span.version for t in trajectories for span in t.weight_spans}
        known = {version: digests[version] for version in versions if version in digests}
        write_trajectories(
            body,
            trajectories,
            requests=np.asarray([*samples]),
            counts=np.asarray([len(sample) for sample in samples.values()]),
            weight_digests=np.frombuffer(json.dumps(known).encode(), np.uint8),
        )
        written = body.getvalue()
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._lock, open(self._own, "ab", buffering=0) as file:
            file.write(_HEAD.pack(len(written), zlib.crc32(written)) + written)

    def keeper(self, digests: Mapping[str, str]) -> Callable[[Samples], None]:
        """Return a function that appends samples as they finish.

        If a write fails, the function warns once and saves no further samples.
        """
        failed: list[OSError] = []

        def keep(samples: Samples) -> None:
            # A failed sample may have failed because the run was ended.
            done = {r: sample for r, sample in samples.items() if not any(t.finish_reason == "failure" for t in sample)}
            if done and not failed:
                try:
                    self.add(done, digests)
                except OSError as error:
                    failed.append(error)
                    log.warning(
                        f"{self._folder}: {error.strerror or error}: samples of step {self._step + 1} are not saved; a run"
                        " that is ended in this step requests them again (rollout.durable)"
                    )

        return keep

    def mend(self) -> None:
        """Cut off an incomplete record at the end of this process's file, because no record after it would be found."""
        if self._own.exists():
            whole = sum(_HEAD.size + size for size, _ in _bodies(self._own))
            if whole < self._own.stat().st_size:
                with open(self._own, "r+b") as file:
                    file.truncate(whole)


def delete_journal(folder: Path, before: int) -> None:
    """Delete the files of steps before step `before`, because a checkpoint includes these steps."""
    for file in folder.glob("step_*.rank*"):
        if int(file.name[len("step_") :].partition(".")[0]) < before:
            file.unlink(missing_ok=True)


def _same(version: str, digests: Mapping[str, str], pushed: Mapping[str, str]) -> bool:
    return bool(digests.get(version)) and digests[version] == pushed.get(version)


def _records(file: Path) -> Iterator[tuple[Samples, dict[str, str]]]:
    for _, body in _bodies(file):
        try:
            yield _read(body)
        except Exception as error:  # any error: the checksum may match by chance, or another release wrote the record
            log.warning(f"{file}: a record is damaged ({type(error).__name__}): ignoring it and the rest of the file")
            return


def _read(body: bytes) -> tuple[Samples, dict[str, str]]:
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        trajectories = iter(read_trajectories(arrays))
        counted = zip(arrays["requests"].tolist(), arrays["counts"].tolist(), strict=True)
        samples = {request: [next(trajectories) for _ in range(count)] for request, count in counted}
        return samples, json.loads(arrays["weight_digests"].tobytes())


def _bodies(file: Path) -> Iterator[tuple[int, bytes]]:
    with open(file, "rb") as opened:
        left = os.fstat(opened.fileno()).st_size
        while head := opened.read(_HEAD.size):
            size, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
            left -= len(head) + size
            # After a power cut, zeros look like an empty record with a matching checksum.
            body = opened.read(size) if size > 0 and left >= 0 else b""
            if not body or zlib.crc32(body) != checksum:
                log.warning(f"{file}: the last record is cut off and is ignored")
                return
            yield size, body


# -- recorded ------------------------------------------------------------------------------------------------------------
# Recorded trajectories instead of an engine: read them, and refuse trajectories of another model or support.


def read_recorded(
    path: Path, support: SamplingSupport, routes: EngineRoutes | None, features: EngineFeatures | None
) -> list[Trajectory]:
    """Return the trajectories of a file. Recorded routes, gates and features are dropped if the run does not use them.

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
