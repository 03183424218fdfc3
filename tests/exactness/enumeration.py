"""Exact laws on a tiny vocabulary: tables, drafters, and the law of draft + verify + continue.

A drafter here is a function ``(tables, chooser) -> Draft`` and a rule ``(draft, chooser) -> (path,
token)``; both take everything random from the chooser, so ``foredraft.verify.reference.outcomes``
runs the pair once for every way it can go.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from foredraft.verify.reference import (
    Chooser,
    block_reference,
    inverse_cdf_reference,
    outcomes,
    rejection_reference,
    traversal_reference,
)

VOCAB_SIZE = 3

Prefix = tuple[int, ...]
LawTable = dict[Prefix, list[float]]


@dataclass(frozen=True)
class Tables:
    """The target's and two drafters' next-token laws for every prefix shorter than ``length``."""

    target: LawTable
    draft: LawTable
    other_draft: LawTable
    length: int


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _one_hot(rng: np.random.Generator) -> np.ndarray:
    return np.eye(VOCAB_SIZE)[rng.integers(VOCAB_SIZE)]


def _with_zeros(rng: np.random.Generator) -> np.ndarray:
    law = _softmax(1.5 * rng.normal(size=VOCAB_SIZE)) * (rng.random(VOCAB_SIZE) < 0.6)
    return law / law.sum() if law.sum() > 0 else _one_hot(rng)


def _pair(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One target law and one draft law of a kind."""
    target = _softmax(1.5 * rng.normal(size=VOCAB_SIZE))
    draft = 0.5 * target + 0.5 * _softmax(1.5 * rng.normal(size=VOCAB_SIZE))
    if kind == "dense":
        return target, draft
    if kind == "independent":
        return target, _softmax(1.5 * rng.normal(size=VOCAB_SIZE))
    if kind == "zeros":
        return _with_zeros(rng), _with_zeros(rng)
    if kind == "one-hot target":
        return _one_hot(rng), draft
    if kind == "one-hot draft":
        return target, _one_hot(rng)
    if kind == "one-hot both":
        return _one_hot(rng), _one_hot(rng)
    if kind == "disjoint":
        split = rng.permutation(VOCAB_SIZE)[0]
        target[split], draft[:] = 0.0, np.eye(VOCAB_SIZE)[split]
        return target / target.sum(), draft
    if kind == "equal":
        return target, target.copy()
    if kind == "cold":  # temperature 0.02: nearly one-hot, with entries down to 1e-100
        return _softmax(rng.normal(size=VOCAB_SIZE) / 0.02), _softmax(
            rng.normal(size=VOCAB_SIZE) / 0.02
        )
    raise ValueError(kind)


KINDS = (
    "dense",
    "independent",
    "zeros",
    "one-hot target",
    "one-hot draft",
    "one-hot both",
    "disjoint",
    "equal",
    "cold",
)


def make_tables(seed: int, length: int, kind: str = "dense") -> Tables:
    """Random tables; kind ``any`` picks one of ``KINDS`` for every prefix."""
    rng = np.random.default_rng(seed)
    tables = Tables({}, {}, {}, length)
    for num in range(length):
        for prefix in itertools.product(range(VOCAB_SIZE), repeat=num):
            this = KINDS[rng.integers(len(KINDS))] if kind == "any" else kind
            target, draft = _pair(this, rng)
            _, other_draft = _pair(this, rng)
            tables.target[prefix] = target.tolist()
            tables.draft[prefix] = draft.tolist()
            tables.other_draft[prefix] = other_draft.tolist()
    return tables


