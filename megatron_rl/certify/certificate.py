"""The certificate as lines for the terminal, as a Markdown page, and with the same content as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl_plugin.trace import OF_LAYER

from megatron_rl.certify.compare import LOG_PROBS, Comparison, Difference, Place
from megatron_rl.config import ModelConfig, ParallelConfig, PrecisionConfig, ServerConfig
from megatron_rl.data.hub import as_id

PAGE, DATA = "certificate.md", "certificate.json"
"""File names in the run's folder."""


@dataclass(frozen=True)
class Step:
    """One step of the proof: two recordings (for example decode and prefill) that should be equal."""

    name: str
    says: str
    """Text that describes the comparison."""
    found: Comparison
    """Result of the comparison."""
    remark: str = ""
    """Remark, added to the outcome in parentheses."""


def name_of(place: Place) -> str:
    """Return the name of a place (an operator in a layer), for example `'router' of layer 3`."""
    layer, operator = place
    return f"'{operator}'" if layer is None else f"'{operator}' of layer {layer}"


def outcome(found: Comparison) -> str:
    """Return one line: "equal to the last bit", or the first unequal place and the largest difference."""
    if not found.tokens:
        return "not compared"
    apart = f"; in {found.otherwise} of {found.sequences} sequences the tokens differ from some position on"
    apart = apart if found.otherwise else ""
    if found.first is None:
        of_layers = [place for place in found.places if place[0] is not None]
        alone = [operator for layer, operator in found.places if layer is None]
        layers, operators = ({place[i] for place in of_layers} for i in (0, 1))
        many = [f"{len(operators)} operators x {len(layers)} layers"] if layers else []
        parts = [*many, *alone, *([LOG_PROBS] if found.log_probs.rows else [])]
        return f"equal to the last bit: {found.tokens} tokens; {', '.join(parts)}{apart}"
    one = found.log_probs if found.first[1] == LOG_PROBS else found.places[found.first]
    line = f"unequal, first {name_of(found.first)}: {one.unequal} of {one.rows} rows, by {one.largest:.2g} at most"
    if one is not found.log_probs:
        line += f"; log-probs: {_cell(found.log_probs)}, KL {found.kl:.2g}"
    return line + apart


def _cell(one: Difference | None) -> str:
    if one is None or not one.rows:
        return "-"
    return f"{one.largest:.2g} ({one.unequal} of {one.rows})" if one.unequal else "equal"


def page(name: str, facts: Mapping[str, str], identical: bool, steps: Sequence[Step]) -> str:
    """Return the certificate as a Markdown page.

    name: name of the run. facts: result of `facts_of`. identical: value of precision.identical.
    """
    lines = [f"# Certificate of {name}", "", verdict(identical, steps), ""]
    lines += [f"- {fact}: {value}" for fact, value in facts.items()]
    lines += ["", "| step | what is compared | outcome |", "|---|---|---|"]
    for step in steps:
        remark = f" ({step.remark})" if step.remark else ""
        lines.append(f"| {step.name} | {step.says}{remark} | {outcome(step.found)} |")
    lines += [
        "",
        "Batch invariance means that the numbers of a token do not depend on other tokens in the same batch. From batch",
        "invariance, decode = prefill and prefill = trainer it follows that trainer = decode; the last step measures this too.",
        "Equal means that every value of every row is the same number. Layers are counted from 0.",
    ]
    shown = [step for step in steps if step.found.first is not None]
    if not shown and steps[-1].found.tokens:
        shown = [steps[-1]]
    for step in shown:
        lines += ["", f"## {step.name}", "", *_table(step.found)]
        lines += _left_out(step.found)
    return "\n".join(lines) + "\n"


