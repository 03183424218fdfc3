"""The loop: schedule, budget, propose, one target pass, verify, commit, observe."""

from __future__ import annotations

import dataclasses
import logging
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
from foredraft.engine.admission import check_deadline, check_priority, make_request
from foredraft.engine.commit import commit
from foredraft.engine.detokenizer import Detokenizer
from foredraft.engine.drafting import Drafting
from foredraft.engine.measure import quick_times
from foredraft.engine.output_text import OutputText, Piece
from foredraft.engine.profiling import known_profile
from foredraft.engine.report_logprobs import with_logprobs
from foredraft.engine.request_state import RequestState
from foredraft.engine.scheduler import Scheduler
from foredraft.errors import ConfigError, InvalidRequestError
from foredraft.model import parallel
from foredraft.model.kv_blocks import BLOCK_ROWS, BlockKVCache
from foredraft.model.kv_cache import ContiguousKVCache, KVCache, row_bytes
from foredraft.model.loader import Target, load_target
from foredraft.model.runner import Runner
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.sampling.forms import Form, Forms
from foredraft.sampling.shaping import shape
from foredraft.stats import EngineStats
from foredraft.tree.graft import graft
from foredraft.types import Budgets, Delta, DraftBatch, StepPlan, StepStats
from foredraft.verify import step as verification
from foredraft.verify.step import verify

if TYPE_CHECKING:
    from foredraft.drafters.base import Drafter

_LOG = logging.getLogger("foredraft")

_ROWS_OF_EQUAL_BITS = 32
"""Rows of a request up to which bfloat16 products on a CPU were seen to give each row the same bits
in any company."""

