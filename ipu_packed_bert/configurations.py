"""The configurations that come with this package: in configs/ of a checkout, or installed with it."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Optional, Union

from ipu_packed_bert.run_folder import CONFIG

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / "configs"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"


def config_file(name: str) -> Path:
    """The file of a --config option: a path, or the bare name of a configuration that comes with this package.

    Raises ValueError for a bare name that is neither, and for a path where nothing is but a name like it.
    """
    path = Path(name)
    bare = path.name == name and not path.suffix
    if path.is_file() or bare and (FOLDER / f"{name}.yml").is_file():
        return path if path.is_file() else FOLDER / f"{name}.yml"
    shipped = sorted(each.stem for each in FOLDER.glob("*.yml"))
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
    return other if other != name and (FOLDER / f"{other}.yml").is_file() else None


def refuse_no_run(option: str, folder: Union[str, Path]) -> None:
    """Raise ValueError where there is no run's folder, which holds its configuration."""
    if not Path(folder, CONFIG).is_file():
        raise ValueError(
            f"{option} {folder}: no run there (no {CONFIG}); name the folder of a run (by default in runs/), "
            "or begin one with --config FILE"
        )
