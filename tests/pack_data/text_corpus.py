"""A small made-up English-like corpus, and builds of it, for the tests of the way from text to store."""

import os
import random
from pathlib import Path

import pytest

from pack_data.building import inputs, stages
from pack_data.building.command import BuildOptions, build
from pack_data.text.examples import make_examples, tokenise

WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one "
    "packing sequence token attention mask position length histogram strategy padding model training accelerator cycle"
).split()


def sentence(rng):
    words = [rng.choice(WORDS) for _ in range(rng.randint(3, 25))]
    return " ".join(words).capitalize() + "."


def document(rng):
    return "\n".join(" ".join(sentence(rng) for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 8)))


def write_corpus(folder, documents=60, seed=0):
    """A folder of text files, one document each."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        (folder / f"{number:03d}.txt").write_text(document(rng))
    return folder


def examples_of(documents, vocabulary, options, part=0):
    """Text to examples."""
    tokens = tokenise(documents, vocabulary, options)
    sequences, used = make_examples(tokens, vocabulary, options, part)
    assert used == len(tokens.ids)
    return sequences


def words_of(example, tokens):
    """The positions of each word's pieces in an example: a word is its first piece and all "##" pieces behind it.

    A part begins with a word, also where trimming left only the end of one.
    """
    ids = list(example.input_ids)
    for position, label in zip(example.masked_lm_positions, example.masked_lm_ids):
        ids[position] = label
    words = []
    for begin, end in ((1, example.first_segment_length - 1), (example.first_segment_length, len(ids) - 1)):
        for position in range(begin, end):
            if position > begin and tokens[ids[position]].startswith("##"):
                words[-1].append(position)
            else:
                words.append([position])
    return words


def build_small(corpus, out, **options):
    """A build of such a corpus that takes a fraction of a second."""
    small = dict(vocabulary_size=200, max_sequence_length=64, packer="spfhp", max_sequences_per_pack=3)
    small.update(duplication_factor=2, seed=3, workers=1)
    return build(BuildOptions(out, corpus, **{**small, **options}))


def make_parts_small(patch):
    """Give builds in this process several parts and shards."""
    patch.setattr(inputs, "PART_CHARACTERS", 6000)
    patch.setattr(stages, "SLOTS_PER_SHARD", 64 * 50)


def content(folder):
    """The files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Stopped(BaseException):
    """Ends a build where it stands, as a signal would."""


def stop_at(monkeypatch, name, *given, **options):
    """A small build that ends where it calls this function of its stages."""
    with monkeypatch.context() as patch:
        patch.setattr(stages, name, lambda *_, **__: (_ for _ in ()).throw(Stopped()))
        with pytest.raises(Stopped):
            build_small(*given, **options)


def stop_unlink(monkeypatch, count):
    """Stops the program where it has removed `count` files and would remove one more."""
    unlink = Path.unlink
    left = iter(range(count))

    def counted(path, *arguments):
        if next(left, None) is None:
            raise Stopped
        unlink(path, *arguments)

    monkeypatch.setattr(Path, "unlink", counted)


def stop_before_rename(monkeypatch, count):
    """Stops the program before its `count`-th rename. Every file appears by a rename: so between any two files.

    Returns a list with the number of renames so far.
    """
    replace = os.replace
    done = [0]

    def counted(*paths):
        done[0] += 1
        if done[0] == count:
            raise Stopped
        replace(*paths)

    monkeypatch.setattr(os, "replace", counted)
    return done