def verdict(identical: bool, steps: Sequence[Step]) -> str:
    """Return the first sentence of the page, with the overall result. identical: value of precision.identical."""
    if all(step.found.equal for step in steps):
        return "Trainer and engine are equal to the last bit."
    step = next(step for step in steps if not step.found.equal)
    asked = "" if identical else " `precision.identical` is off, so this is only a report."
    if step.found.first is None:
        return f"Not shown: {step.name}: {outcome(step.found)}.{asked}"
    of_all = steps[-1].found.first
    begins = (
        f" Trainer and engine first differ at {name_of(of_all)}."
        if of_all is not None and step is not steps[-1]
        else ""
    )
    return f"Not equal: {step.name}: {outcome(step.found)}.{begins}{asked}"


def facts_of(
    model: ModelConfig,
    precision: PrecisionConfig,
    parallel: ParallelConfig,
    server: ServerConfig,
    versions: dict[str, str],
) -> dict[str, str]:
    """Return facts about the comparison: model, precision, parallel layout and versions."""
    sizes = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "context", "expert")}
    return {
        "model": as_id(model.path),
        "precision": f"trainer {precision.train}, engine {precision.rollout},"
        f" `precision.identical` {'on' if precision.identical else 'off'}",
        "layout": ", ".join(f"{name} {size}" for name, size in sizes.items()) + f"; server: tensor {server.tensor}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _table(found: Comparison) -> list[str]:
    """Return a Markdown table of operators by layers.

    A cell is "equal", or the largest difference and the number of unequal rows.
    """
    layers = sorted({layer for layer, _ in found.places if layer is not None})
    operators = sorted({operator for layer, operator in found.places if layer is not None}, key=OF_LAYER.index)
    lines = [f"| operator | {' | '.join(f'layer {layer}' for layer in layers)} |", "|---" * (len(layers) + 1) + "|"]
    for operator in operators:
        lines.append(f"| {operator} | {' | '.join(_cell(found.places.get((layer, operator))) for layer in layers)} |")
    single = {operator: one for (layer, operator), one in found.places.items() if layer is None}
    single[LOG_PROBS] = found.log_probs
    lines = lines if layers else []
    lines += ["", *(f"- {operator}: {_cell(one)}" for operator, one in single.items())]
    return [*lines, f"- KL: {found.kl:.3g} nats per token"]


def _left_out(found: Comparison) -> list[str]:
    names = sorted({operator for _, operator in (*found.left_alone, *found.right_alone)})
    return (
        ["", f"Not compared, because one side lacks these or has them in another form: {', '.join(names)}."]
        if names
        else []
    )


def as_json(facts: Mapping[str, str], identical: bool, steps: Sequence[Step]) -> dict[str, Any]:
    """Return the content of certificate.json. The parameters are explained in `page`."""

    def of_difference(one: Difference) -> dict[str, Any]:
        return {"rows": one.rows, "unequal": one.unequal, "largest": one.largest}

    def of_step(step: Step) -> dict[str, Any]:
        found = step.found
        first = found.first and {"layer": found.first[0], "operator": found.first[1]}
        places = [
            {"layer": layer, "operator": name} | of_difference(one) for (layer, name), one in found.places.items()
        ]
        return {
            "name": step.name,
            "says": step.says,
            "remark": step.remark,
            "equal": found.equal,
            "first": first,
            "sequences": found.sequences,
            "tokens": found.tokens,
            "other_tokens": found.otherwise,
            "log_probs": of_difference(found.log_probs) | {"kl": found.kl},
            "places": places,
            "not_compared": sorted({name for _, name in (*found.left_alone, *found.right_alone)}),
        }

    return {
        "equal": all(step.found.equal for step in steps),
        "identical": identical,
        **facts,
        "steps": [of_step(step) for step in steps],
    }


def write(folder: Path, name: str, facts: Mapping[str, str], identical: bool, steps: Sequence[Step]) -> Path:
    """Write page and JSON into a run's folder, and return the path of the page. The parameters are explained in `page`."""
    (folder / DATA).write_text(json.dumps(as_json(facts, identical, steps), indent=2) + "\n")
    (folder / PAGE).write_text(page(name, facts, identical, steps))
    return folder / PAGE
