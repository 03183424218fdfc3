"""The shape of the code: layers, file names, file sizes, docstrings, and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "foredraft"
MODULES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 600
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "misc", "helpers"}


def run_python(code: str) -> str:
    """What a fresh interpreter prints, with this tree's own sources first on its path."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_import_contracts_hold() -> None:
    """In a process of its own: the linter sets up logging anew and silences loggers that exist."""
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [str(linter), "--no-logo", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_is_in_the_layers() -> None:
    """A package that no contract names would escape the contract."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    modules = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    unnamed = {name for name in packages | modules if f"(foredraft.{name})" not in pyproject}
    assert not unnamed, "name these in the layers contract of pyproject.toml"


def test_no_file_has_a_name_that_says_nothing() -> None:
    found = [
        str(path.relative_to(ROOT))
        for tree in ("src", "tests", "scripts")
        for path in (ROOT / tree).rglob("*")
        if path.stem.strip("_") in NAMES_THAT_SAY_NOTHING
    ]
    assert not found, "a helper lives beside its one user or earns a named module"


def test_no_file_is_too_long() -> None:
    num_lines = {
        name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES
    }
    too_long = {name: lines for name, lines in num_lines.items() if lines > MOST_LINES}
    assert not too_long, f"more than {MOST_LINES} lines: split by what the parts do"


def test_every_public_module_has_a_docstring() -> None:
    public = (path for path in MODULES if path.stem == "__init__" or path.stem[0] != "_")
    bare = [
        name_of(path)
        for path in public
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not bare, "say in a line what the module is for"


def test_importing_the_package_brings_nothing_heavy() -> None:
    loaded = run_python(
        "import foredraft\nprint(*{'torch', 'transformers', 'numba'}.intersection(sys.modules))"
    )
    assert not loaded, f"import foredraft imported {loaded}"


def test_import_is_quick() -> None:
    """Under half a second; the best of three, since the first may read a cold disk."""
    seconds = [
        float(
            run_python(
                "import time; start = time.perf_counter()\n"
                "import foredraft; print(time.perf_counter() - start)"
            )
        )
        for _ in range(3)
    ]
    assert min(seconds) < 0.5, seconds
