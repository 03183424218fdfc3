"""Wrong ways to draft or to verify, each seen in the wild, kept so that the tests must catch them.

``MUTANTS`` holds pairs of a drafter and a rule, at least one of them wrong; the other is right.
"""

from __future__ import annotations

from foredraft.verify.reference import Chooser, rejection_reference, traversal_reference
from tests.exactness.enumeration import (
    Draft,
    Drafter,
    Rule,
    Tables,
    Verdict,
    block_rule,
    draw_from_one_uniform,
    ranked,
    recorded_after_top_k,
    rejection_rule,
    sampled_chain,
    sampled_tree,
    traversal_rule,
)

# ---------------------------------------------------------------------------------- wrong drafters


def top_k_as_if_drawn(tables: Tables, chooser: Chooser) -> Draft:
    """The two likeliest tokens below every row, recorded as draws: min(1, p/q), residual p - q."""
    draft, row = Draft(tables), 0
    while row < len(draft.texts):
        if draft.can_extend(row):
            draft.draft_probs.append(list(tables.draft[draft.texts[row]]))
            for token in ranked(draft.draft_probs[-1])[:2]:
                draft._append(row, token, len(draft.draft_probs) - 1)
        row += 1
    return draft


def argmax_as_if_drawn(tables: Tables, chooser: Chooser) -> Draft:
    draft, row = Draft(tables), 0
    while draft.can_extend(row):
        draft.draft_probs.append(list(tables.draft[draft.texts[row]]))
        token = ranked(draft.draft_probs[-1])[0]
        row = draft._append(row, token, len(draft.draft_probs) - 1)
    return draft


def keep_the_better_sibling(tables: Tables, chooser: Chooser) -> Draft:
    draft = sampled_tree(tables, chooser)
    worse = set()
    for row in range(len(draft.texts)):
        children = [node for node, p in enumerate(draft.parents, start=1) if p == row]
        worse |= set(sorted(children, key=draft.own_prob)[:-1])
    return draft.without(worse)


def reorder_siblings(tables: Tables, chooser: Chooser) -> Draft:
    return sampled_tree(tables, chooser).reordered(lambda draft, node: -draft.own_prob(node))


def sort_siblings_by_token_id(tables: Tables, chooser: Chooser) -> Draft:
    return sampled_tree(tables, chooser).reordered(lambda draft, node: draft.token_ids[node - 1])


def prune_by_own_probability(tables: Tables, chooser: Chooser) -> Draft:
    draft = sampled_tree(tables, chooser)
    nodes = range(1, len(draft.texts))
    return draft.without(
        {node for node in nodes if draft.parents[node - 1] and draft.own_prob(node) <= 0.3}
    )


def drop_unlikely_token(tables: Tables, chooser: Chooser) -> Draft:
    draft = sampled_chain(tables, chooser)
    return draft.without(
        {node for node in range(1, len(draft.texts)) if draft.own_prob(node) < 0.3}
    )


def cut_by_product(tables: Tables, chooser: Chooser) -> Draft:
    draft = sampled_chain(tables, chooser)
    product, dropped = 1.0, set()
    for node in range(1, len(draft.texts)):
        product *= draft.own_prob(node)
        if product < 0.4:
            dropped.add(node)
    return draft.without(dropped)


def cut_to_shortest_of_batch(tables: Tables, chooser: Chooser) -> Draft:
    """A chain cut where the last token drawn is not the likeliest one."""
    draft = sampled_chain(tables, chooser)
    last = len(draft.texts) - 1
    likeliest = ranked(draft.draft_probs[draft.dist_ids[last - 1]])[0]
    return draft.without({last} if draft.token_ids[last - 1] != likeliest else set())


def _recorded_otherwise(tables: Tables, chooser: Chooser, recorded: str) -> Draft:
    draft = sampled_chain(tables, chooser)
    for law in draft.draft_probs:
        law[:] = [p**2 for p in law] if recorded == "temperature" else law[1:] + law[:1]
        total = sum(law)
        law[:] = [p / total for p in law]
    return draft


