"""What a head learns: to write several tokens ahead from its own outputs (training-time test).

Level 0 reads the target's features; level ``j`` reads what level ``j - 1`` gave, one token further.
A row of level ``j`` stands for a draft that began at its text position: it sees the true rows up to
there, and of the levels before it its own row alone. This is EAGLE-3's training-time test (arXiv
2503.01840, section 3.2); with one level and a regression it is EAGLE-1's training, and FastMTP's
for MTP modules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from foredraft.heads.output_law import OutputLaw
from foredraft.heads.recurrent import Output, RecurrentHead
from foredraft.train.features import Batch


@dataclass(frozen=True, slots=True)
class Options:
    """How the levels count.

    Attributes:
        num_levels: Levels that are unrolled.
        decay: Weight of a level over that of the one before.
        prompt_share: Share of the prompts' tokens that are learnt from, where of answers all are.
        regression: Weight of the distance to the target's own feature (EAGLE-1), 0 for none.
        is_measuring: Words that the head has not got count as missed.
        generator: Of what is chosen by chance, on the CPU; ``None`` takes the global one.
    """

    num_levels: int = 4
    decay: float = 0.8
    prompt_share: float = 0.2
    regression: float = 0.0
    is_measuring: bool = False
    generator: torch.Generator | None = None


@dataclass(frozen=True, slots=True)
class Losses:
    """What came of a batch.

    Attributes:
        total: To be made smaller.
        accepted: [num_levels], rows of answers at which the head's likeliest tokens up to this
            level are all the target's: ``accepted / counted`` is the survival of a greedy chain.
        counted: [num_levels], of so many.
    """

    total: torch.Tensor
    accepted: torch.Tensor
    counted: torch.Tensor


class Teacher:
    """What the target says behind every token of a batch, and behind which of them a head learns.

    Behind those of answers always; behind those of prompts by chance.

    Args:
        batch: Of the target.
        output: Its output layer.
        target_ids: int64 [num_words], the words of the head; ``None`` where it has all.
        prompt_share: Share of the prompts' tokens that are learnt from.
        is_measuring: The target's likeliest word is sought among all of its words, those that the
            head has not got too.
        generator: Of the chance; on the CPU.
    """

    def __init__(
        self,
        batch: Batch,
        output: OutputLaw,
        target_ids: torch.Tensor | None,
        prompt_share: float,
        is_measuring: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        """Ask the target once for all levels."""
        after = functional.pad(batch.is_answer, (0, 1))[:, 1:]
        self.is_real = batch.is_real
        self.is_answer = (after | batch.is_answer) & batch.is_real
        self.rows = self.is_answer.clone()
        if prompt_share > 0:
            is_drawn = torch.rand(batch.is_real.shape, generator=generator) < prompt_share
            self.rows |= is_drawn.to(batch.is_real.device) & batch.is_real
        self.place = torch.cumsum(self.rows.flatten(), 0).view_as(self.rows) - 1
        self.own_words = output.only(target_ids)
        self.target_ids = target_ids
        with torch.no_grad():
            final = batch.final[self.rows]
            logits = self.own_words(final).float()
            self.law = torch.softmax(logits, dim=-1)
            if is_measuring and target_ids is not None:
                self.best = output(final).argmax(-1)
            else:
                self.best = self._id_of(logits.argmax(-1))

    def _id_of(self, words: torch.Tensor) -> torch.Tensor:
        return words if self.target_ids is None else self.target_ids[words]

    def goal(self, level: int, size: int) -> Goal:
        """What ``size`` rows of a level, counted from 0, are to say."""
        read = slice(1 + level, 1 + level + size)
        return Goal(self, read, slice(1, 1 + size) if level > 0 else read)


class Goal:
    """What the rows of a level are to say: row ``i`` the target's words behind ``i + 1 + level``.

    Attributes:
        rows: bool [B, size], those that count.
        is_counted: bool [B, size], drafts of which survival is told: their first token is an
            answer's, and this one is there.
    """

    def __init__(self, teacher: Teacher, read: slice, first: slice) -> None:
        """A part of what the teacher says."""
        self._teacher = teacher
        self.rows = teacher.rows[:, read]
        self.is_counted = teacher.is_answer[:, first] & teacher.is_real[:, read]
        self._places = teacher.place[:, read][self.rows]

    def distance(self, student: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How far a head is from it.

        Args:
            student: Its logits at ``rows``, [num_rows, num_words].

        Returns:
            The mean cross-entropy of the rows, and bool [B, size], where both agree on the
            likeliest word.
        """
        student, teacher = student.float(), self._teacher
        with torch.no_grad():
            is_same = torch.zeros_like(self.rows)
            is_same[self.rows] = teacher._id_of(student.argmax(-1)) == teacher.best[self._places]
        said = (teacher.law[self._places] * student).sum(dim=-1)
        return mean(torch.logsumexp(student, dim=-1) - said), is_same