@dataclass
class Draft:
    """One request's draft under construction: what a rule takes, and the text at each row."""

    tables: Tables
    with_replacement: bool = False
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    dist_ids: list[int] = field(default_factory=list)
    draft_probs: list[list[float]] = field(default_factory=list)
    texts: list[Prefix] = field(default_factory=lambda: [()])
    _remaining: dict[tuple[int, str], tuple[int, list[float]]] = field(default_factory=dict)

    @property
    def target_probs(self) -> list[list[float]]:
        return [self.tables.target[text] for text in self.texts]

    def can_extend(self, row: int) -> bool:
        return len(self.texts[row]) + 1 < self.tables.length

    def law(self, row: int, source: str = "draft") -> list[float]:
        """What the next token drawn below ``row`` will be drawn from."""
        return self._entry(row, source)[1]

    def draw(
        self, chooser: Chooser, row: int, source: str = "draft", avoid: tuple[int, ...] = ()
    ) -> int | None:
        """Draw one more child, if any token is left; its law leaves out the tokens to avoid."""
        key = source + "".join(f"-{token}" for token in avoid)
        dist_id, law = self._entry(row, key, source, avoid)
        if not sum(law) > 0.0:
            return None
        token = chooser.draw(law, "draft")
        node = self._append(row, token, dist_id)
        if not self.with_replacement:
            rest = [0.0 if other == token else p for other, p in enumerate(law)]
            self._remaining[row, key] = dist_id, _normalised(rest)
        return node

    def choose(self, row: int, token: int) -> int:
        return self._append(row, token, -1)

    def _entry(
        self, row: int, key: str, source: str = "draft", avoid: tuple[int, ...] = ()
    ) -> tuple[int, list[float]]:
        if (row, key) not in self._remaining:
            table = self.tables.draft if source == "draft" else self.tables.other_draft
            law = list(table[self.texts[row]])
            if avoid:
                law = _normalised([0.0 if t in avoid else p for t, p in enumerate(law)])
            self.draft_probs.append(law)
            self._remaining[row, key] = len(self.draft_probs) - 1, law
        return self._remaining[row, key]

    def _append(self, row: int, token: int, dist_id: int) -> int:
        self.token_ids.append(token)
        self.parents.append(row)
        self.dist_ids.append(dist_id)
        self.texts.append((*self.texts[row], token))
        return len(self.token_ids)

    def without(self, dropped: set[int]) -> Draft:
        """This draft without some nodes and all that is below them."""
        kept = Draft(self.tables, self.with_replacement, draft_probs=self.draft_probs)
        rows = {0: 0}
        for node, parent in enumerate(self.parents, start=1):
            if node not in dropped and parent in rows:
                rows[node] = kept._append(
                    rows[parent], self.token_ids[node - 1], self.dist_ids[node - 1]
                )
        return kept

    def reordered(self, order: Callable[[Draft, int], float]) -> Draft:
        """This draft with the children of every parent sorted by a key of the node."""
        moved = Draft(self.tables, self.with_replacement, draft_probs=self.draft_probs)
        pending = [(0, 0)]
        for old_row, new_row in pending:
            children = [node for node, p in enumerate(self.parents, start=1) if p == old_row]
            for node in sorted(children, key=lambda node: order(self, node)):
                token, dist_id = self.token_ids[node - 1], self.dist_ids[node - 1]
                pending.append((node, moved._append(new_row, token, dist_id)))
        return moved

    def own_prob(self, node: int) -> float:
        """A drawn node's probability in the row it was drawn from."""
        return self.draft_probs[self.dist_ids[node - 1]][self.token_ids[node - 1]]


def _normalised(law: list[float]) -> list[float]:
    total = sum(law)
    return [p / total for p in law] if total > 0.0 else law


Drafter = Callable[[Tables, Chooser], Draft]
Verdict = tuple[tuple[int, ...], int]
Rule = Callable[[Draft, Chooser], Verdict]

# ------------------------------------------------------------------------------------------ rules


def rejection_rule(draft: Draft, chooser: Chooser) -> Verdict:
    return rejection_reference(
        draft.token_ids,
        draft.parents,
        draft.target_probs,
        draft.draft_probs,
        draft.dist_ids,
        chooser,
        with_replacement=draft.with_replacement,
    )


def traversal_rule(draft: Draft, chooser: Chooser) -> Verdict:
    return traversal_reference(
        draft.token_ids,
        draft.parents,
        draft.target_probs,
        draft.draft_probs,
        draft.dist_ids,
        chooser,
        with_replacement=draft.with_replacement,
    )


def block_rule(draft: Draft, chooser: Chooser) -> Verdict:
    return block_reference(
        draft.token_ids,
        draft.parents,
        draft.target_probs,
        draft.draft_probs,
        draft.dist_ids,
        chooser,
    )


# --------------------------------------------------------------------------------- exact drafters


def ranked(law: list[float]) -> list[int]:
    """Tokens, likeliest first."""
    return sorted(range(len(law)), key=lambda token: -law[token])


def no_draft(tables: Tables, chooser: Chooser) -> Draft:
    return Draft(tables)


def sampled_chain(tables: Tables, chooser: Chooser) -> Draft:
    draft, row = Draft(tables), 0
    while draft.can_extend(row):
        row = draft.draw(chooser, row) or 0
    return draft


def chosen_chain(tables: Tables, chooser: Chooser) -> Draft:
    draft, row = Draft(tables), 0
    while draft.can_extend(row):
        row = draft.choose(row, ranked(draft.law(row))[0])
    return draft


def _sampled_tree(tables: Tables, chooser: Chooser, width: int, with_replacement: bool) -> Draft:
    draft, row = Draft(tables, with_replacement), 0
    while row < len(draft.texts):
        if draft.can_extend(row):
            for _ in range(width):
                draft.draw(chooser, row)
        row += 1
    return draft