FORCED = "grammar"
"""Who drafts what a grammar leaves no choice about, in the figures of members."""

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
        is_split = self.target.num_ranks > 1
        self.max_kv_bytes = _kv_bound(self.config, self.target)
        if is_split:
            self.max_kv_bytes = parallel.agree(self.max_kv_bytes)
        self.cache = _make_cache(self.config, self.target, self.max_kv_bytes)
        is_paged = self.config.attention == "flex"
        is_cuda = self.target.device.type == "cuda"
        has_graphs = {"on": True, "off": False, "auto": is_paged and is_cuda and not is_split}
        self.runner = Runner(
            self.target,
            self.cache,
            is_paged=is_paged,
            has_graphs=has_graphs[self.config.cuda_graphs],
        )
        if is_split:
            if not parallel.is_leading():
                parallel.follow(self.runner)
                raise SystemExit(0)  # the first rank has finished the program's work
            self.runner = parallel.LeadingRunner(self.runner)
            self.cache = self.runner.cache
        self.max_num_requests = min(self.config.max_num_requests, self.cache.num_slots)
        self.scheduler = Scheduler(
            self.cache,
            self.max_num_requests,
            self.config.max_num_batched_tokens,
            self.max_kv_bytes,
            self.config.reuse_prefixes,
            lambda state: self.drafting.forget(state.request),
        )
        self.drafting = Drafting(
            self.config.drafter_options, self.target, drafters or {}, self.max_num_requests
        )
        self.controller = Controller(self._traits, _max_auto_nodes(self.target))
        self.last_step: StepStats | None = None
        self.is_stalled = False
        self._needs_costs = False
        self.stats = EngineStats()
        verification.load_kernels()
        kernels.load_kernels()
        self.forms = Forms(
            self.target.tokenizer, self.target.vocab_size, frozenset(self.target.eos_ids)
        )
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
        with_text: bool = False,
        by_token: bool = False,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt_ids: Token ids, at least one.
            sampling: How tokens are picked; ``None`` takes the defaults.
            speculation: How it speculates; ``None`` takes the defaults.
            request_id: A name of its own; ``None`` makes one.
            with_text: Make its text, too (``Delta.pieces``); with stop strings it is made anyway.
            by_token: Give the text in a piece for each token, not for each step.
            priority: The lower, the sooner it runs; one that is more urgent takes the place of one
                that is less so, which goes on later.
            deadline_s: Seconds from now after which it ends with what it has written
                (``finish_reason`` is ``deadline``); ``None`` sets none.

        Raises:
            InvalidRequestError: The request cannot be honoured. Nothing is queued, nobody is
            disturbed.
        """
        sampling = sampling or SamplingParams()
        speculation = speculation or SpeculationParams()
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise InvalidRequestError(
                f"request_id is {request_id!r}; allowed is a text of a character or more, or None."
            )
        name = request_id or self._free_name()
        if name in self.scheduler:
            raise InvalidRequestError(f"request_id {name!r} is in use; choose another.")
        request = make_request(name, prompt_ids, sampling, speculation, self.target)
        deadline = None if deadline_s is None else time.monotonic() + check_deadline(deadline_s)
        state = RequestState(request, check_priority(priority), deadline)
        if sampling.stop or (with_text and self.target.tokenizer is not None):
            state.text = self._output_text(sampling, by_token)
        if sampling.grammar is not None:
            state.form = self.forms.make(sampling.grammar)
        self.drafting.prepare(request)
        self.scheduler.check_room(state)
        if speculation.is_auto and not speculation.is_plain:
            self._needs_costs = True
            self._make_cost_table()
        self.runner.hidden_layers = self.drafting.hidden_layers
        self.scheduler.add(state)
        self._num_requests += 1
        return name

    def step(self) -> list[Delta]:
        """Run one step; return what each request that emitted or ended did."""
        clock = _Clock()
        expired = [self._expire(state) for state in self.scheduler.expired(time.monotonic())]
        plan = self.scheduler.schedule()
        self.is_stalled = not plan.segments
        if self.is_stalled:
            return expired
        budgets = self.controller.budget(plan)
        clock.lap("host")
        drafts = self.drafting.propose(plan, budgets)
        drafts = self._with_forced(plan, drafts, budgets)
        clock.lap("draft")
        num_offered = drafts.num_nodes
        drafts = self.controller.trim(plan, drafts)
        is_cut = (num_offered >= budgets.max_nodes) | (drafts.num_nodes < num_offered)
        clock.lap("host")
        running = self.scheduler.running
        try:  # nothing is committed before all of it is known
            target = self.runner.forward(plan, drafts)
            clock.lap("target")
            shaped = shape(plan, drafts, target, _forms(running))
            picked_by = dataclasses.replace(target, logits=shaped.logits)
            verdict = verify(plan, drafts, picked_by)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            return expired + self._ease(plan, error)
        clock.lap("verify")
        deltas = commit(
            plan,
            drafts,
            verdict,
            running,
            self.cache,
            self.drafting.take_failures(),
            is_cut,
            shaped.problems_of(target.offsets, verdict),
        )
        deltas = with_logprobs(deltas, plan, target, shaped.logits, verdict, running)
        clock.lap("host")
        self.drafting.observe(plan, drafts, target, verdict)
        clock.lap("draft")
        seconds = clock.seconds["target"] + clock.seconds["verify"]
        self.controller.observe(plan, drafts, picked_by, verdict, seconds, self.drafting.seconds)
        states = [self.scheduler.running[s.request.request_id] for s in plan.segments]
        for delta in deltas:
            if delta.finish_reason is None:
                continue
            state = running[delta.request_id]
            if delta.finish_reason != "error":
                self.drafting.finish(state.request, state.token_ids)
            else:
                state.num_cached = 0  # nobody may begin from what went wrong
            self._finish(delta.request_id)
            self._make_cost_table()
        self.scheduler.note_prompts()
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
        return expired + deltas

    def abort(self, request_id: str) -> bool:
        """Drop a request, waiting or running; return whether it was there."""
        return self._finish(request_id)

    def pause(self, request_id: str) -> None:
        """Let a request rest, with its place as long as nobody waits for it."""
        self.scheduler.state(request_id).is_paused = True

    def resume(self, request_id: str) -> None:
        """Let a request go on."""
        self.scheduler.state(request_id).is_paused = False

    def end_text(self, request_id: str) -> tuple[Piece, ...]:
        """Nothing more comes of a request's text: return what was held back."""
        text = self.scheduler.state(request_id).text
        if text is None:
            return ()
        text.end()
        return text.take()

    def close(self) -> None:
        """Let drafters save what they keep; requests that still run are dropped.

        Raises:
            StoreError: It cannot be saved.
        """
        for request_id in self.scheduler.request_ids:
            self.abort(request_id)
        try:
            self.drafting.close()
        finally:
            if isinstance(self.runner, parallel.LeadingRunner):
                self.runner.stop()

    def request_state(self, request_id: str) -> RequestState:
        """Return the state of a waiting or running request; it outlives the request's end.

        Raises:
            KeyError: There is no such request.
        """
        return self.scheduler.state(request_id)

    def _with_forced(self, plan: StepPlan, drafts: DraftBatch, budgets: Budgets) -> DraftBatch:
        """Draft what a grammar leaves no choice about, for whoever drafts at all."""
        chains: dict[int, list[int]] = {}
        for index, limit in enumerate(budgets.max_nodes.tolist()):
            request = plan.segments[index].request
            form = self.scheduler.running[request.request_id].form
            if limit and form is not None and request.speculation.verification == "walk":
                chain = form.forced()[:limit]
                if chain:
                    chains[index] = chain
        return graft(drafts, chains, budgets.max_nodes, FORCED) if chains else drafts

    def _ease(self, plan: StepPlan, error: Exception) -> list[Delta]:
        """Try again with less, after memory ran out; who cannot run alone ends.

        What the failed pass wrote lies behind what is committed, and is written anew.
        """
        self.drafting.take_failures()
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()
        _LOG.warning("memory ran out in a step of %d requests; less is tried", len(plan.segments))
        if self.scheduler.ease(plan):
            return []
        problem = (
            f"memory ran out, even for this request alone ({str(error).splitlines()[0]:.100}); "
            "shorten it, or free some memory"
        )
        deltas = []
        for segment in plan.segments:
            name = segment.request.request_id
            deltas.append(Delta(name, (), 0, "error", error=problem, pieces=self.end_text(name)))
            self.scheduler.running[name].num_cached = 0
            self._finish(name)
        return deltas

    def _expire(self, state: RequestState) -> Delta:
        """End a request whose time is up, with what it has written."""
        name = state.request.request_id
        pieces = self.end_text(name)
        self._finish(name)
        return Delta(name, (), 0, "deadline", pieces=pieces)

    def _make_cost_table(self) -> None:
        """Bring the controller its cost table, with the first request that needs one."""
        if not self._needs_costs or self.controller.cost_table is not None:
            return
        profile = known_profile(self.target)
        if profile is not None:
            self.controller.cost_table = CostTable(profile.passes, profile.paddings)
            return
        if not self.cache.num_free_slots and not self.scheduler.prefixes.num_retained:
            return  # every slot is taken: later, and nothing is drafted until then
        self.scheduler.drop_prefixes()  # passes are timed in slots side by side
        passes, paddings = quick_times(self.runner, self.cache)
        if passes:
            self.controller.cost_table = CostTable(passes, paddings)

    def _traits(self, method: str) -> MethodTraits:
        needs = self.drafting.needs(method)
        return MethodTraits(needs.cost, needs.sees_noise, needs.is_whole, needs.members)

    def _output_text(self, sampling: SamplingParams, by_token: bool) -> OutputText:
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "stop strings were given, but this model's folder holds no tokenizer; use "
                "stop_token_ids."
            )
        return OutputText(
            Detokenizer(tokenizer),
            sampling.stop,
            sampling.include_stop,
            sampling.min_tokens,
            by_token,
        )

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


