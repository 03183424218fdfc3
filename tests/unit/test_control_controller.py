"""How much is drafted: fixed numbers, rooms, what pays, probes, dead methods, classical rules."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.control.controller import MAX_AUTO_NODES, Controller, MethodTraits
from foredraft.control.cost_table import CostTable
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.plan.profile import PassTime
from foredraft.tree import tree
from foredraft.types import DraftBatch, Request, Segment, StepPlan, TargetOutput, Verdict
from tests.tiny import warnings_logged

Cost = Callable[[int, float], float]


def linear(alpha: float) -> Cost:
    """Seconds of a pass: one, and ``alpha`` more for every row beyond the first."""
    return lambda num_requests, rows: 1.0 + alpha * (rows - 1)


def segment(
    name: str = "a",
    method: str = "m",
    num: int | str = "auto",
    rule: str = "walk",
    room: int = 500,
    chunk: int = 0,
) -> Segment:
    """A decode step of a request that may draft ``room`` tokens, or a chunk of its prompt."""
    ids = np.arange(40, dtype=np.int64)
    request = Request(
        name,
        ids,
        SamplingParams(),
        SpeculationParams(method, num, rule),
        0,
        room + 1,
        frozenset(),
    )
    if chunk:
        return Segment(request, ids, 0, 0, chunk, False)
    return Segment(request, ids, 0, len(ids) - 1, 1, True)


def chains(lengths: np.ndarray) -> DraftBatch:
    parents = np.concatenate([np.arange(n) for n in lengths] or [np.empty(0)]).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return DraftBatch(parents + 1, parents, offsets)


class World:
    """A controller among requests whose drafts are accepted with a set chance."""

    def __init__(self, cost: Cost, cost_of: str = "once", unit: float = 1e-9, seed: int = 0):
        self.controller = Controller(lambda method: MethodTraits(cost_of, sees_noise=True))
        self.controller.cost_table = CostTable(
            PassTime(b, b * r, 0, cost(b, b * r), 0.0)
            for b in (1, 2, 3, 4, 8, 16, 32)
            for r in range(1, 33)
        )
        self._cost, self._cost_of, self._unit = cost, cost_of, unit
        self._rng = np.random.default_rng(seed)
        self.budgets: list[int] = []

    def step(self, segments: list[Segment], acceptance: float | Mapping[str, float]) -> list[int]:
        """One step with chains of the full budget; what was verified, by segment."""
        plan = StepPlan(tuple(segments))
        budgets = self.controller.budget(plan)
        self.budgets = budgets.max_nodes.tolist()
        asked = chains(budgets.max_nodes)
        drafts = self.controller.trim(plan, asked)
        counts = drafts.num_nodes
        assert (counts <= budgets.max_nodes).all()
        paths, num_rows = [], []
        for one, count in zip(segments, counts.tolist(), strict=True):
            name = one.request.request_id
            chance = acceptance if isinstance(acceptance, float) else acceptance[name]
            hits = self._rng.random(count) < chance
            paths.append(int(np.argmin(np.append(hits, False))))
            num_rows.append(one.num_rows + count)
        path = [np.arange(1, n + 1) for n in paths]
        path_offsets = np.concatenate([[0], np.cumsum(paths)])
        row_offsets = np.concatenate([[0], np.cumsum(num_rows)])
        none = np.zeros(len(segments) + 1, dtype=np.int64)
        verdict = Verdict(
            np.concatenate(path), path_offsets, none[:0], none, np.ones(len(segments), bool)
        )
        drafted: dict[str, float] = {}
        for one, number in zip(segments, asked.num_nodes.tolist(), strict=True):
            method = one.request.speculation.method
            if number:
                units = 1 if self._cost_of == "once" else number
                drafted[method] = max(drafted.get(method, 0.0), self._unit * units)
        target = TargetOutput(torch.empty(0), row_offsets, {}, row_offsets)
        seconds = self._cost(len(segments), float(row_offsets[-1]))
        self.controller.observe(plan, drafts, target, verdict, seconds, drafted)
        return [int(count) for count in counts]

    def run(
        self, segments: list[Segment], acceptance: float | Mapping[str, float], steps: int
    ) -> np.ndarray:
        """int64 [steps, num_segments]."""
        return np.array([self.step(segments, acceptance) for _ in range(steps)])


# ------------------------------------------------------------------------------------- budgets


def test_a_fixed_number_is_kept_whatever_it_costs() -> None:
    """Also where it never pays and nothing is ever accepted."""
    world = World(linear(5.0))
    fixed = [segment("a", num=5), segment("b", num=128, room=500), segment("c", num=1)]
    for _ in range(200):
        assert world.step(fixed, 0.0) == [5, 128, 1]


def test_without_a_cost_table_fixed_numbers_pass() -> None:
    controller = Controller(lambda method: MethodTraits())
    plan = StepPlan((segment("a", num=5), segment("b", "none"), segment("c", num=0)))
    assert controller.budget(plan).max_nodes.tolist() == [5, 0, 0]
    drafts = chains(np.array([5, 0, 0]))
    assert controller.trim(plan, drafts) is drafts and controller.last is None


@settings(deadline=None)  # the first example loads kernels
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from(["auto", 0, 3, 20])), min_size=1, max_size=8
    ),
    st.floats(0.001, 0.2),
    st.sampled_from(["once", "per_token", "per_level"]),
    st.sampled_from(["walk", "rejection"]),
)
def test_nobody_drafts_more_than_has_room(
    requests: list[tuple[int, int | str]], alpha: float, cost_of: str, rule: str
) -> None:
    world = World(linear(alpha), cost_of, 0.001)
    segments = [
        segment(str(index), num=num, room=room, rule=rule)
        for index, (room, num) in enumerate(requests)
    ]
    for _ in range(3):
        kept = world.step(segments, 0.9)
        for (room, num), budget, count in zip(requests, world.budgets, kept, strict=True):
            most = MAX_AUTO_NODES if num == "auto" else int(num)
            assert count <= budget <= min(room, most)
            if num != "auto":
                assert count == budget == min(room, most)


def test_a_mixed_batch() -> None:
    """Fixed, auto, plain and a chunk of a prompt: each gets its own, and all count as cost."""
    world = World(linear(0.02))
    segments = [
        segment("fixed", num=4),
        segment("auto"),
        segment("plain", "none"),
        segment("chunk", chunk=20),
        segment("last chunk", chunk=40),
        segment("classical", num=3, rule="rejection"),
        segment("other", "n"),
    ]
    for _ in range(60):
        kept = world.step(segments, dict.fromkeys([s.request.request_id for s in segments], 0.9))
        assert [kept[i] for i in (0, 2, 3, 4, 5)] == [4, 0, 0, 0, 3]
    assert kept[1] > 0 and kept[6] > 0
    last = world.controller.last
    assert last is not None
    num_rows = 5 + 20 + 40 + sum(kept)
    assert last.plain_seconds < last.seconds == pytest.approx(1 + 0.02 * (num_rows - 1), rel=0.1)
    # The chunk that does not end its prompt emits nothing.
    assert 6 < last.expected_tokens < 6 + sum(kept)


def test_prompt_chunks_alone_are_no_trouble() -> None:
    world = World(linear(0.02))
    assert world.step([segment("a", chunk=20)], 0.5) == [0]
    assert world.controller.last is not None and world.controller.last.expected_tokens == 0


# ------------------------------------------------------------------------------------ what pays


@pytest.mark.parametrize("seed", range(8))
def test_it_trims_to_what_brute_force_says(seed: int) -> None:
    """A young controller expects 0.7 at every depth; the cost has steps and bumps."""
    rng = np.random.default_rng(seed)
    bumps = np.cumsum(rng.choice([0.0, 0.02, 0.3], 1200, p=[0.6, 0.3, 0.1]))
    rooms = [4, 3, 5]

    def cost(num_requests: int, rows: float) -> float:
        return 1.0 + float(bumps[int(rows)])

    world = World(cost)
    names = ["a", "b", "c"]
    segments = [segment(n, room=r) for n, r in zip(names, rooms, strict=True)]
    survival = np.cumprod(np.full(5, 0.7))
    table = world.controller.cost_table
    assert table is not None
    best = 0.0
    for lengths in itertools.product(*[range(r + 1) for r in rooms]):
        tokens = 3 + sum(float(survival[:n].sum()) for n in lengths)
        seconds = float(table.seconds(3, np.array([3.0 + sum(lengths)]), 39.0)[0])
        best = max(best, tokens / seconds)
    plan = StepPlan(tuple(segments))
    kept = world.controller.trim(plan, chains(world.controller.budget(plan).max_nodes))
    last = world.controller.last
    assert last is not None
    assert last.expected_tokens / last.seconds == pytest.approx(best)
    tokens = 3 + sum(float(survival[:n].sum()) for n in kept.num_nodes)
    assert last.expected_tokens == pytest.approx(tokens)


def test_trimmed_trees_are_whole() -> None:
    """Of branching drafts with confidences: parents stay with their children, ids with nodes."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        world = World(linear(float(rng.uniform(0.005, 0.1))))
        plan = StepPlan((segment("a"), segment("b", num=6), segment("c"), segment("d", "none")))
        sizes = np.array([int(rng.integers(0, 20)), 6, int(rng.integers(0, 20)), 0])
        parents = np.concatenate(
            [[int(rng.integers(0, row + 1)) for row in range(n)] for n in sizes]
        ).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        drafts = DraftBatch(
            np.arange(len(parents)),
            parents,
            offsets,
            confidence=np.where(rng.random(len(parents)) < 0.2, np.nan, rng.random(len(parents))),
        )
        world.controller.budget(plan)
        kept = world.controller.trim(plan, drafts)
        assert kept.num_nodes[1] == 6 and kept.num_nodes[3] == 0
        for index in range(4):
            old = slice(int(offsets[index]), int(offsets[index + 1]))
            new = slice(int(kept.offsets[index]), int(kept.offsets[index + 1]))
            tree.check(kept.parents[new])
            ids = kept.token_ids[new].tolist()
            for token, parent in zip(ids, kept.parents[new].tolist(), strict=True):
                before = int(parents[token])  # ids are places in the whole batch
                if before == 0:
                    assert parent == 0
                else:
                    assert ids[parent - 1] == old.start + before - 1
        assert kept.confidence is not None and len(kept.confidence) == len(kept.token_ids)
        np.testing.assert_array_equal(kept.confidence, drafts.confidence[kept.token_ids])


