"""What a request asks of its logits beyond the filters: bias, penalties, processors, bans, form.

Each changes the logits of a row as a function of the row's own history: the committed text, then
the draft tokens on the path to it. So a row gets what plain decoding would have given it behind the
same text, and what is picked there is the same, whatever else was drafted. The raw logits are never
edited: rows that are shaped are a copy.

Order: logit bias, penalties, the user's processors, and then what may not be picked at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.errors import said
from foredraft.params import SamplingParams
from foredraft.sampling.forms import Form
from foredraft.types import DraftBatch, Int64Array, Segment, StepPlan, TargetOutput, Verdict
from foredraft.upload import upload

_NOTHING = "no token is allowed here, by what allowed_token_ids, bad_token_ids, min_tokens, the"
_NOTHING += " processors and the grammar say together; change one of them"


@dataclass(frozen=True, slots=True)
class Shaped:
    """Logits that tokens are picked by.

    Attributes:
        logits: float32 [num_logit_rows, V]: the target's own tensor where nothing is asked.
        raw: float32 [num_logit_rows, V], the target's own tensor.
        problems: What went wrong at a row, by row.
    """

    logits: torch.Tensor
    raw: torch.Tensor
    problems: Mapping[int, str]

    def problems_of(self, offsets: Int64Array, verdict: Verdict) -> dict[int, str]:
        """Why the text of a segment ends for want of a pick, by segment, where it is known.

        Args:
            offsets: int64 [num_segments + 1], where each segment's logit rows begin and end.
            verdict: What was verified by these logits.
        """
        if self.logits is self.raw:
            return {}
        found = {}
        for index in np.nonzero(~verdict.is_finite)[0].tolist():
            path = verdict.path[verdict.path_offsets[index] : verdict.path_offsets[index + 1]]
            problem = self._problem_at(int(offsets[index]) + (int(path[-1]) if len(path) else 0))
            if problem is not None:
                found[index] = problem
        return found

    def _problem_at(self, row: int) -> str | None:
        if row in self.problems:
            return self.problems[row]
        is_mine = _is_finite(self.raw[row]) and not _is_finite(self.logits[row])
        return _NOTHING if is_mine else None


def shape(
    plan: StepPlan, drafts: DraftBatch, target: TargetOutput, forms: Mapping[str, Form]
) -> Shaped:
    """Shape the logits of every request that asks for it.

    Args:
        plan: Who runs.
        drafts: What was proposed.
        target: What the target said.
        forms: The forms of requests with a grammar, by request id.

    Returns:
        The shaped logits. A row where something went wrong, or the target's own were not finite, is
        NaN, and one where nothing is allowed has no finite logit, so that a request ends there if
        its text comes to it, and is not touched by it else.
    """
    logits = target.logits
    problems: dict[int, str] = {}
    for index, segment in enumerate(plan.segments):
        first, end = int(target.offsets[index]), int(target.offsets[index + 1])
        if first == end or not _is_shaped(segment):
            continue
        if logits is target.logits:
            logits = logits.clone()
        nodes = slice(int(drafts.offsets[index]), int(drafts.offsets[index + 1]))
        rows = _Rows(segment, drafts.token_ids[nodes], drafts.parents[nodes], logits[first:end])
        rows.shape(forms.get(segment.request.request_id))
        problems |= {first + row: problem for row, problem in rows.problems.items()}
    return Shaped(logits, target.logits, problems)


def _is_shaped(segment: Segment) -> bool:
    """Whether a request asks for anything at these rows: ``min_tokens`` does so at first alone."""
    sampling = segment.request.sampling
    return segment.num_output_tokens < sampling.min_tokens or sampling.is_shaped_throughout


class _Rows:
    """The rows of one request: its root and its draft nodes; ``logits`` are changed in place."""

    def __init__(
        self, segment: Segment, draft_ids: Int64Array, parents: Int64Array, logits: torch.Tensor
    ) -> None:
        self.sampling: SamplingParams = segment.request.sampling
        self.problems: dict[int, str] = {}
        self._num_prompt = len(segment.request.prompt_ids)
        self._stop_ids = segment.request.stop_ids
        self._committed = segment.token_ids
        self._draft_ids = draft_ids
        self._parents = parents
        self._logits = logits
        self._is_finite = torch.isfinite(logits.amax(dim=-1))
        self._masks: dict[int, NDArray[np.bool_]] | None = None
        self._paths: list[Int64Array] = [draft_ids[:0]]
        for parent, token in zip(parents.tolist(), draft_ids.tolist(), strict=True):
            self._paths.append(np.append(self._paths[parent], token))

    def shape(self, form: Form | None) -> None:
        """Do all of it, in order."""
        sampling = self.sampling
        if form is not None:
            self._read(form)
        if sampling.logit_bias:
            ids, values = zip(*sampling.biases, strict=True)
            biases = upload(np.array(values, dtype=np.float32), self._logits.device)
            self._logits[:, self._index(ids)] += biases
        if (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
        ):
            self._penalise()
        if sampling.logits_processors:
            self._process()
        self._ban()
        for row, allowed in (self._masks or {}).items():
            self._logits[row].masked_fill_(upload(~allowed, self._logits.device), -torch.inf)
        for row in self.problems:
            self._logits[row] = torch.nan
        self._logits.masked_fill_(~self._is_finite[:, None], torch.nan)

    def _index(self, ids: object) -> torch.Tensor:
        return upload(np.asarray(ids, dtype=np.int64), self._logits.device)

    def _penalise(self) -> None:
        sampling = self.sampling
        rows, ids, counts = _history(
            np.asarray(self._committed),
            self._num_prompt if sampling.repetition_penalty != 1 else -self._num_prompt,
            self._draft_ids,
            self._parents,
            self._logits.shape[1],
        )
        where = (self._index(rows), self._index(ids))
        values = self._logits[where]
        if sampling.repetition_penalty != 1:
            penalty = sampling.repetition_penalty
            values = torch.where(values > 0, values / penalty, values * penalty)
            # A tiny penalty must not make a score infinite: the largest is large enough.
            values = values.clamp(max=torch.finfo(values.dtype).max)
        times = upload(counts, values.device)
        values -= sampling.frequency_penalty * times
        values -= sampling.presence_penalty * (times > 0)
        self._logits[where] = values

    def _process(self) -> None:
        """Run the user's processors, row by row, on rows that can be reached.

        Which those are depends on what the processors said before: the device is waited for.
        """
        was_finite = self._is_finite.cpu().numpy().copy()
        for row, path in enumerate(self._paths):
            if row:
                parent = int(self._parents[row - 1])
                # A token that is ruled out is never picked, so nothing behind it is reached.
                value = float(self._logits[parent, int(self._draft_ids[row - 1])])
                is_reached = was_finite[parent] and value > -np.inf
                is_reached &= parent not in self.problems and not self._is_banned(row - 1)
                was_finite[row] &= is_reached
            if not was_finite[row] or row in self.problems:
                continue
            ids = np.concatenate([self._committed, path])
            input_ids = upload(ids, self._logits.device)[None]
            scores = self._logits[row : row + 1].clone()
            try:
                for processor in self.sampling.logits_processors:
                    scores = processor(input_ids, scores)
                self._logits[row] = _checked(scores, self._logits.shape[1])
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - it may be anybody's code
                self.problems[row] = (
                    f"a logits processor failed ({said(error)}); mend it, or leave it out"
                )

    def _ban(self) -> None:
        sampling, logits = self.sampling, self._logits
        if sampling.allowed_token_ids is not None:
            is_banned = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            is_banned[self._index(sampling.allowed_token_ids)] = False
            logits.masked_fill_(is_banned, -torch.inf)
        single = [entry for entry in sampling.bad_token_ids if isinstance(entry, int)]
        if single:
            logits[:, self._index(single)] = -torch.inf
        for entry in sampling.bad_token_ids:
            if isinstance(entry, int):
                continue
            for row in range(len(self._paths)):
                if self._ends_with(row, entry[:-1]):
                    logits[row, entry[-1]] = -torch.inf
        if self._stop_ids and sampling.min_tokens:
            num_output = len(self._committed) - self._num_prompt
            early = [
                row
                for row, path in enumerate(self._paths)
                if num_output + len(path) < sampling.min_tokens
            ]
            stops = self._index(sorted(self._stop_ids))
            logits[self._index(early)[:, None], stops[None]] = -torch.inf

    def _ends_with(self, row: int, token_ids: tuple[int, ...]) -> bool:
        """Whether the text up to a row ends with these tokens."""
        size = len(token_ids)
        tail = np.concatenate([self._committed[-size:], self._paths[row]])[-size:]
        return len(tail) == size and bool((tail == token_ids).all())

    def _is_banned(self, node: int) -> bool:
        """Whether the request itself rules a draft token out, so that nobody gets behind it."""
        sampling, token, parent = self.sampling, int(self._draft_ids[node]), self._parents[node]
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            return True
        for entry in sampling.bad_token_ids:
            if isinstance(entry, int):
                if entry == token:
                    return True
            elif entry[-1] == token and self._ends_with(int(parent), entry[:-1]):
                return True
        num_output = len(self._committed) - self._num_prompt + len(self._paths[parent])
        if token in self._stop_ids and num_output < sampling.min_tokens:
            return True
        return self._masks is not None and node + 1 not in self._masks

    def _read(self, form: Form) -> None:
        """What a form allows, at the rows that it lets a text come to."""
        self._masks = masks = {}

        def visit(row: int, allowed: NDArray[np.bool_]) -> None:
            masks[row] = allowed

        for row, problem in enumerate(form.walk(self._draft_ids, self._parents, visit)):
            if problem is not None:
                self.problems[row] = problem


def _is_finite(row: torch.Tensor) -> bool:
    """Whether something can be picked at a row; waits for the device."""
    return bool(torch.isfinite(row.amax()))


def _checked(scores: object, vocab_size: int) -> torch.Tensor:
    """A processor's scores as one float32 row."""
    if not isinstance(scores, torch.Tensor) or scores.shape != (1, vocab_size):
        given = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise TypeError(f"it returned {given}, not scores of shape (1, {vocab_size})")
    row = scores[0].detach().float()
    if torch.isnan(row).any() or (row == torch.inf).any():
        raise ValueError("it returned scores that are NaN or infinite")
    return row


