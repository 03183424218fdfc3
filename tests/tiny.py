"""Small models, a byte tokenizer, scripted drafters and a slow decoder, shared by the tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from foredraft.config import EngineConfig
from foredraft.drafters.base import Drafter, DrafterContext, Needs
from foredraft.engine.engine import Engine
from foredraft.model.kv_cache import LayerShape
from foredraft.model.loader import Target, prepare_target
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.sampling.noise import Stream, gumbel
from foredraft.sampling.pick import pick_slowly
from foredraft.sampling.processors import RowParams
from foredraft.stats import RequestStats
from foredraft.types import Budgets, Delta, DraftBatch, Segment, StepPlan, TokenLogprob

VOCAB = 160
CONTEXT = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def family_config(family: str) -> Any:
    """Config of a tiny random model of a family."""
    import transformers as tf

    common = dict(_COMMON)
    if family == "llama":
        return tf.LlamaConfig(**common)
    if family == "mistral":
        return tf.MistralConfig(**common, sliding_window=8)
    if family == "qwen2":
        return tf.Qwen2Config(**common)
    if family == "qwen3":
        return tf.Qwen3Config(**common, head_dim=16)
    if family == "gemma2":
        layers = ["sliding_attention", "full_attention"]
        return tf.Gemma2Config(
            **common,
            head_dim=16,
            sliding_window=8,
            layer_types=layers,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=5.0,
        )
    if family == "gemma3":
        common["num_hidden_layers"] = 3
        layers = ["sliding_attention", "sliding_attention", "full_attention"]
        return tf.Gemma3TextConfig(
            **common, head_dim=16, sliding_window=8, layer_types=layers, query_pre_attn_scalar=16
        )
    if family == "phi3":
        return tf.Phi3Config(**common)
    if family == "olmo2":
        return tf.Olmo2Config(**common)
    if family == "gpt_neox":
        del common["num_key_value_heads"]
        return tf.GPTNeoXConfig(**common)
    if family == "mixtral":
        return tf.MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2)
    if family == "gpt_oss":
        layers = ["sliding_attention", "full_attention"]
        return tf.GptOssConfig(
            **common,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            layer_types=layers,
        )
    if family == "gpt2":
        return tf.GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=CONTEXT,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
        )
    raise ValueError(family)


FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "gpt_neox",
    "mixtral",
    "gpt_oss",
    "gpt2",
)


def family_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A tiny random Transformers model; the same weights for the same seed."""
    import transformers as tf

    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(
        family_config(family), dtype=dtype, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        if "sinks" in name:  # they start uninitialised or at zero, which would hide them
            torch.nn.init.normal_(parameter)
    return model.eval()


def family_target(
    family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, packs: bool = True
) -> Target:
    """A tiny random target, context 256, end-of-sequence id 2."""
    model = family_model(family, dtype, seed)
    return prepare_target(family, model, None, CONTEXT, packs=packs)


def near_target(noise: float = 0.03) -> Target:
    """A tiny model that nearly agrees with ``family_target("llama")``."""
    model = family_model("llama")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return prepare_target("near", model, None, CONTEXT)


class TableModel:
    """A target whose logits are a table indexed by the row's own token: exact probabilities.

    Args:
        table: float32 [V, V], row = last token.
    """

    def __init__(self, table: np.ndarray) -> None:
        self.table = torch.from_numpy(table.astype(np.float32))
        self.config = SimpleNamespace(to_dict=lambda: {"model_type": "table"})

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=self.table)

    def parameters(self) -> list[torch.Tensor]:
        return [self.table]

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=self.table[input_ids])


def table_target(
    table: np.ndarray, eos_ids: frozenset[int] = frozenset(), max_model_len: int = CONTEXT
) -> Target:
    """A target made of a table; no tokenizer, and a layer of 8 bytes a token that nobody writes."""
    return Target(
        "table",
        TableModel(table),
        None,
        (LayerShape(1, 1, 1),),
        len(table),
        max_model_len,
        eos_ids,
        torch.float32,
        torch.device("cpu"),
        False,
    )