def test_it_learns_how_long_to_draft() -> None:
    """By acceptance, each request for itself."""
    world = World(linear(0.03))
    segments = [segment("good"), segment("fair"), segment("bad")]
    chances = {"good": 0.95, "fair": 0.6, "bad": 0.05}
    kept = world.run(segments, chances, 200)[100:].mean(axis=0)
    assert kept[0] > kept[1] + 2 > kept[2] + 2.5
    assert kept[0] > 6 and kept[2] < 1


def test_a_costly_drafter_gets_fewer_tokens() -> None:
    means = []
    for unit in (1e-9, 0.05, 0.2, 2.0):
        world = World(linear(0.01), "per_token", unit)
        means.append(world.run([segment()], 0.8, 300)[100:].mean())
    assert means[0] > means[1] + 1 > means[2] + 2 and means[2] > 0.5
    assert means[3] < 0.1  # each token takes longer than two steps
    # The same time for a whole draft is a smaller matter.
    world = World(linear(0.01), "once", 0.2)
    assert world.run([segment()], 0.8, 300)[100:].mean() > means[2]


# ------------------------------------------------------------------------------ zero, and probes


def probe_gaps(kept: np.ndarray) -> list[int]:
    return np.diff(np.nonzero(kept)[0]).tolist()


@pytest.mark.parametrize("cost_of", ["once", "per_token"])
@pytest.mark.parametrize("rule", ["walk", "rejection"])
def test_where_nothing_is_accepted_it_drafts_nothing_but_probes(cost_of: str, rule: str) -> None:
    """Each a single token, ever further apart, up to 128 steps."""
    world = World(linear(0.1), cost_of, 0.02)
    kept = world.run([segment(rule=rule)], 0.0, 1200)[:, 0]
    late = kept[100:]
    assert late.max() == 1 and 6 <= late.sum() <= 20
    gaps = probe_gaps(late)
    assert gaps[-1] >= 100 and all(b >= a - 2 for a, b in itertools.pairwise(gaps))


