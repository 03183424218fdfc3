"""In bfloat16 too, where the machine's matrix products give a row the same bits in any company.

They do on processors with AMX (oneDNN, up to 32 rows); then a pass over a chain of drafts gives the
very logits of plain decoding, and texts are equal token for token, not only up to near ties.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foredraft.model.kv_cache import ContiguousKVCache
from foredraft.model.packed_linear import can_pack
from foredraft.model.runner import Runner
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import DraftBatch, Request, Segment, StepPlan
from tests.tiny import CONTEXT, VOCAB, ScriptDrafter, engine, family_target, run

PLAIN = SpeculationParams(method="none")


@pytest.fixture(scope="module")
def target():
    """A tiny bfloat16 target, on a machine whose products do not depend on the number of rows."""
    if not can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("this machine has no bfloat16 matrix products")
    target = family_target("llama", torch.bfloat16)
    with torch.inference_mode():
        for module in target.model.modules():
            if hasattr(module, "in_features"):
                rows = torch.randn(32, module.in_features, dtype=torch.bfloat16)
                alone = torch.cat([module(rows[k : k + 1]) for k in range(32)])
                if not torch.equal(module(rows), alone):
                    pytest.skip("this machine's products depend on the number of rows")
    return target


@pytest.mark.parametrize("length", [1, 20, 63, 64, 65, 130, 200])
@torch.inference_mode()
def test_a_chain_has_the_logits_of_plain_decoding(target, length: int) -> None:
    rng = np.random.default_rng(length)
    ids = rng.integers(0, VOCAB, length + 12)
    cache = ContiguousKVCache(target.layers, 2, CONTEXT, torch.bfloat16, target.device)
    runner = Runner(target, cache)
    request = Request("0", ids[:1], SamplingParams(), PLAIN, 0, CONTEXT, frozenset())
    plain_slot, draft_slot = cache.allocate(), cache.allocate()
    plain = []
    for slot in (plain_slot, draft_slot):
        if length > 1:
            chunk = Segment(request, ids[:length], slot, 0, length - 1, is_decode=False)
            runner.forward(StepPlan((chunk,)), DraftBatch.empty(1))
    for end in range(length, length + 12):
        root = Segment(request, ids[:end], plain_slot, end - 1, 1, is_decode=True)
        plain.append(runner.forward(StepPlan((root,)), DraftBatch.empty(1)).logits[0])
    drafts = DraftBatch(ids[length : length + 11], np.arange(11), np.array([0, 11]))
    root = Segment(request, ids[:length], draft_slot, length - 1, 1, is_decode=True)
    logits = runner.forward(StepPlan((root,)), drafts).logits
    assert torch.equal(logits, torch.stack(plain))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["right", "half", "wrong"])
def test_text_is_plain_decodings(target, kind: str, temperature: float) -> None:
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, VOCAB, length).tolist() for length in (1, 9, 61, 120)]
    samplings = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=60, ignore_eos=True)
        for i in range(len(prompts))
    ]
    the_engine = engine(target)
    texts = [run(the_engine, [p], s, PLAIN)[0] for p, s in zip(prompts, samplings, strict=True)]
    whole = [p + t for p, t in zip(prompts, texts, strict=True)]
    drafter = ScriptDrafter(kind, whole, seed=3)
    drafting = engine(target, {"script": drafter})
    speculation = SpeculationParams("script", 7)
    for prompt, sampling, text in zip(prompts, samplings, texts, strict=True):
        assert run(drafting, [prompt], sampling, speculation)[0] == text