def table_text(
    table: np.ndarray, prompt: list[int], sampling: SamplingParams, num_tokens: int
) -> list[int]:
    """What a table target writes, stop rules aside: one slow pick after the other."""
    ids = list(prompt)
    params = RowParams.of([sampling], np.array([1]))
    seeds = np.array([sampling.seed or 0])
    for _ in range(num_tokens):
        logits = np.ascontiguousarray(table[ids[-1]][None], dtype=np.float32)
        ids.append(int(pick_slowly(logits, params, seeds, np.array([len(ids)]))[0]))
    return ids[len(prompt) :]


def engine(target: Target, drafters: dict[str, Drafter] | None = None, **options: Any) -> Engine:
    """An engine over a tiny target; it keeps nothing of ended texts unless it is told to."""
    options = {"kv_cache_gb": 0.25, "max_num_requests": 8, "reuse_prefixes": False, **options}
    return Engine(EngineConfig(**options), target, drafters)


def run(
    the_engine: Engine,
    prompts: list[list[int]],
    sampling: SamplingParams | list[SamplingParams],
    speculation: SpeculationParams | list[SpeculationParams],
    arrivals: list[int] | None = None,
) -> list[list[int]]:
    """Run prompts to the end, each queued before step ``arrivals[i]``; return the output ids."""
    states, step = {}, 0
    waiting = sorted(enumerate(arrivals or [0] * len(prompts)), key=lambda pair: pair[1])
    while waiting or the_engine.has_work:
        while waiting and waiting[0][1] <= step:
            index, _ = waiting.pop(0)
            one = sampling if isinstance(sampling, SamplingParams) else sampling[index]
            other = (
                speculation if isinstance(speculation, SpeculationParams) else speculation[index]
            )
            name = the_engine.add(prompts[index], one, other)
            states[index] = the_engine.request_state(name)
        the_engine.step()
        step += 1
    return [states[index].output_ids.tolist() for index in range(len(prompts))]


@dataclass(frozen=True)
class Ended:
    """What came of one request: what its deltas said, and its counters."""

    ids: list[int]
    finish_reason: str
    stop_token_id: int | None
    error: str | None
    stats: RequestStats
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