@pytest.mark.parametrize("cost_of", ["once", "per_token"])
def test_better_times_are_noticed(cost_of: str) -> None:
    world = World(linear(0.05), cost_of, 0.02)
    assert world.run([segment()], 0.0, 200)[150:].sum() <= 2
    kept = world.run([segment()], 0.95, 400)[:, 0]
    assert kept[350:].mean() > 4


def test_probes_that_bring_no_news_grow_rare() -> None:
    """Drafts are good, but a full batch has no room for them: the probes must not cost much."""
    world = World(linear(1.0))
    segments = [segment(str(index)) for index in range(16)]
    kept = world.run(segments, 0.8, 600)[300:]
    assert kept.max() <= 1
    assert kept.sum(axis=1).mean() < 0.5


@pytest.mark.parametrize("alpha", [0.05, 0.1])
def test_good_drafts_that_turn_bad_are_given_up(alpha: float) -> None:
    """The workload's past must not hold up what is believed of a request that is refuted."""
    world = World(linear(alpha))
    world.run([segment()], 0.9, 200)
    assert world.run([segment()], 0.0, 200)[20:].mean() < 1


def test_a_costly_drafter_pays_for_what_it_drafted_and_not_for_what_was_kept() -> None:
    """Each token takes 0.01; where half of a draft is trimmed, it does not become 0.02."""
    world = World(linear(0.05), "per_token", 0.01)
    plan = StepPlan((segment(),))
    for _ in range(3):
        plan = StepPlan((segment(),))
        world.controller.budget(plan)
        asked = chains(np.array([20]))
        kept = world.controller.trim(plan, asked)
        assert 0 < kept.num_nodes[0] < 15
        rows = np.array([0, 1 + kept.num_nodes[0]])
        none = np.zeros(2, dtype=np.int64)
        verdict = Verdict(none[:0], none, none[:0], none, np.ones(1, bool))
        target = TargetOutput(torch.empty(0), rows, {}, rows)
        world.controller.observe(plan, kept, target, verdict, 1.0, {"m": 0.2})
    assert world.controller._known.methods["m"].unit_seconds == pytest.approx(0.01)


