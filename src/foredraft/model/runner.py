"""The one target pass: a plan and its drafts in, logits at roots and draft nodes out."""

from __future__ import annotations

from typing import Any

import torch

from foredraft.model.attention import PASS_ARGUMENT
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
    """

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        hidden_layers: tuple[int, ...] = (),
        is_paged: bool = False,
    ) -> None:
        """Keep the parts."""
        self.target = target
        self.cache = cache
        self.hidden_layers = hidden_layers
        self.is_paged = is_paged

    @torch.inference_mode()
    def forward(self, plan: StepPlan, drafts: DraftBatch) -> TargetOutput:
        """Compute every row of the plan and its drafts in one pass.

        Logits are made only for the rows that need them. Keys and values of all rows are written to
        the cache: of committed tokens for good, of draft nodes until the path is known.
        """
        target = self.target
        packed = PackedPass(plan, drafts, self.cache, target.device, target.dtype, self.is_paged)
        num_picks = len(packed.logit_rows)
        wanted = packed.logit_rows
        if packed.prompt_rows:
            spans = [torch.arange(first, end) for first, end in packed.prompt_rows.values()]
            wanted = torch.cat([wanted, *(span.to(target.device) for span in spans)])
        num_rows, num_wanted = packed.input_ids.shape[1], len(wanted)
        options: dict[str, Any] = {PASS_ARGUMENT: packed}
        if target.keeps_logits and (num_wanted < num_rows or packed.prompt_rows):
            options["logits_to_keep"] = wanted
        if self.hidden_layers:
            options["output_hidden_states"] = True
        out = target.model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, **options
        )
        logits = out.logits[0]
        if logits.shape[0] != num_wanted or (packed.prompt_rows and not target.keeps_logits):
            logits = logits[wanted]
        hidden_states = {layer: out.hidden_states[layer][0] for layer in self.hidden_layers}
        logits = logits.float().contiguous()
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