def recorded_before_top_k(tables: Tables, chooser: Chooser) -> Draft:
    """Drawn from the two likeliest tokens of the law that is recorded."""
    draft, row = Draft(tables), 0
    while draft.can_extend(row):
        law = list(tables.draft[draft.texts[row]])
        row = draft.draw(chooser, row, avoid=(ranked(law)[-1],)) or 0
        draft.draft_probs[-1] = law
    return draft


def recorded_at_other_temperature(tables: Tables, chooser: Chooser) -> Draft:
    return _recorded_otherwise(tables, chooser, "temperature")


def recorded_with_other_token_map(tables: Tables, chooser: Chooser) -> Draft:
    return _recorded_otherwise(tables, chooser, "token map")


def recorded_with_replacement(tables: Tables, chooser: Chooser) -> Draft:
    draft = sampled_tree(tables, chooser)
    draft.with_replacement = True
    return draft


def chosen_by_later_draws(tables: Tables, chooser: Chooser) -> Draft:
    """The likeliest token that was not drawn, listed before the drawn one."""
    draft = Draft(tables)
    node = draft.draw(chooser, 0) or 0
    drawn = draft.token_ids[node - 1]
    draft.choose(0, next(t for t in ranked(tables.draft[()]) if t != drawn))
    return draft.reordered(lambda draft, node: draft.dist_ids[node - 1])


def chosen_left_in_draft_law(tables: Tables, chooser: Chooser) -> Draft:
    """A chosen token, then a draw that avoids it, recorded as if it could repeat it."""
    draft = Draft(tables)
    token = ranked(tables.draft[()])[1]
    draft.choose(0, token)
    draft.draw(chooser, 0, avoid=(token,))
    draft.draft_probs[0] = list(tables.draft[()])
    return draft


def chosen_by_what_was_drawn_below(tables: Tables, chooser: Chooser) -> Draft:
    """Two chosen siblings with a draw below each; the one with the likelier draw is kept."""
    draft = Draft(tables)
    nodes = [draft.choose(0, token) for token in ranked(tables.draft[()])[:2]]
    drawn = [draft.draw(chooser, node) or 0 for node in nodes]
    worse = min(zip(nodes, drawn, strict=True), key=lambda pair: draft.own_prob(pair[1]))[0]
    return draft.without({worse})


def cousins_share_noise(tables: Tables, chooser: Chooser) -> Draft:
    """Two siblings, and below each a token drawn from one and the same uniform.

    Wrong for traversal, which looks at one cousin before the other; rejection looks at one only.
    """
    draft = Draft(tables)
    nodes = [node for node in (draft.draw(chooser, 0), draft.draw(chooser, 0)) if node]
    laws = [tables.draft[draft.texts[node]] for node in nodes]
    tokens = draw_from_one_uniform(chooser, laws)
    for node, law, token in zip(nodes, laws, tokens, strict=True):
        draft.draft_probs.append(law)
        draft._append(node, token, len(draft.draft_probs) - 1)
    return draft


# ------------------------------------------------------------------------------------- wrong rules


def _excess(weight: float, target: list[float], draft: list[float]) -> list[float]:
    return [max(weight * p - q, 0.0) for p, q in zip(target, draft, strict=True)]


def _normalised(law: list[float], otherwise: list[float]) -> list[float]:
    total = sum(law)
    return [p / total for p in law] if total > 0.0 else otherwise


def _token_rule(draft: Draft, chooser: Chooser, mutation: str) -> Verdict:
    """Rejection on a drawn chain, with one thing wrong."""
    path: tuple[int, ...] = ()
    for node, token in enumerate(draft.token_ids, start=1):
        target = draft.target_probs[node - 1]
        law = draft.draft_probs[draft.dist_ids[node - 1]]
        ratio = target[token] / law[token]
        if mutation == "swapped":
            ratio = law[token] / target[token]
        if mutation == "clamped low":
            ratio = max(ratio, 0.3)
        if not chooser.flip(min(1.0, ratio), "accept", node):
            left = _normalised(_excess(1.0, target, law), target)
            if mutation == "fresh":
                left = target
            elif mutation == "swapped residual":
                left = _normalised(_excess(1.0, law, target), target)
            elif mutation == "filtered":
                left = _normalised(
                    [p if t == ranked(left)[0] else 0.0 for t, p in enumerate(left)], left
                )
            elif mutation == "only zeroed":
                left = _normalised([0.0 if t == token else p for t, p in enumerate(target)], target)
            return path, chooser.draw(left, "recover")
        path = (*path, node)
    return path, chooser.draw(draft.target_probs[-1], "bonus")


