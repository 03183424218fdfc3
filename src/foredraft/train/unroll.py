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

from foredraft.heads.recurrent import Output, RecurrentHead
from foredraft.train.features import Batch


@dataclass(frozen=True, slots=True)
class Options:
    """How the levels count.

    Attributes:
        num_levels: Levels that are unrolled.
        decay: Weight of a level over that of the one before.
        prompt_weight: Weight of tokens of prompts, where those of answers count 1.
        regression: Weight of the distance to the target's own feature (EAGLE-1), 0 for none.
    """

    num_levels: int = 4
    decay: float = 0.8
    prompt_weight: float = 0.2
    regression: float = 0.0


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


class Goal:
    """What the rows of a level are to say: row ``i`` the target's words behind ``i + 1 + level``.

    Args:
        batch: Of the target.
        own_words: Rows of its output layer for the words of the head, [num_words, hidden_size].
        level: From 0.
        size: Rows of it.
        prompt_weight: Of tokens of prompts.

    Attributes:
        teacher: [B, size, hidden_size], what the target's output layer reads there.
        is_answer: bool [B, size], rows that tell of an answer's token.
        weight: [B, size].
        rows: bool [B, size], those that count at all.
    """

    def __init__(
        self,
        batch: Batch,
        own_words: torch.Tensor,
        level: int,
        size: int,
        prompt_weight: float,
    ) -> None:
        """Find them."""
        read = slice(1 + level, 1 + level + size)
        is_real = batch.is_real[:, read]
        after = functional.pad(batch.is_answer, (0, 1))[:, 2 + level : 2 + level + size]
        self._own_words = own_words
        self.teacher = batch.final[:, read]
        self.is_answer = (after | batch.is_answer[:, read]) & is_real
        self.weight = torch.where(self.is_answer, 1.0, prompt_weight) * is_real
        self.rows = self.weight > 0

    def distance(self, student: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How far a head is from it.

        Args:
            student: Its logits at ``rows``, [num_rows, num_words].

        Returns:
            The cross-entropy of each row, [num_rows], and bool [B, size], where both agree on the
            likeliest word.
        """
        student = student.float()
        with torch.no_grad():
            teacher = self.teacher[self.rows].to(self._own_words.dtype)
            logits = functional.linear(teacher, self._own_words).float()
            law = torch.softmax(logits, dim=-1)
            is_same = torch.zeros_like(self.rows)
            is_same[self.rows] = student.argmax(-1) == logits.argmax(-1)
        return torch.logsumexp(student, dim=-1) - (law * student).sum(dim=-1), is_same


def losses(
    head: RecurrentHead,
    batch: Batch,
    embed: torch.nn.Module,
    output_weight: torch.Tensor,
    options: Options,
) -> Losses:
    """Unroll a head over a batch.

    Args:
        head: In training.
        batch: Of the target.
        embed: Its embedding.
        output_weight: Of its output layer, [vocab_size, hidden_size].
        options: See there.
    """
    num_rows = batch.token_ids.shape[1] - 1
    own_words = output_weight[head.target_ids] if head.shape.has_own_words else output_weight
    output: Output | None = None
    if head.shape.kind != "eagle3":

        def output(hidden: torch.Tensor) -> torch.Tensor:
            return functional.linear(hidden, own_words)

    features = batch.features[:, :num_rows].to(output_weight.dtype)
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
        goal = Goal(batch, own_words, level, size, options.prompt_weight)
        per_row, is_same = goal.distance(head.logits(hidden[goal.rows], output))
        value = mean(per_row, goal.weight[goal.rows])
        if options.regression:
            distance = functional.smooth_l1_loss(
                hidden.float(), goal.teacher, reduction="none"
            ).mean(-1)
            value = 0.1 * value + options.regression * mean(distance, goal.weight)
        level_weight = options.decay**level
        total = total + level_weight * value
        weight_of_all += level_weight
        survives = survives[:, :size] & is_same
        accepted.append((survives & goal.is_answer).sum())
        counted.append(goal.is_answer.sum())
    return Losses(total / weight_of_all, torch.stack(accepted), torch.stack(counted))


def mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean."""
    return (values * weights).sum() / weights.sum().clamp(min=1.0)


class _Unrolled:
    """Attention of the levels: level 0 is causal; a later one sees level 0 and its own column.

    Keys and values of the levels are kept between the calls; the first call is level 0.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._levels: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).triu(1)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See ``heads.layer.Attend``."""
        share = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        self._levels.append((key, value))
        size = query.shape[2]
        if len(self._levels) == 1:
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return out.transpose(1, 2).flatten(2)
        query = query * query.shape[-1] ** -0.5
        first_key, first_value = self._levels[0]
        scores = query @ first_key[:, :, :size].transpose(-1, -2)
        scores = scores.masked_fill(self._is_later[:size, :size], -torch.inf)
        own = [(query * k[:, :, :size]).sum(-1, keepdim=True) for k, _ in self._levels[1:]]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1).float(), dim=-1).to(query.dtype)
        out = weights[..., :size] @ first_value[:, :, :size]
        for place, (_, later) in enumerate(self._levels[1:]):
            out = out + weights[..., size + place, None] * later[:, :, :size]
        return out.transpose(1, 2).flatten(2)
