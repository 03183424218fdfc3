"""The classical rules keep the target's law: exact enumeration, no sampling.

Every number here is a sum over all ways that drafting and verification can go, so a tolerance only
covers rounding. The enumeration runs the reference rules; ``test_classical_coins.py`` ties the fast
ones to them coin for coin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from foredraft.verify.reference import Chooser, outcomes, walk_reference
from tests.exactness import enumeration, mutants
from tests.exactness.enumeration import (
    KINDS,
    Draft,
    Drafter,
    Prefix,
    Rule,
    Tables,
    Verdict,
    adaptive,
    block_rule,
    draw_from_one_uniform,
    exact_law,
    law_of,
    make_tables,
    rejection_rule,
    target_law,
    total_variation,
    traversal_rule,
)
from tests.exactness.mutants import MUTANTS

TOLERANCE = 1e-12

CHAINS = {
    "no draft": enumeration.no_draft,
    "sampled chain": enumeration.sampled_chain,
    "chosen chain": enumeration.chosen_chain,
    "stop before drawing": enumeration.stop_before_drawing,
    "stop after keeping": enumeration.stop_after_keeping,
    "recorded after top-k": enumeration.recorded_after_top_k,
}
TREES = {
    "sampled tree": enumeration.sampled_tree,
    "sampled tree with replacement": enumeration.sampled_tree_with_replacement,
    "chosen tree": enumeration.chosen_tree,
    "expand only the better": enumeration.expand_only_the_better,
    "stop siblings early": enumeration.stop_siblings_early,
    "chosen first": enumeration.chosen_first,
    "chosen last": enumeration.chosen_last,
    "chosen between": enumeration.chosen_between,
    "chosen kept out of draws": enumeration.chosen_kept_out_of_draws,
    "chosen taken out of draft law": enumeration.chosen_taken_out_of_draft_law,
    "repeats, recorded without replacement": enumeration.repeats_recorded_without_replacement,
    "two sources": enumeration.two_sources,
    "more siblings than tokens": enumeration.more_siblings_than_tokens,
}
TREE_RULES = {"rejection": rejection_rule, "traversal": traversal_rule}
CHAIN_RULES = {**TREE_RULES, "block": block_rule}
PAIRS = [
    pytest.param(drafter, rule, id=f"{rule_name}: {name}")
    for drafters, rules in ((CHAINS, CHAIN_RULES), (TREES, TREE_RULES))
    for name, drafter in drafters.items()
    for rule_name, rule in rules.items()
]


def error(tables: Tables, drafter: Drafter, rule: Rule) -> float:
    law = exact_law(tables, drafter, rule)
    assert sum(law.joint.values()) == pytest.approx(1.0, abs=TOLERANCE)
    return total_variation(law.joint, target_law(tables))


@pytest.mark.parametrize(("drafter", "rule"), PAIRS)
def test_law_is_the_targets(drafter: Drafter, rule: Rule) -> None:
    num = 40 if drafter in CHAINS.values() else 4
    for seed in range(num):
        tables = make_tables(seed, 3, "dense" if seed % 2 else "independent")
        assert error(tables, drafter, rule) < TOLERANCE, seed


@pytest.mark.parametrize(("drafter", "rule"), PAIRS)
def test_law_is_the_targets_on_awkward_tables(drafter: Drafter, rule: Rule) -> None:
    num = 4 if drafter in CHAINS.values() else 1
    for kind in (*KINDS, "any"):
        for seed in range(num):
            assert error(make_tables(seed, 3, kind), drafter, rule) < TOLERANCE, (kind, seed)


@pytest.mark.parametrize("rule", CHAIN_RULES.values(), ids=CHAIN_RULES)
def test_law_is_the_targets_at_depth_three(rule: Rule) -> None:
    for seed in range(6):
        tables = make_tables(seed, 4, "any" if seed % 2 else "independent")
        for drafter in CHAINS.values():
            assert error(tables, drafter, rule) < TOLERANCE, seed
        if rule is not block_rule:
            drafter = enumeration.expand_only_the_better
            assert error(tables, drafter, rule) < TOLERANCE, seed


@pytest.mark.parametrize("with_replacement", [False, True])
@pytest.mark.parametrize("rule", TREE_RULES.values(), ids=TREE_RULES)
def test_law_is_the_targets_however_the_drafter_adapts(rule: Rule, with_replacement: bool) -> None:
    """Whom to extend, drawing or choosing, and when to stop, by anything drafted so far."""
    for seed in range(30):
        tables = make_tables(seed, 4, "any" if seed % 4 == 0 else "independent")
        drafter = adaptive(seed, 4 if seed % 2 else 5, with_replacement)
        assert error(tables, drafter, rule) < TOLERANCE, seed


def test_block_never_emits_fewer_than_rejection() -> None:
    gains = []
    for seed in range(40):
        tables = make_tables(seed, 3)
        block, token = (
            exact_law(tables, enumeration.sampled_chain, rule).expected_tokens
            for rule in (block_rule, rejection_rule)
        )
        assert block >= token - TOLERANCE, seed
        gains.append(block - token)
    assert max(gains) > 0.02


@pytest.mark.parametrize("name", ["sampled tree", "expand only the better"])
def test_traversal_never_emits_fewer_than_rejection(name: str) -> None:
    gains = []
    for seed in range(8):
        tables = make_tables(seed, 3)
        traversal, rejection = (
            exact_law(tables, TREES[name], rule).expected_tokens
            for rule in (traversal_rule, rejection_rule)
        )
        assert traversal >= rejection - TOLERANCE, seed
        gains.append(traversal - rejection)
    assert max(gains) > 0.005


def test_drawing_without_replacement_emits_more() -> None:
    for seed in range(6):
        tables = make_tables(seed, 3)
        without, with_replacement = (
            exact_law(tables, TREES[name], rejection_rule).expected_tokens
            for name in ("sampled tree", "sampled tree with replacement")
        )
        assert without >= with_replacement, seed


@pytest.mark.parametrize("name", CHAINS)
def test_block_is_traversal_on_a_chain(name: str) -> None:
    """Not only in the law of the text: in the law of path and token, draft by draft."""
    for seed in range(10):
        tables = make_tables(seed, 3, "any" if seed % 2 else "independent")
        for draft, _ in outcomes(lambda chooser, t=tables: CHAINS[name](t, chooser)):
            block, traversal = verdict_law(draft, block_rule), verdict_law(draft, traversal_rule)
            assert total_variation(block, traversal) < TOLERANCE, seed


def test_rejection_of_chosen_tokens_is_sample_and_match() -> None:
    """Accept with p(x), else zero and renormalise: the same as one draw looked up below the row."""
    for seed in range(10):
        tables = make_tables(seed, 3, "any" if seed % 2 else "independent")
        ((draft, _),) = outcomes(lambda chooser, t=tables: enumeration.chosen_tree(t, chooser))
        matched = verdict_law(draft, walk_rule)
        for rule in TREE_RULES.values():
            assert total_variation(matched, verdict_law(draft, rule)) < TOLERANCE, seed


def verdict_law(draft: Draft, rule: Rule) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {}
    for (path, token), weight in outcomes(lambda chooser: rule(draft, chooser)):
        law[(*path, -1, token)] = law.get((*path, -1, token), 0.0) + weight
    return law


# --------------------------------------------------------------------------- noise used only once


def two_steps_with_one_noise(tables: Tables, rule: Rule) -> Callable[[Chooser], Prefix]:
    """Two drafting steps whose noise is keyed by position alone.

    The first step drafts two tokens; where it emits one, the next drafts the second position again,
    from the same uniform.
    """

    def program(chooser: Chooser) -> Prefix:
        firsts = range(enumeration.VOCAB_SIZE)
        second = draw_from_one_uniform(chooser, [tables.draft[(first,)] for first in firsts])
        draft = Draft(tables)
        node = draft.draw(chooser, 0)
        assert node
        first = draft.token_ids[0]
        draft.draft_probs.append(tables.draft[(first,)])
        draft._append(node, second[first], 1)
        text = emitted(draft, rule(draft, chooser))
        if len(text) > 1:
            return text
        draft = Draft(tables, texts=[text], draft_probs=[tables.draft[text]])
        draft._append(0, second[text[0]], 0)
        return emitted(draft, rule(draft, chooser))

    return program


def emitted(draft: Draft, verdict: Verdict) -> Prefix:
    path, token = verdict
    return (*draft.texts[path[-1] if path else 0], token)


def noise_error(rule: Rule) -> float:
    worst = 0.0
    for seed in range(10):
        tables = make_tables(seed, 3)
        law = law_of(tables, two_steps_with_one_noise(tables, rule))
        worst = max(worst, total_variation(law.joint, target_law(tables)))
    return worst


def test_rejection_may_draft_a_position_again_with_the_same_noise() -> None:
    """It never looked at the token the noise drew before."""
    assert noise_error(rejection_rule) < TOLERANCE
    for seed in range(10):
        tables = make_tables(seed, 3)
        assert error(tables, mutants.cousins_share_noise, rejection_rule) < TOLERANCE, seed


@pytest.mark.parametrize("rule", [block_rule, traversal_rule])
def test_block_and_traversal_must_not(rule: Rule) -> None:
    assert noise_error(rule) > 0.01


# ------------------------------------------------------------------------------------------- walk


@dataclasses.dataclass
class PicksOnDemand:
    """Each row's pick, drawn from the target when it is first looked at."""

    draft: Draft
    chooser: Chooser

    def __len__(self) -> int:
        return len(self.draft.texts)

    def __getitem__(self, row: int) -> int:
        return self.chooser.draw(self.draft.target_probs[row], "bonus")


