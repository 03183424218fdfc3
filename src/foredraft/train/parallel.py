"""What Medusa heads learn: each the target's own distribution some tokens further ahead.

Medusa-1 (arXiv 2401.10774, section 2.2): the target stays as it is. Head ``k`` at token ``i``
learns what the target says of token ``i + 2 + k`` once it has read all before it.
"""

from __future__ import annotations

import torch

from foredraft.heads.medusa import MedusaHead
from foredraft.heads.output_law import OutputLaw
from foredraft.train.features import Batch
from foredraft.train.unroll import Losses, Options, teacher_of


def medusa_losses(head: MedusaHead, batch: Batch, output: OutputLaw, options: Options) -> Losses:
    """The losses of all heads over a batch.

    Args:
        head: In training.
        batch: Of the target.
        output: Its output layer.
        options: ``num_levels`` and ``regression`` are not read: heads are as many as there are.
    """
    target_ids = head.target_ids if head.shape.has_own_words else None
    teacher = teacher_of(target_ids, batch, output, options)
    num_tokens = batch.token_ids.shape[1]
    total = output.weight.new_zeros(())
    weight_of_all = 0.0
    survives = batch.is_real
    accepted, counted = [], []
    for level, one in enumerate(head):
        size = num_tokens - 1 - level
        if size < 2:
            break
        goal = teacher.goal(level, size)
        features = batch.features[:, :size][goal.rows].to(output.weight.dtype)
        value, is_same = goal.distance(one(features))
        level_weight = options.decay**level
        total = total + level_weight * value
        weight_of_all += level_weight
        survives = survives[:, :size] & is_same
        accepted.append((survives & goal.is_counted).sum())
        counted.append(goal.is_counted.sum())
    return Losses(total / weight_of_all, torch.stack(accepted), torch.stack(counted))
