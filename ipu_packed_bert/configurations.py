"""The configurations that come with this package: in configs/ of a checkout, or installed with it."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / "configs"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"


def config_file(name: str) -> Path:
    """The file of a --config option: a path, or the bare name of a configuration that comes with this package.

    Raises ValueError for a bare name that is neither; a path is not looked at.
    """
    path = Path(name)
    if path.name != name or path.suffix or path.is_file():
        return path
    shipped = FOLDER / f"{name}.yml"
    if not shipped.is_file():
        names = ", ".join(sorted(each.stem for each in FOLDER.glob("*.yml")))
        raise ValueError(
            f"--config {name}: neither a file nor a configuration that comes with the program; those are {names}"
        )
    return shipped