def run_to_end(
    the_engine: Engine,
    prompts: list[list[int]],
    sampling: SamplingParams | list[SamplingParams],
    speculation: SpeculationParams | list[SpeculationParams],
) -> list[Ended]:
    """Run prompts to the end, all queued at once; what every request's own deltas add up to."""
    names, states = [], {}
    for index, prompt in enumerate(prompts):
        one = sampling if isinstance(sampling, SamplingParams) else sampling[index]
        other = speculation if isinstance(speculation, SpeculationParams) else speculation[index]
        names.append(the_engine.add(prompt, one, other))
        states[names[-1]] = the_engine.request_state(names[-1])
    ids: dict[str, list[int]] = {name: [] for name in names}
    last: dict[str, Delta] = {}
    while the_engine.has_work:
        for delta in the_engine.step():
            assert delta.request_id not in last, "nothing comes after the end"
            ids[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                last[delta.request_id] = delta
    for name in names:
        assert states[name].output_ids.tolist() == ids[name]
    return [
        Ended(
            ids[name],
            str(last[name].finish_reason),
            last[name].stop_token_id,
            last[name].error,
            states[name].stats,
            tuple(states[name].logprobs),
            tuple(states[name].prompt_logprobs),
        )
        for name in names
    ]


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """What foredraft logs as a warning or worse, whatever others have done to its logger."""
    said: list[str] = []
    logger, handler = logging.getLogger("foredraft"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level, logger.disabled
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.disabled = False  # tools that configure logging disable the loggers they find
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.disabled = before[1]


def row_params(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    num: int = 1,
    top_n_sigma: float = 0.0,
    typical_p: float = 1.0,
) -> RowParams:
    """The same sampling parameters for ``num`` rows."""
    return RowParams(
        np.full(num, temperature, dtype=np.float64),
        np.full(num, top_k, dtype=np.int64),
        np.full(num, top_p, dtype=np.float64),
        np.full(num, min_p, dtype=np.float64),
        np.full(num, top_n_sigma, dtype=np.float64),
        np.full(num, typical_p, dtype=np.float64),
    )


def shaped_slowly(
    logits: np.ndarray, ids: list[int], num_prompt: int, sampling: SamplingParams, stops: set[int]
) -> np.ndarray:
    """What a request asks of one row of logits, float32 [1, V], by plain loops over its history."""
    row = logits[0].copy()
    output = ids[num_prompt:]
    for token, bias in sampling.logit_bias:
        row[token] += np.float32(bias)
    for token in set(ids) if sampling.repetition_penalty != 1 else ():
        penalty = np.float32(sampling.repetition_penalty)
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(output):
        row[token] -= np.float32(sampling.frequency_penalty * output.count(token))
        row[token] -= np.float32(sampling.presence_penalty)
    scores = torch.from_numpy(row[None].copy())
    for processor in sampling.logits_processors:
        scores = processor(torch.tensor([ids]), scores)
    row = scores[0].numpy().copy()
    for token in range(len(row)):
        bad = [(one,) if isinstance(one, int) else one for one in sampling.bad_token_ids]
        is_banned = any(
            token == one[-1] and (len(one) == 1 or tuple(ids[1 - len(one) :]) == one[:-1])
            for one in bad
        )
        is_banned |= token not in (sampling.allowed_token_ids or (token,))
        is_early = len(output) < sampling.min_tokens
        ends = (set() if sampling.ignore_eos else set(stops)) | set(sampling.stop_token_ids)
        if is_banned or (is_early and token in ends):
            row[token] = -np.inf
    return row[None]


@torch.inference_mode()
def decode_slowly(
    model: Any, prompt: list[int], sampling: SamplingParams, eos_ids: set[int] = frozenset({2})
) -> tuple[list[int], float]:
    """Plain decoding by whole forward passes without a cache, and Transformers' own attention.

    Returns the tokens, and the smallest lead of a winning score over the next (for near ties).
    """
    ids, least_lead = list(prompt), float("inf")
    params = RowParams.of([sampling], np.array([1]))
    seeds = np.array([sampling.seed or 0])
    tokens = np.arange(model.config.get_text_config().vocab_size)
    for _ in range(sampling.max_tokens or CONTEXT):
        logits = model(torch.tensor([ids])).logits[0, -1:].float().numpy()
        logits = shaped_slowly(logits, ids, len(prompt), sampling, eos_ids)
        token = int(pick_slowly(logits, params, seeds, np.array([len(ids)]))[0])
        scores = logits[0].astype(np.float64)
        if not sampling.is_greedy:
            noise = gumbel(sampling.seed or 0, np.array([len(ids)]), tokens)[0]
            scores = scores / sampling.temperature + noise
        best = np.sort(scores)[-2:]
        least_lead = min(least_lead, best[1] - best[0])
        ids.append(token)
        if token in eos_ids and not sampling.ignore_eos:
            break
    return ids[len(prompt) :], least_lead


class ScriptDrafter(Drafter):
    """Drafts from known texts, spoiled on purpose.

    Kinds: ``right`` drafts what will come; ``half`` spoils each node with chance 1/2; ``wrong``
    spoils all; ``random`` draws tokens; ``noise`` sees the target's noise and drafts the tokens it
    favours most; ``against`` sees the noise and the text and drafts whatever else scores best;
    ``first:k`` drafts ``k`` right tokens, then wrong ones. With ``width`` above 1 every node gets
    siblings, the right token among them at a random place.

    Args:
        kind: See above.
        texts: Whole texts (prompt and output), found by prefix.
        width: Children of a node.
        seed: Of spoiling and of random shapes.
        ragged: Draft a random number of nodes up to the budget.
    """

    Config = dict
    needs = Needs()

    def __init__(
        self,
        kind: str,
        texts: list[list[int]],
        width: int = 1,
        seed: int = 0,
        ragged: bool = False,
        vocab_size: int = VOCAB,
    ) -> None:
        self._kind = kind
        self._texts = texts
        self._width = width
        self._rng = np.random.default_rng(seed)
        self._ragged = ragged
        self._vocab_size = vocab_size
        self.forgotten: list[str] = []

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        token_ids: list[int] = []
        parents: list[int] = []
        offsets = [0]
        for segment, budget in zip(plan.segments, budgets.max_nodes.tolist(), strict=True):
            if self._ragged:
                budget = int(self._rng.integers(0, budget + 1))
            tokens, tree = self._tree(segment, budget)
            token_ids += tokens
            parents += tree
            offsets.append(len(token_ids))
        return DraftBatch(
            np.array(token_ids, dtype=np.int64),
            np.array(parents, dtype=np.int64),
            np.array(offsets, dtype=np.int64),
        )

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def _tree(self, segment: Segment, budget: int) -> tuple[list[int], list[int]]:
        """Grow along the true text; every node on it gets ``width`` children while nodes last."""
        width = self._width if segment.request.speculation.allows_trees else 1
        tokens: list[int] = []
        parents: list[int] = []
        row, depth = 0, 1
        while len(tokens) < budget:
            right = self._right(segment, depth)
            if right is None and self._kind == "right":
                break  # the text ends here
            children = self._children(segment, depth, right, min(width, budget - len(tokens)))
            first = len(tokens) + 1
            tokens += children
            parents += [row] * len(children)
            on_text = [i for i, token in enumerate(children) if token == right]
            row = first + (on_text[0] if on_text else int(self._rng.integers(len(children))))
            depth += 1
        return tokens, parents

    def _right(self, segment: Segment, depth: int) -> int | None:
        known = segment.token_ids.tolist()
        for text in self._texts:
            if text[: len(known)] == known and len(known) + depth <= len(text):
                return text[len(known) + depth - 1]
        return None

    def _children(self, segment: Segment, depth: int, right: int | None, count: int) -> list[int]:
        rng, vocab_size = self._rng, self._vocab_size
        others = rng.permutation(vocab_size).tolist()
        if self._kind in ("noise", "against"):
            position = np.array([len(segment.token_ids) + depth - 1])
            noise = gumbel(segment.request.seed, position, np.arange(vocab_size))[0]
            others = np.argsort(-noise).tolist()
        others = [token for token in others if token != right]
        if right is None or self._kind in ("wrong", "against"):
            return others[:count]
        if self._kind in ("random", "noise"):
            return sorted([right, *others], key=lambda t: [*others, right].index(t))[:count]
        if self._kind == "half" and rng.random() < 0.5:
            return others[:count]
        if self._kind.startswith("first:") and depth > int(self._kind.split(":")[1]):
            return others[:count]
        place = int(rng.integers(count))
        children = others[: count - 1]
        children.insert(place, right)
        return children


def context() -> DrafterContext:
    """The drafter context of the tiny models."""
    return DrafterContext(vocab_size=VOCAB, max_model_len=CONTEXT)


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _undo_mix64(x: int) -> int:
    """Inverse of the SplitMix64 finaliser."""
    x ^= (x >> 31) ^ (x >> 62)
    x = (x * pow(0x94D049BB133111EB, -1, 1 << 64)) & _MASK
    x ^= (x >> 27) ^ (x >> 54)
    x = (x * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & _MASK
    return x ^ (x >> 30) ^ (x >> 60)


def seed_for(bits: int, position: int, token_id: int, stream: Stream = Stream.PICK) -> int:
    """A seed under which one token of one position has ``v = (bits + 1/2) * 2**-52``."""
    for low in range(4096):
        key = (_undo_mix64((bits << 12) | low) - _GOLDEN * (token_id + 1)) & _MASK
        first = (_undo_mix64(key) - _GOLDEN * (position + 1)) & _MASK
        seed = (_undo_mix64(first) - _GOLDEN * (int(stream) + 1)) & _MASK
        if seed < 1 << 63:
            return seed
    raise AssertionError("half of all seeds are in range")
