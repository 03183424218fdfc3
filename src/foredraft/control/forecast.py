"""How much to ask drafters for whose drafts take time, before anything is drafted.

Expected survival by depth stands in for drafts that do not exist yet.
"""

from __future__ import annotations

import numpy as np

from foredraft.control.allocate import allocate
from foredraft.control.estimator import bins_of
from foredraft.control.knowledge import Knowledge
from foredraft.control.members import depths_that_pay
from foredraft.control.view import MethodNote, RequestNote, View
from foredraft.registry import PLAIN
from foredraft.types import Int64Array

LEAST_GAIN = 0.01
"""What drafting must promise for a request that has not been drafting: no flutter around zero."""

_FIRST_DEPTH = 2
"""Levels of the first draft of a method whose time is not known yet."""


def forecast(
    known: Knowledge, view: View, method: str, indices: list[int], nodes: Int64Array
) -> None:
    """Cut the budgets of one method's requests to what is expected to pay, before drafting.

    Chains of expected survival by depth stand in for drafts that do not exist yet. Drafting
    costs by the level, so each deepest level is priced with its drafting; the best one wins.
    """
    found, traits = known.method(method), known.traits(method)
    deepest = _deepest(found, int(nodes[indices].max()))
    depths = np.arange(1, deepest + 1)
    bins = bins_of(depths, np.zeros_like(depths), None)
    survival = np.empty((len(indices), deepest))
    names = [segment.request.request_id for segment in view.plan.segments]
    for row, index in enumerate(indices):
        survival[row] = np.cumprod(found.by_depth.acceptance(bins, names[index]))
        survival[row, nodes[index] :] = 0.0
        survival[row] *= view.weights[index]
    unit = found.unit_seconds or 0.0
    rows = view.num_rows + np.arange(survival.size + 1.0)
    step = known.seconds(view, rows)
    best_rate, best = view.sure_worth / step[0], None
    is_idle = all(view.notes[index].num_idle for index in indices)
    least = best_rate * (1 + (LEAST_GAIN if is_idle else 0.0))
    for level in range(1, deepest + 1):
        offered = survival[:, :level].ravel()
        draft = unit * (1 if traits.cost == "once" else level)
        padding = known.padding(view, np.repeat(indices, level), 0, 0)
        costs = step[: len(offered) + 1] + draft
        chosen = allocate(offered, costs, view.sure_worth, 0.0, padding)
        rate = chosen.expected_tokens / chosen.seconds
        if chosen.is_kept.any() and rate > max(best_rate, least):
            best_rate, best = rate, chosen.is_kept.reshape(len(indices), level).sum(axis=1)
    if best is not None and known.is_plain_due(view, best_rate * step[0] / view.sure_worth):
        best = None
    idle = []
    for row, index in enumerate(indices):
        note = view.notes[index]
        wanted = 0 if best is None else int(best[row])
        nodes[index] = min(int(nodes[index]), wanted)
        if wanted:
            note.num_idle = 0
            continue
        found.by_depth.age(names[index])
        note.num_idle += 1
        idle.append(index)
    known.choose_probes([view.notes[index] for index in idle])
    probes = [index for index in idle if view.notes[index].is_probe]
    nodes[probes] = 1
    if probes and best is None:
        known.owe(unit / float(step[0]))


