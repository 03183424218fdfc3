"""``foredraft plan`` as people use and misuse it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.main import main
from foredraft.plan.profile import DraftTime
from foredraft.plan.trace import append_trace, trace_line
from tests.unit.test_plan_planner import draw_steps, make_profile
from tests.unit.test_plan_roofline import LLAMA

NUMBERS = ("--acceptance", 0.8, "--alpha", 0.1)
KEYS = {
    "best_num_speculative_tokens", "expected_tokens", "speedup", "speedup_interval", "ceiling",
    "break_even_batch", "verdict", "table",
}  # fmt: skip
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_it(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(["plan", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run_it


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return tmp_path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    drafts = {"ngram": DraftTime(0.01, "once"), "eagle": DraftTime(0.1, "per_token")}
    make_profile({1: 0.05, 4: 0.2, 16: 0.9}, **drafts).save(path)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = (
        trace_line("ngram", 1, 0.0, 90, draw_steps([0.8] * 8, 40, seed), 30.0) for seed in range(10)
    )
    append_trace(path, lines)
    return path


def _json(run: Run, *arguments: Any) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    assert set(result) >= KEYS
    return result


def _refused(run: Run, *arguments: Any) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


def test_numbers(run: Run) -> None:
    result = _json(run, *NUMBERS)
    assert result["best_num_speculative_tokens"] == 6
    assert result["expected_tokens"] == pytest.approx(3.951, abs=1e-3)
    assert result["speedup"] == pytest.approx(3.951 / 1.6, abs=1e-3)
    assert result["ceiling"] == pytest.approx(10)
    assert result["break_even_batch"] is None and result["speedup_interval"] is None
    assert _json(run, "--acceptance", 0.5, "--alpha", 0)["ceiling"] is None


def test_what_people_see(run: Run) -> None:
    code, out, err = run(*NUMBERS, "--t-draft", 0.05)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "numbers as given: alpha 0.1, t_draft 0.05"
    assert lines[-1] == "Speculate with 6 draft tokens: 2.39 times plain decoding expected."
    assert any("best N" in line and "ceiling" in line for line in lines)
    off = run("--acceptance", 0.2, "--alpha", 0.5)[1]
    assert off.splitlines()[-1].startswith("Leave it off:")


def test_a_roofline(run: Run, model: Path) -> None:
    options = ("--acceptance", 0.7, "--model-config", model, "--context", 0)
    named = _json(run, *options, "--hardware", "H100-SXM")
    assert 200 < named["break_even_batch"] <= 296
    assert [row["batch"] for row in named["table"]][:3] == [1, 2, 4]
    own = _json(run, *options, "--bandwidth-gb-s", 3350, "--tflops", 989)
    assert own["speedup"] == named["speedup"]
    file = _json(
        run, "--acceptance", 0.7, "--model-config", model / "config.json", "--hardware", "T4",
        "--batch", 8, "--batch", 2, "--weight-bits", 4,
    )  # fmt: skip
    assert [row["batch"] for row in file["table"]] == [8, 2]
    assert file["speedup"] == file["table"][0]["speedup"]


def test_a_profile_and_a_trace(run: Run, profile: Path, trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = _json(run, "--profile", profile, "--trace", trace, "--html", page)
    low, high = result["speedup_interval"]
    assert low < result["speedup"] < high
    assert result["acceptance"] == pytest.approx(0.8, abs=0.03)
    assert 4 < result["break_even_batch"] <= 16
    assert page.read_text(encoding="utf-8").count("<svg") == 5
    eagle = _json(run, "--profile", profile, "--acceptance", 0.8, "--method", "eagle")
    assert eagle["draft_cost"] == "per_token"


def test_emit_alone_and_in_json(run: Run) -> None:
    code, out, _ = run(*NUMBERS, "--emit", "vllm")
    assert code == 0
    assert out.splitlines()[-1].startswith("vllm serve MODEL --speculative-config '{")
    result = _json(run, *NUMBERS, "--emit", "tgi")
    assert result["emit"]["text"].endswith("--speculate 6")
    head = _json(
        run, *NUMBERS, "--method", "eagle3", "--t-draft", 0.05, "--draft-model", "a/b", "--emit",
        "sglang",
    )  # fmt: skip
    assert "--speculative-draft-model-path a/b" in head["emit"]["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "neither --acceptance nor --trace is given"),
        (("--acceptance", 0.8), "costs must come from one place, but none is given"),
        (("--acceptance", 1.5, "--alpha", 0.1), "acceptance is 1.5"),
        (("--acceptance", "nan", "--alpha", 0.1), "acceptance is nan"),
        (("--acceptance", "high", "--alpha", 0.1), "see 'foredraft plan --help'"),
        (("--acceptance", 0.8, "--alpha", -0.1), "alpha is -0.1"),
        ((*NUMBERS, "--batch", 0), "batch is 0; allowed is an integer of 1 or more"),
        ((*NUMBERS, "--batch", 1, "--batch", 2), "it holds for one batch size"),
        ((*NUMBERS, "--t-draft", -1), "t_draft is -1"),
        ((*NUMBERS, "--draft-cost", "twice"), "draft_cost is 'twice'"),
        ((*NUMBERS, "--max-num-speculative-tokens", 0), "max_num_speculative_tokens is 0"),
        ((*NUMBERS, "--method", "magic"), "method is 'magic'"),
        ((*NUMBERS, "--emit", "abacus"), "engine is 'abacus'"),
        ((*NUMBERS, "--hardware", "T4"), "without --model-config there is no roofline"),
        ((*NUMBERS, "--weight-bits", 4), "without --model-config there is no roofline"),
        ((*NUMBERS, "--draft-model", "x"), "add --emit"),
        ((*NUMBERS, "--context", 5), "context is given, but alpha"),
        ((*NUMBERS, "--trace", "x"), "--acceptance and --trace are both given"),
        ((*NUMBERS, "--profile", "/no/such"), "/no/such cannot be read as a profile"),
        (("--trace", "/no/such", "--alpha", 0.1), "/no/such cannot be read as a trace"),
        ((*NUMBERS, "--html", "/no/such/x.html"), "there is no folder /no/such"),
        (("--acceptance", 0.8, "--model-config", "/no"), "is given without a machine"),
        (
            ("--acceptance", 0.8, "--model-config", "/no", "--hardware", "T4", "--tflops", 3),
            "leave one out",
        ),
        (("--acceptance", 0.8, "--model-config", "/no", "--hardware", "x"), "hardware is 'x'"),
        (("--acceptance", 0.8, "--model-config", "/no", "--hardware", "T4"), "cannot be read"),
    ],
)
def test_bad_input(run: Run, arguments: tuple[Any, ...], message: str) -> None:
    assert message in _refused(run, *arguments)


def test_two_sources_of_costs(run: Run, profile: Path, model: Path) -> None:
    assert "given are alpha and a profile" in _refused(run, *NUMBERS, "--profile", profile)
    machine = ("--model-config", model, "--hardware", "T4")
    assert "given are alpha and a model config" in _refused(run, *NUMBERS, *machine)


def test_a_damaged_profile_is_refused(run: Run, profile: Path) -> None:
    text = profile.read_text(encoding="utf-8")
    profile.write_text(text.replace("1.05", "1.01"), encoding="utf-8")
    message = _refused(run, "--acceptance", 0.8, "--profile", profile)
    assert "is damaged" in message and "foredraft profile" in message


def test_a_folder_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    assert "cannot be written" in _refused(run, *NUMBERS, "--html", tmp_path)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\n"
        "from foredraft.cli.main import main\n"
        "try: main(['plan', '--acceptance', '0.8', '--alpha', '0.1', '--json'])\n"
        "except SystemExit as left: assert not left.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'numba', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_package_alone_is_light() -> None:
    code = (
        "import sys\n"
        "import foredraft.plan\n"
        "foredraft.plan.make_plan\n"
        "assert not {'torch', 'numpy', 'rich', 'typer', 'pydantic'} & set(sys.modules)\n"
        "from foredraft import plan\n"
        "assert all(hasattr(plan, name) for name in plan.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
