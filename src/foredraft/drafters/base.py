"""The drafter contract: propose before the target pass, observe after the commit, then forget.

A drafter guesses; the target decides. Under the default rule (``walk``) every emitted token is the
target's own pick, and a pick never looks at the draft: whatever a drafter proposes, however it came
by it, and however wrong it is, the text stays the same, token for token. A drafter can only change
how many target passes the text takes. Two things are still asked of every drafter, because they
protect the run and not the text: it keeps to its budget, and it proposes ids of the vocabulary.

Under a classical rule (``rejection``, ``block``, ``traversal``) the text keeps its law only if each
drafted token comes with the very distribution it was drawn from, or is declared a point mass: a
choice that depends on nothing but committed tokens. See ``DraftBatch.draft_probs`` and
``DraftBatch.dist_ids``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from foredraft.params import VERIFICATIONS
from foredraft.types import (
    Budgets,
    DraftBatch,
    Int64Array,
    Request,
    StepPlan,
    TargetOutput,
    Verdict,
)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter must be given; the engine reads this and never a drafter's name.

    Attributes:
        hidden_layers: The target's layers whose hidden states ``observe`` reads from
            ``TargetOutput.hidden_states``; empty for a drafter that reads none.
        draft_probs: Whether its drafts are drawn at random, so that a classical rule needs the
            distributions in ``DraftBatch.draft_probs``. False means every token is a point mass.
        cost: What the time to draft is counted by: ``once`` a draft (n-gram, Medusa), once a
            ``per_level`` of its tree or ``per_token`` of its chain (a draft model, EAGLE, MTP).
        sees_noise: Whether its drafts depend on the target's noise at their positions. Then the
            target's probability of a token is not the chance that it is picked.
        rules: The verification rules that its drafts are fit for.
        is_whole: Whether a draft is worth having only as a whole, for what the target says of it
            and not for what is accepted alone. Then ``auto`` never trims it, but asks for all of it
            or nothing.
        learns: Whether what it drafts for one request depends on others before it. One that does
            not is kept where a comparison begins anew.
        members: Where several draft together, those whose drafts take time, and how it is counted:
            each gets its own share of the budget, ``Budgets.member_nodes``.
    """

    hidden_layers: tuple[int, ...] = ()
    draft_probs: bool = False
    cost: str = "once"
    sees_noise: bool = False
    rules: tuple[str, ...] = VERIFICATIONS
    is_whole: bool = False
    learns: bool = True
    members: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is told about the target, once.

    Attributes:
        vocab_size: Size of the target's vocabulary; every drafted id is below it.
        max_model_len: Most tokens (prompt and output) a request can ever hold.
        tokenizer: The target's tokenizer (Transformers' own), or ``None`` where it has none.
        method: The name under which requests ask for it.
        max_num_requests: Most requests that it drafts for at once.
        device: Where the target lies, as PyTorch writes it.
        weight_bytes: Of the target's weights; 0 where that is not known.
        target: The loaded target (``model.loader.Target``), for heads, which read with its
            embedding and may write with its output layer; ``None`` in tests of other drafters.
    """

    vocab_size: int
    max_model_len: int
    tokenizer: Any = None
    method: str = ""
    max_num_requests: int = 16
    device: str = "cpu"
    weight_bytes: int = 0
    target: Any = None


class Drafter(ABC):
    """Proposes tokens for the target to verify. Exact under the default rule, whatever it proposes.

    State is kept by request id. It is made at the first ``propose`` (or ``observe``) that needs it,
    from ``Segment.token_ids``, so a request may be met in mid-life; it only ever follows committed
    tokens, so there is nothing to roll back when a draft is rejected; and ``forget`` drops it.

    Attributes:
        Config: The method's own config, a frozen dataclass that checks itself; the engine builds it
            from the options given for the method.
        needs: What the engine must supply; a class attribute, or set by ``__init__`` where it
            depends on the config.
        member_seconds: Wall time that each of ``needs.members`` took in the last ``propose``.
    """

    Config: ClassVar[type[Any]]
    needs: Needs = Needs()
    member_seconds: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def __init__(self, config: Any, context: DrafterContext) -> None:
        """Make a drafter that knows no request yet.

        Args:
            config: An instance of ``Config``.
            context: Facts about the target.
        """

    @property
    def num_state_bytes(self) -> int:
        """Bytes held on the host for requests and past texts; 0, the default, is not counted."""
        return 0

    @abstractmethod
    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        """Propose one token tree for each segment of the step.

        Args:
            plan: Who runs. The last of a segment's ``token_ids`` is the root; drafts come after it.
            budgets: Most nodes for each segment, already cut to the room left in the context and
                to what the request asked for. It is 0 where plain decoding was chosen and for every
                segment that is not a decode step.

        Returns:
            A batch with ``len(plan.segments) + 1`` offsets. A segment never has more nodes than its
            budget, and none where the budget is 0; fewer, or none, is always allowed. Parents come
            before their children, no two siblings hold the same token (unless they were drawn with
            replacement, which the batch then says), and every id is in ``[0, vocab_size)``. Where
            ``segment.request.speculation.allows_trees`` is false, the tree is a chain.
        """

    def observe(
        self, plan: StepPlan, drafts: DraftBatch, target: TargetOutput, verdict: Verdict
    ) -> None:
        """Look at what a step brought; called after the commit of every step, prompt chunks too.

        The default does nothing, for drafters that read committed tokens alone.

        Args:
            plan: The plan of the step; its ``token_ids`` are those from before the commit.
            drafts: What was verified: of every method, and after it was trimmed.
            target: What the target pass gave, for every row of the step.
            verdict: What was accepted and emitted, before any stop rule.
        """
        return None

    def finish(self, request: Request, token_ids: Int64Array) -> None:
        """Look at a whole text; called when a request ended by itself, before it is forgotten.

        It is called for every request of the engine, whatever its method. The default does nothing,
        for drafters that keep nothing of a text that has ended.

        Args:
            request: The request.
            token_ids: int64 [length], prompt and output, after every stop rule.
        """
        return None

    def renew(self) -> bool:
        """Forget what was learnt from other requests; whether there is nothing more of it.

        Called where a comparison begins anew and nothing runs. Who returns False is made anew.
        """
        return not self.needs.learns

    def close(self) -> None:
        """Let go of what outlives a request: called once, when the engine is closed."""
        return None

    def forget(self, request_id: str) -> None:
        """Drop everything kept for a request that has ended; an unknown id is no error.

        The default does nothing, for drafters without state.

        Args:
            request_id: The request that ended, for whatever reason.
        """
        return None


def close_all(drafters: Iterable[Drafter]) -> None:
    """Close every drafter, and then raise the first error that one of them raised."""
    errors = []
    for drafter in drafters:
        try:
            drafter.close()
        except Exception as error:  # noqa: BLE001 - the others are to be closed all the same
            errors.append(error)
    if errors:
        raise errors[0]
