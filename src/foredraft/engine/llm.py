"""The front door in Python: text, token ids or chat messages in, finished or streamed text out."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from foredraft.config import EngineConfig, make_config
from foredraft.engine.engine import Engine
from foredraft.engine.outputs import RequestOutput, Run, StreamChunk
from foredraft.errors import ForedraftError, InvalidRequestError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.stats import RequestStats
from foredraft.types import Delta

if TYPE_CHECKING:
    from foredraft.drafters.base import Drafter
    from foredraft.model.loader import Target

_LOG = logging.getLogger("foredraft")

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | np.ndarray
"""A text, token ids, or chat messages (mappings with ``role`` and ``content``)."""


class LLM:
    """A target model, ready to generate.

    Args:
        model: ``default`` (the embedded model), a Hugging Face folder or hub name, or a ``.gguf``.
        target: A target loaded already, instead of ``model``.
        drafters: Drafters of your own by method name.
        notify: Told, in a sentence, what takes long while the model loads.
        **options: Other fields of ``EngineConfig``.

    Raises:
        ModelLoadError: The model cannot be loaded.
        ConfigError: An option is unknown or cannot be honoured.

    Example:
        >>> from foredraft import LLM, SamplingParams  # doctest: +SKIP
        >>> llm = LLM("default")  # doctest: +SKIP
        >>> print(llm.generate("The capital of France is")[0].text)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "default",
        *,
        target: Target | None = None,
        drafters: Mapping[str, Drafter] | None = None,
        notify: Callable[[str], None] = _LOG.info,
        **options: Any,
    ) -> None:
        """Load the model."""
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        config = make_config(EngineConfig, {"model": name, **options}, "the engine")
        self.engine = Engine(config, target, drafters, notify)
        self.tokenizer = self.engine.target.tokenizer
        self._runs: dict[str, Run] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationParams | Sequence[SpeculationParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, all in one batch.

        Args:
            prompts: One prompt (a string, token ids, or chat messages), or a list of prompts.
            sampling: For all, or one for each.
            speculation: For all, or one for each.
            progress: Show a bar on standard error; ``None`` shows it where that is a terminal and
                there are several prompts.

        Returns:
            One output a prompt, in order. In a list of prompts, one that cannot be honoured comes
            back with ``finish_reason == "error"`` and the others go on.

        Raises:
            InvalidRequestError: A single prompt cannot be honoured, or lists are of unequal length.
        """
        is_one = _is_one_prompt(prompts)
        every: list[Any] = [prompts] if is_one else list(prompts)
        samplings = _for_each(sampling, SamplingParams, len(every), "sampling")
        speculations = _for_each(speculation, SpeculationParams, len(every), "speculation")
        runs: list[list[Run] | RequestOutput] = []
        started: list[Run] = []
        try:
            for prompt, one_sampling, one_speculation in zip(
                every, samplings, speculations, strict=True
            ):
                try:
                    samples = self._start_samples(prompt, one_sampling, one_speculation)
                    started += samples
                    runs.append(samples)
                except ForedraftError as error:
                    if is_one:
                        raise
                    runs.append(_refused(error))
            if progress is None:
                progress = sys.stderr.isatty() and len(every) > 1
            with _bar(progress, started) as advance:
                while any(run.output is None for run in started):
                    self.step(advance)
        finally:
            for run in started:
                self.drop(run)
        return [
            run
            if isinstance(run, RequestOutput)
            else best_of([run.finished() for run in run], one_sampling)
            for run, one_sampling in zip(runs, samplings, strict=True)
        ]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
    ) -> TextStream:
        """Generate for one prompt, step by step.

        The joined ``text`` of all chunks equals ``generate(prompt)[0].text``. Closing the iterator,
        or dropping it, ends the request. Several streams may be read in turn.

        Args:
            prompt: A string, token ids, or chat messages.
            sampling: How tokens are picked.
            speculation: How it speculates.

        Returns:
            An iterator: a chunk for each step in which the request emitted something; the last one
            has the output.

        Raises:
            InvalidRequestError: The request cannot be honoured; raised at the call.
        """
        sampling = sampling or SamplingParams()
        return TextStream(self, self.start(prompt, sampling, speculation or SpeculationParams()))

    def close(self) -> None:
        """Drop what still runs, and let drafters save what they keep; safe to repeat.

        Raises:
            StoreError: It cannot be saved.
        """
        for run in list(self._runs.values()):
            self.drop(run)
        self.engine.close()

    def __enter__(self) -> LLM:
        """Use as a context, which closes it."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Return a prompt's token ids, int64.

        Raises:
            InvalidRequestError: It is empty, or chat messages for a tokenizer without a template.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("the prompt is empty; allowed is any text. Give it some.")
            _check_unicode(prompt)
            ids = self._need_tokenizer()(prompt, verbose=False)["input_ids"]
            if not ids:
                raise InvalidRequestError(
                    f"the prompt {prompt!r} gives no token; give it some text."
                )
            return np.asarray(ids, dtype=np.int64)
        if isinstance(prompt, bytes) or not isinstance(prompt, (np.ndarray, Sequence)):
            raise InvalidRequestError(
                f"a prompt is of type {type(prompt).__name__}; allowed is a text, token ids, or "
                "chat messages."
            )
        if len(prompt) and all(isinstance(item, Mapping) for item in prompt):
            return self._encode_chat(list(prompt))
        try:
            ids = np.asarray(prompt, dtype=None if len(prompt) else np.int64)
        except ValueError as error:  # a ragged list of lists
            raise InvalidRequestError(
                "a prompt is a list of lists of unequal lengths; allowed is a flat sequence of "
                "integer token ids."
            ) from error
        return ids.astype(np.int64) if np.issubdtype(ids.dtype, np.integer) else ids

    def _encode_chat(self, messages: list[Any]) -> np.ndarray:
        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            raise InvalidRequestError(
                "chat messages were given, but this model's tokenizer has no chat template; pass "
                "the prompt as a text (without --chat), or use an instruct model."
            )
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(
                message.get("content"), str
            ):
                raise InvalidRequestError(
                    f"a chat message is {message!r}; allowed is a mapping with the strings 'role' "
                    "and 'content'."
                )
            _check_unicode(message["content"])
        if not any(message["content"].strip() for message in messages):
            raise InvalidRequestError(
                "the chat messages are empty; allowed is any text. Give one of them some."
            )
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates raise what they like
            raise InvalidRequestError(
                f"the chat template refused the messages ({error}); check their roles and order."
            ) from error
        return np.asarray(ids, dtype=np.int64)

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "a text was given, but this model's folder holds no tokenizer; pass token ids "
                "instead."
            )
        return self.tokenizer

    def _start_samples(
        self, prompt: Prompt, sampling: SamplingParams, speculation: SpeculationParams
    ) -> list[Run]:
        """Queue a request for each text of a prompt, all or none."""
        ids = self.encode(prompt)
        runs: list[Run] = []
        try:
            for one in each_sample(sampling):
                runs.append(self._start(ids, one, speculation))
        except ForedraftError:
            for run in runs:
                self.drop(run)
            raise
        return runs

    def _start(
        self,
        prompt_ids: np.ndarray,
        sampling: SamplingParams,
        speculation: SpeculationParams,
        **options: Any,
    ) -> Run:
        request_id = self.engine.add(prompt_ids, sampling, speculation, with_text=True, **options)
        run = Run(self.engine.request_state(request_id))
        self._runs[request_id] = run
        return run

    # What streams and servers are made of.

    def start(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        speculation: SpeculationParams,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Run:
        """Queue a request of one text, which comes in a piece for each token.

        Raises:
            InvalidRequestError: It cannot be honoured, or asks for several texts.
        """
        if sampling.num_samples > 1:
            raise InvalidRequestError(
                f"{sampling.num_samples} texts of a prompt were asked for, and a stream has one; "
                "use generate, or a stream for each."
            )
        return self._start(
            self.encode(prompt),
            sampling,
            speculation,
            by_token=True,
            priority=priority,
            deadline_s=deadline_s,
        )

    def step(self, on_delta: Callable[[Delta], None] | None = None) -> bool:
        """Run one step of the engine, and hand every request's part to whoever waits for it.

        Returns:
            Whether anybody ran: not where all are paused.
        """
        if not self.engine.has_work:
            raise RuntimeError("a request has not ended, but was taken out of the engine")
        deltas = self.engine.step()
        for delta in deltas:
            run = self._runs.get(delta.request_id)
            if run is None:
                continue
            run.take(delta)
            if on_delta is not None:
                on_delta(delta)
        return bool(deltas) or not self.engine.is_stalled

    def drop(self, run: Run) -> None:
        """Forget a request; end it if it still runs."""
        if self._runs.pop(run.request_id, None) is not None and run.output is None:
            self.engine.abort(run.request_id)

    def end(self, run: Run, error: str | None = None) -> None:
        """End a request that still runs, with what it has written: its output is made.

        Args:
            run: The request.
            error: What went wrong; ``None`` where it was called off (``abort``).
        """
        if run.output is None:
            pieces = self.engine.end_text(run.request_id)
            self.drop(run)
            reason = "abort" if error is None else "error"
            run.take(Delta(run.request_id, (), 0, reason, error=error, pieces=pieces))


class TextStream(Iterator[StreamChunk]):
    """One request being generated; iterate over its chunks. Made by ``LLM.stream``."""

    def __init__(self, llm: LLM, run: Run) -> None:
        """Follow ``run``, which is queued already."""
        self._llm = llm
        self._run = run
        self._chunks: deque[StreamChunk] = deque()
        run.chunks = self._chunks

    def __next__(self) -> StreamChunk:
        """Run steps until the request emits something."""
        while not self._chunks:
            if self._run.output is not None or self._run.request_id not in self._llm._runs:
                self.close()
                raise StopIteration
            try:
                self._llm.step()
            except BaseException:
                self.close()
                raise
        return self._chunks.popleft()

    def close(self) -> None:
        """End the request if it still runs, and free what it holds; safe to repeat."""
        self._llm.drop(self._run)
        self._chunks.clear()

    def __del__(self) -> None:
        """End a request that nobody can read any more."""
        self.close()


def each_sample(sampling: SamplingParams) -> list[SamplingParams]:
    """The parameters of each text of a prompt, with a seed of its own."""
    if sampling.num_samples == 1:
        return [dataclasses.replace(sampling, best_of=None)]
    seed = secrets.randbits(53) if sampling.seed is None else sampling.seed
    is_chosen = sampling.num_samples > sampling.n
    logprobs = 0 if sampling.logprobs is None and is_chosen else sampling.logprobs
    return [
        dataclasses.replace(
            sampling, n=1, best_of=None, seed=(seed + index) % 2**63, logprobs=logprobs
        )
        for index in range(sampling.num_samples)
    ]


def best_of(outputs: Sequence[RequestOutput], sampling: SamplingParams) -> RequestOutput:
    """The output of a prompt: its only text, or the first of all that are kept with all of them."""
    if len(outputs) == 1:
        return outputs[0]
    if len(outputs) > sampling.n:
        # One that failed comes last, whatever it had written.
        ranked = sorted(outputs, key=lambda one: (one.finish_reason == "error", -one.mean_logprob))
        outputs = ranked[: sampling.n]
        if sampling.logprobs is None:
            outputs = [dataclasses.replace(output, logprobs=None) for output in outputs]
    return dataclasses.replace(outputs[0], samples=tuple(outputs))


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the prompt is not valid Unicode text (half a character at position {error.start}); "
            "mend it."
        ) from error


