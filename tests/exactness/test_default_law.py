"""The engine's texts have the target's law: every rule, chains and trees, through the whole path.

A table target with eight tokens gives exact probabilities: the law of the next three tokens
depends on the last one alone. Thousands of requests run through one engine, their texts are cut
into threes, and each three, given the token before it, is a draw that is held against enumeration
by a chi-square. Seeds are fixed, so a test passes always or never; a fresh seed would fail a right
engine once in ten thousand times (``P_VALUE``). A wrong one must be far beyond that (``CAUGHT``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from foredraft.drafters.base import Drafter, Needs
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.sampling.noise import Stream, position_keys, units_torch
from foredraft.sampling.processors import probs
from foredraft.types import Budgets, DraftBatch, StepPlan
from tests.tiny import ScriptDrafter, engine, row_params, run, table_target, table_text

VOCAB = 8
P_VALUE = 1e-4
CAUGHT = 1e-12
NUM_DRAWS = 20_000
NUM_MUTANT_DRAWS = 2_000
THREES = 10
"""Draws taken from one request."""

_RNG = np.random.default_rng(3)
TABLE = _RNG.normal(0, 1.0, (VOCAB, VOCAB)) - 2.0 * np.eye(VOCAB)  # no token clings to itself
DRAFT_TABLE = 0.6 * TABLE + _RNG.normal(0, 1.0, (VOCAB, VOCAB))

CHAIN, TREE = "chain", "tree"


def processed(table: np.ndarray, **options: float) -> torch.Tensor:
    """Processed probabilities of every row, float32 [V, V]."""
    return probs(torch.from_numpy(table.astype(np.float32)), row_params(num=VOCAB, **options))


def p_value(seen: Counter, **options: float) -> float:
    """Chi-square of threes, given the token before, against the target's law.

    Cells that expect fewer than 5 are put together. A three of probability zero gives 0.
    """
    rows = processed(TABLE, **options).double().numpy()
    rows = rows / rows.sum(axis=1, keepdims=True)
    law = np.einsum("sa,ab,bc->sabc", rows, rows, rows).reshape(VOCAB, -1)
    counts = np.zeros((VOCAB,) * 4)
    for tokens, count in seen.items():
        counts[tokens] = count
    statistic, freedom = 0.0, 0
    for observed, probabilities in zip(counts.reshape(VOCAB, -1), law, strict=True):
        if observed[probabilities == 0].any():
            return 0.0
        expected = observed.sum() * probabilities
        is_large = expected >= 5
        pairs = list(zip(observed[is_large], expected[is_large], strict=True))
        rest = expected[~is_large].sum()
        if rest > 0:
            pairs.append((observed[~is_large].sum(), rest))
        statistic += sum((one - other) ** 2 / other for one, other in pairs)
        freedom += max(0, len(pairs) - 1)
    return float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0


class LawDrafter(Drafter):
    """Draws chains, or trees with two siblings below every node, from a table of its own.

    Siblings are drawn without replacement (largest of log probability plus noise, in that order).
    The noise is that of the step and the node, not of the position: see ``Stream.DRAFT``. How many
    tokens are drawn is decided by the budget alone.
    """

    Config = dict
    needs = Needs(draft_probs=True)

    def __init__(self, shape: str, **options: float) -> None:
        self._num_siblings = 1 if shape == CHAIN else 2
        self.laws = processed(DRAFT_TABLE, **options)
        self.recorded = self.laws
        self.num_drafted = 0

    def noise(self, plan: StepPlan, num_rows: int) -> np.ndarray:
        """Uniforms [num_segments, num_rows, V], fresh for every step and every parent."""
        seeds = np.array([s.request.seed for s in plan.segments], dtype=np.int64)
        positions = np.array([s.root_position + 1 for s in plan.segments], dtype=np.int64)
        keys = position_keys(seeds, positions, Stream.DRAFT).view(np.int64)
        flat = units_torch(torch.from_numpy(keys), torch.arange(num_rows * VOCAB)).numpy()
        return flat.reshape(len(seeds), num_rows, VOCAB)

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        num_segments, most = len(plan.segments), int(budgets.max_nodes.max(initial=0))
        laws = self.laws.double().numpy()
        v = self.noise(plan, most + 1)
        # All trees have one shape, of which a segment takes as many nodes as it has room for.
        parents = np.arange(most) // self._num_siblings
        tokens = np.zeros((num_segments, most + 1), dtype=np.int64)
        tokens[:, 0] = [segment.token_ids[-1] for segment in plan.segments]
        is_drawn = np.ones((num_segments, most + 1), dtype=bool)
        for node in range(1, most + 1):
            row = int(parents[node - 1])
            rank = (node - 1) % self._num_siblings
            with np.errstate(divide="ignore"):
                scores = np.log(laws[tokens[:, row]]) - np.log(-np.log1p(-v[:, row]))
            ranked = np.argsort(-scores, axis=1)[:, rank]
            tokens[:, node] = ranked
            # Where the law has no more tokens, there is no further sibling, nor what is below it.
            drawn = laws[tokens[:, row], ranked] > 0
            is_drawn[:, node] = drawn & is_drawn[:, row]
        ids, rows, dists, offsets = [], [], [], [0]
        for index, budget in enumerate(budgets.max_nodes.tolist()):
            place = {0: 0}
            for node in range(1, budget + 1):
                if is_drawn[index, node]:
                    parent = int(parents[node - 1])
                    place[node] = len(place)
                    ids.append(tokens[index, node])
                    rows.append(place[parent])
                    dists.append(tokens[index, parent])
            offsets.append(len(ids))
        self.num_drafted += len(ids)
        return DraftBatch(
            np.array(ids, dtype=np.int64),
            np.array(rows, dtype=np.int64),
            np.array(offsets, dtype=np.int64),
            self.recorded,
            np.array(dists, dtype=np.int64),
        )


def sampled(
    drafter: Drafter | None,
    verification: str,
    num_nodes: int,
    num_draws: int,
    prompt: tuple[int, ...] = (0,),
    **options: float,
) -> tuple[Counter, float]:
    """Threes of tokens behind their predecessor, and the mean number accepted in a step.

    Every request has a seed of its own. One that has said enough is dropped, which nothing that is
    looked at depends on.
    """
    method = "law" if drafter is not None else "ngram"
    drafters = {"law": drafter} if drafter is not None else {}
    the_engine = engine(
        table_target(TABLE), drafters, max_num_requests=100, max_num_batched_tokens=4096
    )
    speculation = SpeculationParams(method, num_nodes, verification)
    states = []
    num_seen = 1 + 3 * THREES
    for seed in range(num_draws // THREES):
        sampling = SamplingParams(seed=seed, max_tokens=num_seen + num_nodes, **options)
        name = the_engine.add(list(prompt), sampling, speculation)
        states.append(the_engine.request_state(name))
    while the_engine.has_work:
        the_engine.step()
        for name, state in list(the_engine.scheduler.running.items()):
            if len(state.output_ids) >= num_seen:
                the_engine.abort(name)
    num_steps = sum(state.stats.num_verify_steps for state in states)
    num_accepted = sum(state.stats.num_accepted_tokens for state in states)
    seen = Counter(
        tuple(state.output_ids[begin : begin + 4].tolist())
        for state in states
        for begin in range(0, num_seen - 1, 3)
    )
    assert sum(seen.values()) == num_draws
    return seen, num_accepted / max(1, num_steps)


DRAWN = {"temperature": 1.0}
FILTERED = {"temperature": 0.8, "top_k": 4}
CASES = [
    ("rejection", TREE, 4, DRAWN),
    ("block", CHAIN, 3, FILTERED),
    ("traversal", TREE, 4, DRAWN),
]
SLOW_CASES = [
    ("rejection", CHAIN, 3, DRAWN),
    ("rejection", CHAIN, 1, {"temperature": 1.5, "top_p": 0.8}),
    ("rejection", TREE, 6, {"temperature": 1.0, "top_k": 2}),
    ("block", CHAIN, 3, DRAWN),
    ("traversal", TREE, 6, FILTERED),
    ("traversal", CHAIN, 2, {"temperature": 0.7, "min_p": 0.1}),
]


def check_law(
    verification: str, shape: str, num_nodes: int, options: dict[str, float], num_draws: int
) -> None:
    drafter = LawDrafter(shape, **options)
    seen, accepted = sampled(drafter, verification, num_nodes, num_draws, **options)
    assert drafter.num_drafted > num_draws
    assert accepted > 0.3
    assert p_value(seen, **options) > P_VALUE


@pytest.mark.parametrize(("verification", "shape", "num_nodes", "options"), CASES, ids=str)
def test_classical_rules(
    verification: str, shape: str, num_nodes: int, options: dict[str, float]
) -> None:
    check_law(verification, shape, num_nodes, options, NUM_DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize(("verification", "shape", "num_nodes", "options"), SLOW_CASES, ids=str)
def test_more_classical_rules(
    verification: str, shape: str, num_nodes: int, options: dict[str, float]
) -> None:
    check_law(verification, shape, num_nodes, options, NUM_DRAWS)


def check_chosen(verification: str, num_draws: int) -> None:
    seen, accepted = sampled(None, verification, 4, num_draws, (0, 7, 2, 5, 7, 2, 3), **DRAWN)
    assert accepted > 0.1
    assert p_value(seen, **DRAWN) > P_VALUE


def test_chosen_tokens() -> None:
    """What the n-gram drafter finds in the text is a point mass: trees of them, no draft law."""
    check_chosen("rejection", NUM_DRAWS // 2)


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["block", "traversal"])
def test_more_chosen_tokens(verification: str) -> None:
    check_chosen(verification, NUM_DRAWS)


@pytest.mark.parametrize(
    "shape", [pytest.param(CHAIN, marks=pytest.mark.slow), TREE], ids=[CHAIN, TREE]
)
def test_the_default_rule(shape: str) -> None:
    """``walk``, with drafts that know nothing of its noise."""
    drafter = LawDrafter(shape, **FILTERED)
    seen, accepted = sampled(drafter, "walk", 6, NUM_DRAWS, **FILTERED)
    assert accepted > 0.15
    assert p_value(seen, **FILTERED) > P_VALUE


def test_the_default_rule_with_drafts_that_see_the_noise() -> None:
    """Drafts chosen by looking at the target's own noise: what biases any other rule."""
    drafter = ScriptDrafter("noise", [], 2, vocab_size=VOCAB)
    seen, _ = sampled(drafter, "walk", 4, NUM_DRAWS // 2, **DRAWN)
    assert p_value(seen, **DRAWN) > P_VALUE


def test_plain_decoding() -> None:
    seen, accepted = sampled(None, "walk", 0, NUM_DRAWS, **DRAWN)
    assert accepted == 0
    assert p_value(seen, **DRAWN) > P_VALUE


# ---------------------------------------------------------------------------------------- mutants


class RecordsAnotherLaw(LawDrafter):
    """Draws at the request's temperature and records the law from before it."""

    def __init__(self, shape: str, **options: float) -> None:
        super().__init__(shape, **options)
        self.recorded = processed(DRAFT_TABLE)


class DropsUnlikelyTokens(LawDrafter):
    """Cuts a drawn chain at the first token of low probability."""

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        batch = super().propose(plan, budgets)
        keep = np.ones(len(batch.token_ids), dtype=bool)
        for begin, end in itertools.pairwise(batch.offsets.tolist()):
            for node in range(begin, end):
                own = float(self.laws[batch.dist_ids[node], batch.token_ids[node]])
                if own < 0.15 or (node > begin and not keep[node - 1]):
                    keep[node] = False
        counts = [int(keep[a:b].sum()) for a, b in itertools.pairwise(batch.offsets.tolist())]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return DraftBatch(
            batch.token_ids[keep],
            batch.parents[keep],
            offsets,
            batch.draft_probs,
            batch.dist_ids[keep],
        )


class DrawsWithTheCoins(LawDrafter):
    """Noise that is not independent of the coins which decide on the tokens drawn with it."""

    def noise(self, plan: StepPlan, num_rows: int) -> np.ndarray:
        v = super().noise(plan, num_rows)
        seeds = np.array([s.request.seed for s in plan.segments], dtype=np.int64)
        positions = np.array([s.root_position + 1 for s in plan.segments], dtype=np.int64)
        keys = position_keys(seeds, positions, Stream.ACCEPT).view(np.int64)
        # Row k's coin decides on node k; here it also draws it, between two halves of the tokens.
        coins = units_torch(torch.from_numpy(keys), torch.arange(num_rows + 1)).numpy()
        v[:, :, : VOCAB // 2] *= coins[:, 1:, None] ** 2
        return v


Mutant = Callable[..., LawDrafter]


@pytest.mark.parametrize(
    ("mutant", "verification", "shape", "num_nodes", "options"),
    [
        (RecordsAnotherLaw, "traversal", TREE, 4, {"temperature": 0.5}),
        (DropsUnlikelyTokens, "block", CHAIN, 3, DRAWN),
        (DrawsWithTheCoins, "rejection", CHAIN, 3, DRAWN),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_mutants_are_caught(
    mutant: Mutant, verification: str, shape: str, num_nodes: int, options: dict[str, float]
) -> None:
    drafter = mutant(shape, **options)
    seen, _ = sampled(drafter, verification, num_nodes, NUM_MUTANT_DRAWS, **options)
    assert p_value(seen, **options) < CAUGHT


# ----------------------------------------------------------------------------- and at temperature 0


@pytest.mark.parametrize("verification", ["walk", "rejection", "block", "traversal"])
@pytest.mark.parametrize("draft_temperature", [0.0, 1.0])
def test_greedy_text_under_every_rule(verification: str, draft_temperature: float) -> None:
    """The drafter may draw at random; a greedy target's text is plain decoding's all the same."""
    shape = CHAIN if verification == "block" else TREE
    table = np.random.default_rng(5).normal(size=(VOCAB, VOCAB))
    table[3, 5] = table[3, 2] = 9.0  # two equal likeliest ones: the first is the text
    prompts = [[token] for token in range(VOCAB)]
    sampling = SamplingParams(max_tokens=20, seed=4)
    drafter = LawDrafter(shape, temperature=draft_temperature)
    the_engine = engine(table_target(table), {"law": drafter})
    outputs = run(the_engine, prompts, sampling, SpeculationParams("law", 6, verification))
    assert outputs == [table_text(table, prompt, sampling, 20) for prompt in prompts]
    assert outputs[3][0] == 2


FEATURES = {
    "logit_bias": {2: 0.7, 5: -0.9},
    "presence_penalty": 0.8,
    "frequency_penalty": 0.3,
}
PROCESSED = torch.from_numpy(np.random.default_rng(9).normal(0, 0.6, (VOCAB, VOCAB))).float()


def add_by_last(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that goes by the last token of the row's own history."""
    return scores + PROCESSED[input_ids[0, -1]]


def feature_law(first: int) -> np.ndarray:
    """Exact law [V, V, V] of three tokens behind one, every feature on: written out."""
    law = np.zeros((VOCAB,) * 3)

    def step(last: int, said: list[int]) -> np.ndarray:
        logits = TABLE[last].copy()
        for token, bias in FEATURES["logit_bias"].items():  # type: ignore[attr-defined]
            logits[token] += bias
        for token in said:
            logits[token] -= 0.3
        for token in set(said):
            logits[token] -= 0.8
        logits = logits + PROCESSED[last].double().numpy()
        shares = np.exp(logits - logits.max())
        return shares / shares.sum()

    for a, one in enumerate(step(first, [])):
        for b, two in enumerate(step(a, [a])):
            law[a, b] = one * two * step(b, [a, b])
    return law


@pytest.mark.parametrize(("verification", "shape", "num_nodes", "options"), CASES, ids=str)
def test_features_keep_the_law_under_classical_rules(
    verification: str, shape: str, num_nodes: int, options: dict[str, float]
) -> None:
    """Bias, penalties by the output of each node's own path, and a processor, all at once."""
    drafter = LawDrafter(shape, temperature=1.0)
    the_engine = engine(
        table_target(TABLE), {"law": drafter}, max_num_requests=100, max_num_batched_tokens=4096
    )
    states = []
    for seed in range(4000):
        sampling = SamplingParams(
            1.0, seed=seed, max_tokens=3, logits_processors=(add_by_last,), **FEATURES
        )
        name = the_engine.add([1], sampling, SpeculationParams("law", num_nodes, verification))
        states.append(the_engine.request_state(name))
    while the_engine.has_work:
        the_engine.step()
    counts = np.zeros((VOCAB,) * 3)
    for state in states:
        counts[tuple(state.output_ids.tolist())] += 1
    expected = feature_law(1) * len(states)
    is_large = expected >= 5
    pairs = list(zip(counts[is_large], expected[is_large], strict=True))
    pairs.append((counts[~is_large].sum(), expected[~is_large].sum()))
    statistic = sum((one - other) ** 2 / other for one, other in pairs)
    assert stats.chi2.sf(statistic, len(pairs) - 1) > P_VALUE
    assert sum(state.stats.num_accepted_tokens for state in states) > 400
    wrong = np.einsum("a,ab,bc->abc", *(_plain_rows(1), _plain_rows(), _plain_rows()))
    assert _statistic(counts, wrong * len(states)) > 10 * statistic


def _plain_rows(first: int | None = None) -> np.ndarray:
    """The law of the table without the features, of all rows or one."""
    rows = np.exp(TABLE - TABLE.max(axis=1, keepdims=True))
    rows = rows / rows.sum(axis=1, keepdims=True)
    return rows if first is None else rows[first]


def _statistic(counts: np.ndarray, expected: np.ndarray) -> float:
    is_large = expected >= 5
    return float(((counts - expected)[is_large] ** 2 / expected[is_large]).sum())
