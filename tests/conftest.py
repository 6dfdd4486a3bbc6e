"""Gives every test sixteen CPU devices. Loaded by pytest before any test module, hence before JAX."""

import atexit
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

DEVICES = 16
# A test compiles hundreds of small programs and runs each a few times. These settings compile them in a third of the time;
# RATRAIN_TEST_OPTIMIZED=1 compiles them as for a user.
QUICK_TO_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if version("jaxlib").startswith("0.10."):  # an unknown setting ends the process
    QUICK_TO_COMPILE["xla_cpu_use_fusion_emitters"] = False
END_TO_END = Path(__file__).parent / "e2e"
QUICK = os.environ.get("RATRAIN_TEST_OPTIMIZED") != "1"

# An assert of a helper that fails shows as much as one of a test.
HELPERS = {path.stem for path in Path(__file__).parent.glob("*.py")} - {"__init__", "conftest"}
pytest.register_assert_rewrite(*(f"tests.{name}" for name in sorted(HELPERS)))

if "jax" in sys.modules:
    raise pytest.UsageError("JAX was imported before tests/conftest.py could set its CPU devices.")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = " ".join(
        [
            *os.environ.get("XLA_FLAGS", "").split(),
            f"--xla_force_host_platform_device_count={DEVICES}",
            *(
                f"--{name}={str(value).lower()}"
                for name, value in QUICK_TO_COMPILE.items()
                if QUICK
            ),
        ]
    )

# Many tests compile the same programs: in one run each is compiled once, by whichever worker comes first.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": compiled,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

# Compiling takes as long as it takes, and CI should fail on what a change broke, not on chance.
settings.register_profile("ratrain", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("ratrain")


@pytest.fixture
def double_precision():
    """Sets the default float type. The context manager would not reach the runtime's threads."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if END_TO_END in item.path.parents:
            item.add_marker("e2e")