def _refused(error: ForedraftError) -> RequestOutput:
    return RequestOutput("", (), (), "", "error", None, None, RequestStats(), str(error))


def _is_one_prompt(prompts: Any) -> bool:
    """Whether this is one prompt and not a list of them; an empty list is a list of none."""
    if isinstance(prompts, (str, np.ndarray)):
        return True
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"the prompt is of type {type(prompts).__name__}; allowed is a text, token ids, chat "
            "messages, or a list of these."
        )
    return len(prompts) > 0 and all(isinstance(p, (int, np.integer, Mapping)) for p in prompts)


def _for_each(given: Any, cls: type[Any], count: int, name: str) -> list[Any]:
    if given is None:
        return [cls()] * count
    if isinstance(given, cls):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(one, cls) for one in given):
        raise InvalidRequestError(
            f"{name} is {given!r}; allowed is one {cls.__name__} for all prompts, or a list with "
            "one for each."
        )
    if len(given) != count:
        raise InvalidRequestError(
            f"{name} has {len(given)} entries for {count} prompts; allowed is one {cls.__name__} "
            "for all, or one for each."
        )
    return list(given)


@contextmanager
def _bar(is_shown: bool, runs: Sequence[Run]) -> Iterator[Callable[[Delta], None]]:
    """A progress bar over requests on standard error, or nothing; gives what moves it on."""
    if not is_shown:
        yield lambda delta: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    progress = Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts, {task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    request_ids = {run.request_id for run in runs}
    task = progress.add_task("generating", total=len(runs), tokens=0)
    num_tokens = 0

    def advance(delta: Delta) -> None:
        nonlocal num_tokens
        if delta.request_id in request_ids:
            num_tokens += len(delta.token_ids)
            progress.update(task, advance=delta.finish_reason is not None, tokens=num_tokens)

    with progress:
        yield advance
