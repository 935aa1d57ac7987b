"""The configurations of this package, in configs/ of a checkout or installed with it."""

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
_DERIVED = "derived"  # the file of all configurations without a separate file


@lru_cache(None)
def _derived() -> Dict[str, Any]:
    """Read the settings of the configurations without a separate file, by name."""
    return yaml.safe_load((FOLDER / f"{_DERIVED}.yml").read_text(encoding="utf-8"))


@lru_cache(None)
def shipped_names() -> List[str]:
    """Return the names of all configurations of the program, which --config accepts."""
    files = {path.stem for path in FOLDER.glob("*.yml")}
    names = files.union(_derived()) - {_DERIVED}
    return sorted(name for name in names if not name.startswith("_"))


def derived_tree(path: Union[str, Path]) -> Optional[Any]:
    """Return the settings of a configuration of FOLDER without a separate file, None for any other path."""
    path = Path(path)
    in_folder = path.suffix == ".yml" and path.parent.resolve() == FOLDER.resolve()
    if path.is_file() or not in_folder:
        return None
    return _derived().get(path.stem)


def config_file(name: str) -> Path:
    """Return the file of a --config option.

    Args:
        name: a path, or the bare name of a configuration of the program.

    Returns:
        The path; a configuration that is derived from others has no file at its path.

    Raises:
        ValueError: a bare name is unknown, or a path is a directory, or does not exist but is similar to a known name.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_names()
    is_bare = path.name == name and not path.suffix
    is_in_configs = path == Path(FOLDER.name, path.name) or path.parent == FOLDER
    if path.stem in shipped and (is_bare or is_in_configs):
        return FOLDER / f"{path.stem}.yml"
    if path.is_dir():
        raise ValueError(
            f"--config {name}: a directory, not a configuration; continue a run with --resume {name}, or train on a "
            f"data set with --config packed_host --data {name}"
        )

    known = {stem: stem for stem in shipped}
    if not is_bare:
        known.update((sibling.stem, str(sibling)) for sibling in path.parent.glob("*.yml"))
    similar = difflib.get_close_matches(path.stem, known, n=3)
    hint = f"did you mean {' or '.join(known[stem] for stem in similar)}?" if similar else ""
    if is_bare:
        choices = ", ".join(shipped)
        raise ValueError(
            f"--config {name}: neither a file nor a configuration of the program; {hint or f'choose one of {choices}'}"
        )
    if hint:
        raise ValueError(f"--config {name}: no such file; {hint}")
    return path


def for_one_gpu(name: str) -> Optional[str]:
    """Return the configuration for one GPU with the model, length and phase of one for IPUs, None if there is none."""
    for_gpu = re.sub(r"_((bow_)?pod|ipu)[0-9]+$", "_gpu1", name)
    if for_gpu == name or for_gpu not in shipped_names():
        return None
    return for_gpu


def refuse_no_run(option: str, folder: Union[str, Path]) -> None:
    """Raise ValueError if the directory of an option is not that of a run."""
    if Path(folder, CONFIG).is_file():
        return
    way_out = (
        "pass the directory of a run (by default in runs/), or start a new one with --config FILE"
    )
    for above in list(Path(folder).parents)[:2]:  # of one of its checkpoints
        if (above / CONFIG).is_file():
            way_out = f"did you mean {option} {above}?"
    raise ValueError(f"{option} {folder}: not a run (no {CONFIG}); {way_out}")
