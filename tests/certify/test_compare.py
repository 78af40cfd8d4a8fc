"""Two recordings compared: what is equal, what is the first place that is not, and of which rows that is said."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from megatron_rl_plugin.trace import EMBEDDING, FINAL_NORM, OF_LAYER

from megatron_rl.certify.certificate import Step, as_json, facts_of, outcome, page, verdict
from megatron_rl.certify.compare import LOG_PROBS, Recorded, common_prefix, compare, matching_rows, order_of
from megatron_rl.certify.engine_side import read_passes
from megatron_rl.config.load import build_config

LAYERS = 3
PLACES = [(None, EMBEDDING), *((layer, name) for layer in range(LAYERS) for name in OF_LAYER), (None, FINAL_NORM)]


def random_side(rng, sequences=4) -> dict[int, Recorded]:
    """Values of widths of their own, in another order than they are computed; log-probs of the second half."""
    found = {}
    for number in range(sequences):
        n = int(rng.integers(6, 15))
        log_probs = torch.full((n,), math.nan)
        log_probs[n // 2 :] = -torch.from_numpy(rng.exponential(size=n - n // 2)).float()
        values = {place: torch.randn(n - 1, int(rng.integers(2, 7))) for place in PLACES}
        shuffled = [PLACES[i] for i in rng.permutation(len(PLACES))]
        tokens = torch.from_numpy(rng.integers(0, 50, n))
        found[number] = Recorded(tokens, log_probs, torch.arange(n - 1), {p: values[p] for p in shuffled})
    return found


def copied(side: dict[int, Recorded]) -> dict[int, Recorded]:
    return {
        number: replace(one, log_probs=one.log_probs.clone(), values={p: v.clone() for p, v in one.values.items()})
        for number, one in side.items()
    }


def test_a_copy_is_equal_and_all_of_it_was_compared(rng):
    side = random_side(rng)
    found = compare(side, copied(side))
    rows = sum(len(one.positions) for one in side.values())
    assert found.equal and found.first is None and found.kl == 0 and not found.left_alone
    assert list(found.places) == PLACES and all(one.rows == rows for one in found.places.values())
    assert found.log_probs.rows == sum(int((~one.log_probs.isnan()).sum()) for one in side.values())
    assert (found.sequences, found.otherwise) == (len(side), 0)
    assert outcome(found).startswith(
        f"equal to the last bit: {rows} tokens; {len(OF_LAYER)} operators x {LAYERS} layers"
    )


def test_the_first_unequal_place_is_that_which_is_computed_first(rng):
    side, other = random_side(rng), None
    other = copied(side)
    changed = sorted((PLACES[i] for i in rng.choice(len(PLACES), 4, replace=False)), key=PLACES.index)
    largest = 0.0
    for place in changed:
        one = other[int(rng.integers(len(other)))]
        row = int(rng.integers(len(one.positions)))
        before = one.values[place][row, 1].clone()
        one.values[place][row, 1] = torch.nextafter(before, torch.tensor(math.inf))
        if place == changed[0]:
            largest = float((one.values[place][row, 1].double() - before.double()).abs())
    found = compare(side, other)
    assert found.first == changed[0] and not found.equal
    assert (found.places[changed[0]].unequal, found.places[changed[0]].largest) == (1, largest)
    assert {place for place, one in found.places.items() if one.unequal} == set(changed)
    assert sorted(PLACES, key=order_of) == PLACES


def test_log_probs_are_the_last_place_and_their_kl_is_estimated(rng):
    side = random_side(rng)
    other = copied(side)
    d = torch.zeros(0, dtype=torch.float64)
    for one in other.values():
        one.log_probs -= 0.25 * torch.rand(len(one.log_probs))
    for number, one in side.items():
        d = torch.cat([d, (one.log_probs.double() - other[number].log_probs.double())])
    d = d[~d.isnan()]
    found = compare(side, other)
    assert found.first == (None, LOG_PROBS)
    assert found.kl == pytest.approx(float((d.exp() - 1 - d).mean()))
    assert found.log_probs.largest == pytest.approx(float(d.abs().max()))


def test_behind_other_tokens_nothing_is_compared(rng):
    side = random_side(rng)
    other = copied(side)
    one = other[2]
    place = int(rng.integers(1, len(one.tokens)))
    other[2] = replace(one, tokens=one.tokens.clone())
    other[2].tokens[place] += 1
    for value in other[2].values.values():
        value[place:] += 1.0
    other[2].log_probs[place:] += 1.0
    found = compare(side, other)
    assert found.otherwise == 1 and found.first is None and not found.equal
    assert "in 1 of 4 sequences the tokens differ" in outcome(found)
    rows = sum(len(r.positions) for n, r in side.items() if n != 2) + min(place, len(one.positions))
    assert all(difference.rows == rows for difference in found.places.values())


def test_a_position_that_was_computed_again_counts_each_time(rng):
    side = random_side(rng, sequences=1)
    [one] = side.values()
    twice = replace(
        one,
        positions=torch.cat([one.positions, one.positions[:3]]),
        values={p: torch.cat([v, v[:3]]) for p, v in one.values.items()},
    )
    found = compare({0: twice}, side)
    assert found.equal and found.places[PLACES[0]].rows == len(one.positions) + 3
    assert found.tokens == len(one.positions)
    twice.values[1, "router"][-1] += 1.0
    assert compare({0: twice}, side).places[1, "router"].unequal == 1


def test_places_of_another_form_are_left_out(rng):
    side = random_side(rng)
    other = copied(side)
    for one in other.values():
        del one.values[2, "query"]
        one.values[0, "key"] = torch.randn(len(one.positions), 40)
    found = compare(side, other)
    assert found.equal
    assert found.left_alone == [(0, "key"), (2, "query")] and found.right_alone == [(0, "key")]


def test_values_are_compared_whatever_their_type(rng):
    value = torch.randn(5, 4).bfloat16()
    tokens, unknown = torch.arange(6), torch.full((6,), math.nan)

    def side(values):
        return {0: Recorded(tokens, unknown, torch.arange(5), {(0, "MLP"): values})}

    assert compare(side(value), side(value.float())).equal
    assert not compare(side(value), side(value.float() * (1 + 1e-6))).equal
    broken = value.clone()
    broken[1, 1] = math.nan
    assert compare(side(broken), side(broken)).equal
    found = compare(side(value), side(broken)).places[0, "MLP"]
    assert (found.unequal, found.largest) == (1, math.inf)


def test_nothing_compared_is_not_equal():
    assert not compare({}, {}).equal and outcome(compare({}, {})) == "not compared"


def test_prefixes_and_rows():
    assert common_prefix(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4, 5])) == 2
    assert common_prefix(torch.tensor([1, 2]), torch.tensor([1, 2, 4])) == 2
    mine, theirs = matching_rows(torch.tensor([0, 1, 2, 3, 1]), torch.tensor([1, 2, 3, 2]), 3)
    assert (mine.tolist(), theirs.tolist()) == ([1, 2, 4], [0, 3, 0])


def test_passes_are_read_by_request(tmp_path):
    """Two passes of three requests, of which one is another's, and a file that is not complete."""
    value = torch.arange(8.0)[:, None]
    first = {
        "rids": ["a", "foreign", "b"],
        "rows": torch.tensor([0, 0, 1, 2, 2]),
        "positions": torch.tensor([0, 1, 7, 0, 1]),
        "values": {(0, "MLP"): value[:5]},
    }
    second = {"rids": ["b", "a"], "rows": torch.tensor([0, 1]), "positions": torch.tensor([2, 2]), "values": {}}
    second["values"] = {(0, "MLP"): value[5:7]}
    torch.save(second, tmp_path / "00000002-decode.pt")
    torch.save(first, tmp_path / "00000001-extend.pt")
    (tmp_path / "00000003-decode.pt.partial").write_bytes(b"half")
    a, b, c = read_passes(tmp_path, ["a", "b", "c"])
    assert a.positions.tolist() == [0, 1, 2] and a.values[0, "MLP"][:, 0].tolist() == [0.0, 1.0, 6.0]
    assert b.positions.tolist() == [0, 1, 2] and b.values[0, "MLP"][:, 0].tolist() == [3.0, 4.0, 5.0]
    assert len(c.positions) == 0 and not c.values


def test_the_page_names_the_step_and_the_place(rng):
    side = random_side(rng)
    other = copied(side)
    other[1].values[1, "MLP norm"][2] += 0.5
    steps = [
        Step("alone = among others", "a and b", compare(side, copied(side))),
        Step("trainer = decode", "c and d", compare(side, other)),
    ]
    config = build_config({"precision": {"identical": True}})
    sections = config.model, config.precision, config.parallel, config.rollout.server
    facts = facts_of(*sections, {"torch": "2"})
    assert verdict(True, steps).startswith("Not equal: trainer = decode: unequal, first 'MLP norm' of layer 1: 1 of")
    assert "is off, so this is only a report" in verdict(False, steps)
    text = page(config.name, facts, True, steps)
    [line] = [line for line in text.splitlines() if line.startswith("| MLP norm |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == cells[3] == "equal" and cells[2].startswith("0.5 (1 of")
    found = as_json(facts, True, steps)
    assert (found["equal"], found["steps"][0]["equal"]) == (False, True)
    assert found["steps"][1]["first"] == {"layer": 1, "operator": "MLP norm"}
    assert verdict(True, steps[:1]) == "Trainer and engine are equal to the last bit."
    assert as_json(facts, True, steps[:1])["equal"]
