"""The n-gram drafter against a plain twin, and what it promises. As a script, it prints times."""

import random
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters import ngram
from foredraft.drafters.base import Drafter, DrafterContext, Needs
from foredraft.drafters.ngram import NgramConfig, NgramDrafter
from foredraft.errors import ConfigError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import Budgets, DraftBatch, Request, Segment, StepPlan

VOCAB_SIZE = 1000
MAX_MATCH_LEN = 128


def drafter_with(vocab_size=VOCAB_SIZE, **options):
    return NgramDrafter(NgramConfig(**options), DrafterContext(vocab_size, 1 << 17))


def segment_of(history, request_id="r", verification="walk", num_rows=1, is_decode=True):
    token_ids = np.array(history, dtype=np.int64)
    token_ids.flags.writeable = False
    request = Request(
        request_id=request_id,
        prompt_ids=token_ids[:1],
        sampling=SamplingParams(),
        speculation=SpeculationParams(verification=verification),
        seed=0,
        max_tokens=64,
        stop_ids=frozenset(),
    )
    start = len(token_ids) - num_rows
    return Segment(request, token_ids, 0, start, num_rows, is_decode)


def propose(drafter, segments, budgets):
    plan = StepPlan(tuple(segments))
    drafts = drafter.propose(plan, Budgets(np.array(budgets, dtype=np.int64)))
    check_batch(drafts, plan, budgets, drafter.context.vocab_size)
    return drafts


def check_batch(drafts: DraftBatch, plan, budgets, vocab_size):
    """What the contract asks of any batch."""
    assert drafts.draft_probs is None and drafts.dist_ids is None
    for array in (drafts.token_ids, drafts.parents, drafts.offsets):
        assert array.dtype == np.int64
    assert len(drafts.offsets) == len(plan.segments) + 1
    assert drafts.offsets[0] == 0
    assert drafts.offsets[-1] == len(drafts.token_ids) == len(drafts.parents)
    for number, segment in enumerate(plan.segments):
        tokens, parents = tree_of(drafts, number)
        assert len(tokens) <= budgets[number]
        assert all(0 <= token < vocab_size for token in tokens)
        assert all(0 <= parent <= node for node, parent in enumerate(parents))
        children = list(zip(parents, tokens, strict=True))
        assert len(set(children)) == len(children), "two siblings hold the same token"
        if not segment.request.speculation.allows_trees:
            assert parents == list(range(len(parents)))


def tree_of(drafts, number):
    begin, end = drafts.offsets[number : number + 2]
    return drafts.token_ids[begin:end].tolist(), drafts.parents[begin:end].tolist()


def draft_one(drafter, history, budget, **kwargs):
    return tree_of(propose(drafter, [segment_of(history, **kwargs)], [budget]), 0)


def chain(*tokens):
    return list(tokens), list(range(len(tokens)))


# ------------------------------------------------------------------------------------- plain twin


def twin(history, budget, config, vocab_size=VOCAB_SIZE, allows_trees=True):
    """The same tree, by looking at every earlier position; nodes are paths from the root."""
    tail = len(history) - 1
    by_len = {n: [] for n in range(config.max_ngram_len, config.min_ngram_len - 1, -1)}
    for end in range(tail - 1, -1, -1):
        matched = 0
        while (
            matched < MAX_MATCH_LEN
            and matched <= end
            and history[end - matched] == history[tail - matched]
        ):
            matched += 1
        if matched >= config.min_ngram_len:
            by_len[min(matched, config.max_ngram_len)].append((end, matched))
    met = [occurrence for same_len in by_len.values() for occurrence in same_len]
    candidates = sorted(met[: config.num_candidates], key=lambda c: -c[1])
    paths = []
    num_branches = 0
    for end, matched in candidates:
        follows = list(history[end + 1 :])
        max_depth = min(budget, config.draft_len_factor * matched)
        if matched >= len(follows):
            follows *= 1 + max_depth // len(follows)
        follows = follows[:max_depth]
        before = len(paths)
        for depth in range(1, len(follows) + 1):
            path = tuple(follows[:depth])
            if not 0 <= path[-1] < vocab_size:
                break
            if path not in paths:
                if len(paths) == budget:
                    break
                paths.append(path)
        num_branches += len(paths) > before
        if num_branches == (config.num_branches if allows_trees else 1):
            break
    rows = {(): 0} | {path: row for row, path in enumerate(paths, 1)}
    return [path[-1] for path in paths], [rows[path[:-1]] for path in paths]


