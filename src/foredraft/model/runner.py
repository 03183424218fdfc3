"""The one target pass: a plan and its drafts in, logits at roots and draft nodes out."""

from __future__ import annotations

from typing import Any

import torch

from foredraft.model.attention import PASS_ARGUMENT
from foredraft.model.graphs import PassGraphs
from foredraft.model.kv_cache import KVCache
from foredraft.model.loader import Target
from foredraft.model.packing import PackedPass
from foredraft.types import DraftBatch, StepPlan, TargetOutput


class Runner:
    """Runs the target over packed passes.

    Args:
        target: The loaded model.
        cache: Where keys and values lie.
        hidden_layers: Indices into Transformers' ``hidden_states`` (0 is the embedding's output,
            the last is the final, normalised one) to hand out with every pass.
        is_paged: Whether attention reads block tables in place.
        has_graphs: Whether decode passes are recorded and played again (``graphs``).
    """

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        hidden_layers: tuple[int, ...] = (),
        is_paged: bool = False,
        has_graphs: bool = False,
    ) -> None:
        """Keep the parts."""
        self.target = target
        self.cache = cache
        self.hidden_layers = hidden_layers
        self.is_paged = is_paged
        self.graphs = PassGraphs(self._compute, target.device) if has_graphs else None

    @torch.inference_mode()
    def forward(self, plan: StepPlan, drafts: DraftBatch) -> TargetOutput:
        """Compute every row of the plan and its drafts in one pass.

        Logits are made only for the rows that need them. Keys and values of all rows are written to
        the cache: of committed tokens for good, of draft nodes until the path is known.
        """
        target = self.target
        room = self.graphs.room(plan, drafts) if self.graphs is not None else None
        packed = PackedPass(
            plan, drafts, self.cache, target.device, target.dtype, self.is_paged, room
        )
        if self.graphs is not None and room is not None:
            logits, hidden_states = self.graphs.run(packed, room, self.hidden_layers)
            num_rows = int(packed.row_offsets[-1])
            hidden_states = {layer: rows[:num_rows] for layer, rows in hidden_states.items()}
        else:
            logits, hidden_states = self._compute(packed)
        num_picks = int(packed.logit_offsets[-1])
        prompt_logits: dict[int, torch.Tensor] = {}
        begin = num_picks
        for index, (first, end) in packed.prompt_rows.items():
            prompt_logits[index] = logits[begin : begin + end - first]
            begin += end - first
        return TargetOutput(
            logits[:num_picks],
            packed.logit_offsets,
            hidden_states,
            packed.row_offsets,
            prompt_logits,
        )

    def _compute(self, packed: PackedPass) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits of the rows that need them, those of prompts last, and hidden states of all."""
        target = self.target
        wanted = packed.wanted_rows
        options: dict[str, Any] = {PASS_ARGUMENT: packed}
        if target.keeps_logits and wanted is not None:
            options["logits_to_keep"] = wanted
        if self.hidden_layers:
            options["output_hidden_states"] = True
        out = target.model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, **options
        )
        logits = out.logits[0]
        if wanted is not None and not (target.keeps_logits and len(logits) == len(wanted)):
            logits = logits[wanted]
        hidden_states = {layer: out.hidden_states[layer][0] for layer in self.hidden_layers}
        return logits.float().contiguous(), hidden_states
