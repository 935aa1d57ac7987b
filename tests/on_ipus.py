"""Run the IPU tests in an environment with the Poplar SDK (make test-ipu): python tests/on_ipus.py [pytest options]

First the IPU suite as everywhere, on the stand-in, then the tests marked `ipu` on the PopTorch that is installed: on
IPUs where they are attached, else on the Poplar IPU Model with 4 tiles an IPU (POPTORCH_IPU_MODEL=1: with all 1,472).

Exit status: 0 all pass; 1 a test fails; 2 there is no SDK, or no pytest.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITE = (
    "engine/test_fake_poptorch",
    "engine/test_ipu_signatures",
    "engine/test_ipu_lowering",
    "engine/test_ipu_engine",
    "engine/test_ipu_tier",
    "engine/test_poprun",
    "tasks/test_on_ipus",
    "tasks/test_ipu_graphs",
)
ON_THE_SDK = ("engine/test_ipu_tier",)


def main(argv):
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    try:
        import poptorch
    except (ImportError, AssertionError) as error:  # PopTorch asserts that torch is the version it was built with
        why = " ".join(str(error).split())
        return complain(f"no Poplar SDK for {sys.executable} ({why}); enable SDK 3.4: make test-ipu PYTHON=python")
    if missing:
        return complain(f"{sys.executable} lacks {' and '.join(missing)}: pip install {' '.join(missing)}")
    attached = max((number for number in (1, 2, 4, 8, 16) if poptorch.ipuHardwareIsAvailable(number)), default=0)
    if attached < 4 and not asked_for("POPTORCH_IPU_MODEL"):
        # Read by PopTorch in the tests' process; a test that finds as many IPUs as it wants does not need it.
        model = "the Poplar IPU Model, 4 tiles an IPU" if not attached else f"{attached} IPUs, else the IPU Model"
        if not attached:
            os.environ["POPTORCH_SMALL_IPU_MODEL"] = "1"
    else:
        model = f"{attached} IPUs" if attached else "the Poplar IPU Model"
    print(f"PopTorch {poptorch.__version__} on {model}", flush=True)
    suites = ((SUITE, ["-m", "not ipu"]), (ON_THE_SDK, ["-m", "ipu", "--durations=5"]))
    return max(run(modules, [*options, *argv]) for modules, options in suites)


def asked_for(variable):
    return os.environ.get(variable, "").strip() not in ("", "0")


def complain(problem):
    print(f"error: {problem}", file=sys.stderr)
    return 2


def run(modules, options):
    files = [str(ROOT / "tests" / "ipu_packed_bert" / f"{name}.py") for name in modules]
    alone = ["-n", "0"] if importlib.util.find_spec("xdist") is not None else []
    finished = subprocess.run([sys.executable, "-m", "pytest", "-q", *alone, *options, *files], cwd=ROOT)
    return 1 if finished.returncode else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
