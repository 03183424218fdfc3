"""The loop: schedule, budget, propose, one target pass, verify, commit, observe."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

from foredraft.config import EngineConfig
from foredraft.control import kernels
from foredraft.control.allocate import Allocation
from foredraft.control.controller import MAX_AUTO_NODES, Controller, MethodTraits
from foredraft.control.cost_table import CostTable
from foredraft.engine.commit import commit
from foredraft.engine.drafting import Drafting
from foredraft.engine.measure import quick_times
from foredraft.engine.profiling import known_profile
from foredraft.engine.request_state import RequestState
from foredraft.engine.scheduler import Scheduler
from foredraft.errors import ConfigError, InvalidRequestError
from foredraft.model.kv_cache import ContiguousKVCache, row_bytes
from foredraft.model.loader import Target, load_target
from foredraft.model.runner import Runner
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.stats import EngineStats
from foredraft.types import Delta, Request, StepStats
from foredraft.verify import step as verification
from foredraft.verify.step import verify

if TYPE_CHECKING:
    from foredraft.drafters.base import Drafter

_LOG = logging.getLogger("foredraft")

_ROWS_OF_EQUAL_BITS = 32
"""Rows of a request up to which bfloat16 products on a CPU were seen to give each row the same bits
in any company."""

_CPU_SHARE_OF_FREE_MEMORY = 0.3
_GPU_SHARE_OF_FREE_MEMORY = 0.8


class Engine:
    """Runs many requests at once; each step is one target pass over all of them.

    Args:
        config: Options; ``None`` takes the defaults.
        target: A loaded target; ``None`` loads what ``config`` names. With one, the options for
            loading (``model``, ``dtype``, ``device``) do nothing; ``max_model_len`` shortens it.
        drafters: Drafters of your own by method name, besides those of the registry.
        notify: Told, in a sentence, what takes long while the model loads.

    Raises:
        ModelLoadError: The model cannot be loaded.
        ConfigError: An option cannot be honoured.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        target: Target | None = None,
        drafters: Mapping[str, Drafter] | None = None,
        notify: Callable[[str], None] = _LOG.info,
    ) -> None:
        """Load the target and reserve the cache."""
        self.config = config or EngineConfig()
        self.target = (
            load_target(self.config, notify) if target is None else _shortened(target, self.config)
        )
        self.max_kv_bytes = _kv_bound(self.config, self.target)
        self.cache = _make_cache(self.config, self.target, self.max_kv_bytes)
        self.scheduler = Scheduler(
            self.cache,
            self.cache.num_slots,
            self.config.max_num_batched_tokens,
            self.max_kv_bytes,
        )
        self.runner = Runner(self.target, self.cache)
        self.drafting = Drafting(
            self.config.drafter_options, self.target, drafters or {}, self.cache.num_slots
        )
        self.controller = Controller(self._traits, _max_auto_nodes(self.target))
        self.last_step: StepStats | None = None
        self.stats = EngineStats()
        verification.load_kernels()
        kernels.load_kernels()
        self._num_requests = 0

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_work

    def add(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt_ids: Token ids, at least one.
            sampling: How tokens are picked; ``None`` takes the defaults.
            speculation: How it speculates; ``None`` takes the defaults.
            request_id: A name of its own; ``None`` makes one.

        Raises:
            InvalidRequestError: The request cannot be honoured. Nothing is queued, nobody is
            disturbed.
        """
        sampling = sampling or SamplingParams()
        speculation = speculation or SpeculationParams()
        name = request_id or self._free_name()
        if name in self.scheduler:
            raise InvalidRequestError(f"request_id {name!r} is in use; choose another.")
        speculation = self._with_prediction_ids(speculation)
        request = self._request(name, _check_prompt(prompt_ids, self.target), sampling, speculation)
        self.drafting.prepare(request)
        if speculation.is_auto and not speculation.is_plain:
            self._make_cost_table()
        self.runner.hidden_layers = self.drafting.hidden_layers
        self.scheduler.add(RequestState(request))
        self._num_requests += 1
        return name

    def step(self) -> list[Delta]:
        """Run one step; return what each request that emitted or ended did."""
        clock = _Clock(self.target.device)
        plan = self.scheduler.schedule()
        if not plan.segments:
            return []
        budgets = self.controller.budget(plan)
        clock.lap("host")
        drafts = self.drafting.propose(plan, budgets)
        clock.lap("draft")
        num_offered = drafts.num_nodes
        drafts = self.controller.trim(plan, drafts)
        is_cut = (num_offered >= budgets.max_nodes) | (drafts.num_nodes < num_offered)
        clock.lap("host")
        target = self.runner.forward(plan, drafts)
        clock.lap("target")
        verdict = verify(plan, drafts, target)
        clock.lap("verify")
        deltas = commit(
            plan,
            drafts,
            verdict,
            self.scheduler.running,
            self.cache,
            self.drafting.take_failures(),
            is_cut,
        )
        clock.lap("host")
        self.drafting.observe(plan, drafts, target, verdict)
        clock.lap("draft")
        seconds = clock.seconds["target"] + clock.seconds["verify"]
        self.controller.observe(plan, drafts, target, verdict, seconds, self.drafting.seconds)
        states = [self.scheduler.running[s.request.request_id] for s in plan.segments]
        for delta in deltas:
            if delta.finish_reason is None:
                continue
            if delta.finish_reason != "error":
                state = self.scheduler.running[delta.request_id]
                self.drafting.finish(state.request, state.token_ids)
            self._finish(delta.request_id)
        clock.lap("host")
        self.last_step = StepStats(
            draft_s=clock.seconds["draft"],
            target_s=clock.seconds["target"],
            verify_s=clock.seconds["verify"],
            host_s=clock.seconds["host"],
            num_rows=int(target.row_offsets[-1]),
            num_segments=len(plan.segments),
            num_decoding=sum(segment.is_decode for segment in plan.segments),
            num_draft_tokens=len(drafts.token_ids),
            num_accepted_tokens=sum(delta.num_accepted for delta in deltas),
            num_tokens=sum(len(delta.token_ids) for delta in deltas),
            **_forecast(self.controller.last, clock.seconds),
        )
        self.stats.record(self.last_step)
        _record_times(states, self.last_step, clock)
        emitted = {delta.request_id: len(delta.token_ids) for delta in deltas}
        for segment, state in zip(plan.segments, states, strict=True):
            if segment.is_decode:
                state.stats.record_forecast(self.last_step, emitted[segment.request.request_id])
        return deltas

    def abort(self, request_id: str) -> bool:
        """Drop a request, waiting or running; return whether it was there."""
        return self._finish(request_id)

    def close(self) -> None:
        """Let drafters save what they keep; requests that still run are dropped.

        Raises:
            StoreError: It cannot be saved.
        """
        for request_id in self.scheduler.request_ids:
            self.abort(request_id)
        self.drafting.close()

    def request_state(self, request_id: str) -> RequestState:
        """Return the state of a waiting or running request; it outlives the request's end.

        Raises:
            KeyError: There is no such request.
        """
        return self.scheduler.state(request_id)

    def _make_cost_table(self) -> None:
        """Bring the controller its cost table, with the first request that needs one."""
        if self.controller.cost_table is None:
            profile = known_profile(self.target)
            if profile is not None:
                passes, paddings = profile.passes, profile.paddings
            else:
                passes, paddings = quick_times(self.runner, self.cache)
            self.controller.cost_table = CostTable(passes, paddings)

    def _traits(self, method: str) -> MethodTraits:
        needs = self.drafting.needs(method)
        return MethodTraits(needs.cost, needs.sees_noise, needs.is_whole, needs.members)

    def _with_prediction_ids(self, speculation: SpeculationParams) -> SpeculationParams:
        """The params with the prediction as token ids, which must fit into the context."""
        prediction = speculation.prediction
        if prediction is None:
            return speculation
        if isinstance(prediction, str):
            tokenizer = self.target.tokenizer
            if tokenizer is None:
                raise InvalidRequestError(
                    "prediction is a text, but this model's folder holds no tokenizer; give it as "
                    "token ids."
                )
            prediction = tokenizer(prediction, add_special_tokens=False, verbose=False)["input_ids"]
        if len(prediction) > self.target.max_model_len:
            raise InvalidRequestError(
                f"the prediction has {len(prediction)} tokens; allowed are "
                f"{self.target.max_model_len}, the context. Shorten it."
            )
        return dataclasses.replace(speculation, prediction=tuple(prediction))

    def _free_name(self) -> str:
        """A name that nobody chose for a request that is still here."""
        while (name := f"request-{self._num_requests}") in self.scheduler:
            self._num_requests += 1
        return name

    def _finish(self, request_id: str) -> bool:
        state = self.scheduler.finish(request_id)
        if state is None:
            return False
        self.drafting.forget(state.request)
        self.controller.forget(request_id)
        return True

    def _request(
        self,
        name: str,
        prompt_ids: np.ndarray,
        sampling: SamplingParams,
        speculation: SpeculationParams,
    ) -> Request:
        target = self.target
        room = target.max_model_len - len(prompt_ids)
        if room < 1:
            raise InvalidRequestError(
                f"the prompt has {len(prompt_ids)} tokens; allowed are "
                f"{target.max_model_len - 1}, one less "
                f"than the context of {target.max_model_len}. Shorten the prompt."
            )
        for token_id in sampling.stop_token_ids:
            if token_id >= target.vocab_size:
                raise InvalidRequestError(
                    f"stop_token_ids holds {token_id}; allowed are ids below the vocabulary size "
                    f"of {target.vocab_size}. Remove it."
                )
        eos_ids = frozenset() if sampling.ignore_eos else target.eos_ids
        return Request(
            request_id=name,
            prompt_ids=prompt_ids,
            sampling=sampling,
            speculation=speculation,
            seed=secrets.randbits(53) if sampling.seed is None else sampling.seed,
            max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            stop_ids=eos_ids | frozenset(sampling.stop_token_ids),
        )


class _Clock:
    """Adds up wall time by phase."""

    def __init__(self, device: torch.device) -> None:
        self.started_at = self.now = time.perf_counter()
        self.seconds = {"draft": 0.0, "target": 0.0, "verify": 0.0, "host": 0.0}
        self._device = device

    def lap(self, phase: str) -> None:
        if phase == "target" and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[phase] += now - self.now
        self.now = now


def _forecast(chosen: Allocation | None, seconds: Mapping[str, float]) -> dict[str, float]:
    """What the controller expected of a step, with the time that it does not forecast."""
    if chosen is None:
        return {}
    return {
        "expected_tokens": chosen.expected_tokens,
        "predicted_s": chosen.seconds + seconds["draft"] + seconds["host"],
        "plain_s": chosen.plain_seconds + seconds["host"],
    }


def _record_times(states: list[RequestState], step: StepStats, clock: _Clock) -> None:
    for state in states:
        stats = state.stats
        if state.started_at is None:
            state.started_at = clock.started_at
        stats.record_time(step)
        if stats.num_tokens:
            stats.elapsed_s = clock.now - state.started_at
            stats.first_token_s = stats.first_token_s or stats.elapsed_s


def _max_auto_nodes(target: Target) -> int:
    """Most draft nodes of a request that leave the text what plain decoding's rounding makes it."""
    if target.device.type == "cpu" and target.dtype == torch.bfloat16:
        return _ROWS_OF_EQUAL_BITS - 1
    return MAX_AUTO_NODES


def _shortened(target: Target, config: EngineConfig) -> Target:
    """A loaded target with the context that the config asks for."""
    if config.max_model_len is None or config.max_model_len == target.max_model_len:
        return target
    if config.max_model_len > target.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the loaded target allows up to "
            f"{target.max_model_len}. Leave it out, or load the target for more."
        )
    return dataclasses.replace(target, max_model_len=config.max_model_len)