def sampled_tree(tables: Tables, chooser: Chooser) -> Draft:
    return _sampled_tree(tables, chooser, 2, with_replacement=False)


def sampled_tree_with_replacement(tables: Tables, chooser: Chooser) -> Draft:
    return _sampled_tree(tables, chooser, 2, with_replacement=True)


def chosen_tree(tables: Tables, chooser: Chooser) -> Draft:
    draft, row = Draft(tables), 0
    while row < len(draft.texts):
        if draft.can_extend(row):
            for token in ranked(draft.law(row))[:2]:
                draft.choose(row, token)
        row += 1
    return draft


def expand_only_the_better(tables: Tables, chooser: Chooser) -> Draft:
    """Draw two siblings, keep both in draw order, expand only the likelier one, two levels deep."""
    draft, row = Draft(tables), 0
    while draft.can_extend(row):
        nodes = [node for node in (draft.draw(chooser, row), draft.draw(chooser, row)) if node]
        row = max(nodes, key=draft.own_prob)
    return draft


def stop_siblings_early(tables: Tables, chooser: Chooser) -> Draft:
    """Draw no second sibling once the first was likely; keep what was drawn."""
    draft, row = Draft(tables), 0
    while row < len(draft.texts):
        if draft.can_extend(row):
            first = draft.draw(chooser, row)
            if first and draft.own_prob(first) <= 0.5:
                draft.draw(chooser, row)
        row += 1
    return draft


def stop_before_drawing(tables: Tables, chooser: Chooser) -> Draft:
    """A chain that stops when the next law is too flat, which is known before drawing from it."""
    draft, row = Draft(tables), 0
    while draft.can_extend(row):
        if -sum(p * math.log(p) for p in draft.law(row) if p > 0.0) > 0.9:
            break
        row = draft.draw(chooser, row) or 0
    return draft


def stop_after_keeping(tables: Tables, chooser: Chooser) -> Draft:
    """A chain that stops after an unlikely token, and keeps it."""
    draft, row = Draft(tables), 0
    while draft.can_extend(row):
        row = draft.draw(chooser, row) or 0
        if draft.own_prob(row) < 0.35:
            break
    return draft


def _mixed(grow: Callable[[Draft, Chooser, int], None]) -> Drafter:
    """Grow below the root and below its first two children."""

    def drafter(tables: Tables, chooser: Chooser) -> Draft:
        draft = Draft(tables)
        for row in range(3):
            if row < len(draft.texts) and draft.can_extend(row):
                grow(draft, chooser, row)
        return draft

    return drafter


@_mixed
def chosen_first(draft: Draft, chooser: Chooser, row: int) -> None:
    """One token chosen, then two drawn that may repeat it."""
    draft.choose(row, ranked(draft.tables.other_draft[draft.texts[row]])[0])
    draft.draw(chooser, row)
    draft.draw(chooser, row)


@_mixed
def chosen_last(draft: Draft, chooser: Chooser, row: int) -> None:
    """One token drawn, then the likeliest other one chosen."""
    drawn = draft.draw(chooser, row)
    taken = draft.token_ids[drawn - 1] if drawn else None
    draft.choose(row, next(token for token in ranked(draft.law(row)) if token != taken))


@_mixed
def chosen_between(draft: Draft, chooser: Chooser, row: int) -> None:
    """A draw, a choice that looks at it, and one more draw."""
    drawn = draft.draw(chooser, row)
    taken = draft.token_ids[drawn - 1] if drawn else 0
    draft.choose(row, (taken + 1) % VOCAB_SIZE)
    draft.draw(chooser, row)


@_mixed
def chosen_kept_out_of_draws(draft: Draft, chooser: Chooser, row: int) -> None:
    """A choice, then a draw that avoids it, recorded with the law that it was drawn from."""
    token = ranked(draft.tables.other_draft[draft.texts[row]])[0]
    draft.choose(row, token)
    draft.draw(chooser, row, avoid=(token,))


@_mixed
def two_sources(draft: Draft, chooser: Chooser, row: int) -> None:
    """A draw from each of two drafters, and at the root one more from the first."""
    draft.draw(chooser, row, "other")
    if row < 2:
        draft.draw(chooser, row)
    if row == 0:
        draft.draw(chooser, row, "other")


@_mixed
def more_siblings_than_tokens(draft: Draft, chooser: Chooser, row: int) -> None:
    """Draws until the law is used up, then padding that was never drawn."""
    while draft.draw(chooser, row):
        pass
    dist_id = draft.dist_ids[-1]
    draft._append(row, 0, dist_id)
    draft._append(row, VOCAB_SIZE - 1, dist_id)


