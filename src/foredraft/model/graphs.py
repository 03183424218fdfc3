"""Decode passes recorded once and played again: a CUDA graph for each shape that comes often.

A decode step of a few rows keeps a GPU busy for less time than it takes to ask for its hundreds of
kernels one by one. A recorded pass asks once. What is recorded goes by addresses, so a pass is
filled up to a shape (``Room``: rows and requests rounded up to powers of two), its inputs are
copied to where the recorded pass reads them, and its logits lie where that one wrote them.

Only passes that read block tables in place can be recorded: their shapes do not grow with the text.
Prompts are computed as they come. A shape is recorded when it comes for the second time, up to
``MAX_GRAPHS`` of them; where a machine cannot record, a warning says so and steps go on unrecorded.

On other devices "playing" is running the pass of the kept tensors: the twin that tests compare.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from foredraft.model.packing import PackedPass
from foredraft.model.paged_attention import Room
from foredraft.types import DraftBatch, StepPlan

_LOG = logging.getLogger("foredraft")

MAX_GRAPHS = 48
"""Shapes that are recorded at most; each keeps its logits and its inputs."""

MAX_ROWS = 512
"""Passes of more rows keep a GPU busy anyway."""

_WARM_UPS = 2

Outputs = tuple[torch.Tensor, dict[int, torch.Tensor]]
"""Logits [num_rows, vocab_size] and hidden states [num_rows, hidden_size] by layer."""

Compute = Callable[[PackedPass], Outputs]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A pass that can be played: where it reads, how it is played, where it wrote."""

    inputs: list[torch.Tensor]
    play: Callable[[], Outputs]


class PassGraphs:
    """Records and plays decode passes.

    Args:
        compute: Runs a pass; reads what changes from one step to the next through
            ``PackedPass.tensors`` alone.
        record: Runs it once and returns what plays it; ``None`` takes what suits the device.
    """

    def __init__(
        self,
        compute: Compute,
        device: torch.device,
        record: Callable[[Callable[[], Outputs]], Callable[[], Outputs]] | None = None,
    ) -> None:
        """Record nothing yet."""
        self._compute = compute
        self._record = record or (_record_cuda if device.type == "cuda" else _keep)
        self._recorded: dict[tuple[Room, tuple[int, ...]], _Recorded] = {}
        self._seen: set[tuple[Room, tuple[int, ...]]] = set()
        self.is_able = True

    @property
    def num_graphs(self) -> int:
        """Shapes recorded so far."""
        return len(self._recorded)

    def room(self, plan: StepPlan, drafts: DraftBatch) -> Room | None:
        """The shape to which a step is filled up; ``None`` where it is not to be recorded."""
        num_rows = len(plan.segments) + len(drafts.token_ids)
        if not self.is_able or num_rows > MAX_ROWS:
            return None
        if any(not s.is_decode or s.wants_prompt_logits for s in plan.segments):
            return None
        return Room(_rounded(num_rows), _rounded(len(plan.segments)))

    def run(self, packed: PackedPass, room: Room, hidden_layers: tuple[int, ...]) -> Outputs:
        """Compute a pass that was filled up, by playing it where its shape is recorded.

        The tensors returned are the caller's own.
        """
        key = room, hidden_layers
        recorded = self._recorded.get(key)
        if recorded is None:
            if key not in self._seen or len(self._recorded) >= MAX_GRAPHS:
                self._seen.add(key)
                return self._compute(packed)
            try:
                play = self._record(lambda: self._compute(packed))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.is_able = False
                _LOG.warning(
                    "decode passes cannot be recorded on this machine (%.200s); steps go on "
                    "without, and cost the asking for each kernel",
                    error,
                )
                return self._compute(packed)
            recorded = self._recorded[key] = _Recorded(packed.tensors, play)
        else:
            for mine, new in zip(recorded.inputs, packed.tensors, strict=True):
                mine.copy_(new, non_blocking=True)
        logits, hidden_states = recorded.play()
        return logits.clone(), {layer: h.clone() for layer, h in hidden_states.items()}


def _rounded(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _keep(run: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """Play by running: the plain twin."""
    return run


def _record_cuda(run: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """Record on a stream of its own, after kernels have been compiled and chosen."""
    here = torch.cuda.current_stream()
    stream = torch.cuda.Stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    here.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()

    def play() -> Outputs:
        graph.replay()
        return outputs

    return play