# --------------------------------------------------------------------------------- dead methods


def test_a_dead_method_is_off_for_a_while_and_tried_again() -> None:
    world = World(linear(0.01))
    segments = [segment(str(index)) for index in range(16)]
    with warnings_logged() as said:
        num_steps = 0
        while not said and num_steps < 600:
            world.step(segments, 0.0)
            num_steps += 1
        assert len(said) == 1
        assert "'m'" in said[0] and "256 steps" in said[0] and "0.0 %" in said[0]
        off = [sum(world.step(segments, 0.0)) for _ in range(255)]
        assert sum(off) == 0 and len(said) == 1
        assert all(budget == 0 for budget in world.budgets)
        world.step(segments, 0.9)
        assert any(world.budgets)  # asked again
        back = world.run(segments, 0.9, 500)
        assert back[300:].mean() > 1 and len(said) == 1


def test_a_dead_method_does_not_drag_others_down() -> None:
    world = World(linear(0.01))
    segments = [segment(str(i), "bad") for i in range(8)] + [segment("x", "good")]
    chances = dict.fromkeys(map(str, range(8)), 0.0) | {"x": 0.9}
    kept = world.run(segments, chances, 250)
    assert kept[100:, :8].mean() < 0.05 and kept[100:, 8].mean() > 4


# ------------------------------------------------------------------------------ classical rules


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_under_a_classical_rule_nothing_drawn_is_trimmed(rule: str) -> None:
    """The number is decided before drafting; then it may be dear, and is kept all the same."""
    world = World(linear(0.05))
    means = []
    for chance in (0.9, 0.3):
        for _ in range(150):
            kept = world.step([segment(rule=rule)], chance)
            assert kept == world.budgets
        means.append(np.mean([world.step([segment(rule=rule)], chance)[0] for _ in range(50)]))
    assert means[0] > means[1] + 2 and 0 < means[0] < MAX_AUTO_NODES
    plan = StepPlan((segment("new", rule=rule),))
    long = chains(np.array([31]))
    assert world.controller.trim(plan, long) is long


def test_what_has_no_room_beside_classical_drafts_is_trimmed() -> None:
    world = World(linear(0.1))
    plan = StepPlan((segment("a", rule="rejection"), segment("b")))
    world.controller.budget(plan)
    kept = world.controller.trim(plan, chains(np.array([20, 31])))
    assert kept.num_nodes[0] == 20 and kept.num_nodes[1] < 10


# ------------------------------------------------------------------------------------- learning


def test_a_target_that_is_young_teaches_by_its_probabilities() -> None:
    """Where drafts were fixed before the noise: one look, instead of one coin."""
    controller = Controller(lambda method: MethodTraits())
    controller.cost_table = CostTable([PassTime(1, r, 0, 1 + 0.01 * r, 0.0) for r in (1, 8, 32)])
    one = segment(room=8)
    request = dataclasses.replace(one.request, sampling=SamplingParams(1.0, seed=1))
    one = dataclasses.replace(one, request=request)
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]])).repeat(9, 1)
    for _ in range(20):
        plan = StepPlan((one,))
        controller.budget(plan)
        drafts = DraftBatch(np.array([3, 2]), np.array([0, 1]), np.array([0, 2]))
        rows = np.array([0, 3])
        none = np.zeros(2, dtype=np.int64)
        verdict = Verdict(none[:0], none, none[:0], none, np.ones(1, bool))
        target = TargetOutput(logits[:3], rows, {}, rows)
        controller.observe(plan, drafts, target, verdict, 1.0, {"m": 1e-9})
    # Neither was accepted, yet what is believed is the chance of each: 0.4, then 0.3.
    table = controller._known.methods["m"].acceptance
    share = table.num_hits / table.num_trials
    assert share == pytest.approx((0.4 + 0.4 * 0.3) / 1.4, abs=0.01)


