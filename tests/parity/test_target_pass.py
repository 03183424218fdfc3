"""The target pass against Transformers' own forward, and the cache against a fresh prefill."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.engine.commit import _keep_path
from foredraft.model import packing
from foredraft.model.kv_blocks import BlockKVCache
from foredraft.model.kv_cache import ContiguousKVCache, KVCache
from foredraft.model.paged_attention import PagedAttention
from foredraft.model.runner import Runner
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.tree.tree import ancestors
from foredraft.types import DraftBatch, Request, Segment, StepPlan
from tests.tiny import CONTEXT, FAMILIES, VOCAB, family_model, family_target

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
"""Between passes of one model. A norm of Transformers works in float32 whatever the model's dtype,
so in float64 too, and a batched pass of its own may round a value there to the other side."""

LOGIT_TOLERANCE = {torch.float64: 5e-6, torch.float32: 2e-5}


class _Sequence:
    """One request driven by hand through the runner."""

    def __init__(self, runner: Runner, name: str, prompt: np.ndarray) -> None:
        self.runner = runner
        self.slot = runner.cache.allocate()
        self.ids = prompt
        self.num_cached = 0
        self.request = Request(
            name, prompt, SamplingParams(), SpeculationParams(), 0, CONTEXT, frozenset()
        )

    def segment(self, num_rows: int | None = None) -> Segment:
        left = len(self.ids) - self.num_cached
        num_rows = left if num_rows is None else min(num_rows, left)
        is_decode = self.num_cached > 0 and left == 1
        return Segment(self.request, self.ids, self.slot, self.num_cached, num_rows, is_decode)

    def commit(self, tokens: np.ndarray, path: np.ndarray, last: int) -> None:
        root = len(self.ids) - 1
        _keep_path(self.runner.cache, self.slot, root, path)
        self.num_cached = root + 1 + len(path)
        self.ids = np.concatenate([self.ids, tokens[path - 1], [last]])


def _drafts(trees: list[tuple[np.ndarray, np.ndarray]]) -> DraftBatch:
    sizes = [len(tokens) for tokens, _ in trees]
    return DraftBatch(
        np.concatenate([t for t, _ in trees]).astype(np.int64),
        np.concatenate([p for _, p in trees]).astype(np.int64),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    )


def _random_tree(rng: np.random.Generator, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    parents = np.array([rng.integers(0, k + 1) for k in range(num_nodes)], dtype=np.int64)
    return rng.integers(0, VOCAB, num_nodes), parents


def _path_to(parents: np.ndarray, row: int) -> np.ndarray:
    seen = np.nonzero(ancestors(parents)[row])[0]
    return seen[seen > 0]


def _expected(model: torch.nn.Module, ids: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Transformers' own logits after ``ids``."""
    return model(torch.from_numpy(ids)[None]).logits[0, -1].to(dtype)


