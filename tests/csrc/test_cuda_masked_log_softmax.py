"""The CUDA kernels of masked_log_softmax, emulated on the CPU: against fp64, under random schedules, and with planted bugs."""

from __future__ import annotations

import math
import random

import pytest
import torch
from emulation import Emulated, Guarded, compile_emulated, fails
from hypothesis import given, settings
from hypothesis import strategies as st

INF = math.inf


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Emulated:
    return Emulated(compile_emulated("masked_log_softmax", tmp_path_factory.mktemp("emulated")))


class Case:
    """Random logits, targets, options and order of the warps."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        self.rows = rng.randint(1, 3)
        self.columns = rng.choice([1, 2, 7, 31, 64, 255, 256, 1000, 1001, 2048, 4104])
        self.log_rho = rng.choice([None, 0.0, -1.0, -2.5, -13.0])
        self.temperature = rng.choice([1.0, 0.6, 1.7])
        self.with_entropy = rng.random() < 0.7
        self.first_column = rng.choice([0, self.columns, 2 * self.columns])
        self.schedule = rng.randint(0, 2**31)
        self.offset = rng.choice([0, 0, 1])
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.rows, self.columns, generator=generator) * rng.choice([0.3, 2, 6])
        if rng.random() < 0.5:
            x = (x * 4).round() / 4  # ties, at the threshold too
        if self.columns > 2:
            x[torch.rand(x.shape, generator=generator) < 0.1] = -INF
        if self.columns > 2 and rng.random() < 0.2:
            x[:, rng.randrange(self.columns)] = -3.3e38  # a mask; times log2(e) it is -inf
            self.log_rho = rng.choice([None, self.log_rho])
        if rng.random() < 0.15:
            x[0, rng.randrange(self.columns)] = rng.choice([math.nan, INF])
        if rng.random() < 0.1:
            x[-1] = -INF
        self.logits = x.to(rng.choice([torch.float32, torch.bfloat16]))
        self.targets = torch.randint(0, 3 * self.columns, (self.rows,), generator=generator)
        if rng.random() < 0.3:
            self.targets[-1] = -100
        self.factors = torch.randn(3, self.rows, generator=generator)
        self.factors[:, torch.rand(self.rows, generator=generator) < 0.2] = 0.0

    def expect(self):
        """(extremes, sums, d, safe) in fp64 by the definitions; the set is taken in fp32."""
        x = self.logits.float()
        maximum = torch.where(x.isnan().any(-1), INF, x.nan_to_num(-INF, INF, -INF).amax(-1))
        local = self.targets - self.first_column
        here = (local >= 0) & (local < self.columns)
        at_target = torch.where(here, x.gather(1, local.clamp(0, self.columns - 1)[:, None])[:, 0], -INF)
        safe = x > -INF
        if self.log_rho is not None:
            safe &= x / self.temperature >= (maximum / self.temperature + self.log_rho)[:, None]
        d = (x.double() - maximum.double()[:, None]) / torch.tensor(self.temperature).double()
        e = torch.exp(d)
        safe_sum = torch.where(safe, e, 0).sum(-1)
        weighted = torch.where(safe, e * d, 0).sum(-1) if self.with_entropy else torch.zeros(self.rows)
        pruned = torch.where(safe, 0, e).sum(-1)
        return torch.stack([maximum, at_target]), torch.stack([safe_sum, pruned, weighted.double()]), d, safe


def run(kernels: Emulated, case: Case) -> list[torch.Tensor]:
    """Outputs of all kernels, with what they wrote beyond them checked."""
    kernels.set_schedule(case.schedule)
    logits = Guarded(case.logits, case.offset)
    bits = case.logits.dtype == torch.bfloat16
    x = (logits.tensor, bits, case.rows, case.columns)
    log_rho = -INF if case.log_rho is None else case.log_rho
    extremes, first = (Guarded(torch.empty(2, case.rows)) for _ in range(2))
    sums, second = (Guarded(torch.empty(3, case.rows)) for _ in range(2))
    kernels.call("extremes", *x, case.targets, case.first_column, extremes.tensor)
    options = (log_rho, case.temperature, case.with_entropy)
    maximum = extremes.tensor[0].contiguous()
    kernels.call("sums", *x, maximum, *options, sums.tensor)
    kernels.call("extremes_and_sums", *x, case.targets - case.first_column, *options, first.tensor, second.tensor)
    out = Guarded(torch.full_like(case.logits, 7.0), case.offset)
    more = (case.targets, case.first_column, maximum, case.factors, log_rho, case.temperature)
    kernels.call("gradient", *x, *more, out.tensor)
    assert torch.equal(logits.tensor.view(torch.uint8), case.logits.view(torch.uint8))
    kernels.call("gradient", *x, *more, logits.tensor)
    outputs = [extremes, sums, first, second, out, logits]
    for output in outputs:
        output.check()
    return [output.tensor for output in outputs]


def check(kernels: Emulated, case: Case) -> None:
    extremes, sums, first, second, out, in_place = run(kernels, case)
    expected_extremes, expected_sums, d, safe = case.expect()
    for result in (extremes, first):
        torch.testing.assert_close(result, expected_extremes, atol=0, rtol=0, equal_nan=True)  # the target may be a NaN
    finite = expected_extremes[0].isfinite()
    assert not second[:, ~finite].any()
    # d has three roundings, so that e^d is wrong by d 2^-22 of itself: of a sum of d e^d far below 1 that is more than 2e-6.
    within = 2e-6 * expected_sums.abs() + 1e-30
    within[2] += 2**-22 * torch.where(safe, d.exp() * d.square(), 0).sum(-1)
    within[1] += 2**-22 * torch.where(~safe & d.isfinite(), d.exp() * d.abs(), 0).sum(-1)
    for result in (sums, second):
        assert ((result.double() - expected_sums).abs() <= within)[:, finite].all()

    factor, slope, at_target = case.factors.double()[:, :, None]
    gradient = torch.where(safe, (factor + slope * d) * d.exp(), 0.0)
    local = case.targets - case.first_column
    for row, column in enumerate(local.tolist()):
        if 0 <= column < case.columns and safe[row, column]:
            gradient[row, column] += at_target[row, 0]
    gradient[(case.factors == 0).all(0)] = 0.0
    check_rows = finite | (case.factors == 0).all(0)
    tolerance = {"atol": 2e-6, "rtol": 1e-5} if out.dtype == torch.float32 else {"atol": 1e-5, "rtol": 5e-3}
    torch.testing.assert_close(out[check_rows].double(), gradient[check_rows], **tolerance)
    assert not out[check_rows][~safe[check_rows]].any()
    assert torch.equal(out[check_rows], in_place[check_rows])


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31))
def test_kernels_match_the_definition(kernels, seed):
    check(kernels, Case(seed))


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_results_do_not_depend_on_the_schedule(kernels, seed):
    case = Case(seed)
    first = run(kernels, case)
    case.schedule += 1
    for a, b in zip(first, run(kernels, case), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class Rows:
    """Sums of rows as the kernels find them, with targets and the gradients that come back."""

    def __init__(self, seed: int):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.count, self.vocabulary = rng.choice([1, 2, 127, 128, 129, 300]), 50
        self.log_rho, self.temperature = rng.choice([None, 0.0, -0.5, -3.0]), rng.choice([1.0, 0.6, 1.7])
        uniform = torch.rand(7, self.count, generator=generator)
        self.targets = torch.randint(-2, self.vocabulary + 2, (self.count,), generator=generator)
        self.targets[uniform[0] < 0.2] = -100
        maximum = 20 * uniform[1] - 10
        at_target = maximum - 8 * uniform[2] * (uniform[0] < 0.8)  # or the largest itself
        at_target[uniform[0] > 0.9] = -INF
        self.extremes = torch.stack([maximum, at_target])
        safe = 1 + 30 * uniform[3]
        self.sums = torch.stack([safe, 10 ** (2 - 10 * uniform[4]), -3 * safe * uniform[5]])
        self.extremes[0, uniform[6] < 0.05] = INF
        self.extremes[0, uniform[6] > 0.95] = -INF
        self.grads = torch.randn(2, self.count, generator=generator)
        self.grads[:, uniform[6] < 0.2] = 0.0

    def expect(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Values and factors in fp64 by the definition; the set is taken in fp32."""
        counts = self.targets != -100
        maximum, at_target = self.extremes
        safe, pruned, weighted = self.sums.double()
        inside = counts & (at_target > -INF)
        if self.log_rho is not None:
            inside &= at_target / self.temperature >= maximum / self.temperature + self.log_rho
        temperature = float(torch.tensor(self.temperature))
        margin = (at_target.double() - maximum.double()) / temperature
        entropy = safe.log() - weighted / safe
        values = {
            "log_probs": torch.where(inside, margin - safe.log(), torch.where(counts, -INF, 0.0)),
            "coverage": torch.where(counts, safe / (safe + pruned), 1.0),
            "entropy": torch.where(counts, entropy, 0.0),
            "margin": torch.where(counts, margin, 0.0),
            "pruned": torch.where(counts, pruned / (safe + pruned), 0.0),
            "in_support": inside,
            "bad_logits": counts & ~(maximum / self.temperature).isfinite(),
            "outside": counts & ((self.targets < 0) | (self.targets >= self.vocabulary)),
        }
        of_log_probs, of_entropy = self.grads.double()
        at_target = torch.where(inside, of_log_probs / temperature, 0.0)
        scaled = torch.where(counts, of_entropy / safe / temperature, 0.0)
        return values, torch.stack([scaled * (safe.log() - entropy) - at_target / safe, -scaled, at_target])


