"""The result in plain sentences: which method wins, by how much, at what cost, how surely."""

from __future__ import annotations

import math

from moetta.results import BASELINE, Comparison, Group, number
from moetta.results.groups import spread


def headline(comparison: Comparison, proposed: str | None = None) -> str:
    """One comparison's result; says when it is too close to call or when nothing helped.

    Args:
        comparison: What is compared.
        proposed: A method to mention even if it does not win.
    """
    groups = [group for group in comparison.groups if group.protocol == 0]
    adapted = [group for group in groups if group.method != BASELINE]
    if not adapted:
        reached = _percent(groups[0])
        return f"On {comparison.name}, the source model without adaptation reaches {reached}."
    best, *rest = adapted
    sentences = [_winner(comparison, best, rest)]
    if rest:
        sentences.append(_margin(best, rest[0]))
    ours = next((g for g in adapted if g.method == proposed and not g.variant), None)
    if ours is not None and ours is not best:
        place = adapted.index(ours) + 1
        behind = best.accuracy.mean - ours.accuracy.mean
        sentences.append(
            f"{ours.label} is number {place} of {len(adapted)}, {_points(behind)} behind, "
            f"at {_percent(ours)}{_cost(ours)}."
        )
    return " ".join(sentences + _collapses(adapted))


def _winner(comparison: Comparison, best: Group, rest: list[Group]) -> str:
    where = f"On {comparison.name}, "
    gained = comparison.gain(best)
    if gained is not None and gained.mean <= 0:
        verb = "no method beats" if rest else f"{best.label} does not beat"
        what = f"{verb} leaving the model alone"
        tail = f"the best, {best.label}, reaches" if rest else "it reaches"
        loss = f", {_points(-gained.mean)} below no adaptation" if gained.mean < 0 else ""
        return f"{where}{what}: {tail} {_percent(best)}{loss}{_cost(best)}."
    above = "" if gained is None else f", {_points(gained.mean)} above no adaptation"
    if not rest:
        return f"{where}{best.label} reaches {_percent(best)}{above}{_cost(best)}."
    return f"{where}{best.label} is the most accurate: {_percent(best)}{above}{_cost(best)}."


def _margin(best: Group, second: Group) -> str:
    lead = best.accuracy.mean - second.accuracy.mean
    after = f"{second.label} ({_percent(second, brief=True)})"
    if round(lead, 2) == 0:
        return f"{second.label} is level with it."
    both = spread(best.accuracy, second.accuracy)
    if both is not None:
        if lead <= both:
            return (
                f"Its lead of {_points(lead)} over {after} is within the spread over seeds "
                f"(sd of the difference {both:.2f}): too close to call."
            )
        return f"It leads {after} by {_points(lead)}, beyond the spread over seeds."
    samples = number(best.runs[0], "samples")
    if not samples:
        return f"It leads {after} by {_points(lead)}; with one seed, the spread is unknown."
    share = best.accuracy.mean / 100
    error = 100 * 1.96 * math.sqrt(2 * share * (1 - share) / samples)
    sure = (
        f"more than chance would explain on {samples:,.0f} images (±{error:.2f})"
        if lead > error
        else f"which chance could explain on {samples:,.0f} images (±{error:.2f})"
    )
    return f"It leads {after} by {_points(lead)}, {sure}; with one seed, the spread is unknown."


def _percent(group: Group, *, brief: bool = False) -> str:
    stat = group.accuracy
    text = f"{stat.mean:.2f}\N{NO-BREAK SPACE}%"
    if brief:
        return text
    if stat.sd is None:
        return f"{text} (one seed)"
    return f"{text} (sd {stat.sd:.2f}, {len(stat.values)} seeds)"


def _points(value: float) -> str:
    return f"{value:.2f}\N{NO-BREAK SPACE}point" + ("" if f"{value:.2f}" == "1.00" else "s")


def _cost(group: Group) -> str:
    time = group.time
    return "" if time is None else f", in {time.mean:.1f} times the time of no adaptation"


def _collapses(groups: list[Group]) -> list[str]:
    fallen = [f"{g.label} in {g.collapses} of {len(g.runs)}" for g in groups if g.collapses]
    if not fallen:
        return []
    more = f" and {len(fallen) - 4} more" if len(fallen) > 4 else ""
    return [f"Collapsed runs (below half of no adaptation): {', '.join(fallen[:4])}{more}."]