def _assert_cache_is_fresh(
    own: torch.nn.Module, runner: Runner, sequence: _Sequence, dtype: torch.dtype
) -> None:
    """The slot's rows are those of a fresh prefill of the same tokens: ours, and Transformers'."""
    ids = sequence.ids[: sequence.num_cached]
    fresh = _Sequence(runner, "fresh", ids)
    runner.forward(StepPlan((fresh.segment(),)), DraftBatch.empty(1))
    theirs = own(torch.from_numpy(ids)[None], use_cache=True).past_key_values
    for layer, cached in enumerate(theirs.layers):
        ours_of, fresh_of = (
            runner.cache.read(layer, runner.cache.locate((slot,), len(ids)))
            for slot in (sequence.slot, fresh.slot)
        )
        for own_rows, expected, rows in zip(
            ours_of, fresh_of, (cached.keys, cached.values), strict=True
        ):
            ours, expected = own_rows[0], expected[0]
            torch.testing.assert_close(ours, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            expected = rows[0].transpose(0, 1)  # a sliding window keeps its last rows only
            limit = LOGIT_TOLERANCE[dtype]
            torch.testing.assert_close(ours[-len(expected) :], expected, rtol=limit, atol=limit)
    runner.cache.free(fresh.slot)


_MIXTURES = {"mixtral", "gpt_oss"}  # PyTorch's grouped matrix product has no float64
_CASES = [(f, torch.float32) for f in FAMILIES] + [
    (f, torch.float64) for f in FAMILIES if f not in _MIXTURES
]


@pytest.mark.parametrize(("family", "dtype"), _CASES)
@torch.inference_mode()
def test_logits_and_cache_equal_a_fresh_prefill(family: str, dtype: torch.dtype) -> None:
    _check_family(family, dtype)


@pytest.mark.parametrize("call_cost", [0, 200, 1 << 40])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@torch.inference_mode()
def test_however_requests_share_attention_calls(
    family: str, call_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many calls as shapes, some, one for all that lie side by side."""
    monkeypatch.setattr(packing, "_CALL_COST", call_cost)
    _check_family(family, torch.float32)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 400)), min_size=1, max_size=7),
    st.sampled_from([0, 50, 1000, 1 << 40]),
)
def test_groups_are_the_cheapest(shapes: list[tuple[int, int]], call_cost: int) -> None:
    def cost(ends: list[int]) -> int:
        total, begin = 0, 0
        for end in ends:
            group = shapes[begin:end]
            most_rows, most_keys = (max(shape[i] for shape in group) for i in (0, 1))
            total += len(group) * most_rows * most_keys + call_cost
            begin = end
        return total

    inner = range(1, len(shapes))
    every = [
        [*cuts, len(shapes)]
        for count in range(len(shapes))
        for cuts in itertools.combinations(inner, count)
    ]
    rows, keys = (np.array(column) for column in zip(*shapes, strict=True))
    found = packing._split(rows, keys, call_cost).tolist()
    assert found in every and cost(found) == min(map(cost, every))


_BLOCK_FAMILIES = {"llama", "mistral", "gemma2", "gemma3", "gpt_oss", "phi3"}


@pytest.mark.parametrize(
    ("family", "dtype", "is_paged"),
    [
        pytest.param(
            family,
            dtype,
            is_paged,
            # Uncompiled FlexAttention takes seconds: every family once, one in both.
            marks=[pytest.mark.slow]
            if is_paged and dtype != torch.float64 and family not in {"llama", *_MIXTURES}
            else [],
        )
        for family, dtype in _CASES
        for is_paged in (False, True)
        if family in _BLOCK_FAMILIES
    ],
)
@torch.inference_mode()
def test_block_tables_say_the_same(family: str, is_paged: bool, dtype: torch.dtype) -> None:
    """Read by the reference, or in place: windows, soft caps and sinks as well."""
    _check_family(family, dtype, block_rows=128 if is_paged else 16, is_paged=is_paged)


@torch.inference_mode()
def test_the_blocks_that_are_named_hold_every_key_that_is_seen() -> None:
    """What a compiled kernel skips, for no row sees any of it."""
    rng = np.random.default_rng(2)
    target = family_target("mistral")
    cache = BlockKVCache(target.layers, 6, CONTEXT, torch.float32, target.device, 60, 16)
    runner = Runner(target, cache)
    sequences = [
        _Sequence(runner, str(i), rng.integers(0, VOCAB, n)) for i, n in enumerate((50, 9))
    ]
    for sequence in sequences:
        runner.forward(StepPlan((sequence.segment(),)), DraftBatch.empty(1))
        sequence.num_cached = len(sequence.ids) - 1
    cache.copy_rows(sequences[0].slot, other := cache.allocate(), 32)
    assert cache.num_holders(other) == [2, 2]
    trees = [np.array([0, 0, 1, 2]), np.array([0, 1])]
    plan = StepPlan(tuple(sequence.segment() for sequence in sequences))
    for segment, tree in zip(plan.segments, trees, strict=True):
        cache.reserve(segment.slot, segment.start, segment.start + 1 + len(tree))
    paged = PagedAttention(plan, trees, cache, target.device)
    for window in (None, 6):
        mask = paged.block_mask(window)
        num_rows, num_keys = 8, cache.flat(0)[0].shape[0]
        rows, keys = torch.arange(num_rows)[:, None], torch.arange(num_keys)[None]
        seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), rows, keys)
        named = mask.to_dense()[0, 0].bool().repeat_interleave(16, dim=1)
        assert named.shape == (1, num_keys) and (named | ~seen).all()
        num_committed = [49, 8]
        for row, who in ((0, 0), (4, 0), (5, 1), (7, 1)):
            depth = {0: 0, 4: 2, 5: 0, 7: 2}[row]
            whole = num_committed[who] + 1 + depth
            assert int(seen[row].sum()) == (whole if window is None else min(whole, window))


def _check_family(
    family: str, dtype: torch.dtype, block_rows: int = 0, is_paged: bool = False
) -> None:
    """Chunks, decode rows and trees of four ragged requests in one pass, commit after commit."""
    rng = np.random.default_rng(7)
    limit = LOGIT_TOLERANCE[dtype]
    own = family_model(family, dtype)
    target = family_target(family, dtype)
    cache: KVCache = ContiguousKVCache(target.layers, 6, CONTEXT, dtype, target.device)
    if block_rows:
        cache = BlockKVCache(target.layers, 6, CONTEXT, dtype, target.device, 99, block_rows)
    runner = Runner(target, cache, is_paged=is_paged)
    sequences = [
        _Sequence(runner, str(i), rng.integers(0, VOCAB, length))
        for i, length in enumerate((1, 3, 17, 40))
    ]
    trees_seen = 0
    for _ in range(8):
        # One sequence gets its prompt in chunks of seven, so chunks and trees share a pass.
        plan, trees, rows = [], [], []
        for index, sequence in enumerate(sequences):
            segment = sequence.segment(7 if index == 3 else None)
            num_nodes = int(rng.integers(0, 7)) if segment.is_decode else 0
            plan.append(segment)
            trees.append(_random_tree(rng, num_nodes))
            trees_seen += num_nodes > 1
            rows.append(num_nodes + 1 if segment.wants_pick else 0)
        order = sorted(range(len(plan)), key=lambda i: (not plan[i].is_decode, plan[i].slot))
        output = runner.forward(
            StepPlan(tuple(plan[i] for i in order)), _drafts([trees[i] for i in order])
        )
        assert np.diff(output.offsets).tolist() == [rows[i] for i in order]
        for place, index in enumerate(order):
            sequence, (tokens, parents) = sequences[index], trees[index]
            if not rows[index]:
                sequence.num_cached += plan[index].num_rows
                continue
            logits = output.logits[output.offsets[place] : output.offsets[place + 1]]
            for row in range(rows[index]):
                ids = np.concatenate([sequence.ids, tokens[_path_to(parents, row) - 1]])
                expected = _expected(own, ids, torch.float32)
                torch.testing.assert_close(logits[row], expected, rtol=limit, atol=limit)
            accepted = int(rng.integers(0, rows[index]))
            sequence.commit(tokens, _path_to(parents, accepted), int(rng.integers(0, VOCAB)))
            _assert_cache_is_fresh(own, runner, sequence, dtype)
    assert trees_seen > 5


@torch.inference_mode()
def test_hidden_states_are_transformers_own() -> None:
    rng = np.random.default_rng(3)
    own, target = family_model("llama"), family_target("llama")
    cache = ContiguousKVCache(target.layers, 2, CONTEXT, torch.float32, target.device)
    runner = Runner(target, cache, hidden_layers=(0, 1, 2))
    sequence = _Sequence(runner, "0", rng.integers(0, VOCAB, 9))
    output = runner.forward(StepPlan((sequence.segment(),)), DraftBatch.empty(1))
    expected = own(torch.from_numpy(sequence.ids)[None], output_hidden_states=True).hidden_states
    for layer in (0, 1, 2):
        torch.testing.assert_close(
            output.hidden_states[layer], expected[layer][0], rtol=1e-4, atol=1e-4
        )
    assert output.row_offsets.tolist() == [0, 9]


@torch.inference_mode()
def test_logits_are_made_only_where_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    target = family_target("llama")
    cache = ContiguousKVCache(target.layers, 2, CONTEXT, torch.float32, target.device)
    rows_seen = []
    target.model.lm_head.register_forward_hook(
        lambda m, args, out: rows_seen.append(args[0].shape[1])
    )
    runner = Runner(target, cache)
    sequence = _Sequence(runner, "0", np.arange(20) + 5)
    runner.forward(StepPlan((sequence.segment(12),)), DraftBatch.empty(1))
    sequence.num_cached = 12
    runner.forward(StepPlan((sequence.segment(),)), DraftBatch.empty(1))
    assert rows_seen == [0, 1]
