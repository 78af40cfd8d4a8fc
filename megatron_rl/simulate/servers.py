"""Event simulation of rollout servers. The events are arrivals and ends of requests. A weight sync interrupts all requests."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import batched

import numpy as np

from megatron_rl.simulate.costs import Costs, Setting

TOKENS_PER_CALL = 4096
"""Copy of the constant in megatron_rl/rollout/collect.py, which imports torch. Tests compare the calls of both modules."""


@dataclass(slots=True, eq=False)
class Request:
    """A response that has been requested or is running."""

    prompt: tuple[int, int]
    """(number of the batch, index of the prompt in the batch)."""
    length: float
    """Number of tokens that the response has at its end."""
    call: Call
    done: float = 0.0
    """Number of tokens that the response had when the server last admitted it."""
    start: float = 0.0
    """Number of iterations that the server had done when it last admitted the response."""
    version: int = 0
    """Version of the weights that sampled the response's first token."""


@dataclass(slots=True, eq=False)
class Call:
    """Requests that share an HTTP call. The client counts all of them as in flight until the last one has ended."""

    leader: int
    server: int
    size: int
    open: int
    requests: list[Request] = field(default_factory=list)
    """Requests of the call before they are sent to the server; then empty."""


def calls_of(first: int, count: int, total: int, servers: int, per_call: int) -> list[tuple[int, range]]:
    """Return (server, request numbers) of a leader's calls, in order.

    A leader is a data-parallel rank of the trainer. Its requests are first .. first + count - 1. total: number of requests of
    all leaders, which are split into one equal block per server (`server_order` in megatron_rl/servers/client.py). If the
    leader's requests lie in several blocks, its calls alternate between these servers. per_call: largest number of requests
    of a call.
    """
    blocks: dict[int, list[int]] = defaultdict(list)
    for number in range(first, first + count):
        blocks[number * servers // total].append(number)
    calls = [
        (part[0] - numbers[0], server, range(part[0], part[-1] + 1))
        for server, numbers in blocks.items()
        for part in batched(numbers, per_call)
    ]
    return [(server, numbers) for _, server, numbers in sorted(calls, key=lambda call: call[:2])]


@dataclass(slots=True)
class Work:
    """Work that a server has done, in the units of `Costs`."""

    iterations: float = 0.0
    tokens: float = 0.0
    """Number of decoded response tokens."""
    kv_tokens: float = 0.0
    """Number of cached tokens that were read, summed over iterations."""
    prefill_tokens: float = 0.0


class _Server:
    """A server. Its clock, called position, counts iterations. An iteration adds one token to every running response."""

    def __init__(self, costs: Costs, slots: int, prompt_tokens: float) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[tuple[float, int, Request]] = []
        """Heap of (position at which the response ends, order of admission, request)."""
        self.work = Work()
        self.stamp = 0
        """Number that changes whenever the next end is computed again."""
        self._costs, self._slots, self._prompt = costs, slots, prompt_tokens
        self._time = self._position = self._prefill_s = self._kv = 0.0
        self._iteration_s = 0.0
        self._computed: set[tuple[int, int]] = set()
        """Prompts that are in the prefix cache."""

    def advance(self, now: float) -> None:
        """Simulate the server's work from the last call until the time `now` (in seconds)."""
        left = now - self._time
        self._time = now
        if not self.running:
            return
        prefill = min(left, self._prefill_s)
        self._prefill_s -= prefill
        # Seconds of n iterations, in which the cache grows: a n + c n^2.
        left, c = left - prefill, self._costs.decode_kv_token_s * len(self.running) / 2
        a = self._iteration_s + self._costs.decode_kv_token_s * self._kv
        if left > 0:
            self._iterate(2 * left / (a + math.sqrt(a * a + 4 * c * left)))

    def _iterate(self, count: float) -> None:
        running = len(self.running)
        work = self.work
        work.iterations += count
        work.tokens += running * count
        work.kv_tokens += (self._kv + running * count / 2) * count
        self._kv += running * count
        self._position += count

    def next_end(self) -> float:
        """Return the time at which the next response ends if nothing else happens. `advance` must have been called."""
        if not self.running:
            return math.inf
        count, kv_s = max(0.0, self.running[0][0] - self._position), self._costs.decode_kv_token_s
        seconds = count * (self._iteration_s + kv_s * self._kv) + kv_s * len(self.running) * count**2 / 2
        return self._time + self._prefill_s + seconds

    def end(self, now: float) -> list[Request]:
        """End and return the responses that end at the time `now`, which `next_end` returned."""
        self._time, self._prefill_s = now, 0.0
        self._iterate(max(0.0, self.running[0][0] - self._position))
        self._position, ended = max(self._position, self.running[0][0]), []
        while self.running and self.running[0][0] <= self._position:
            ended.append(heappop(self.running)[2])
            self._kv -= ended[-1].length + self._prompt
        return ended

    def admit(self, version: int, order: int) -> int:
        """Admit waiting requests while slots are free. Each prompt is prefilled once, and a response's earlier tokens again."""
        before = len(self.running)
        while self.waiting and len(self.running) < self._slots:
            request = self.waiting.popleft()
            new = request.done + (0 if request.prompt in self._computed else self._prompt)
            self._computed.add(request.prompt)
            if not request.done:
                request.version = version
            self.work.prefill_tokens += new
            self._prefill_s += new * self._costs.prefill_token_s
            self._kv += self._prompt + request.done
            order += 1
            request.start = self._position
            heappush(self.running, (self._position + request.length - request.done, order, request))
        self._iteration_s = self._costs.iteration_s(len(self.running))
        return len(self.running) - before

    def retract(self) -> None:
        """Move all running requests to the end of the queue, as SGLang does, and empty the prefix cache."""
        for _, _, request in sorted(self.running, key=lambda entry: entry[1]):
            request.done = min(request.length, request.done + self._position - request.start)
            self.waiting.append(request)
        self.running.clear()
        self._computed.clear()
        self._prefill_s = self._kv = 0.0


class Servers:
    """All servers and their clients. `now` counts seconds of work, `wall` counts seconds of wall-clock time.

    The two times differ if trainer and servers share processors. While both have work, both run at 1 / costs.overlap_slowdown
    of their speed.
    """

    def __init__(self, setting: Setting, costs: Costs) -> None:
        self.now = self.wall = 0.0
        self.seconds_with: defaultdict[int, float] = defaultdict(float)
        """{number of running responses: seconds of wall-clock time with this number}."""
        self.idle_s = self.overlap_s = 0.0
        """idle_s: wall-clock seconds in which a server runs nothing, summed over servers. overlap_s: seconds of work in which
        both trainer and servers have work."""
        self._setting, self._costs = setting, costs
        self._servers = [_Server(costs, setting.slots, setting.prompt_tokens) for _ in range(setting.servers)]
        self._in_flight = [0] * setting.leaders
        self._calls: list[deque[Call]] = [deque() for _ in range(setting.leaders)]
        self._arrivals: deque[tuple[float, list[list[Call]]]] = deque()
        self._ends: list[tuple[float, int, int]] = []
        """Heap of (time of the next end, server, the server's stamp). Entries with an old stamp are ignored."""
        self._asked: dict[int, list[Request]] = {}
        self._open: dict[int, int] = {}
        """{batch: number of its responses that have not ended}."""
        self._running = self._active = self._order = 0
        self._paused, self._version = False, 0

    @property
    def work(self) -> list[Work]:
        """Work that each server has done."""
        return [server.work for server in self._servers]

    def ask(self, batch: int, lengths: Sequence[int] | np.ndarray) -> None:
        """Request a batch of responses with these lengths. The responses to one prompt are adjacent."""
        setting, total = self._setting, len(lengths)
        per_call = max(1, TOKENS_PER_CALL // setting.max_new_tokens)
        leaders, requests = [], []
        for leader in range(setting.leaders):
            first, last = (r * total // setting.leaders for r in (leader, leader + 1))
            calls = []
            for server, numbers in calls_of(first, last - first, total, setting.servers, per_call):
                call = Call(leader, server, len(numbers), len(numbers))
                prompts = [(batch, number // setting.samples_per_prompt) for number in numbers]
                call.requests = [
                    Request(p, float(lengths[number]), call) for p, number in zip(prompts, numbers, strict=True)
                ]
                requests += call.requests
                calls.append(call)
            leaders.append(calls)
        self._asked[batch], self._open[batch] = requests, total
        self._arrivals.append((self.now + self._costs.request_s, leaders))

    def finish(self, batch: int) -> list[Request]:
        """Wait for a batch and return its requests."""
        while self._open[batch]:
            self._next(math.inf, computing=False)
        return self._asked.pop(batch)

    def wait_for_all(self) -> None:
        """Wait for all requested batches."""
        while any(self._open.values()):
            self._next(math.inf, computing=False)

    def pass_time(self, seconds: float) -> None:
        """Advance the simulation by `seconds` of the trainer's work."""
        until = self.now + seconds
        while self._next(until, computing=True):
            pass

    def pause(self) -> None:
        """Interrupt all running requests, as a weight sync does."""
        for server in self._servers:
            server.advance(self.now)
            server.retract()
            server.stamp += 1
        self._ends.clear()
        self._running = self._active = 0
        self._paused = True

    def resume(self, version: int) -> None:
        """Continue with new weights of this version."""
        self._paused, self._version = False, version
        self._admit(range(len(self._servers)))

    def _next(self, until: float, *, computing: bool) -> bool:
        """Advance to the next event, or to `until` if no event comes earlier. Returns True if there was an event."""
        while self._ends and self._ends[0][2] != self._servers[self._ends[0][1]].stamp:
            heappop(self._ends)
        end = self._ends[0][0] if self._ends else math.inf
        arrival = self._arrivals[0][0] if self._arrivals else math.inf
        at = min(end, arrival)
        assert min(at, until) < math.inf, "the run waits for a batch that was never requested"
        self._clock(min(at, until), computing)
        if at > until:
            return False
        if arrival <= end:
            leaders = self._arrivals.popleft()[1]
            for calls, new in zip(self._calls, leaders, strict=True):
                calls.extend(new)
            touched = {server for leader in range(len(leaders)) for server in self._serve(leader)}
        else:
            touched = self._end(heappop(self._ends)[1])
        if not self._paused:
            self._admit(touched)
        return True

    def _clock(self, now: float, computing: bool) -> None:
        seconds = now - self.now
        overlaps = computing and self._running > 0
        wall = seconds * self._costs.overlap_slowdown if overlaps else seconds
        self.overlap_s += seconds if overlaps else 0.0
        self.seconds_with[self._running] += wall
        self.idle_s += wall * (len(self._servers) - self._active)
        self.now, self.wall = now, self.wall + wall

    def _end(self, index: int) -> set[int]:
        server, touched = self._servers[index], {index}
        ended = server.end(self.now)
        self._running -= len(ended)
        self._active -= not server.running
        for request in ended:
            self._open[request.prompt[0]] -= 1
            call = request.call
            call.open -= 1
            if not call.open:
                self._in_flight[call.leader] -= call.size
                touched |= self._serve(call.leader)
        return touched

    def _serve(self, leader: int) -> set[int]:
        """Send a leader's waiting calls, in order, within its limit of requests in flight.

        The limit works as in servers/request_slots.py: a call above the limit is sent alone. Returns the servers that got
        requests.
        """
        calls, limit, touched = self._calls[leader], self._setting.concurrency, set()
        while calls and (not self._in_flight[leader] or self._in_flight[leader] + calls[0].size <= limit):
            call = calls.popleft()
            self._in_flight[leader] += call.size
            self._servers[call.server].waiting.extend(call.requests)
            call.requests = []  # a request refers to its call: this avoids cycles
            touched.add(call.server)
        return touched

    def _admit(self, indices: Sequence[int] | set[int] | range) -> None:
        for index in sorted(indices):
            server = self._servers[index]
            server.advance(self.now)
            was_active = bool(server.running)
            admitted = server.admit(self._version, self._order)
            self._order += admitted
            self._running += admitted
            self._active += bool(server.running) - was_active
            server.stamp += 1
            if server.running:
                heappush(self._ends, (server.next_end(), index, server.stamp))
