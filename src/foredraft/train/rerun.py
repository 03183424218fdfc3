"""What a draft model learns: the target's own distribution behind every token (distillation).

It reads the text as it stands, so one pass says what it would write everywhere; a chain of its
drafts survives where it agrees with the target on one token after another.
"""

from __future__ import annotations

import torch

from foredraft.heads.draft_model import KeptLayers
from foredraft.heads.output_law import OutputLaw
from foredraft.train.features import Batch
from foredraft.train.unroll import Losses, Options, teacher_of


def draft_losses(draft: KeptLayers, batch: Batch, output: OutputLaw, options: Options) -> Losses:
    """The losses of a batch.

    Args:
        draft: In training.
        batch: Of the target.
        output: Its output layer.
        options: ``num_levels`` says how far survival is counted; ``decay`` and ``regression`` are
            not read.
    """
    target_ids = draft.target_ids if draft.has_own_words else None
    teacher = teacher_of(target_ids, batch, output, options)
    hidden = draft.body(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    num_tokens = batch.token_ids.shape[1]
    goal = teacher.goal(-1, num_tokens)
    value, is_same = goal.distance(teacher.own_words(hidden[goal.rows]))
    survives, accepted, counted = is_same, [], []
    for level in range(min(options.num_levels, num_tokens)):
        survives = survives[:, : num_tokens - level] & is_same[:, level:]
        is_answer = teacher.is_answer[:, : num_tokens - level]
        is_there = batch.is_real[:, level:] & is_answer  # short texts have fewer levels
        accepted.append((survives & is_there).sum())
        counted.append(is_there.sum())
    return Losses(value, torch.stack(accepted), torch.stack(counted))