@_mixed
def chosen_taken_out_of_draft_law(draft: Draft, chooser: Chooser, row: int) -> None:
    """A choice, then a draw that may repeat it, recorded as if it could not.

    A repeat has no mass under the recorded law and is passed over; any other draw has that law.
    """
    token = ranked(draft.tables.draft[draft.texts[row]])[1]
    draft.choose(row, token)
    node = draft.draw(chooser, row)
    law = draft.draft_probs[draft.dist_ids[node - 1]] if node else []
    law[:] = _normalised([0.0 if t == token else p for t, p in enumerate(law)])


def repeats_recorded_without_replacement(tables: Tables, chooser: Chooser) -> Draft:
    """Draws with replacement, verified without: a repeat is passed over, for the same reason."""
    draft = sampled_tree_with_replacement(tables, chooser)
    draft.with_replacement = False
    return draft


def recorded_after_top_k(tables: Tables, chooser: Chooser) -> Draft:
    """Drawn from the whole law, recorded after top-k; again what lies outside is passed over."""
    draft = sampled_chain(tables, chooser)
    for law in draft.draft_probs:
        law[ranked(law)[-1]] = 0.0
        law[:] = _normalised(law)
    return draft


def adaptive(seed: int, num_nodes: int, with_replacement: bool = False) -> Drafter:
    """A drafter that decides by all that it has drafted: whom to extend, how, and when to stop.

    Its decisions are arbitrary but fixed functions of the draft so far, one set for each seed.
    """

    def drafter(tables: Tables, chooser: Chooser) -> Draft:
        draft = Draft(tables, with_replacement)
        while len(draft.token_ids) < num_nodes:
            decide = random.Random(f"{seed} {draft.parents} {draft.token_ids} {draft.dist_ids}")
            rows = [row for row in range(len(draft.texts)) if draft.can_extend(row)]
            row = decide.choice(rows)
            how = decide.choice(("draw", "draw", "draw", "other", "choose", "choose", "stop"))
            if how == "stop":
                break
            if how == "choose":
                draft.choose(row, decide.randrange(VOCAB_SIZE))
            elif draft.draw(chooser, row, "draft" if how == "draw" else "other") is None:
                break
        return draft

    return drafter


# ------------------------------------------------------------------------------------------- laws


@dataclass(frozen=True)
class ExactLaw:
    """The law of the first ``length`` tokens, and the expected number emitted by the step."""

    joint: dict[Prefix, float]
    expected_tokens: float


def target_law(tables: Tables) -> dict[Prefix, float]:
    return _continued(tables, {(): 1.0})


def exact_law(tables: Tables, drafter: Drafter, rule: Rule) -> ExactLaw:
    """Draft, verify and continue from the target, over every way it can go."""

    def program(chooser: Chooser) -> Prefix:
        draft = drafter(tables, chooser)
        path, token = rule(draft, chooser)
        return (*draft.texts[path[-1] if path else 0], token)

    return law_of(tables, program)


def law_of(tables: Tables, program: Callable[[Chooser], Prefix]) -> ExactLaw:
    """Emit some tokens and continue from the target, over every way it can go."""
    emitted: dict[Prefix, float] = defaultdict(float)
    for text, weight in outcomes(program):
        emitted[text] += weight
    expected = sum(weight * len(text) for text, weight in emitted.items())
    return ExactLaw(_continued(tables, emitted), expected)


def draw_from_one_uniform(chooser: Chooser, laws: list[list[float]]) -> list[int]:
    """Draw a token from each law by inverting their cumulative sums at one shared uniform."""
    sums = [list(itertools.accumulate(law)) for law in laws]
    edges = sorted({0.0, 1.0, *(min(edge, 1.0) for row in sums for edge in row)})
    cell = chooser.draw([high - low for low, high in itertools.pairwise(edges)], "draft")
    middle = (edges[cell] + edges[cell + 1]) / 2
    return [inverse_cdf_reference(law, middle) for law in laws]


def _continued(tables: Tables, emitted: dict[Prefix, float]) -> dict[Prefix, float]:
    joint: dict[Prefix, float] = defaultdict(float)
    pending = list(emitted.items())
    while pending:
        text, weight = pending.pop()
        if len(text) >= tables.length:
            joint[text[: tables.length]] += weight
        else:
            pending.extend(
                ((*text, token), weight * p) for token, p in enumerate(tables.target[text]) if p > 0
            )
    return joint


def total_variation(one: dict[Prefix, float], other: dict[Prefix, float]) -> float:
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})