def check_rows(kernels: Emulated, rows: Rows) -> None:
    values, factors = rows.expect()
    found = {n: Guarded(torch.zeros(rows.count)) for n in ("log_probs", "coverage", "entropy", "margin", "pruned")}
    flags = {n: torch.zeros(rows.count, dtype=torch.bool) for n in ("in_support", "bad_logits", "outside")}
    log_rho = -INF if rows.log_rho is None else rows.log_rho
    given = (rows.targets, rows.count, rows.vocabulary, rows.extremes, rows.sums, log_rho, rows.temperature)
    kernels.call("finish", *given, *(output.tensor for output in found.values()), *flags.values())
    for name, output in flags.items():
        assert torch.equal(output, values[name]), name
    good = ~values["bad_logits"]  # else the numbers mean nothing
    eps = 2.0**-23
    sizes = rows.extremes.abs().nan_to_num(posinf=0.0, neginf=0.0).sum(0) / rows.temperature
    for name, output in found.items():
        output.check()
        # A quotient and a logarithm of its own size, and before a margin two quotients of the size of logits.
        within = 4 * eps * values[name].abs() + (
            eps * (sizes + 5) if name in ("log_probs", "margin", "entropy") else 0.0
        )
        same = (output.tensor.double() == values[name]) | ((output.tensor.double() - values[name]).abs() <= within)
        assert same[good].all(), name
    out = Guarded(torch.zeros(3, rows.count))
    safe, entropy = rows.sums[0].contiguous(), found["entropy"].tensor
    given = (rows.targets, rows.count, flags["in_support"], safe, entropy)
    kernels.call("factors", *given, *rows.grads, rows.temperature, out.tensor)
    out.check()
    # Each part is of a few roundings; the difference of logarithm and entropy keeps those of their sizes.
    within = 8 * eps * (factors[2].abs() / safe + factors[1].abs() * (1 + safe.log() + entropy.abs()))
    assert ((out.tensor[0].double() - factors[0]).abs() <= within)[good].all()
    assert ((out.tensor[1:].double() - factors[1:]).abs() <= 4 * eps * factors[1:].abs())[:, good].all()
    kernels.call("factors", *given[:4], 0, rows.grads[0], 0, rows.temperature, out.tensor)
    assert torch.equal(out.tensor[1], torch.zeros(rows.count)) and torch.equal(
        out.tensor[2].double() == 0, factors[2] == 0
    )


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31))
def test_values_and_factors_of_rows_match_the_definition(kernels, seed):
    check_rows(kernels, Rows(seed))