def forecast_whole(
    known: Knowledge, view: View, method: str, indices: list[int], nodes: Int64Array
) -> None:
    """Give each request of a method the whole of its budget or nothing, before drafting.

    What a whole draft brings is what it brought before; those that it brought most come first.
    """
    found = known.method(method)
    notes = view.notes
    for index in indices:
        notes[index].begin_gain(found)
    worth = {index: notes[index].gain * float(view.weights[index]) for index in indices}
    order = sorted(indices, key=lambda index: -worth[index])
    each = np.minimum(nodes[order], found.whole_size or nodes[order])
    sizes = np.concatenate([[0.0], np.cumsum(each)])
    gains = np.concatenate([[0.0], np.cumsum([worth[index] for index in order])])
    seconds = known.seconds(view, view.num_rows + sizes)
    padded = len(notes) * float(each.max()) - sizes[1:]
    padding = known.padding(view, np.zeros(0, dtype=np.int64), 0, 0)
    seconds[1:] += (found.unit_seconds or 0.0) + padded * padding.row_seconds
    rates = (view.sure_worth + gains) / seconds
    best = int(np.argmax(rates))
    if all(notes[index].num_idle for index in indices) and (
        rates[best] < rates[0] * (1 + LEAST_GAIN)
    ):
        best = 0
    idle = order[best:]
    for index in order[:best]:
        notes[index].num_idle = 0
    for index in idle:
        notes[index].num_idle += 1
    known.choose_probes([notes[index] for index in idle])
    probes = [index for index in idle if notes[index].is_probe]
    nodes[[index for index in idle if not notes[index].is_probe]] = 0
    if probes:
        known.owe(max(0.0, rates[best] / rates[best + len(probes)] - 1))


def member_nodes(
    known: Knowledge, view: View, limits: Int64Array, nodes: Int64Array
) -> dict[str, Int64Array]:
    """What members may draft whose drafts take time, beside the free ones of their method.

    Args:
        known: What was learnt.
        view: The step.
        limits: int64 [num_segments], most nodes of a draft, before any forecast.
        nodes: int64 [num_segments], nodes of all members together; raised to what these may draft.
    """
    found: dict[str, Int64Array] = {}
    for number, method in enumerate(view.names):
        members = {} if method == PLAIN else known.traits(method).members
        for member, cost in members.items():
            own = found[member] = np.where((view.which == number) & view.is_walk, limits, 0)
            indices = np.nonzero((own > 0) & view.may_trim)[0].tolist()
            if indices and known.cost_table is not None:
                own[indices] = _forecast_member(known, view, member, cost, indices, own[indices])
            np.maximum(nodes, own, out=nodes)
    return found


def _forecast_member(
    known: Knowledge, view: View, member: str, cost: str, indices: list[int], limits: Int64Array
) -> Int64Array:
    """Nodes for a member of each of some requests, before anything is drafted."""
    found = known.method(member)
    if not known.is_on(member):
        return np.zeros_like(limits)
    found.num_steps += 1
    segments = view.plan.segments
    names = [segments[index].request.request_id for index in indices]
    owners = [view.notes[index] for index in indices]
    notes = [owner.members.setdefault(member, RequestNote()) for owner in owners]
    depths = np.arange(1, _deepest(found, int(limits.max())) + 1)
    bins = bins_of(depths, np.zeros_like(depths), None)
    survival = np.array([np.cumprod(found.by_depth.acceptance(bins, n)) for n in names])
    survival[depths > limits[:, None]] = 0.0
    weights = view.weights[indices]
    unit = found.unit_seconds or 0.0
    chosen, plain_s = depths_that_pay(
        survival * weights[:, None],
        np.array([owner.free_gain for owner in owners]) * weights,
        view.num_rows + sum(owner.free_nodes for owner in owners),
        view.sure_worth,
        lambda rows: known.seconds(view, rows),
        lambda depth: unit * (1 if cost == "once" else depth),
        LEAST_GAIN if all(note.num_idle for note in notes) else 0.0,
    )
    idle = []
    for note, name, number in zip(notes, names, chosen.tolist(), strict=True):
        note.is_probe = False
        note.num_idle = 0 if number else note.num_idle + 1
        if not number:
            found.by_depth.age(name)
            idle.append(note)
    known.choose_probes(idle)
    is_probe = np.array([note.is_probe for note in notes])
    if is_probe.any() and not chosen.any():
        known.owe(unit / plain_s)
    return np.where(is_probe, 1, chosen)


def _deepest(found: MethodNote, most: int) -> int:
    """Most levels to ask for: few, as long as it is not known what one costs."""
    return min(most, _FIRST_DEPTH) if found.unit_seconds is None else most