def fresh_after_rejection(draft: Draft, chooser: Chooser) -> Verdict:
    return _token_rule(draft, chooser, "fresh")


def ratio_upside_down(draft: Draft, chooser: Chooser) -> Verdict:
    return _token_rule(draft, chooser, "swapped")


def residual_upside_down(draft: Draft, chooser: Chooser) -> Verdict:
    return _token_rule(draft, chooser, "swapped residual")


def residual_filtered_again(draft: Draft, chooser: Chooser) -> Verdict:
    """The residual goes through top-k once more."""
    return _token_rule(draft, chooser, "filtered")


def residual_of_a_chosen_token(draft: Draft, chooser: Chooser) -> Verdict:
    """A drawn token accepted by min(1, p/q), but only itself taken out when rejected."""
    return _token_rule(draft, chooser, "only zeroed")


def acceptance_with_a_floor(draft: Draft, chooser: Chooser) -> Verdict:
    return _token_rule(draft, chooser, "clamped low")


def _block(draft: Draft, chooser: Chooser, mutation: str) -> Verdict:
    """Block verification of a drawn chain, with one thing wrong."""
    num_nodes = len(draft.token_ids)
    target = draft.target_probs
    laws = [draft.draft_probs[dist_id] for dist_id in draft.dist_ids]
    weights = [1.0]
    for i, token in enumerate(draft.token_ids):
        ratio = target[i][token] / laws[i][token]
        if mutation == "not carried":
            weights.append(min(ratio, 1.0))
        else:
            weights.append(min(weights[i] * ratio, 1.0))
    accepted = 0
    for i in range(1, num_nodes + 1):
        if i < num_nodes:
            mass = sum(_excess(weights[i], target[i], laws[i]))
            total = mass + 1.0 - weights[i]
            chance = mass / total if total > 0.0 else 1.0
            if mutation == "weight as coin":
                chance = weights[i]
        else:
            chance = weights[i]
            if mutation == "last ratio":
                last = draft.token_ids[-1]
                chance = min(target[i - 1][last] / laws[i - 1][last], 1.0)
        if chooser.flip(chance, "accept", i):
            accepted = i
        elif mutation == "early stop":
            break
    left = target[accepted]
    if accepted < num_nodes:
        weight = 1.0 if mutation == "token residual" else weights[accepted]
        left = _normalised(_excess(weight, left, laws[accepted]), left)
    return tuple(range(1, accepted + 1)), chooser.draw(left, "bonus")


def block_stops_early(draft: Draft, chooser: Chooser) -> Verdict:
    """The scan ends at the first prefix turned down."""
    return _block(draft, chooser, "early stop")


def block_last_coin_by_token(draft: Draft, chooser: Chooser) -> Verdict:
    """The whole chain's coin is its last token's ratio, not its weight."""
    return _block(draft, chooser, "last ratio")


def block_residual_by_token(draft: Draft, chooser: Chooser) -> Verdict:
    """The residual is that of the token rule: p - q, not weight * p - q."""
    return _block(draft, chooser, "token residual")


def block_coin_is_weight(draft: Draft, chooser: Chooser) -> Verdict:
    return _block(draft, chooser, "weight as coin")


def block_weight_not_carried(draft: Draft, chooser: Chooser) -> Verdict:
    return _block(draft, chooser, "not carried")


def accepts_what_has_no_mass(draft: Draft, chooser: Chooser) -> Verdict:
    """A token without mass in the recorded law is accepted: u * 0 < p."""
    laws = [[max(p, 1e-300) for p in draft.draft_probs[dist_id]] for dist_id in draft.dist_ids]
    return rejection_reference(
        draft.token_ids,
        draft.parents,
        draft.target_probs,
        laws,
        range(len(laws)),
        chooser,
    )