@numba.njit(cache=True)
def _history(  # type: ignore[no-untyped-def]
    committed, num_prompt, draft_ids, parents, vocab_size
):
    """Every row's distinct tokens so far, and how often each is in the output.

    A negative ``num_prompt`` leaves tokens out that are in the prompt alone.
    """
    has_prompt = num_prompt >= 0
    first = abs(num_prompt)
    counts = np.zeros(vocab_size, dtype=np.int64)
    is_seen = np.zeros(vocab_size, dtype=np.bool_)
    touched = np.empty(committed.size, dtype=np.int64)
    num_touched = 0
    for place in range(committed.size):
        token = committed[place]
        if place >= first:
            counts[token] += 1
        elif not has_prompt:
            continue
        if not is_seen[token]:
            is_seen[token] = True
            touched[num_touched] = token
            num_touched += 1
    num_rows = draft_ids.size + 1
    most = num_rows * (num_touched + draft_ids.size)
    rows = np.empty(most, dtype=np.int64)
    ids = np.empty(most, dtype=np.int64)
    times = np.empty(most, dtype=np.float32)
    size = 0
    for row in range(num_rows):
        begin = size
        for index in range(num_touched):
            rows[size], ids[size] = row, touched[index]
            times[size] = counts[touched[index]]
            size += 1
        node = row
        while node > 0:
            token = draft_ids[node - 1]
            place = begin
            while place < size and ids[place] != token:
                place += 1
            if place == size:
                rows[size], ids[size], times[size] = row, token, 0
                size += 1
            times[place] += 1
            node = parents[node - 1]
    return rows[:size], ids[:size], times[:size]