@pytest.mark.parametrize(
    ("dtype", "columns"), [(torch.bfloat16, 50_257), (torch.bfloat16, 201_088), (torch.float32, 262_144)]
)
def test_real_vocabularies(kernels, dtype, columns):
    kernels.set_schedule(columns)
    logits = (torch.randn(1, columns) * 3).to(dtype)
    targets, extremes, sums = torch.tensor([columns - 1]), torch.empty(2, 1), torch.empty(3, 1)
    bf16 = dtype == torch.bfloat16
    kernels.call("extremes_and_sums", logits, bf16, 1, columns, targets, -13.0, 1.0, True, extremes, sums)

    assert extremes[:, 0].tolist() == [float(logits.max()), float(logits[0, -1])]
    d = logits.double() - logits.double().max()
    kept = torch.where(logits.float() >= logits.float().max() - 13.0, d.exp(), 0.0)
    expected = torch.stack([kept.sum(), (kept * d).sum()])
    torch.testing.assert_close(sums[[0, 2], 0].double(), expected, atol=0, rtol=2e-6)
    pruned = torch.where(kept > 0, 0.0, d.exp()).sum()  # |d| below 32: its three roundings are 8e-6 of e^d
    torch.testing.assert_close(sums[1, 0].double(), pruned, atol=0, rtol=8e-6)


