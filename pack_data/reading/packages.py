"""Packages that only some commands need, imported on use; the error for a missing one names it and the fix."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Optional, Tuple

# What is imported -> what is installed, where the names differ.
_INSTALLED_AS = {"yaml": "pyyaml", "google.protobuf": "protobuf", "google_crc32c": "google-crc32c"}
# Package -> the oldest version that reads untrusted files safely, and the fault of the versions before it.
_SAFE_SINCE = {"pyarrow": ("14.0.1", "runs code that a Parquet file holds (CVE-2023-47248)")}
# Everything else of ours that can be missing.
_PACKAGES = (
    "numpy scipy tokenizers tqdm msgspec torch tensorboard safetensors transformers matplotlib jinja2 h5py pyarrow "
    "dask distributed zstandard"
).split()


def load_package(module: str, what: str) -> ModuleType:
    """Import a module that `what` needs.  Raises ValueError if its package is missing, unsafe or does not load."""
    try:
        package = module.split(".")[0]
        if package in _SAFE_SINCE:
            _check_version(package)
        return importlib.import_module(module)
    except ImportError as error:
        package = package_of(module) or package
        if isinstance(error, ModuleNotFoundError):
            raise ValueError(f"{what} needs the package {package}: pip install {package}") from None
        raise ValueError(
            f"{what} needs the package {package}, which does not load here: {error}"
        ) from None


def _check_version(package: str) -> None:
    """Raise ValueError for a version of a package that is not safe."""
    oldest, fault = _SAFE_SINCE[package]
    version = importlib.import_module(package).__version__
    if _numbers(version) < _numbers(oldest):
        raise ValueError(f"{package} {version} {fault}: pip install '{package}>={oldest}'")


def _numbers(version: str) -> Tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def require(what: str, *modules: str) -> None:
    """Raise ValueError, one line that names all of them, if modules are missing; call it before the work."""
    missing = []
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            missing.append(package_of(module) or module)
        except ImportError:
            load_package(module, what)
    if missing:
        raise ValueError(f"{what} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def package_of(module: Optional[str]) -> Optional[str]:
    """Return the package to install for a module; None for a module of ours or of Python."""
    name = module or ""
    for imported, package in _INSTALLED_AS.items():
        if name == imported or name.startswith(imported + "."):
            return package
    root = name.split(".")[0]
    return root if root in _PACKAGES else None
