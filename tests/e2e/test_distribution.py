"""The wheel and the sdist hold the whole project and work away from the checkout."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "ratrain_jax"
# What the wheel must hold: every module and data file, the linked folders' included.
EXPECTED = {
    path.relative_to(ROOT).as_posix()
    if folder == PACKAGE
    else f"{PACKAGE}/{path.relative_to(ROOT).as_posix()}"
    for folder in (PACKAGE, "lowering", "kernels")
    for pattern in ("*.py", "*.toml")
    for path in (ROOT / folder).rglob(pattern)
} | {f"{PACKAGE}/py.typed"}


def python(*args: str, cwd: Path, path: Path | None = None) -> str:
    """Runs this interpreter and returns what it printed; PYTHONPATH is `path` or nothing."""
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Builds a "wheel" or an "sdist" with the tools installed here and returns its file."""
    code = f"import sys, hatchling.build as b; print(b.build_{kind}(sys.argv[1]))"
    return out / python("-c", code, str(out), cwd=source).splitlines()[-1]


@pytest.fixture(scope="module", params=["checkout", "sdist"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the checkout, and one built from the sdist of the checkout."""
    out = tmp_path_factory.mktemp(request.param)
    if request.param == "checkout":
        return build("wheel", ROOT, out)
    sdist = build("sdist", ROOT, out)
    with tarfile.open(sdist) as archive:
        assert all(member.isfile() or member.isdir() for member in archive)  # no links
        archive.extractall(out, filter="data")
    return build("wheel", out / sdist.name.removesuffix(".tar.gz"), out)


def test_the_wheel_holds_every_module_and_claims_one_name(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert names >= EXPECTED
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {PACKAGE}


def test_the_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path):
    site = tmp_path / "site"
    python(
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
        cwd=tmp_path,
    )
    code = """
import importlib, json, pkgutil, ratrain_jax
names = [m.name for m in pkgutil.walk_packages(ratrain_jax.__path__, "ratrain_jax.")]
found = {n: importlib.import_module(n).__file__ for n in names if not n.endswith("__main__")}
print(json.dumps(found))
"""
    found = json.loads(python("-c", code, cwd=tmp_path, path=site))
    assert f"{PACKAGE}.lowering" in found
    assert f"{PACKAGE}.kernels" in found
    assert all(Path(file).is_relative_to(site) for file in found.values())
