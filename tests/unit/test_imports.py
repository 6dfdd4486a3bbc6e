"""Who may import whom: ratrain_jax -> lowering -> kernels, and never back.

The rules are checked on the text of every file (`find_faults`), so that an import inside a function
or under TYPE_CHECKING counts too; the lazy loading is checked by running it.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ratrain_jax

ROOT = Path(__file__).parents[2]
PACKAGE = "ratrain_jax"
# Folder -> the module that its files are imported as; the links in ratrain_jax are left out.
FOLDERS = {
    "ratrain_jax": PACKAGE,
    "lowering": f"{PACKAGE}.lowering",
    "kernels": f"{PACKAGE}.kernels",
    "tests": "tests",
    "examples": "examples",
    "benchmarks": "benchmarks",
}
GROUND = (f"{PACKAGE}.errors", f"{PACKAGE}.compat")
FOLDERS_OF_PACKAGE = (f"{PACKAGE}.kernels", f"{PACKAGE}.lowering", PACKAGE)


def level(module: str) -> int | None:
    """How high a module stands: ground is 0, kernels 1, lowering 2, the rest 3, others None."""
    if module in GROUND:
        return 0
    for height, folder in enumerate(FOLDERS_OF_PACKAGE, start=1):
        if module == folder or module.startswith(f"{folder}."):
            return height
    return None


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src":
            yield node.lineno, "jax._src"


def find_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module imports and may not, as `line: name`."""
    package = module if is_package else module.rpartition(".")[0]
    own = level(module)
    faults = []
    for line, name in imports(ast.parse(source), package):
        # `from ratrain_jax.errors import StepError` names something inside the module.
        target = next((ground for ground in GROUND if name.startswith(f"{ground}.")), name)
        height = level(target)
        plain = name.split(".")[0] in ("lowering", "kernels")
        private = name.startswith("jax._src")
        upward = own is not None and height is not None and height > own
        if own == 0 and height is not None:
            upward = True  # the ground floor imports nothing of the project
        if plain or private or upward:
            faults.append(f"{line}: {name}")
    return faults


def modules() -> Iterator[tuple[str, Path]]:
    for folder, root in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT / folder)
            if folder == PACKAGE and relative.parts[0] in ("lowering", "kernels"):
                continue  # reached through their own folders
            parts = relative.with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            yield ".".join([root, *parts]), path


MODULES = dict(modules())


def test_every_folder_of_the_package_is_read():
    heights = {level(module) for module in MODULES}
    assert {0, 1, 2, 3, None} <= heights
    assert f"{PACKAGE}.kernels" in MODULES
    assert "tests.unit.test_imports" in MODULES


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downwards(module: str):
    path = MODULES[module]
    faults = find_faults(path.read_text("utf-8"), module, path.name == "__init__.py")
    assert not faults, f"{path.relative_to(ROOT)} imports what it may not: {faults}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ratrain_jax.kernels.tile", "from ratrain_jax.lowering import program"),
        ("ratrain_jax.kernels.tile", "from ratrain_jax.lowering.program import Program"),
        ("ratrain_jax.kernels.tile", "from ..lowering import program"),
        ("ratrain_jax.kernels.tile", "import ratrain_jax"),
        ("ratrain_jax.kernels.tile", "def late():\n    import ratrain_jax.train"),
        (
            "ratrain_jax.kernels.tile",
            "import importlib\nimportlib.import_module('ratrain_jax.train')",
        ),
        ("ratrain_jax.lowering.program", "from ratrain_jax.train import train_step"),
        ("ratrain_jax.lowering.program", "from ratrain_jax import Window"),
        ("ratrain_jax.lowering.program", "from .. import options"),
        ("ratrain_jax.errors", "from ratrain_jax import compat"),
        ("ratrain_jax.compat", "import ratrain_jax.kernels"),
        ("ratrain_jax.train", "import lowering"),
        ("ratrain_jax.train", "from kernels.machine import Machine"),
        ("tests.unit.test_x", "from lowering import program"),
        ("tests.unit.test_x", "import kernels as k"),
        ("ratrain_jax.train", "from jax._src import core"),
        ("ratrain_jax.train", "from jax import _src"),
        ("ratrain_jax.train", "import jax\njax._src.core"),
        ("examples.demo", "import jax._src.core"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str):
    assert find_faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ratrain_jax.kernels.tile", "from ratrain_jax.errors import MachineError"),
        ("ratrain_jax.kernels.tile", "from ratrain_jax import compat"),
        ("ratrain_jax.kernels.tile", "from .machine import Machine"),
        ("ratrain_jax.kernels.tile", "from . import machine"),
        ("ratrain_jax.lowering.program", "from ratrain_jax.kernels import machine"),
        ("ratrain_jax.lowering.program", "from ..kernels import machine"),
        ("ratrain_jax.train", "from ratrain_jax.lowering import program"),
        ("ratrain_jax.train", "import jax.numpy as jnp"),
        ("tests.unit.test_x", "from ratrain_jax.lowering import program"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str):
    assert not find_faults(source, module)


def loaded_by(code: str) -> set[str]:
    """The project's modules that a fresh interpreter holds after running the code."""
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    names = json.loads(done.stdout)
    return {name for name in names if name.split(".")[0] in (PACKAGE, "lowering", "kernels")}


def test_importing_kernels_loads_nothing_from_above():
    loaded = loaded_by("import ratrain_jax.kernels")
    assert f"{PACKAGE}.kernels" in loaded
    assert {level(name) for name in loaded - {PACKAGE}} <= {0, 1}


def test_importing_lowering_loads_nothing_from_above():
    loaded = loaded_by("import ratrain_jax.lowering")
    assert f"{PACKAGE}.lowering" in loaded
    assert {level(name) for name in loaded - {PACKAGE}} <= {0, 1, 2}


def test_importing_the_package_loads_no_other_module():
    assert loaded_by("import ratrain_jax") == {PACKAGE}


def test_every_public_name_can_be_had():
    for name in ratrain_jax.__all__:
        assert getattr(ratrain_jax, name) is not None
        assert name in dir(ratrain_jax)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'ratrain_jax' has no attribute 'train_stop'"):
        _ = ratrain_jax.train_stop  # pyright: ignore[reportAttributeAccessIssue]


def test_the_names_told_to_type_checkers_are_the_names_loaded():
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text("utf-8"))
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    told = {}
    for line in guarded.body:
        assert isinstance(line, ast.ImportFrom)
        for alias in line.names:
            told[alias.name] = line.module if line.module != PACKAGE else f"{PACKAGE}.{alias.name}"
    assert told == ratrain_jax._HOMES


def test_no_public_name_can_be_replaced_by_a_module():
    for name, home in ratrain_jax._HOMES.items():
        own = f"{PACKAGE}.{name}"
        assert home == own or own not in MODULES