def test_what_is_forgotten_starts_anew() -> None:
    world = World(linear(0.05))
    world.run([segment("steady")], 0.8, 200)
    world.run([segment("bad")], 0.0, 60)
    assert world.run([segment("bad")], 0.0, 20).mean() < 0.7
    world.controller.forget("bad")
    world.controller.forget("nobody")
    assert world.step([segment("bad")], 0.8)[0] > 0


# ------------------------------------------------------------------------------- what keeps fresh


def test_probes_of_a_batch_are_made_together_and_paid_off() -> None:
    """The first node of a step makes it dearer by a fifth, however many there are."""

    def jump(num_requests: int, rows: float) -> float:
        return 1.0 if rows <= num_requests else 1.2 + 0.001 * (rows - num_requests)

    world = World(jump)
    segments = [segment(str(index)) for index in range(8)]
    kept = world.run(segments, 0.03, 600)[100:]
    with_probes = (kept.sum(axis=1) > 0).sum()
    assert 2 <= with_probes <= 500 * 0.005 / 0.15 + 2
    assert kept.sum() > 3 * with_probes


def test_the_price_of_plain_decoding_is_looked_at_again() -> None:
    """Where drafting always wins by a little, a step in 49 goes without; where by much, none."""
    world = World(linear(0.1))
    little = world.run([segment("a")], 0.25, 400)
    idle = (little[50:].sum(axis=1) == 0).sum()
    assert idle >= 5
    gaps = world.run([segment("b")], 0.95, 400)
    assert (gaps[50:].sum(axis=1) == 0).sum() == 0


# ----------------------------------------------------------------------------------- preferences


@pytest.mark.parametrize("cost_of", ["once", "per_token"])
def test_who_would_be_served_first_drafts_where_others_do_not(cost_of: str) -> None:
    """Eight requests where a draft token is not worth the time of all: only the one that asks."""
    segments = [segment(name) for name in "abcdefgh"]
    first = dataclasses.replace(
        segments[2].request, speculation=SpeculationParams("m", preference="latency")
    )
    preferring = [*segments]
    preferring[2] = dataclasses.replace(segments[2], request=first)
    world = World(linear(0.1), cost_of)
    alike = world.run(segments, 0.4, 300)[150:]
    world = World(linear(0.1), cost_of)
    found = world.run(preferring, 0.4, 300)[150:]
    assert alike.mean() < 0.3
    assert found[:, 2].mean() > 0.9
    assert np.delete(found, 2, axis=1).mean() < 0.3


def test_where_all_would_be_served_first_nobody_is() -> None:
    requests = [segment(name) for name in "abcdefgh"]
    latency = [
        dataclasses.replace(
            one,
            request=dataclasses.replace(
                one.request, speculation=SpeculationParams("m", preference="latency")
            ),
        )
        for one in requests
    ]
    plain, other = (World(linear(0.1)).run(one, 0.7, 80) for one in (requests, latency))
    np.testing.assert_array_equal(plain, other)


def test_what_several_propose_is_worth_the_mean_of_their_words() -> None:
    """What a and b say is always accepted, what b and c say never; so what of a and c together?

    The largest of the words would be 1, and is too large: it is what pays at no price that
    the mean does not.
    """
    controller = Controller(lambda method: MethodTraits("once", sees_noise=True))
    controller.cost_table = CostTable(
        PassTime(b, b * r, 0, linear(0.6)(b, b * r), 0.0) for b in (1, 2) for r in range(1, 9)
    )
    votes = {"ab": [0.9, 0.9, -1.0], "bc": [-1.0, 0.9, 0.9], "ac": [0.9, -1.0, 0.9]}

    def a_step(who: str) -> int:
        plan = StepPlan((segment(),))
        controller.budget(plan)
        one = np.ones(1, dtype=np.int64)
        said = np.array(votes[who])[:, None]
        asked = DraftBatch(one, 0 * one, np.array([0, 1]), votes=said, voters=("a", "b", "c"))
        kept = controller.trim(plan, asked)
        path = one if who == "ab" else one[:0]
        none = np.zeros(2, dtype=np.int64)
        verdict = Verdict(path, np.array([0, len(path)]), none[:0], none, np.ones(1, dtype=bool))
        rows = np.array([0, 2])
        controller.observe(
            plan, asked, TargetOutput(torch.empty(0), rows, {}, rows), verdict, 1.6, {"m": 1e-9}
        )
        return int(kept.num_nodes[0])

    for _ in range(40):
        a_step("ab")
        a_step("bc")
    assert a_step("ab") == 1 and a_step("ac") == 0
