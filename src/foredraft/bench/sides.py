"""Ways to draft beside each other: each in an engine of its own, taking turns every few tokens."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foredraft.config import EngineConfig
from foredraft.engine.engine import Engine
from foredraft.engine.measure import as_passes, prepared_requests, time_rows
from foredraft.engine.request_state import RequestState
from foredraft.model.loader import Target
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.plan.profile import PassTime
from foredraft.plan.trace import trace_line

_NUM_TURNS = 6


class Side:
    """One way to draft, in an engine of its own over the shared target, under steady traffic.

    Sides take turns every few steps, so that a machine that slows down slows all of them; and each
    learns from its own steps alone. A request leaves after ``num_tokens`` counted tokens, and the
    next one comes, so that the batch keeps its size and a round is a request of each. Steps with
    prompts in them are run but not counted.

    Attributes:
        num_tokens: Tokens of the counted steps.
        quota: Tokens that it was to come to; the last step may have brought more.
        steps: Draft tokens, requests and tokens of each counted step.
        seconds: Of the counted steps.
        deciding: Seconds of these that the controller took.
        proposing: Seconds of these that drafters took to propose.
        updating: Seconds of these that drafters took to learn.
    """

    def __init__(
        self,
        target: Target,
        prompt_ids: Sequence[Any],
        speculation: SpeculationParams,
        num_tokens: int,
        num_requests: int,
    ) -> None:
        """Queue the first requests.

        Args:
            target: The loaded model.
            prompt_ids: Prompts, taken in turn.
            speculation: How all of them are drafted.
            num_tokens: Counted tokens of a request; its first comes with the prompt.
            num_requests: How many decode at once.
        """
        self._num_requests = num_requests
        config = EngineConfig(max_num_requests=num_requests, reuse_prefixes=False)
        self.engine = Engine(config, target=target)
        self._ids = prompt_ids
        self._sampling = SamplingParams(max_tokens=num_tokens + 1, ignore_eos=True)
        self._speculation = speculation
        self._clocks = {"deciding": 0.0, "proposing": 0.0, "updating": 0.0}
        self._states: list[RequestState] = []
        self.steps: list[tuple[int, int, int]] = []
        self.num_tokens = self.quota = 0
        self.seconds = self.deciding = self.proposing = self.updating = 0.0
        self._excess_s = 0.0
        controller = self.engine.controller
        drafting = self.engine.drafting
        for owner, name, clock in (
            (controller, "budget", "deciding"),
            (controller, "trim", "deciding"),
            (controller, "observe", "deciding"),
            (drafting, "propose", "proposing"),
            (drafting, "observe", "updating"),
            (drafting, "finish", "updating"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), clock))
        for _ in range(self._num_requests):
            self._add()

    def advance(self, num_tokens: int) -> None:
        """Run until so many tokens more than at the last turn's end were to be counted.

        Who came further than that then, by a step that brought many, runs less now: all sides have
        written the same stretch of text.
        """
        self.quota += num_tokens
        while self.num_tokens < self.quota:
            before = dict(self._clocks)
            deltas = self.engine.step()
            step = self.engine.last_step
            if step is not None and step.num_decoding == step.num_segments == self._num_requests:
                self.seconds += step.total_s
                for clock, since in before.items():
                    spent = self._clocks[clock] - since
                    setattr(self, clock, getattr(self, clock) + spent)
                self.steps.append((step.num_draft_tokens, step.num_segments, step.num_tokens))
                self.num_tokens += step.num_tokens
                excess = max(0, self.num_tokens - self.quota)
                self._excess_s = step.total_s * excess / step.num_tokens
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._add()

    @property
    def rate(self) -> float:
        """Tokens per second up to the quota: of the step that led beyond it, the part within."""
        return self.quota / (self.seconds - self._excess_s)

    @property
    def texts(self) -> list[list[int]]:
        """Token ids of the first requests, as far as they came."""
        return [state.output_ids.tolist() for state in self._states[: self._num_requests]]

    @property
    def foreseen(self) -> float | None:
        """The controller's own forecast of the speedup, where it made one."""
        foreseen_s = sum(state.stats.predicted_s for state in self._states)
        plain_s = sum(state.stats.expected_plain_s for state in self._states)
        return plain_s / foreseen_s if foreseen_s else None

    def work(self) -> dict[str, float]:
        """What was drafted in the counted steps, the host's time for it, and what is kept."""
        return {
            "steps": len(self.steps),
            "requests": sum(step[1] for step in self.steps),
            "drafted": sum(step[0] for step in self.steps),
            "accepted": sum(step[2] - step[1] for step in self.steps),
            "proposing_s": self.proposing,
            "updating_s": self.updating,
            "kept_bytes": self.engine.drafting.num_state_bytes(self._speculation.method),
        }

    def traces(self, plain_step_s: float) -> list[str]:
        """Trace lines of the requests that decoded, beside plain steps of so many seconds."""
        return [
            trace_line(
                self._speculation.method,
                self._num_requests,
                0.0,
                state.stats.num_tokens,
                state.stats.steps,
                state.stats.decode_s or None,
                plain_step_s,
                state.stats.members,
                self._speculation.is_auto,
                self.engine.target.name,
            )
            for state in self._states
            if state.stats.steps
        ]

    def _add(self) -> None:
        ids = self._ids[len(self._states) % len(self._ids)]
        name = self.engine.add(ids, self._sampling, self._speculation)
        self._states.append(self.engine.request_state(name))

    def _timed(self, call: Callable[..., Any], clock: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            self._clocks[clock] += time.perf_counter() - started
            return result

        return wrapped


class PassTimes:
    """The bare passes of a cell, timed in turn with its sides: what the arithmetic predicts from.

    Args:
        engine: Is idle; its cache is filled with noise for the passes.
        num_requests: Requests of each pass.
        context: Tokens of each request in the cache.
        rows: Rows of a request, one pass for each.
    """

    def __init__(
        self, engine: Engine, num_requests: int, context: int, rows: Sequence[int]
    ) -> None:
        """Time nothing yet."""
        self._engine = engine
        self._num_requests = num_requests
        self._context = context
        self._rows = [num_requests * number for number in rows]
        self._times: dict[int, list[float]] = {}

    def visit(self) -> None:
        """Time every pass once more."""
        runner, cache = self._engine.runner, self._engine.cache
        with prepared_requests(runner, cache, self._num_requests, self._context) as seconds:
            for number, found in time_rows(seconds, self._rows, 1).items():
                self._times.setdefault(number, []).extend(found)

    def warm_up(self) -> None:
        """Run every number of rows up to the largest once.

        The first product of a shape takes some 6 % of a pass more, to make its kernel.
        """
        runner, cache = self._engine.runner, self._engine.cache
        with prepared_requests(runner, cache, self._num_requests, self._context) as seconds:
            for number in range(self._num_requests, max(self._rows) + 1):
                seconds(number)

    @property
    def passes(self) -> tuple[PassTime, ...]:
        """Medians over the visits."""
        return tuple(as_passes(self._num_requests, self._context, self._times))


def settle(engine: Engine, num_requests: int, num_tokens: int, most_rows: int) -> None:
    """Do beforehand what would be charged to whichever side comes first.

    A pause to collect garbage among the modules' objects, and the kernels of every shape.

    Args:
        engine: Is idle.
        num_requests: The largest batch to come.
        num_tokens: Tokens of each request in the cache.
        most_rows: Of a request, in one pass.
    """
    gc.collect()
    gc.freeze()
    if engine.target.dtype != torch.bfloat16:
        return  # oneDNN makes kernels by the shape for bfloat16 alone
    PassTimes(engine, num_requests, num_tokens, (most_rows,)).warm_up()


def take_turns(
    sides: Mapping[str, Side],
    rounds: int,
    num_tokens: int,
    tell: Callable[[str], None],
    passes: PassTimes | None = None,
) -> None:
    """Let every side run so many tokens a round, in turns of a few steps.

    Args:
        sides: By name.
        rounds: How many.
        num_tokens: Of a round, all requests together.
        tell: Told where it is.
        passes: Visited at every turn.
    """
    for round_index in range(rounds):
        for turn in range(_NUM_TURNS):
            tell(f"round {round_index + 1} of {rounds}, turn {turn + 1} of {_NUM_TURNS}")
            for side in sides.values():
                side.advance(num_tokens // _NUM_TURNS)
            if passes is not None:
                passes.visit()
