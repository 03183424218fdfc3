"""The specification of verification: plain slow loops, one function a rule.

The fast rules beside this file must decide as these do for the same coins. A rule here asks a
``Chooser`` for everything random, so the same code runs on given coins and, through ``outcomes``,
once for every way its choices can fall: its law is then known exactly, not sampled.

**What the classical rules owe to the draft, and why they are exact.** A draft is exact to verify
with ``rejection_reference`` or ``traversal_reference`` if it could have been built one token at a
time, each appended as the *last* child of its parent, and each with a recorded law that is its true
law given everything drafted before it. For a drawn token that is the row it was drawn from, without
the siblings before it that were drawn from the same row. For a chosen one it is a point mass,
whatever was looked at to choose it. Which parent to extend, drawing or choosing, and when to stop
may depend on anything drafted so far.

Proof. Fix a tree, and add a leaf ``z`` with law ``draft`` as the last child of ``v``. Let
``target`` and ``w`` be what is left at ``v`` after its older children (``w`` is 1 under rejection).
Without ``z``, ``v`` ends the path with mass ``w * target``, and is turned down with ``1 - w``. With
it, a token comes through ``z`` with mass ``min(w * target, draft)`` and past it with mass
``max(w * target - draft, 0)``: the sum is ``w * target`` again, so ``v`` is turned down as often as
before. Nothing else in the tree looks at ``z``, and below ``z`` the text continues from the target.
So the law of the text is the same with and without the last token drafted, whatever the others
are; taking the tokens away one by one, latest first, leads back to no draft at all.

It follows that siblings drawn and siblings chosen mix freely below one parent, in the order in
which they were drafted: a token chosen by looking at drawn siblings (to repeat none, say) stands
after them, and a token may be chosen first as long as the draws after it have the law they are
recorded with. A rejected chosen token is taken out of the target's law only. If the drafter keeps
it out of later draws, those were drawn from another law, and that one is to be recorded. What
breaks the condition is what looks back: to delete, reorder or select among tokens that were drawn
already, or to list a chosen token before the draws that it was chosen by. No rule can see that, so
none refuses it. Block verification is traversal on a chain.

Nor may a draw share its noise with another one that it is recorded as independent of. Noise keyed
by position alone is shared by cousins, tokens of one depth below different parents, and by the next
step, where it draws again for positions that this step drafted in vain. Block and traversal
verification have looked at those tokens by then, so for them the noise that drafts must be keyed by
the step and the parent too. Rejection never looks at a token unless its parent was accepted: it
stays exact, as long as the shape of the tree does not depend on such draws.

A drawn token without mass under its recorded law is passed over, with all below it, as if it had
never been drafted. That is right for padding behind a law that has no more tokens, and it stays
exact where the recorded law is the true one given that the token is not passed over: draws that
happen to repeat a sibling, recorded as if they could not, or a law recorded after a filter that was
not applied to the draw. (The other way about, a law recorded before the filter, is wrong.)

All rules here read tables of any float type as Python floats (float64), rows by index. They do not
check shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from foredraft.verify.coins import Coins

Result = TypeVar("Result")

Table = Any
"""Rows of probabilities: anything for which ``table[row]`` can be iterated over as floats."""


class Chooser(Protocol):
    """Where a reference rule gets everything random from."""

    def flip(self, probability: float, kind: str, index: int) -> bool:
        """Return True with the given probability; ``index`` is the row it decides on."""

    def draw(self, distribution: Sequence[float], kind: str) -> int:
        """Draw an index; ``kind`` is ``recover`` or ``bonus``. The distribution sums to 1."""


class CoinChooser:
    """Chooses by given coins, as the fast rules do."""

    def __init__(self, coins: Coins) -> None:
        """Take the coins."""
        self._coins = coins

    def flip(self, probability: float, kind: str, index: int) -> bool:
        """Compare the coin of row ``index`` with the probability."""
        return bool(self._coins.accept[index] < probability)

    def draw(self, distribution: Sequence[float], kind: str) -> int:
        """Invert the cumulative sum at the coin of this kind."""
        uniform = {"recover": self._coins.recover, "bonus": self._coins.bonus}[kind]
        return inverse_cdf_reference(distribution, uniform)


class _Replay:
    """Follows a script of choices, then takes the first branch and notes the others."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.weight = 1.0
        self.others: list[tuple[int, ...]] = []
        self._script = script
        self._taken: list[int] = []

    def flip(self, probability: float, kind: str, index: int) -> bool:
        return self._branch([(0, 1.0 - probability), (1, probability)]) == 1

    def draw(self, distribution: Sequence[float], kind: str) -> int:
        return self._branch(list(enumerate(distribution)))

    def _branch(self, branches: list[tuple[int, float]]) -> int:
        open_branches = [(value, weight) for value, weight in branches if weight > 0.0]
        step = len(self._taken)
        if step < len(self._script):
            choice = self._script[step]
        else:
            choice = 0
            for other in range(1, len(open_branches)):
                self.others.append((*self._taken, other))
        self._taken.append(choice)
        value, weight = open_branches[choice]
        self.weight *= weight
        return value