def traversal_keeps_draft_law(draft: Draft, chooser: Chooser) -> Verdict:
    """The draft law of the next sibling still holds the rejected token."""
    return traversal_reference(
        draft.token_ids,
        draft.parents,
        draft.target_probs,
        draft.draft_probs,
        draft.dist_ids,
        chooser,
        with_replacement=True,
    )


def _traversal(draft: Draft, chooser: Chooser, mutation: str) -> Verdict:
    """Traversal of a drawn tree, with one thing wrong."""

    def visit(row: int, weight: float, path: tuple[int, ...]) -> Verdict | None:
        target = draft.target_probs[row]
        law = None
        for node, parent in enumerate(draft.parents, start=1):
            if parent != row:
                continue
            token = draft.token_ids[node - 1]
            law = law or list(draft.draft_probs[draft.dist_ids[node - 1]])
            node_weight = min(weight * target[token] / law[token], 1.0)
            verdict = visit(node, node_weight, (*path, node))
            if verdict:
                return verdict
            support = [t == token or mutation != "drawn tokens only" for t in range(len(law))]
            parts = _excess(weight, target, law)
            mass = sum(part for part, counted in zip(parts, support, strict=True) if counted)
            if mutation == "drawn tokens only":
                # The mass outside the drafted tokens is guessed from the target alone.
                mass += weight * sum(p for p, c in zip(target, support, strict=True) if not c)
            total = mass + (1.0 - weight)
            if mutation != "weight kept":
                weight = min(1.0, mass / total) if total > 0.0 else 1.0
            target = _normalised(parts, target)
            law = _normalised([0.0 if t == token else q for t, q in enumerate(law)], law)
        if row == 0 or chooser.flip(weight, "accept", row):
            return path, chooser.draw(target, "recover")
        return None

    verdict = visit(0, 1.0, ())
    assert verdict
    return verdict


def traversal_weight_kept(draft: Draft, chooser: Chooser) -> Verdict:
    """A row's weight is not lowered when a child is rejected."""
    return _traversal(draft, chooser, "weight kept")


def traversal_approximate_sums(draft: Draft, chooser: Chooser) -> Verdict:
    """The residual mass is summed over the drafted tokens and guessed elsewhere."""
    return _traversal(draft, chooser, "drawn tokens only")


MUTANTS: dict[str, tuple[Drafter, Rule]] = {
    **{
        f"{drafter.__name__}, {rule.__name__}": (drafter, rule)
        for drafter in (
            top_k_as_if_drawn,
            argmax_as_if_drawn,
            keep_the_better_sibling,
            reorder_siblings,
            sort_siblings_by_token_id,
            prune_by_own_probability,
            drop_unlikely_token,
            cut_by_product,
            cut_to_shortest_of_batch,
            recorded_before_top_k,
            recorded_at_other_temperature,
            recorded_with_other_token_map,
            recorded_with_replacement,
            chosen_by_later_draws,
            chosen_left_in_draft_law,
            chosen_by_what_was_drawn_below,
        )
        for rule in (rejection_rule, traversal_rule)
    },
    **{
        f"{drafter.__name__}, {block_rule.__name__}": (drafter, block_rule)
        for drafter in (
            argmax_as_if_drawn,
            drop_unlikely_token,
            cut_by_product,
            cut_to_shortest_of_batch,
            recorded_before_top_k,
            recorded_at_other_temperature,
            recorded_with_other_token_map,
        )
    },
    **{
        rule.__name__: (sampled_chain, rule)
        for rule in (
            fresh_after_rejection,
            ratio_upside_down,
            residual_upside_down,
            residual_filtered_again,
            residual_of_a_chosen_token,
            acceptance_with_a_floor,
            block_stops_early,
            block_last_coin_by_token,
            block_residual_by_token,
            block_coin_is_weight,
            block_weight_not_carried,
        )
    },
    cousins_share_noise.__name__: (cousins_share_noise, traversal_rule),
    accepts_what_has_no_mass.__name__: (recorded_after_top_k, accepts_what_has_no_mass),
    **{
        rule.__name__: (sampled_tree, rule)
        for rule in (traversal_keeps_draft_law, traversal_weight_kept, traversal_approximate_sums)
    },
}
"""Name -> (drafter, rule)."""
