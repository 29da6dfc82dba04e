"""Imports point one way, and importing poise stays light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import poise

PACKAGE = Path(poise.__file__).parent

# From the bottom up. A module imports only from lower rows, or from its own folder. Hence reference and kernels, which
# share a row, never import each other.
ROWS = (
    ("algebra", "summary", "dropout", "kvview"),
    ("mask",),
    ("score", "stats"),
    ("arguments",),
    ("problem", "lowering"),
    ("plan",),
    ("reference", "kernels"),
    ("traced", "testing"),
    ("transformed",),
    ("dispatch",),
    ("op", "explanation"),
    ("sdpa",),
    ("hf", "torch_hook"),
    ("monitor",),
    ("inspection",),
    ("__init__",),
    ("nn",),
    ("variants",),
    ("models",),
    ("report",),
    ("lab",),
    ("cli",),
    ("__main__",),
)
ROW = {name: height for height, row in enumerate(ROWS) for name in row}

MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """poise/kernels/ops.py -> kernels.ops"""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def owner(name: str) -> str:
    """The row entry that a module belongs to: kernels.ops -> kernels"""
    return name.split(".")[0]


def imported(path: Path) -> set[str]:
    """Row entries of poise that a file imports, anywhere in it, also for type checking only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("poise.")}
            found |= {"__init__" for alias in node.names if alias.name == "poise"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively: write the full name"
            if node.module == "poise":
                found |= {alias.name if alias.name in ROW else "__init__" for alias in node.names}
            elif node.module and node.module.startswith("poise."):
                found.add(node.module.split(".")[1])
    return found


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_every_module_has_a_row(path: Path) -> None:
    assert owner(dotted(path)) in ROW, "place the new module in ROWS"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_module_imports_only_from_lower_rows(path: Path) -> None:
    mine = owner(dotted(path))
    upwards = {name for name in imported(path) - {mine} if ROW[name] >= ROW[mine]}
    assert not upwards, f"{dotted(path)} imports {sorted(upwards)}"


def test_the_reader_of_imports_sees_every_form(tmp_path: Path) -> None:
    source = tmp_path / "every_form.py"
    source.write_text(
        "import poise\nimport poise.op\nfrom poise import plan\nfrom poise.kernels import ops\n"
        "def f():\n    from poise.stats import merge\n"
    )
    assert imported(source) == {"__init__", "op", "plan", "kernels", "stats"}


def test_there_is_no_drawer_for_odds_and_ends() -> None:
    parts = {part for path in MODULES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert not parts & {"utils", "util", "common", "core", "misc", "helpers"}


def test_all_public_names_exist() -> None:
    assert [name for name in poise.__all__ if not hasattr(poise, name)] == []
    assert poise.__version__


@pytest.fixture(scope="module")
def newly_loaded() -> set[str]:
    """Modules that `import poise` loads beyond those of torch and numpy."""
    script = (
        "import json, sys, torch, numpy.random; before = set(sys.modules); import poise; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return set(json.loads(printed.stdout))


def test_importing_poise_loads_nothing_foreign(newly_loaded: set[str]) -> None:
    roots = {name.split(".")[0] for name in newly_loaded} - set(sys.stdlib_module_names)
    assert roots <= {"poise", "torch", "numpy"}


def test_importing_poise_loads_no_compiler_and_no_tests(newly_loaded: set[str]) -> None:
    heavy = ("torch._dynamo", "torch._inductor", "poise.testing")
    assert not {name for name in newly_loaded if name.startswith(heavy)}
