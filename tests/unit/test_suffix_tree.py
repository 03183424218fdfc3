"""The suffix tree against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters.suffix_tree import SEPARATOR, SuffixTree

TEXTS = st.lists(st.integers(0, 3), min_size=0, max_size=60)


def ids(text: list[int]) -> np.ndarray:
    return np.array(text, dtype=np.int64)


def occurrences(text: list[int], part: list[int]) -> int:
    size = len(part)
    return sum(text[i : i + size] == part for i in range(len(text) - size + 1))


def grown(sequences: list[list[int]], max_depth: int, pieces: int = 1) -> SuffixTree:
    """A tree of sequences, the last one unfinished, appended in so many pieces."""
    tree = SuffixTree(max_depth)
    whole = [t for s in sequences[:-1] for t in [*s, SEPARATOR]] + sequences[-1]
    for piece in np.array_split(ids(whole), pieces):
        tree.extend(piece)
    return tree


def edges(tree: SuffixTree) -> list[tuple[list[int], int]]:
    """Every node's string up to the first token of its edge, with its count."""
    found = []
    for node in range(1, int(tree._numbers[1])):
        path: list[int] = []
        at = int(tree._nodes[node, 2])
        first = int(tree._tokens[tree._nodes[node, 0]])
        while at > 0:
            start, length, parent = (int(x) for x in tree._nodes[at, :3])
            path = tree._tokens[start : start + length].tolist() + path
            at = parent
        if first != SEPARATOR:
            found.append(([*path, first], int(tree._nodes[node, 3])))
    return found


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(1, 9))
def test_counts_are_occurrences(sequences: list[list[int]], pieces: int) -> None:
    """Of the string up to the first token of every edge, over all sequences, none across two."""
    tree = grown(sequences, 256, pieces)
    found = edges(tree)
    assert len({tuple(path) for path, _ in found}) == len(found)
    for path, count in found:
        assert count == sum(occurrences(s, path) for s in sequences), path
    # And every string that occurs is found.
    for text in sequences:
        for begin in range(0, len(text), 7):
            for end in range(begin + 1, len(text) + 1):
                assert tree.count(ids(text[begin:end])) >= occurrences(text, text[begin:end])


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3), TEXTS, st.integers(2, 12))
def test_the_longest_match(sequences: list[list[int]], text: list[int], max_depth: int) -> None:
    tree = grown(sequences, max_depth)
    finished = [*sequences[:-1], sequences[-1]]
    longest = 0
    for size in range(1, min(max_depth, len(text)) + 1):
        tail = text[len(text) - size :]
        if any(occurrences(s[:-1], tail) for s in finished):
            longest = size
    # Beyond the depth that is followed, a leaf may still hold more.
    assert longest <= tree.match(ids(text)) or longest >= max_depth
    if len(text) < max_depth and all(len(s) < max_depth for s in sequences):
        assert tree.match(ids(text)) == longest


@settings(deadline=None)
@given(TEXTS)
def test_the_longest_repeated_suffix_is_kept(text: list[int]) -> None:
    tree = grown([text], 256, pieces=5)
    longest = 0
    for size in range(1, len(text)):
        if occurrences(text, text[len(text) - size :]) > 1:
            longest = size
    assert tree.matched_len == longest


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_siblings_are_a_list_with_the_most_seen_first(sequences: list[list[int]]) -> None:
    tree = grown(sequences, 64)
    nodes = tree._nodes
    num_nodes = int(tree._numbers[1])
    seen = set()
    for node in range(num_nodes):
        child, before = int(nodes[node, 4]), -1
        counts = []
        while child != -1:
            assert int(nodes[child, 2]) == node and int(nodes[child, 6]) == before
            seen.add(child)
            counts.append(int(nodes[child, 3]))
            before, child = child, int(nodes[child, 5])
        assert not counts or counts[0] == max(counts)
    assert seen == set(range(1, num_nodes))


def drafted(tree: SuffixTree, text: list[int], limit: int, **options: object):  # type: ignore[no-untyped-def]
    out = (np.empty(limit, np.int64), np.empty(limit, np.int64), np.empty(limit))
    settings = {"is_own": False, "num_branches": 4, "len_factor": 8.0} | options
    count, matched, escape = tree.draft(ids(text), limit=limit, out=out, **settings)
    return [a[:count].tolist() for a in out], matched, escape


def test_a_draft_follows_what_came_most_often() -> None:
    tree = grown([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5], [9]], 64)
    (tokens, parents, chances), matched, escape = drafted(tree, [7, 1, 2, 3], 3)
    assert matched == 3 and tokens == [4, 5, 6] and parents == [0, 1, 1]
    assert chances[0] == pytest.approx(3 / (3 + 1 / 3))
    assert chances[1] == pytest.approx(2 / (3 + 1 / 4))
    assert chances[2] == pytest.approx(1 / (3 + 1 / 4))
    assert escape == pytest.approx((1 / 3) / (3 + 1 / 3))


def test_nothing_is_drafted_across_the_end_of_a_sequence() -> None:
    tree = grown([[1, 2, 3], [4, 5], [9]], 64)
    (tokens, _, _), matched, _ = drafted(tree, [1, 2], 8)
    assert tokens == [3] and matched == 2
    assert drafted(tree, [1, 2, 3], 8) == ([[], [], []], 0, 1.0)
    assert drafted(tree, [5], 8)[0][0] == []


def test_what_followed_shorter_matches_comes_with_the_rest() -> None:
    tree = grown([[1, 2, 3], [8, 2, 4], [8, 2, 4], [9]], 64)
    (tokens, parents, chances), matched, escape = drafted(tree, [1, 2], 4, len_factor=1.0)
    assert matched == 2 and tokens == [3, 4] and parents == [0, 0]
    assert chances[0] == pytest.approx(1 / 1.5) and escape == pytest.approx(0.5 / 1.5)
    assert chances[1] == pytest.approx(escape * 2 / (3 + 1))


def test_its_own_end_is_no_occurrence() -> None:
    """A text whose end was never seen before drafts nothing from itself."""
    tree = grown([[1, 2, 3, 4]], 64)
    assert drafted(tree, [1, 2, 3, 4], 8, is_own=True) == ([[], [], []], 0, 1.0)
    tree.extend(ids([1, 2]))
    (tokens, _, chances), matched, _ = drafted(tree, [1, 2, 3, 4, 1, 2], 4, is_own=True)
    assert tokens == [3, 4, 1, 2] and matched == 2
    assert chances[0] == pytest.approx(1 / 1.5)


def test_loops_are_followed_round() -> None:
    tree = grown([[5, 6] * 10], 64)
    (tokens, parents, _), _, _ = drafted(tree, [5, 6] * 10, 6, is_own=True, num_branches=1)
    assert tokens == [5, 6] * (len(tokens) // 2) and parents == list(range(len(tokens)))
    assert len(tokens) >= 2


def test_bounds() -> None:
    tree = SuffixTree(8)
    rng = np.random.default_rng(0)
    text = np.repeat(rng.integers(0, 50, 400), 3)
    for piece in np.array_split(text, 300):
        tree.extend(piece)
        assert tree.matched_len < 8
    assert tree.num_tokens == 1200 and int(tree._numbers[1]) <= 2 * 1200 + 1
    assert tree.num_bytes < 1200 * 160 + 20_000
    np.testing.assert_array_equal(tree.token_ids, text)
