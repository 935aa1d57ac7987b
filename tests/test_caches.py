"""Every cache of the product: its key is content. A path or a time is none: the file may be written again."""

import ast
import os
import sys

import pytest

from pack_data.building import assignment_on_disk
from tests.imports import MODULES
from tests.pack_data.text_corpus import build_small, content, write_corpus

# Each cached function, and its key: name and type of each parameter. Without one, only the installation decides.
CACHES = {
    "ipu_packed_bert.data.factors._packed_factor": "histogram: LengthHistogram, packer: str, "
    "max_sequences_per_pack: Optional[int]",
    "padding_free.attention._kernel_options": "module: str",
    "padding_free.varlen_on_cpu._blocks": "lengths: Tuple[int, ...]",
    "ipu_packed_bert.settings.config.settings_of": "command: str, task: type",
    "ipu_packed_bert.settings.shipped._derived": "",
    "ipu_packed_bert.settings.shipped.shipped_names": "",
    "ipu_packed_bert.settings.yaml_files._parsed": "text: str",
    "pack_data.batching.collators._warn_left_out": "",
    "pack_data.batching.plans._optimal_packing_of": "lengths: bytes, max_sequence_length: int",
    "pack_data.building.assignment_on_disk._places_of": "recipe: bytes",
    "pack_data.building.tasks._parsed": "files: VocabularyFiles, lower_case: bool",
    "pack_data.formats.saved._parsed": "directory: str, state_json: bytes, info_json: Optional[bytes]",
    "pack_data.formats.sequence_output: another use of lru_cache": "",  # whether pyarrow is there
    "pack_data.formats.tfrecord._crc32c": "",
    "pack_data.formats.tfrecord._message_class": "",
    "pack_data.store.sequences._sums_of_weights": "count: int, stream: int",
    "pack_data.store.sequences._weights_of": "count: int, stream: int",
    "pack_data.text.corpus._embedded_documents": "",
}


def _names(node):
    return {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node)}


def _caches():
    """Yield (name, key) of every function that a cache of functools decorates, and "" for any other use of one."""
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        decorators = set()
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            caches = [item for item in node.decorator_list if _names(item) & {"lru_cache", "cache"}]
            if caches:
                decorators.update(part for item in caches for part in ast.walk(item))
                key = [f"{item.arg}: {ast.unparse(item.annotation)}" for item in node.args.args]
                yield f"{module}.{node.name}", ", ".join(key)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Name, ast.Attribute)) and node not in decorators and "lru_cache" in _names(node):
                yield f"{module}: another use of lru_cache", ""


@pytest.mark.skipif(sys.version_info < (3, 9), reason="ast.unparse")
def test_every_cache_is_keyed_by_content():
    caches = dict(_caches())
    assert caches == CACHES
    for name, key in caches.items():
        assert not any(word in key for word in ("Path", "path", "Any", "mtime")), f"{name}: {key}"


BUILDS = [("a", dict(vocabulary_size=90)), ("a", {}), ("b", dict(vocabulary_size=90)), ("b", {})]


def test_builds_of_one_process_into_one_directory_have_the_vocabularies_of_their_own(tmp_path):
    """A cache by path gave the second build the ids of the first one's vocabulary."""
    for seed, name in enumerate("ab"):
        write_corpus(tmp_path / name, documents=12, seed=seed)
    for number, (name, options) in enumerate(BUILDS):
        build_small(tmp_path / name, tmp_path / f"alone{number}", **options).close()
    for number, (name, options) in enumerate(BUILDS):
        build_small(tmp_path / name, tmp_path / "out", overwrite=True, **options).close()
        assert content(tmp_path / "out") == content(tmp_path / f"alone{number}"), (name, options)


def test_places_on_disk_are_those_of_the_recipe_that_is_there(tmp_path):
    """The same name and time, other packs: the places come from the content."""
    corpus = write_corpus(tmp_path / "corpus", documents=6)
    packs = []
    for size in (32, 64):
        with build_small(corpus, tmp_path / "out", max_sequence_length=size, overwrite=True) as store:
            packs.append(len(store))
        (tmp_path / "recipe.json").write_bytes((tmp_path / "out" / "recipe.json").read_bytes())
        os.utime(tmp_path / "recipe.json", (0, 0))
        assert assignment_on_disk._places(tmp_path).packs == packs[-1]
    assert packs[0] != packs[1]