def random_config(rng):
    max_ngram_len = rng.randint(1, 6)
    return NgramConfig(
        max_ngram_len=max_ngram_len,
        min_ngram_len=rng.randint(1, max_ngram_len),
        num_branches=rng.randint(1, 4),
        num_candidates=rng.choice([1, 2, 3, 16]),
        draft_len_factor=rng.choice([1, 2, 3, 128]),
    )


def random_growth(rng, alphabet, max_len):
    """Growing prefixes of one history: some steps bring nothing, some many tokens."""
    block = [rng.randrange(alphabet) for _ in range(rng.randint(1, 12))]
    history = [rng.randrange(alphabet)]
    while len(history) < max_len:
        yield list(history)
        more = rng.choice([0, 1, 1, 1, 2, 5, rng.randint(0, 40)])
        if rng.random() < 0.3:
            history += (block * (1 + more // len(block)))[:more]
        else:
            history += [rng.randrange(alphabet) for _ in range(more)]


def test_equals_the_plain_twin_on_random_growing_histories():
    rng = random.Random(11)
    num_drafts = num_trees = 0
    for round_number in range(300):
        config = random_config(rng)
        drafter = NgramDrafter(config, DrafterContext(VOCAB_SIZE, 4096))
        for history in random_growth(rng, rng.choice([1, 2, 3, 5, 9]), 120):
            budget = rng.choice([1, 2, 3, 8, 32, 128])
            verification = rng.choice(["walk", "walk", "block"])
            got = draft_one(drafter, history, budget, verification=verification)
            want = twin(history, budget, config, allows_trees=verification == "walk")
            assert got == want, (round_number, config, history, budget, verification)
            num_drafts += bool(got[0])
            num_trees += got[1] != list(range(len(got[1])))
    assert num_drafts > 4000 and num_trees > 400  # the comparison was not an empty one


def test_equals_the_plain_twin_across_growth_of_the_tables():
    rng = random.Random(12)
    config = NgramConfig(num_branches=3)
    drafter = NgramDrafter(config, DrafterContext(VOCAB_SIZE, 4096))
    for history in random_growth(rng, 30, 1400):  # room is doubled at 256, 512 and 1024 tokens
        assert draft_one(drafter, history, 12) == twin(history, 12, config)


@settings(max_examples=300, deadline=None)
@given(
    history=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 60), max_size=6),
    budget=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
def test_equals_the_plain_twin_for_any_history(history, cuts, budget, seed):
    config = random_config(random.Random(seed))
    drafter = NgramDrafter(config, DrafterContext(3, 64))  # 3 itself is not in the vocabulary
    for length in [*sorted(cut for cut in cuts if cut < len(history)), len(history)]:
        prefix = history[:length]
        assert draft_one(drafter, prefix, budget) == twin(prefix, budget, config, vocab_size=3)


# ------------------------------------------------------------------------------- what is drafted


def test_the_longest_match_wins_over_a_more_recent_one():
    history = [1, 2, 3, 4, 50, 51, 9, 3, 4, 60, 61, 9, 1, 2, 3, 4]
    assert draft_one(drafter_with(num_branches=1), history, 2) == chain(50, 51)


def test_a_match_is_measured_beyond_the_longest_indexed_ngram():
    far = [8, 7, 1, 2, 3, 50, 51]
    history = [*far, 9, 1, 2, 3, 60, 61, 0, 8, 7, 1, 2, 3]
    assert draft_one(drafter_with(max_ngram_len=2, num_branches=1), history, 2) == chain(50, 51)


def test_of_equally_long_matches_the_most_recent_wins():
    history = [9, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2]
    assert draft_one(drafter_with(num_branches=1), history, 1) == chain(60)


def test_only_so_many_earlier_occurrences_are_looked_at():
    history = [7, 1, 50, *[8, 1, 60] * 3, 7, 1]  # the longest match is the fourth from the end
    options = {"max_ngram_len": 1, "num_branches": 1}
    assert draft_one(drafter_with(num_candidates=4, **options), history, 1) == chain(50)
    assert draft_one(drafter_with(num_candidates=3, **options), history, 1) == chain(60)


def test_the_tail_does_not_match_itself():
    for history in ([1], [1, 2, 3, 4], [5, 5 + 1]):
        assert draft_one(drafter_with(), history, 8) == chain()


def test_a_continuation_shorter_than_the_budget_ends_with_the_history():
    assert draft_one(drafter_with(draft_len_factor=128), [1, 2, 3, 4, 1], 8) == chain(2, 3, 4, 1)


def test_a_loop_goes_on_round():
    drafter = drafter_with(draft_len_factor=128)
    assert draft_one(drafter, [9, 1, 2, 3, 1, 2, 3, 1], 8) == chain(2, 3, 1, 2, 3, 1, 2, 3)
    assert draft_one(drafter, [4, 4], 5, request_id="s") == chain(4, 4, 4, 4, 4)


def test_a_draft_is_as_long_as_its_match_warrants():
    history = [1, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17, 0, 1, 2, 3]
    for factor, length in ((1, 3), (2, 6), (128, 8)):
        got = draft_one(drafter_with(draft_len_factor=factor), history, 8)
        assert got == chain(*range(10, 10 + length))


def test_what_the_best_leaves_goes_to_another_continuation():
    history = [1, 50, 51, 52, 0, 1, 60, 61, 62, 0, 9, 1]
    assert draft_one(drafter_with(), history, 8) == ([60, 61, 50, 51], [0, 1, 0, 3])
    assert draft_one(drafter_with(), history, 3, request_id="s") == ([60, 61, 50], [0, 1, 0])
    assert draft_one(drafter_with(num_branches=1), history, 8) == chain(60, 61)


def test_another_continuation_hangs_where_it_first_differs():
    history = [1, 50, 51, 52, 0, 1, 50, 61, 62, 0, 9, 1]
    got = draft_one(drafter_with(draft_len_factor=3), history, 8)
    assert got == ([50, 61, 62, 51, 52], [0, 1, 2, 1, 4])


def test_the_same_continuation_twice_is_no_branch():
    history = [1, 40, 41, 0, 1, 60, 61, 0, 1, 60, 61, 0, 9, 1]
    assert draft_one(drafter_with(), history, 8) == ([60, 61, 40, 41], [0, 1, 0, 3])


def test_block_verification_gets_chains_only():
    history = [1, 50, 51, 52, 0, 1, 60, 61, 62, 0, 9, 1]
    drafter = drafter_with(num_branches=4)
    assert draft_one(drafter, history, 8, verification="block") == chain(60, 61)
    assert draft_one(drafter, history, 8, verification="walk") != chain(60, 61)


def test_nothing_shorter_than_the_shortest_ngram_is_drafted_from():
    history = [9, 1, 2, 50, 8, 2, 60, 7, 1, 2]
    assert draft_one(drafter_with(min_ngram_len=2), history, 1) == chain(50)
    assert draft_one(drafter_with(min_ngram_len=3), history, 1) == chain()


def test_large_ids_match_and_ids_outside_the_vocabulary_are_not_drafted():
    big = 2**31
    history = [big, 5, big - 1, 6, big, 7, 0, big, 5, big - 1]
    options = {"num_branches": 1, "draft_len_factor": 128}
    drafter = drafter_with(vocab_size=2**31 + 1, **options)
    assert draft_one(drafter, history, 4) == chain(6, big, 7, 0)
    assert draft_one(drafter_with(**options), history, 4) == chain(6)
    assert draft_one(drafter_with(**options), [3, -1, 3, 4, 0, 3], 1) == chain(4)
    assert draft_one(drafter_with(**options), [3, -1, 4, 0, 3], 2) == chain()


def test_hash_collisions_do_not_matter():
    rng = random.Random(13)
    config = NgramConfig(num_branches=3)
    drafter = NgramDrafter(config, DrafterContext(VOCAB_SIZE, 4096))
    drafter._multiplier = np.uint64(0)  # every n-gram has the same key
    for history in random_growth(rng, 6, 400):
        assert draft_one(drafter, history, 8) == twin(history, 8, config)


# ----------------------------------------------------------------------------------------- state


def state_of(drafter, request_id="r"):
    """Everything an index knows, but for where the hash put it."""
    index = drafter._indexes[request_id]
    heads = [sorted(row[row >= 0].tolist()) for row in index.heads]
    return index.num_indexed, heads, index.previous[: index.num_indexed].tolist()


@pytest.mark.parametrize("seed", range(12))
def test_state_does_not_depend_on_how_the_history_grew(seed):
    rng = random.Random(seed)
    config = random_config(rng)
    grown = NgramDrafter(config, DrafterContext(VOCAB_SIZE, 4096))
    history = []
    for history in random_growth(rng, rng.choice([2, 20, 400]), rng.choice([50, 900])):
        draft_one(grown, history, 4)
    fresh = NgramDrafter(config, DrafterContext(VOCAB_SIZE, 4096))
    draft_one(fresh, history, 4)
    assert state_of(grown) == state_of(fresh)


def test_a_step_indexes_only_what_was_committed_since_the_last_one():
    rng = random.Random(3)
    history = [rng.randrange(5) for _ in range(100)]
    drafter = drafter_with()
    draft_one(drafter, history, 4)
    index = drafter._indexes["r"]
    marked = index.previous[:100] = -7
    previous = index.previous
    history += [11, 12, 13]
    draft_one(drafter, history, 4)
    assert index is drafter._indexes["r"] and index.previous is previous
    assert (previous[:100] == marked).all() and (previous[100:103] != marked).all()
    assert index.num_indexed == 103


def test_a_request_costs_nothing_before_its_first_budget():
    drafter = drafter_with()
    plain = segment_of([1, 2, 1, 2], request_id="plain")
    propose(drafter, [plain], [0])
    assert drafter.num_state_bytes == 0
    propose(drafter, [plain, segment_of([1, 2, 1], request_id="drafted")], [0, 2])
    assert list(drafter._indexes) == ["drafted"]
    got = draft_one(drafter, [1, 2, 1, 2, 1], 2, request_id="plain")  # first met in mid-life
    assert got == chain(2, 1)


def test_forget_frees_a_request_and_no_other():
    drafter = drafter_with()
    draft_one(drafter, [1, 2, 3, 1], 2, request_id="a")
    kept = drafter.num_state_bytes
    draft_one(drafter, [4, 5, 6, 4], 2, request_id="b")
    drafter.forget("b")
    assert drafter.num_state_bytes == kept > 0
    assert draft_one(drafter, [1, 7, 0, 0, 1], 1, request_id="b") == chain(7)  # the id used again
    drafter.forget("a")
    drafter.forget("b")
    drafter.forget("never seen")
    assert drafter.num_state_bytes == 0


def test_a_shorter_history_under_a_known_id_is_another_text():
    drafter = drafter_with()
    draft_one(drafter, [1, 2, 3, 4, 1, 2], 2)
    assert draft_one(drafter, [7, 8, 9, 7], 2) == chain(8, 9)
    assert draft_one(drafter, [7, 8, 9, 7, 8], 1) == chain(9)


def test_memory_is_bounded_by_the_length_of_the_history():
    for num_lengths, length in ((4, 300), (4, 5000), (1, 5000), (7, 4096)):
        drafter = drafter_with(max_ngram_len=num_lengths)
        draft_one(drafter, list(range(length)), 4)
        per_token = drafter.num_state_bytes / length
        assert 12 * num_lengths <= per_token < 24 * num_lengths


# ----------------------------------------------------------------------------------------- plans


def test_requests_with_ragged_budgets_do_not_mix():
    rng = random.Random(5)
    config = NgramConfig(num_branches=3)
    drafter = NgramDrafter(config, DrafterContext(VOCAB_SIZE, 4096))
    growths = {f"r{i}": random_growth(rng, rng.choice([2, 3, 5]), 80) for i in range(9)}
    for _ in range(12):
        histories = {name: h for name, g in growths.items() if (h := next(g, None))}
        names = rng.sample(sorted(histories), len(histories))
        budgets = [rng.choice([0, 1, 2, 7, 40]) for _ in names]
        segments = [segment_of(histories[name], request_id=name) for name in names]
        drafts = propose(drafter, segments, budgets)
        for number, (name, budget) in enumerate(zip(names, budgets, strict=True)):
            assert tree_of(drafts, number) == twin(histories[name], budget, config)


def test_prompt_chunks_get_nothing_and_leave_no_trace():
    drafter = drafter_with()
    history = [1, 2, 3, 1]
    chunk = segment_of(history, request_id="chunk", num_rows=4, is_decode=False)
    cut = replace(segment_of(history, request_id="cut"), start=1)
    decode = segment_of(history, request_id="decode")
    for budgets in ([0, 0, 2], [5, 5, 2]):
        drafts = propose(drafter, [chunk, cut, decode], budgets)
        assert drafts.offsets.tolist() == [0, 0, 0, 2]
        assert list(drafter._indexes) == ["decode"]


def test_a_plan_without_segments_and_a_plan_without_budget():
    drafter = drafter_with()
    assert propose(drafter, [], []).offsets.tolist() == [0]
    assert propose(drafter, [segment_of([1, 1])] * 2, [0, 0]).offsets.tolist() == [0, 0, 0]


def test_views_of_any_kind_are_read_without_compiling_anew():
    drafter = drafter_with()
    buffer = np.array([1, 0, 2, 0, 3, 0, 1, 0], dtype=np.int64)
    kinds = [buffer[::2], buffer[::2].copy(), buffer[::2].astype(np.int32)]
    for number, token_ids in enumerate(kinds):
        segment = replace(segment_of([1]), token_ids=token_ids, start=3)
        request = replace(segment.request, request_id=str(number))
        drafts = propose(drafter, [replace(segment, request=request)], [2])
        assert tree_of(drafts, 0) == chain(2, 3)
        assert token_ids.flags.writeable
    assert len(ngram._index_and_draft.signatures) == 1


# -------------------------------------------------------------------------------------- contract


def test_needs_nothing_and_keeps_the_contract_defaults():
    drafter = drafter_with()
    assert isinstance(drafter, Drafter)
    assert NgramDrafter.Config is NgramConfig
    assert drafter.needs == Needs(hidden_layers=(), draft_probs=False)
    assert drafter.observe(StepPlan(()), DraftBatch.empty(0), None, None) is None
    with pytest.raises(TypeError, match="abstract"):
        Drafter(NgramConfig(), DrafterContext(1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ngram_len": 0}, "max_ngram_len is 0; allowed is an integer from 1 to 16."),
        ({"max_ngram_len": 17}, "max_ngram_len is 17; allowed is an integer from 1 to 16."),
        ({"max_ngram_len": 4.0}, "max_ngram_len is 4.0; allowed is an integer from 1 to 16."),
        ({"max_ngram_len": True}, "max_ngram_len is True; allowed is an integer from 1 to 16."),
        ({"max_ngram_len": "3"}, "max_ngram_len is '3'; allowed is an integer from 1 to 16."),
        ({"min_ngram_len": 0}, "min_ngram_len is 0; allowed is an integer from 1 to 4."),
        (
            {"min_ngram_len": 3, "max_ngram_len": 2},
            "min_ngram_len is 3; allowed is an integer from 1 to 2. It may not exceed",
        ),
        ({"num_branches": 0}, "num_branches is 0; allowed is an integer from 1 to 16. Use 1 for"),
        ({"num_branches": 17}, "num_branches is 17; allowed is an integer from 1 to 16."),
        ({"num_candidates": 0}, "num_candidates is 0; allowed is an integer from 1 to 256."),
        ({"num_candidates": 257}, "num_candidates is 257; allowed is an integer from 1 to 256."),
        ({"draft_len_factor": 0}, "draft_len_factor is 0; allowed is an integer from 1 to 128."),
        ({"draft_len_factor": 129}, "draft_len_factor is 129; allowed is an integer from 1 to"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, message):
    with pytest.raises(ConfigError) as error:
        NgramConfig(**options)
    assert str(error.value).startswith(message)


def test_the_limits_of_every_option_are_allowed_and_unknown_ones_are_not():
    for options in (
        {"max_ngram_len": 1, "min_ngram_len": 1, "num_branches": 1, "num_candidates": 1},
        {"max_ngram_len": 16, "min_ngram_len": 16, "num_branches": 16, "num_candidates": 256},
        {"draft_len_factor": 1},
        {"draft_len_factor": 128},
    ):
        config = NgramConfig(**options)
        drafter = NgramDrafter(config, DrafterContext(VOCAB_SIZE, 64))
        history = [1, 2, 3] * 9
        assert draft_one(drafter, history, 128) == twin(history, 128, config)
    with pytest.raises(TypeError):
        NgramConfig(ngram=3)
    with pytest.raises(AttributeError):
        NgramConfig().max_ngram_len = 5


# ---------------------------------------------------------------------------------------- timing


def print_times():
    """Print microseconds per call at batch 1, one new token a call, and what the index holds."""
    begin = time.perf_counter()
    drafter_with()
    print(f"first drafter (compiled, or read from the cache): {time.perf_counter() - begin:.2f} s")
    rng = np.random.default_rng(0)
    budgets = Budgets(np.array([8]))
    print("history   first us  median us  p99 us  max us  mean nodes  bytes/token  text")
    for name, draw in (
        ("words, Zipf", lambda n: np.minimum(rng.zipf(1.2, n), 50_000)),
        ("4 words", lambda n: rng.integers(0, 4, n)),
        ("one loop", lambda n: np.arange(n) % 7),
        ("no repeats", lambda n: np.arange(n)),
    ):
        for length in (1_000, 16_000, 128_000):
            history = draw(length + 2000).astype(np.int64)
            history.flags.writeable = False
            drafter = drafter_with(vocab_size=1 << 31)
            whole = segment_of(history)
            times, num_nodes = [], 0
            for end in range(length, length + 2000):
                plan = StepPlan((replace(whole, token_ids=history[:end], start=end - 1),))
                begin = time.perf_counter()
                drafts = drafter.propose(plan, budgets)
                times.append((time.perf_counter() - begin) * 1e6)
                num_nodes += len(drafts.token_ids)
            first, rest = times[0], np.array(times[1:])
            print(
                f"{length:7d} {first:10.0f} {np.median(rest):10.1f} {np.quantile(rest, 0.99):7.1f}"
                f" {rest.max():7.0f} {num_nodes / 2000:11.2f}"
                f" {drafter.num_state_bytes / len(history):12.0f}  {name}"
            )


if __name__ == "__main__":
    print_times()
