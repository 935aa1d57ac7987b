"""The configurations that come with this package: in configs/ of a checkout, or installed with it."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

import yaml

from ipu_packed_bert.run_files.folder import CONFIG

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "configs"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"
_DERIVED = "derived"  # the file with the configurations that have no file of their own


@lru_cache(None)
def _derived() -> Dict[str, Any]:
    """Read the settings of the configurations without a file of their own, by name."""
    return yaml.safe_load((FOLDER / f"{_DERIVED}.yml").read_text(encoding="utf-8"))


@lru_cache(None)
def shipped_names() -> List[str]:
    """Return the names of all configurations that come with the program, as --config takes them."""
    names = {path.stem for path in FOLDER.glob("*.yml")} | set(_derived())
    return sorted(name for name in names if name != _DERIVED and not name.startswith("_"))


def derived_tree(path: Union[str, Path]) -> Optional[Any]:
    """Return the settings of a configuration of FOLDER without a file of its own, None for any other path."""
    path = Path(path)
    if path.suffix != ".yml" or path.parent.resolve() != FOLDER.resolve() or path.is_file():
        return None
    return _derived().get(path.stem)


def config_file(name: str) -> Path:
    """The file of a --config option: a path, or the bare name of a configuration that comes with this package.

    A configuration that is derived from others has no file; its path is where the file would be.
    Raises ValueError for a bare name that is neither, and for a path where nothing is but a name like it.
    """
    path = Path(name)
    bare = path.name == name and not path.suffix
    if path.is_file():
        return path
    if path.stem in shipped_names() and (bare or path == Path(FOLDER.name, path.name) or path.parent == FOLDER):
        return FOLDER / f"{path.stem}.yml"
    shipped = shipped_names()
    beside = {} if bare else {each.stem: str(each) for each in path.parent.glob("*.yml")}
    alike = difflib.get_close_matches(path.stem, [*beside, *shipped], n=1, cutoff=0.8)
    meant = f"did you mean {beside.get(alike[0], alike[0])}?" if alike else ""
    if bare:
        raise ValueError(
            f"--config {name}: neither a file nor a configuration that comes with the program; "
            + (meant or f"those are {', '.join(shipped)}")
        )
    if meant and not path.exists():
        raise ValueError(f"--config {name}: no such file; {meant}")
    return path


def for_one_gpu(name: str) -> Optional[str]:
    """The configuration for one GPU of the same model, length and phase as the one for IPUs; None where none comes."""
    other = re.sub(r"_((bow_)?pod|ipu)[0-9]+$", "_gpu1", name)
    return other if other != name and other in shipped_names() else None


def refuse_no_run(option: str, folder: Union[str, Path]) -> None:
    """Raise ValueError where there is no run's folder, which holds its configuration."""
    if not Path(folder, CONFIG).is_file():
        raise ValueError(
            f"{option} {folder}: no run there (no {CONFIG}); name the folder of a run (by default in runs/), "
            "or begin one with --config FILE"
        )