def walk_rule(draft: Draft, chooser: Chooser) -> Verdict:
    picks = PicksOnDemand(draft, chooser)
    path, tokens = walk_reference(draft.token_ids, draft.parents, picks)  # type: ignore[arg-type]
    assert [draft.token_ids[node - 1] for node in path] == list(tokens[:-1])
    return path, tokens[-1]


@pytest.mark.parametrize(
    "drafter",
    [
        *TREES.values(),
        mutants.reorder_siblings,
        mutants.keep_the_better_sibling,
        mutants.cut_by_product,
        mutants.top_k_as_if_drawn,
        mutants.chosen_by_what_was_drawn_below,
    ],
)
def test_walk_keeps_the_law_whatever_is_drafted(drafter: Drafter) -> None:
    """Even where it was pruned, reordered or chosen by what was drawn: picks never look at it."""
    for seed in range(2):
        tables = make_tables(seed, 3, "any" if seed % 2 else "independent")
        assert error(tables, drafter, walk_rule) < TOLERANCE, seed


def test_walk_takes_the_first_of_equal_siblings_and_stops_at_a_leaf() -> None:
    # rows: 0 root; 1, 2: the same token below the root; 3 below 1; 4 below 2
    assert walk_reference([5, 5, 7, 8], [0, 0, 1, 2], [5, 7, 8, 9, 0]) == ((1, 3), (5, 7, 9))
    assert walk_reference([5, 5, 7, 8], [0, 0, 1, 2], [5, 8, 8, 9, 0]) == ((1,), (5, 8))
    assert walk_reference([5], [0], [4, 0]) == ((), (4,))
    assert walk_reference([], [], [4]) == ((), (4,))


# ---------------------------------------------------------------------------------------- mutants


@pytest.mark.parametrize("name", MUTANTS)
def test_enumeration_catches_the_mutant(name: str) -> None:
    drafter, rule = MUTANTS[name]
    candidates = (
        make_tables(seed, 3, kind) for seed in range(20) for kind in ("dense", "independent")
    )
    assert any(error(tables, drafter, rule) > 0.01 for tables in candidates)
