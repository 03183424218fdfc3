"""What Medusa heads learn: each the target's own distribution some tokens further ahead.

Medusa-1 (arXiv 2401.10774, section 2.2): the target stays as it is. Head ``k`` at token ``i``
learns what the target says of token ``i + 2 + k`` once it has read all before it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from foredraft.heads.medusa import MedusaHead
from foredraft.train.features import Batch
from foredraft.train.unroll import Losses, Options, mean


def medusa_losses(
    head: MedusaHead, batch: Batch, output_weight: torch.Tensor, options: Options
) -> Losses:
    """The losses of all heads over a batch.

    Args:
        head: In training.
        batch: Of the target.
        output_weight: Of its output layer, [vocab_size, hidden_size].
        options: ``num_levels`` and ``regression`` are not read: heads are as many as there are.
    """
    own_words = output_weight[head.target_ids] if head.shape.has_own_words else output_weight
    num_tokens = batch.token_ids.shape[1]
    total = output_weight.new_zeros(())
    weight_of_all = 0.0
    survives = batch.is_real
    accepted, counted = [], []
    for level, one in enumerate(head):
        size = num_tokens - 1 - level
        if size < 2:
            break
        read = slice(1 + level, 1 + level + size)
        is_real = batch.is_real[:, read]
        after = functional.pad(batch.is_answer, (0, 1))[:, 2 + level : 2 + level + size]
        is_answer = (after | batch.is_answer[:, read]) & is_real
        weight = torch.where(is_answer, 1.0, options.prompt_weight) * is_real
        rows = weight > 0
        student = one(batch.features[:, :size][rows].to(output_weight.dtype)).float()
        with torch.no_grad():
            teacher = batch.final[:, read][rows].to(output_weight.dtype)
            logits = functional.linear(teacher, own_words).float()
            law = torch.softmax(logits, dim=-1)
        per_row = torch.logsumexp(student, dim=-1) - (law * student).sum(dim=-1)
        level_weight = options.decay**level
        total = total + level_weight * mean(per_row, weight[rows])
        weight_of_all += level_weight
        with torch.no_grad():
            is_same = torch.zeros_like(rows)
            is_same[rows] = student.argmax(-1) == logits.argmax(-1)
            survives = survives[:, :size] & is_same
            accepted.append((survives & is_answer).sum())
            counted.append(is_answer.sum())
    return Losses(total / weight_of_all, torch.stack(accepted), torch.stack(counted))
