"""Should I speculate, with how many draft tokens, up to which batch size?"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.environment import cpu_name, versions
from foredraft.errors import PlanError
from foredraft.plan.acceptance import (
    Survival,
    SurvivalEstimate,
    check_count,
    check_probability,
    quantiles,
)
from foredraft.plan.cost import METHOD_DRAFT_COSTS, StepCost, check_draft_cost
from foredraft.plan.profile import Profile
from foredraft.plan.result import ENOUGH, BatchPlan, Plan, PlanCell
from foredraft.plan.roofline import Roofline
from foredraft.plan.terms import (
    GivenTerms,
    MeasuredTerms,
    RooflineTerms,
    Terms,
    ceiling,
    draft_costs,
)

DEFAULT_MAX_NUM_SPECULATIVE_TOKENS = 32
_MOST_TOKENS = 1024
_WORTH_IT = 1.03  # below this a gain is hardly one
_METHODS = ", ".join(METHOD_DRAFT_COSTS)


def make_plan(
    *,
    acceptance: float | None = None,
    estimate: SurvivalEstimate | None = None,
    alpha: float | None = None,
    t_draft: float | None = None,
    draft_cost: str | None = None,
    roofline: Roofline | None = None,
    profile: Profile | None = None,
    context: int | None = None,
    batches: Sequence[int] = (),
    max_num_speculative_tokens: int = DEFAULT_MAX_NUM_SPECULATIVE_TOKENS,
    method: str | None = None,
) -> Plan:
    """Work out whether drafting pays, and how much of it.

    Args:
        acceptance: Constant acceptance of a draft token; or
        estimate: acceptance from recorded steps. One of the two.
        alpha: Marginal cost of one more draft token, in plain decode steps; or
        roofline: a model on a machine; or
        profile: what was measured. One of the three.
        t_draft: Draft time in plain decode steps. Not given, it is the profile's; else 0 for a
            method that looks drafts up, and refused for one that computes them.
        draft_cost: How draft time counts; not given, as is usual for the method.
        context: Tokens of each request in the cache; for a roofline or a profile. Not given, 1024
            for a roofline and the shortest measured for a profile.
        batches: Batch sizes; the first is the one the verdict begins with. Not given, 1 or those
            that were measured.
        max_num_speculative_tokens: Largest N to look at.
        method: How drafts are made; not given, ``ngram``.

    Raises:
        PlanError: A number is out of range, two contradict each other, or one is missing.
    """
    if (acceptance is None) == (estimate is None):
        raise PlanError(
            "acceptance must come from one place: give either an acceptance (from 0 to 1) or a "
            "trace of recorded steps."
        )
    most = check_count("max_num_speculative_tokens", max_num_speculative_tokens, 1)
    if most > _MOST_TOKENS:
        raise PlanError(f"max_num_speculative_tokens is {most}; allowed is up to {_MOST_TOKENS}.")
    batches = _check_batches(batches)
    if acceptance is not None:
        survival = Survival(1.0, (), check_probability("acceptance", acceptance))
        replicates: tuple[Survival, ...] = ()
        overall = float(acceptance)
    else:
        assert estimate is not None
        survival, replicates = estimate.survival, estimate.replicates
        overall = estimate.acceptance or 0.0
    name = method or "ngram"
    terms = _choose_terms(alpha, roofline, profile, t_draft, draft_cost, context, name)
    if isinstance(terms, GivenTerms) and len(batches) > 1:
        raise PlanError(
            f"alpha is one number, so it holds for one batch size, but {len(batches)} are given; "
            "give one, or a profile, or a model config and hardware."
        )
    rows = tuple(
        _plan_batch(terms, batch, most, survival, replicates)
        for batch in batches or terms.default_batches()
    )
    known = terms.known_batches()
    edge = _break_even(terms, known, most, survival)
    return Plan(
        method=name,
        draft_cost=terms.draft_cost,
        source=terms.source,
        acceptance=overall,
        survival=survival,
        batches=rows,
        break_even_batch=edge,
        most_known_batch=known[-1] if known else None,
        verdict=_verdict(terms, rows[0], most, survival, edge, known),
        notes=_notes(terms, rows, most, survival, estimate),
    )


def _check_batches(batches: Sequence[int]) -> list[int]:
    checked = [check_count("batch", batch, 1) for batch in batches]
    if len(set(checked)) < len(checked):
        raise PlanError(f"batch is given as {checked}; give each size once.")
    return checked


def _choose_terms(
    alpha: float | None,
    roofline: Roofline | None,
    profile: Profile | None,
    t_draft: float | None,
    draft_cost: str | None,
    context: int | None,
    method: str,
) -> Terms:
    given = [
        name
        for name, value in (
            ("alpha", alpha),
            ("a model config with hardware", roofline),
            ("a profile", profile),
        )
        if value is not None
    ]
    if len(given) != 1:
        what = "none is given" if not given else f"given are {' and '.join(given)}"
        raise PlanError(
            f"costs must come from one place, but {what}; give an alpha, or a model config with "
            "hardware, or a profile."
        )
    if draft_cost is not None:
        check_draft_cost(draft_cost)
    if profile is not None:
        if t_draft is not None:
            draft_cost = draft_cost or _usual_cost(method)
        elif draft_cost is not None:
            raise PlanError(
                "draft_cost is given, but the draft time is the profile's, which says itself how "
                "it counts; give t_draft too, or leave draft_cost out."
            )
        return MeasuredTerms(profile, method, context, t_draft, draft_cost)
    draft_cost = draft_cost or _usual_cost(method)
    if t_draft is None:
        if draft_cost != "once":
            raise PlanError(
                f"t_draft is not given, but drafting costs time for each token or level "
                f"(draft_cost {draft_cost}); give it, in plain decode steps: 0.05 is a draft model "
                "20 times as fast as the target."
            )
        t_draft = 0.0
    if roofline is not None:
        return RooflineTerms(roofline, 1024 if context is None else context, t_draft, draft_cost)
    if context is not None:
        raise PlanError(
            "context is given, but alpha is one number whatever the context; give a profile, or a "
            "model config and hardware, or leave context out."
        )
    assert alpha is not None
    return GivenTerms(StepCost(alpha, t_draft, draft_cost))


def _usual_cost(method: str) -> str:
    if method not in METHOD_DRAFT_COSTS:
        raise PlanError(
            f"method is {method!r}, of which it is not known how draft time counts; known are "
            f"{_METHODS}. Give draft_cost."
        )
    return METHOD_DRAFT_COSTS[method]


def _plan_batch(
    terms: Terms,
    num_requests: int,
    most: int,
    survival: Survival,
    replicates: Sequence[Survival],
) -> BatchPlan:
    verify = [terms.verify_cost(n, num_requests) for n in range(most + 1)]
    expected, costs = _outcomes(terms, num_requests, verify, survival)
    speedups = [e / c for e, c in zip(expected, costs, strict=True)]
    drawn: list[list[float]] = [[] for _ in range(most + 1)]
    for replicate in replicates:
        for n, (e, c) in enumerate(
            zip(*_outcomes(terms, num_requests, verify, replicate), strict=True)
        ):
            drawn[n].append(e / c)
    slack = 1.0 + terms.uncertainty
    cells = []
    for n in range(most + 1):
        low: float | None = None
        high: float | None = None
        if n and (replicates or slack > 1.0):
            low, high = quantiles(drawn[n]) if replicates else (speedups[n], speedups[n])
            low, high = min(low, speedups[n]) / slack, max(high, speedups[n]) * slack
        elif replicates or slack > 1.0:
            low = high = 1.0
        cells.append(PlanCell(n, expected[n], costs[n], speedups[n], low, high))
    best = speedups.index(max(speedups))
    return BatchPlan(
        num_requests=num_requests,
        alpha=terms.alpha(best, num_requests),
        t_draft=terms.t_draft(num_requests),
        ceiling=ceiling(terms, num_requests, most),
        cells=tuple(cells),
    )


def _outcomes(
    terms: Terms, num_requests: int, verify: Sequence[float], survival: Survival
) -> tuple[list[float], list[float]]:
    """Expected tokens and costs of a step, for every N.

    Args:
        terms: Costs.
        num_requests: Batch size.
        verify: Cost of a verify pass with 0, 1, 2, ... draft tokens a request.
        survival: Acceptance. Steps without a draft verify nothing, so that a request has
            ``draft_share * N`` draft tokens on average.
    """
    most = len(verify) - 1
    drafts = draft_costs(terms, num_requests, most, survival.draft_share)
    expected, costs = [1.0], [1.0]
    for n, alive in enumerate(survival.by_position(most), start=1):
        expected.append(expected[-1] + alive)
        costs.append(drafts[n] + _between(verify, survival.draft_share * n))
    return expected, costs


def _between(values: Sequence[float], place: float) -> float:
    lower = min(int(place), len(values) - 1)
    upper = min(lower + 1, len(values) - 1)
    return values[lower] + (values[upper] - values[lower]) * (place - lower)


def _pays(terms: Terms, num_requests: int, most: int, survival: Survival) -> bool:
    verify = [terms.verify_cost(n, num_requests) for n in range(most + 1)]
    expected, costs = _outcomes(terms, num_requests, verify, survival)
    return any(e > c for e, c in zip(expected[1:], costs[1:], strict=True))


def _break_even(terms: Terms, known: Sequence[int], most: int, survival: Survival) -> int | None:
    """Batch size from which no draft pays any more: looked for among ``known``, then between two.

    A mixture of experts can lose at batch 1, where each row touches new experts, and win beyond;
    so what counts is the largest batch that pays.
    """
    last = None
    for index, batch in enumerate(known):
        if _pays(terms, batch, most, survival):
            last = index
    if last is None:
        return known[0] if known else None
    if last == len(known) - 1:
        return None
    before, after = known[last], known[last + 1]
    while after - before > 1:
        middle = (before + after) // 2
        if _pays(terms, middle, most, survival):
            before = middle
        else:
            after = middle
    return after


def _least_acceptance(terms: Terms, num_requests: int, most: int) -> float | None:
    """Return the constant acceptance from which a draft pays; ``None`` if not even 1 does."""
    if not _pays(terms, num_requests, most, Survival(1.0, (), 1.0)):
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        pays = _pays(terms, num_requests, most, Survival(1.0, (), middle))
        low, high = (low, middle) if pays else (middle, high)
    return high


def _verdict(
    terms: Terms,
    batch: BatchPlan,
    most: int,
    survival: Survival,
    edge: int | None,
    known: Sequence[int],
) -> str:
    where = f" at batch {batch.num_requests}" if known or batch.num_requests > 1 else ""
    cell = batch.best_draft
    n = cell.num_speculative_tokens
    tokens = f"{n} draft token{'s' if n > 1 else ''}"
    sentences = []
    if cell.speedup <= 1.0:
        sentences.append(
            f"Leave it off{where}: no draft is expected to beat plain decoding, the best "
            f"({tokens}) runs at {cell.speedup:.2f} of it."
        )
        if cell.spans_one:
            sentences.append(_doubt(cell))
        least = _least_acceptance(terms, batch.num_requests, most)
        if least is None:
            sentences.append("Not even an acceptance of 1 would change that.")
        elif survival.draft_share == 1.0:
            sentences.append(_from_which(least))
    else:
        sure = "" if cell.low is None else f" ({cell.low:.2f} to {cell.high:.2f})"
        start = "Speculate" if cell.speedup >= _WORTH_IT else "It hardly pays"
        link = " with" if cell.speedup >= _WORTH_IT else ", with"
        sentences.append(
            f"{start}{where}{link} {tokens}: {cell.speedup:.2f} times plain decoding "
            f"expected{sure}."
        )
        if cell.spans_one:
            sentences.append(_doubt(cell))
    if isinstance(terms, RooflineTerms):
        fits = terms.roofline.most_requests(terms.context)
        if fits is not None and fits < batch.num_requests:
            sentences.append(
                f"But only {fits} requests of this context fit into the memory of one "
                f"{terms.roofline.hardware.name}."
                if fits
                else f"But the model does not fit into the memory of one "
                f"{terms.roofline.hardware.name}."
            )
    if edge is not None and edge > batch.num_requests:
        if cell.speedup <= 1.0 and edge > 1:
            sentences.append(f"It pays at larger batches, up to {edge - 1}.")
        sentences.append(f"Leave it off from batch {edge} on.")
    elif edge is None and known and cell.speedup <= 1.0:
        sentences.append(f"It pays at larger batches, up to {known[-1]}, the largest known.")
    elif edge is None and len(known) > 1:
        sentences.append(f"Some draft pays at every batch known, {known[0]} to {known[-1]}.")
    return " ".join(sentences)


def _from_which(acceptance: float) -> str:
    if acceptance < 0.005:
        return "It would pay from any acceptance above 0."
    if acceptance > 0.995:
        return "It would pay only where nearly everything is accepted."
    return f"It would pay from an acceptance of {acceptance:.2f}."


def _doubt(cell: PlanCell) -> str:
    return (
        f"The interval, {cell.low:.2f} to {cell.high:.2f}, spans 1: measure more before deciding."
    )


def _elsewhere(profile: Profile) -> list[str]:
    """What tells a profile from one that would be measured here and now."""
    notes = []
    theirs, ours = profile.machine.get("cpu"), cpu_name()
    if theirs is not None and theirs != ours:
        notes.append(
            f"the profile was measured on another machine ({theirs}; this one is {ours}), and the "
            "plan holds for that one"
        )
    here = versions()
    others = [
        f"{package} {profile.versions[package]} (here {here[package]})"
        for package in ("foredraft", "torch", "transformers")
        if package in profile.versions and profile.versions[package] != here[package]
    ]
    if others:
        notes.append(
            f"the profile was measured with {', '.join(others)}; measure again with 'foredraft "
            "profile'"
        )
    return notes


def _measured_notes(terms: MeasuredTerms, rows: Sequence[BatchPlan], most: int) -> list[str]:
    """Where the costs are from, and where they were not measured."""
    profile = terms.profile
    measured = [row.num_requests for row in rows if row.num_requests in profile.batches()]
    contexts = {batch: terms.context_of(batch) for batch in measured}
    notes = _elsewhere(profile)
    if contexts:
        if len(set(contexts.values())) == 1:
            where = f"{next(iter(contexts.values()))} tokens of context"
        else:
            where = ", ".join(f"{c} tokens of context at batch {b}" for b, c in contexts.items())
        wanted = terms.context
        is_far = wanted is not None and any(
            not c / 2 <= wanted <= 2 * c for c in contexts.values() if c or wanted
        )
        notes.append(
            f"costs are those measured with {where}"
            + (f"; nothing nearer to {wanted} was measured" if is_far else "")
        )
    beyond = [
        str(batch)
        for batch, context in contexts.items()
        if not profile.is_measured(batch * (1 + most), batch, context)
    ]
    if beyond:
        notes.append(
            f"at batch {', '.join(beyond)} not so many as {most} draft tokens were measured; the "
            "last slope is taken to go on"
        )
    return notes


def _notes(
    terms: Terms,
    rows: Sequence[BatchPlan],
    most: int,
    survival: Survival,
    estimate: SurvivalEstimate | None,
) -> tuple[str, ...]:
    notes = []
    best, enough = rows[0].best.num_speculative_tokens, rows[0].enough.num_speculative_tokens
    if 0 < enough < best:
        tokens = "1 draft token already reaches" if enough == 1 else f"{enough} already reach"
        notes.append(f"{tokens} {ENOUGH:.0%} of what {best} do")
    if any(row.best.num_speculative_tokens == most for row in rows):
        notes.append(f"the best N is the largest looked at, {most}; a larger one may be better")
    if estimate is not None and estimate.is_chosen:
        notes.append(
            "the trace was recorded while 'auto' chose how much to draft, which flatters long "
            "drafts; record with a fixed --num-speculative-tokens for a fair figure"
        )
    if estimate is None:
        notes.append(
            "acceptance was given, so there is no interval for it; record steps with --trace to "
            "get one"
        )
    elif survival.draft_share < 1.0:
        notes.append(
            f"{1 - survival.draft_share:.0%} of the recorded steps had no draft; the figures are "
            "over all steps"
        )
    if estimate is not None and len(survival.conditional) < max(
        r.best.num_speculative_tokens for r in rows
    ):
        notes.append(
            f"positions beyond {len(survival.conditional)} were not recorded; they are taken to "
            f"have the overall acceptance, {survival.beyond:.2f}"
        )
    if isinstance(terms, MeasuredTerms):
        notes += _measured_notes(terms, rows, most)
        others = [] if estimate is None else set(estimate.models) - {terms.profile.model}
        if others:
            notes.append(
                f"the steps were recorded with {', '.join(sorted(others))}, and the profile is of "
                f"{terms.profile.model}; the plan holds for neither unless they are one model"
            )
    if isinstance(terms, RooflineTerms):
        notes.append(
            "a roofline takes every kernel to reach the machine's peak and drafting to cost the "
            "same share at every batch; measure before relying on it"
        )
        fits = terms.roofline.most_requests(terms.context)
        if fits is not None and fits < max(row.num_requests for row in rows):
            size = terms.roofline.shape.stored_bytes / 1e9
            notes.append(
                f"at this context {fits} requests fit into the memory of one "
                f"{terms.roofline.hardware.name} beside {size:.3g} GB of weights; for several, "
                "give the bandwidth and TFLOPS of all together"
            )
        if any(layer.num_experts for layer in terms.roofline.shape.layers):
            notes.append("experts are taken to be drawn at random, each token on its own")
    return tuple(notes)