def outcomes(program: Callable[[Chooser], Result]) -> Iterator[tuple[Result, float]]:
    """Run a program once for every way its choices can fall.

    Args:
        program: Draws, flips and returns; deterministic but for the chooser it is given.

    Yields:
        Each run's result and its exact probability. The probabilities sum to 1.
    """
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        replay = _Replay(scripts.pop())
        result = program(replay)
        scripts.extend(replay.others)
        yield result, replay.weight


def inverse_cdf_reference(distribution: Sequence[float], uniform: float) -> int:
    """Return the first token whose cumulative sum exceeds ``uniform`` of the total.

    Where rounding leaves none, the last token that has any probability.
    """
    total = 0.0
    for probability in distribution:
        total += probability
    reached = 0.0
    last = -1
    for token, probability in enumerate(distribution):
        reached += probability
        if probability > 0.0:
            last = token
            if reached > uniform * total:
                return token
    return last


def walk_reference(
    token_ids: Sequence[int], parents: Sequence[int], picks: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Walk one draft along the target's own picks. Exact, and identical to plain decoding.

    Daliri et al., arXiv 2408.07978, section 4.

    Args:
        token_ids: [num_nodes].
        parents: [num_nodes], the parent's row.
        picks: [1 + num_nodes], the target's pick at each row.

    Returns:
        The accepted nodes from the root down (of equal siblings the first), and the emitted tokens:
        every pick on the way, the last one too.
    """
    children: list[dict[int, int]] = [{} for _ in range(len(picks))]
    for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True), start=1):
        children[int(parent)].setdefault(int(token), node)
    path: list[int] = []
    tokens: list[int] = []
    row = 0
    while True:
        pick = int(picks[row])
        tokens.append(pick)
        if pick not in children[row]:
            return tuple(path), tuple(tokens)
        row = children[row][pick]
        path.append(row)


def rejection_reference(
    token_ids: Sequence[int],
    parents: Sequence[int],
    target_probs: Table,
    draft_probs: Table | None,
    dist_ids: Sequence[int],
    chooser: Chooser,
    *,
    with_replacement: bool = False,
) -> tuple[tuple[int, ...], int]:
    """Recursive rejection; see ``foredraft.verify.rejection``. Exact in law."""
    path: list[int] = []
    row = 0
    while True:
        target_law = _floats(target_probs[row])
        laws = _SiblingLaws(draft_probs, len(target_law), with_replacement)
        children = _children(parents, row)
        accepted = None
        for node in children:
            token, dist_id = int(token_ids[node - 1]), int(dist_ids[node - 1])
            draft_law = laws.law(token, dist_id)
            if draft_law[token] == 0.0:
                continue  # Never drawn.
            if chooser.flip(min(1.0, target_law[token] / draft_law[token]), "accept", node):
                accepted = node
                break
            target_law, _ = _leftover(target_law, 1.0, draft_law)
            laws.spend(token, dist_id)
        if accepted is None:
            return tuple(path), chooser.draw(target_law, "recover" if children else "bonus")
        path.append(accepted)
        row = accepted


def block_reference(
    token_ids: Sequence[int],
    parents: Sequence[int],
    target_probs: Table,
    draft_probs: Table | None,
    dist_ids: Sequence[int],
    chooser: Chooser,
) -> tuple[tuple[int, ...], int]:
    """Block verification of a chain; see ``foredraft.verify.block``. Exact in law.

    A flip is asked for every prefix, though only the longest accepted one counts.
    """
    num_nodes = len(token_ids)
    vocab_size = len(_floats(target_probs[0]))
    draft_laws = [
        _SiblingLaws(draft_probs, vocab_size, False).law(int(token), int(dist_id))
        for token, dist_id in zip(token_ids, dist_ids, strict=True)
    ]
    num_drawn = 0
    while num_drawn < num_nodes and draft_laws[num_drawn][int(token_ids[num_drawn])] > 0.0:
        num_drawn += 1
    weights = [1.0]
    for i in range(num_drawn):
        token = int(token_ids[i])
        ratio = weights[i] * float(target_probs[i][token]) / draft_laws[i][token]
        weights.append(min(ratio, 1.0))
    accepted = 0
    for i in range(1, num_drawn + 1):
        if i == num_drawn:
            probability = weights[i]
        else:
            _, mass = _leftover(_floats(target_probs[i]), weights[i], draft_laws[i])
            probability = _posterior_weight(mass, weights[i])
        if chooser.flip(probability, "accept", i):
            accepted = i
    law = _floats(target_probs[accepted])
    if accepted < num_drawn:
        law, _ = _leftover(law, weights[accepted], draft_laws[accepted])
    kind = "bonus" if accepted == num_nodes else "recover"
    return tuple(range(1, accepted + 1)), chooser.draw(law, kind)


def traversal_reference(
    token_ids: Sequence[int],
    parents: Sequence[int],
    target_probs: Table,
    draft_probs: Table | None,
    dist_ids: Sequence[int],
    chooser: Chooser,
    *,
    with_replacement: bool = False,
) -> tuple[tuple[int, ...], int]:
    """Traversal verification of a tree; see ``foredraft.verify.traversal``. Exact in law."""

    def visit(row: int, weight: float, path: tuple[int, ...]) -> tuple[tuple[int, ...], int] | None:
        target_law = _floats(target_probs[row])
        laws = _SiblingLaws(draft_probs, len(target_law), with_replacement)
        children = _children(parents, row)
        for node in children:
            token, dist_id = int(token_ids[node - 1]), int(dist_ids[node - 1])
            draft_law = laws.law(token, dist_id)
            if draft_law[token] == 0.0:
                continue  # Never drawn, and nor was anything below it.
            node_weight = min(weight * target_law[token] / draft_law[token], 1.0)
            verdict = visit(node, node_weight, (*path, node))
            if verdict is not None:
                return verdict
            target_law, mass = _leftover(target_law, weight, draft_law)
            weight = _posterior_weight(mass, weight)
            laws.spend(token, dist_id)
        if chooser.flip(weight, "accept", row):
            return path, chooser.draw(target_law, "recover" if children else "bonus")
        return None

    verdict = visit(0, 1.0, ())
    assert verdict is not None, "the weight of the root stays 1"
    return verdict


class _SiblingLaws:
    """The laws the children of one parent were drafted from, one after the other."""

    def __init__(self, draft_probs: Table | None, vocab_size: int, with_replacement: bool) -> None:
        self._draft_probs = draft_probs
        self._vocab_size = vocab_size
        self._with_replacement = with_replacement
        self._laws: dict[int, list[float]] = {}

    def law(self, token: int, dist_id: int) -> list[float]:
        if dist_id < 0:
            return [1.0 if other == token else 0.0 for other in range(self._vocab_size)]
        if dist_id not in self._laws:
            assert self._draft_probs is not None
            self._laws[dist_id] = _floats(self._draft_probs[dist_id])
        return self._laws[dist_id]

    def spend(self, token: int, dist_id: int) -> None:
        if dist_id < 0 or self._with_replacement:
            return
        law = [0.0 if other == token else p for other, p in enumerate(self._laws[dist_id])]
        mass = sum(law)
        self._laws[dist_id] = [p / mass for p in law] if mass > 0.0 else law


def _leftover(
    target_law: list[float], weight: float, draft_law: list[float]
) -> tuple[list[float], float]:
    """Return the normalised positive part of ``weight * target_law - draft_law``, and its mass.

    Where there is none, which up to rounding happens with probability zero or does not matter, the
    target's law as it was.
    """
    excess = [
        max(weight * target_prob - draft_prob, 0.0)
        for target_prob, draft_prob in zip(target_law, draft_law, strict=True)
    ]
    mass = sum(excess)
    if not mass > 0.0:
        return target_law, 0.0
    return [part / mass for part in excess], mass


def _posterior_weight(mass: float, weight: float) -> float:
    """Return what a path weighs once a child that left ``mass`` has been rejected."""
    total = mass + (1.0 - weight)
    return mass / total if total > 0.0 else 1.0


def _children(parents: Sequence[int], row: int) -> list[int]:
    return [node for node, parent in enumerate(parents, start=1) if int(parent) == row]


def _floats(row: Any) -> list[float]:
    return [float(probability) for probability in row]
