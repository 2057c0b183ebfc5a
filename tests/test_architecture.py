"""The rules that keep the package a house one can find things in."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import fedgist

ROOT = Path(fedgist.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# What each layer may import, from the bottom up; `run` stands for the modules that compose a run.
LAYERS = [
    {"types", "queries", "errors", "progress", "whole"},
    {"data", "encoders", "privacy"},
    {"method"},
    {"train", "compress", "heads", "methods"},
    {"run", "config", "agreement", "policy"},
    {"exchange", "audit", "report"},
    {"setup"},
    {"evaluation", "exposure", "shadowing", "utility"},
    {"inspection"},
    {"experiment", "federation", "auditing", "bench"},
    {"doctor", "flower_app"},
    {"summary", "utility_print", "cli", "__main__"},
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
ONLY = {
    "dp_accounting": "privacy/accounting.py",
    "opendp": "privacy/noise.py",
    "flwr": "exchange/flower.py",
    "sqlite3": "privacy/ledger.py",
}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_from_layers_below(path):
    here = part_of(path)
    if here == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "fedgist" or len(parts) == 1:
            continue
        assert RANK[parts[1]] <= RANK[here], f"{here} must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_one_file_per_outside_library(path):
    for name in imports(path):
        home = ONLY.get(name.split(".")[0])
        assert home is None or path == ROOT / home, f"{name} belongs in {home}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.end_lineno - node.lineno
            doc = ast.get_docstring(node)
            body -= len(doc.splitlines()) if doc else 0
            assert body <= 60, f"{node.name} has {body} lines"


def test_methods_reach_neither_exchange_nor_audit_nor_cli():
    for path in (ROOT / "methods").glob("*.py"):
        for name in imports(path):
            assert not name.startswith(("fedgist.exchange", "fedgist.audit", "fedgist.cli"))


def loads(tree):
    """Return calls of torch.load: a zip of tensors, and nothing else when weights_only is set."""
    return [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "torch.load"
    ]


def test_nothing_is_unpickled_or_evaluated():
    allowed = {ROOT / "data" / "cifar.py"}  # a restricted unpickler, tested there
    for path in FILES:
        tree = ast.parse(path.read_text())
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        calls = {
            f"{n.func.value.id}.{n.func.attr}"
            for n in ast.walk(tree)
            if isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and isinstance(n.func.value, ast.Name)
        }
        assert not names & {"eval", "exec"}, path
        unsafe = calls & {"pickle.load", "pickle.loads"}
        unsafe |= {ast.unparse(n) for n in loads(tree) if "weights_only=True" not in ast.unparse(n)}
        assert path in allowed or not unsafe, path


def test_every_public_name_exists():
    for path in FILES:
        if path.name == "__main__.py":
            continue
        module = importlib.import_module(
            ".".join(["fedgist", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(
                ".__init__"
            )
        )
        names = getattr(module, "__all__", [])
        assert len(set(names)) == len(names), path
        for name in names:
            assert hasattr(module, name), f"{path}: {name}"