def test_what_does_not_fit_a_launch_is_an_error(kernels):
    nothing = torch.empty(0)
    with pytest.raises(RuntimeError, match="extremes: more rows than"):
        kernels.call("extremes", nothing, False, 1 << 31, 8, nothing, 0, nothing)
    with pytest.raises(RuntimeError, match="sums: rows of more than"):
        kernels.call("sums", nothing, False, 1, (1 << 30) + 1, nothing, -1.0, 1.0, False, nothing)


KERNELS, LAUNCHERS, SHARED = "masked_log_softmax/kernels.cuh", "masked_log_softmax/cuda.cu", "device.cuh"
ROWS = "masked_log_softmax/row_values.h"
BUGS = {
    "no barrier in a reduction": (
        SHARED,
        "    __syncthreads();\n    if (warp > 0) return;",
        "    if (warp > 0) return;",
    ),
    "a barrier that some never reach": (
        SHARED,
        "    __syncthreads();\n    if (warp > 0) return;",
        "    if (warp > 0) return;\n    __syncthreads();",
    ),
    "no barrier behind the threshold": (
        KERNELS,
        "__syncthreads();\n    float total[3] = {};\n    add_up(packs,",
        "float total[3] = {};\n    add_up(packs,",
    ),
    "a shuffle over a wrong distance": (SHARED, "x, distance)", "x, distance / 2 + 1)"),
    "a mask's 0 * -inf": (KERNELS, "d = fmaxf((v - most) * scale, LOWEST);\n", "d = (v - most) * scale;\n"),
    "no tail": (SHARED, "for (; i < count; i += step) each(load(i), i);", ""),
    "a pack too many": (SHARED, "(GROUP - 1) * step < count", "(GROUP - 1) * step <= count"),
    "a pack before the row": (KERNELS, "packs[count - 1 - i]", "packs[count - 2 - i]"),
    "ties outside the set": (KERNELS, "v >= threshold ? e", "v > threshold ? e"),
    "ties without a gradient": (KERNELS, "v >= threshold ? value", "v > threshold ? value"),
    "NaN not seen": (KERNELS, "maximum_or_nan(most[0], to_float", "fmaxf(most[0], to_float"),
    "packs at odd addresses": (LAUNCHERS, "const bool aligned = (addresses | ", "const bool aligned = ("),
    "entropy over the whole softmax": (ROWS, "row.weighted / row.safe", "row.weighted / full"),
    "a gradient outside the set": (ROWS, "if (in_support) {", "if (target != IGNORED) {"),
    "a row too few": (LAUNCHERS, "(rows + ROWS - 1) / ROWS", "(rows - 1) / ROWS"),
    "rows of odd length in packs": (LAUNCHERS, "(addresses | logits.columns * (logits.bf16 ? 2 : 4))", "addresses"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug, tmp_path):
    file, old, new = BUGS[bug]
    library = compile_emulated("masked_log_softmax", tmp_path, {file: (old, new)}, alignment=file == LAUNCHERS)
    broken = Emulated(library)

    def look(seed: int) -> None:
        if file == ROWS or "row too few" in bug:
            check_rows(broken, Rows(seed))
        else:
            check(broken, Case(seed))

    assert fails(look)