class _Clock:
    """Adds up wall time by phase; on CUDA the pass ends in ``verify``, which waits for the picks.

    No phase waits for the device to be told the time.
    """

    def __init__(self) -> None:
        self.started_at = self.now = time.perf_counter()
        self.seconds = {"draft": 0.0, "target": 0.0, "verify": 0.0, "host": 0.0}

    def lap(self, phase: str) -> None:
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


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # PyTorch's allocator on a CPU has no error of its own.
    return "allocate memory" in str(error) or "not enough memory" in str(error)


def _max_auto_nodes(target: Target) -> int:
    """Most draft nodes of a request that leave the text what plain decoding's rounding makes it."""
    if target.device.type == "cpu" and target.dtype == torch.bfloat16:
        return _ROWS_OF_EQUAL_BITS - 1
    return MAX_AUTO_NODES


def _shortened(target: Target, config: EngineConfig) -> Target:
    """A loaded target with the context that the config asks for."""
    if config.tensor_parallel_size not in (1, target.num_ranks):
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, and the loaded target is "
            f"split over {target.num_ranks}; leave it out, or load the target with it."
        )
    if config.max_model_len is None or config.max_model_len == target.max_model_len:
        return target
    if config.max_model_len > target.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the loaded target allows up to "
            f"{target.max_model_len}. Leave it out, or load the target for more."
        )
    return dataclasses.replace(target, max_model_len=config.max_model_len)


def _forms(states: Mapping[str, RequestState]) -> dict[str, Form]:
    return {name: state.form for name, state in states.items() if state.form is not None}


def _kv_bound(config: EngineConfig, target: Target) -> int:
    """Most bytes of keys and values over all running requests."""
    if config.kv_cache_gb is not None:
        return int(config.kv_cache_gb * 2**30)
    if target.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(target.device)
        return int(free * _GPU_SHARE_OF_FREE_MEMORY)
    return int(psutil.virtual_memory().available * _CPU_SHARE_OF_FREE_MEMORY)


def _make_cache(config: EngineConfig, target: Target, max_kv_bytes: int) -> KVCache:
    # Beside those that run, texts that have ended are kept for their beginnings.
    num_slots = config.max_num_requests * (2 if config.reuse_prefixes else 1)
    where = target.max_model_len, target.dtype, target.device
    num_bytes = row_bytes(target.layers, target.dtype)
    if config.kv_layout == "blocks" or config.attention == "flex":
        # FlexAttention's kernels go by stretches of so many keys.
        block_rows = 128 if config.attention == "flex" else BLOCK_ROWS
        num_blocks = max(1, max_kv_bytes // (block_rows * num_bytes))
        return BlockKVCache(target.layers, num_slots, *where, num_blocks, block_rows)
    if target.device.type != "cpu":  # there a reservation is memory at once
        slot_bytes = target.max_model_len * num_bytes
        num_slots = max(1, min(num_slots, max_kv_bytes // slot_bytes))
    return ContiguousKVCache(target.layers, num_slots, *where)
