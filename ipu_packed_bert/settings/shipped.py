"""The configurations that come with this package: in configs/ of a checkout, or installed with it."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import yaml

from ipu_packed_bert.run_files.folder import CONFIG

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "configs"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"
_DERIVED = "derived"  # the file with the configurations that have no file of their own


class _Derived(NamedTuple):
    """A configuration without a file of its own: the one that it is derived from, and the entries that apply to it."""

    base: str
    entries: Tuple[Mapping[str, Any], ...]


@lru_cache(None)
def _shipped() -> Dict[str, Optional[_Derived]]:
    """Every configuration that comes with the program by name; None where it has a file of its own."""
    known: Dict[str, Optional[_Derived]] = {path.stem: None for path in sorted(FOLDER.glob("*.yml"))}
    del known[_DERIVED]
    for entry in yaml.safe_load((FOLDER / f"{_DERIVED}.yml").read_text(encoding="utf-8")):
        if "from" not in entry:
            derived = known[entry["name"]]
            assert derived is not None, entry["name"]
            known[entry["name"]] = derived._replace(entries=(*derived.entries, entry))
            continue
        pattern = re.compile("(.*)".join(map(re.escape, entry["from"].split("*"))) + r"\Z")
        for found in filter(None, map(pattern.match, list(known))):
            name = entry["name"].replace("*", "{}").format(*found.groups())
            known[name] = _Derived(found.string, (entry,))
    return known


def shipped_names() -> List[str]:
    """The names of all configurations that come with the program, as --config takes them."""
    return sorted(_shipped())


def derived_tree(path: Union[str, Path], base_tree: Any) -> Optional[Any]:
    """The settings of a configuration of FOLDER without a file of its own; None where `path` is no such one.

    base_tree: a function that gives the settings of the configuration of a name.
    """
    path = Path(path)
    derived = _shipped().get(path.stem) if path.parent.resolve() == FOLDER.resolve() and path.suffix == ".yml" else None
    if derived is None or path.is_file():
        return None
    tree = base_tree(derived.base)
    for entry in derived.entries:
        tree = merged(tree, entry["settings"])
    return tree


def merged(base: Any, tree: Any) -> Any:
    """`base` with the values of `tree` in their places, section by section.

    `times 4` is the base's value times 4, `replace a b` has b for each a of the base's text.
    """
    word, *others = tree.split() if isinstance(tree, str) else ("",)
    if word == "times" and isinstance(base, int):
        return int(base * float(others[0]))
    if word == "replace" and isinstance(base, str):
        return base.replace(others[0], others[1])
    if not isinstance(base, dict) or not isinstance(tree, dict):
        return tree
    return {**base, **{key: merged(base.get(key), value) for key, value in tree.items()}}


def config_file(name: str) -> Path:
    """The file of a --config option: a path, or the bare name of a configuration that comes with this package.

    A configuration that is derived from others has no file; its path is where the file would be.
    Raises ValueError for a bare name that is neither, and for a path where nothing is but a name like it.
    """
    path = Path(name)
    bare = path.name == name and not path.suffix
    if path.is_file():
        return path
    if path.stem in _shipped() and (bare or path == Path(FOLDER.name, path.name) or path.parent == FOLDER):
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
    return other if other != name and other in _shipped() else None


def refuse_no_run(option: str, folder: Union[str, Path]) -> None:
    """Raise ValueError where there is no run's folder, which holds its configuration."""
    if not Path(folder, CONFIG).is_file():
        raise ValueError(
            f"{option} {folder}: no run there (no {CONFIG}); name the folder of a run (by default in runs/), "
            "or begin one with --config FILE"
        )