def _check_prompt(prompt_ids: Sequence[int] | np.ndarray, target: Target) -> np.ndarray:
    try:
        ids = np.asarray(prompt_ids)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"the prompt is no sequence of token ids ({error}).") from error
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise InvalidRequestError(
            f"the prompt is an array of shape {ids.shape} and kind {ids.dtype}; allowed is a flat "
            "sequence of integer token ids."
        )
    if ids.size == 0:
        raise InvalidRequestError(
            "the prompt is empty; allowed is one token or more. Give it some text."
        )
    is_outside = (ids < 0) | (ids >= target.vocab_size)
    if is_outside.any():
        place = int(np.argmax(is_outside))
        raise InvalidRequestError(
            f"the prompt holds token id {int(ids[place])} at position {place}; allowed are ids "
            f"from 0 to {target.vocab_size - 1}. Check that the tokenizer is this model's."
        )
    return ids.astype(np.int64)


def _kv_bound(config: EngineConfig, target: Target) -> int:
    """Most bytes of keys and values over all running requests."""
    if config.kv_cache_gb is not None:
        return int(config.kv_cache_gb * 2**30)
    if target.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(target.device)
        return int(free * _GPU_SHARE_OF_FREE_MEMORY)
    return int(psutil.virtual_memory().available * _CPU_SHARE_OF_FREE_MEMORY)


def _make_cache(config: EngineConfig, target: Target, max_kv_bytes: int) -> ContiguousKVCache:
    num_slots = config.max_num_requests
    if target.device.type != "cpu":  # there a reservation is memory at once
        slot_bytes = target.max_model_len * row_bytes(target.layers, target.dtype)
        num_slots = max(1, min(num_slots, max_kv_bytes // slot_bytes))
    return ContiguousKVCache(
        target.layers, num_slots, target.max_model_len, target.dtype, target.device
    )
