"""Replays recorded answers through arctic-inference's suffix cache; run by its own interpreter.

Usage: python arctic_replay.py STREAMS.json BUDGET. The last line printed is a JSON list of cells as
``foredraft.bench.drafters`` makes them. It imports nothing of foredraft.
"""

import json
import statistics
import sys
import time
from typing import Any

import numpy as np

_NAME = "arctic-inference"


def _replay(cache: Any, texts: list[Any], budget: int, is_warm: bool) -> dict[str, Any]:
    accepted = steps = drafted = 0
    times = []
    for index, (prompt, output) in enumerate(texts):
        name = f"{is_warm}-{index}"
        text = prompt + output
        cache.start_request(name, np.array(prompt, dtype=np.int32))
        length, new = len(prompt) + 1, text[len(prompt) : len(prompt) + 1]
        while length < len(text):
            recent = np.array(text[max(0, length - 64) : length], dtype=np.int32)
            added = np.array(new, dtype=np.int32)
            most = min(budget, len(text) - length)
            started = time.perf_counter()
            cache.add_active_response(name, added)
            draft = cache.speculate(
                name, recent, max_spec_tokens=most, max_spec_factor=2.0, use_tree_spec=True
            )
            times.append(time.perf_counter() - started)
            ids, parents = list(draft.token_ids), list(draft.parents)
            row, num = -1, 0
            while length + num + 1 < len(text):
                found = [
                    node
                    for node, (token, parent) in enumerate(zip(ids, parents))  # noqa: B905
                    if parent == row and token == text[length + num]
                ]
                if not found:
                    break
                row, num = found[0], num + 1
            accepted, steps, drafted = accepted + num, steps + 1, drafted + len(ids)
            new = text[length : length + num + 1]
            length += num + 1
        cache.add_active_response(name, np.array(new, dtype=np.int32))
        cache.stop_request(name)
    return {
        "what": "replay",
        "method": _NAME,
        "warm": is_warm,
        "accepted_per_step": accepted / steps,
        "drafted_per_step": drafted / steps,
        "us_per_step": statistics.median(times) * 1e6,
    }


def main() -> None:
    """Replay cold, then again with every answer in the cache."""
    from arctic_inference.suffix_decoding import (  # type: ignore[import-not-found]
        SuffixDecodingCache,
    )

    with open(sys.argv[1], encoding="utf-8") as file:
        texts = json.load(file)
    budget = int(sys.argv[2])
    cache = SuffixDecodingCache(max_tree_depth=64)
    cells = [_replay(cache, texts, budget, is_warm) for is_warm in (False, True)]
    print(json.dumps(cells))  # noqa: T201


if __name__ == "__main__":
    main()