def losses(
    head: RecurrentHead,
    batch: Batch,
    embed: torch.nn.Module,
    target_output: OutputLaw,
    options: Options,
) -> Losses:
    """Unroll a head over a batch.

    Args:
        head: In training.
        batch: Of the target.
        embed: Its embedding.
        target_output: Its output layer.
        options: See there.
    """
    num_rows = batch.token_ids.shape[1] - 1
    target_ids = head.target_ids if head.shape.has_own_words else None
    teacher = teacher_of(target_ids, batch, target_output, options)
    output: Output | None = None if head.shape.has_output else teacher.own_words

    features = batch.features[:, :num_rows].to(target_output.weight.dtype)
    hidden = head.fuse(features)
    attend = _Unrolled(num_rows, batch.token_ids.device)
    total = hidden.new_zeros(())
    weight_of_all = 0.0
    survives = batch.is_real[:, :num_rows]
    accepted, counted = [], []
    for level in range(min(options.num_levels, num_rows - 1)):
        size = num_rows - level  # later rows have no token to read any more
        with torch.no_grad():
            embeds = embed(batch.token_ids[:, 1 + level : 1 + level + size]).to(hidden.dtype)
        positions = torch.arange(level, level + size, device=hidden.device)[None]
        hidden = head.level(hidden[:, :size], embeds, head.rotate(positions), attend)
        # Row i, fed the token at i + 1 + level, tells of the one after it.
        goal = teacher.goal(level, size)
        value, is_same = goal.distance(head.logits(hidden[goal.rows], output))
        if options.regression:
            final = batch.final[:, 1 + level : 1 + level + size][goal.rows]
            distance = functional.smooth_l1_loss(
                hidden[goal.rows].float(), final, reduction="none"
            ).mean(-1)
            value = 0.1 * value + options.regression * mean(distance)
        level_weight = options.decay**level
        total = total + level_weight * value
        weight_of_all += level_weight
        survives = survives[:, :size] & is_same
        accepted.append((survives & goal.is_counted).sum())
        counted.append(goal.is_counted.sum())
    return Losses(total / weight_of_all, torch.stack(accepted), torch.stack(counted))


def teacher_of(
    target_ids: torch.Tensor | None, batch: Batch, output: OutputLaw, options: Options
) -> Teacher:
    """What is to be learnt of a batch by what drafts some words, or all (``None``)."""
    return Teacher(
        batch,
        output,
        target_ids,
        options.prompt_share,
        options.is_measuring,
        options.generator,
    )


def mean(values: torch.Tensor) -> torch.Tensor:
    """Of values [n]; 0 where there are none."""
    return values.sum() / max(1, len(values))


class _Unrolled:
    """Attention of the levels: level 0 is causal; a later one sees level 0 and its own column.

    Keys and values of the levels are kept between the calls; the first call is level 0.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._levels: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).triu(1)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None = None,
    ) -> torch.Tensor:
        """See ``heads.layer.Attend``."""
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        share = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        self._levels.append((key, value))
        size = query.shape[2]
        if len(self._levels) == 1:
            out = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling
            )
            return out.transpose(1, 2).flatten(2)
        query = query * scaling
        first_key, first_value = self._levels[0]
        scores = query @ first_key[:, :, :size].transpose(-1, -2)
        scores = scores.masked_fill(self._is_later[:size, :size], -torch.inf)
        own = [(query * k[:, :, :size]).sum(-1, keepdim=True) for k, _ in self._levels[1:]]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1).float(), dim=-1).to(query.dtype)
        out = weights[..., :size] @ first_value[:, :, :size]
        for place, (_, later) in enumerate(self._levels[1:]):
            out = out + weights[..., size + place, None] * later[:, :, :size]
        return out.transpose(1, 2).flatten(2)
