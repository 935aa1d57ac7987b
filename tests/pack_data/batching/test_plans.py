"""The nine ways to make batches: laws on all of them, the paper's example and table, ranks, resuming."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.batching.__main__ import main
from pack_data.batching.collators import PaddingCollator, PaddingFreeCollator, collate
from pack_data.batching.plans import WAYS, BatchOptions, Piece, get_way
from pack_data.batching.properties import Properties, report
from pack_data.batching.sampler import BatchSampler
from pack_data.command import run_main
from pack_data.histogram import LengthHistogram
from pack_data.optimal import pack

MSL = 32
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


def drawn(count, seed=0, longest=MSL):
    return np.random.default_rng(seed).integers(1, longest + 1, count)


def batches(plan):
    return [plan.batch(step, rank) for step in range(plan.steps) for rank in range(plan.ranks)]


# ---- laws --------------------------------------------------------------------------------------------------------------


@every_way
@given(lengths=st.lists(st.integers(1, MSL), min_size=1, max_size=60), batch_size=st.integers(1, 5), ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_every_token_comes_once_and_nothing_is_overfull(way, lengths, batch_size, ranks, seed):
    options = BatchOptions(batch_size, MSL, ranks, seed)
    plan = way.plan(lengths, options)
    assert len(plan.batches) - 1 == plan.steps * ranks
    tokens = []
    for batch in batches(plan):
        assert sum(piece.stop - piece.start for row in batch for piece in row) <= options.capacity
        assert len(batch) <= batch_size
        for row in batch:
            assert row
            for piece in row:
                assert 0 <= piece.start < piece.stop <= lengths[piece.example]
                tokens += [(piece.example, offset) for offset in range(piece.start, piece.stop)]
    assert sorted(tokens) == [(example, offset) for example, length in enumerate(lengths) for offset in range(length)]


@every_way
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_have_equal_steps_and_no_rank_is_idle_without_need(way, ranks):
    plan = way.plan(drawn(101), BatchOptions(2, MSL, ranks))
    assert all(any(plan.batch(step, rank) for rank in range(ranks)) for step in range(plan.steps))
    full = [all(plan.batch(step, rank) for rank in range(ranks)) for step in range(plan.steps)]
    assert all(full[:-1])
    if way.group.__name__ in ("multipack", "random_packing"):
        assert full[-1]  # 101 examples in a handful of bins: the last ones are shared out


@every_way
def test_the_seed_and_the_epoch_decide_everything(way):
    lengths = drawn(80)
    same = [batches(way.plan(lengths, BatchOptions(4, MSL, 2, 7), epoch=1)) for _ in range(2)]
    assert same[0] == same[1]
    assert same[0] != batches(way.plan(lengths, BatchOptions(4, MSL, 2, 7), epoch=2))
    assert same[0] != batches(way.plan(lengths, BatchOptions(4, MSL, 2, 8), epoch=1))


@every_way
def test_stopping_anywhere_and_going_on_gives_the_same_batches(way):
    lengths, options = drawn(40), BatchOptions(2, MSL, 2, 3)

    def two_epochs(sampler):
        for batch in sampler:
            yield batch
        for batch in sampler:
            yield batch

    uninterrupted = list(two_epochs(BatchSampler(way.name, lengths, options, rank=1)))
    assert len(uninterrupted) > 2
    for stop in range(1, len(uninterrupted)):
        first = BatchSampler(way.name, lengths, options, rank=1)
        source = two_epochs(first)
        for _ in range(stop):
            next(source)
        second = BatchSampler(way.name, lengths, options, rank=1)
        second.load_state(first.state())
        rest = list(second)
        assert rest == uninterrupted[stop:stop + len(rest)] and rest
        assert second.epoch == first.epoch + (1 if rest else 0)


def test_a_state_of_another_data_set_or_setting_is_refused():
    options = BatchOptions(2, MSL, 2, 3)
    state = BatchSampler("RandomPacking+PosID", drawn(40), options).state()
    with pytest.raises(ValueError, match="the state was taken with examples 40, this sampler has 41"):
        BatchSampler("RandomPacking+PosID", drawn(41), options).load_state(state)
    with pytest.raises(ValueError, match="taken with ranks 2, this sampler has 4"):
        BatchSampler("RandomPacking+PosID", drawn(40), BatchOptions(2, MSL, 4, 3)).load_state(state)
    with pytest.raises(ValueError, match="taken with way RandomPacking"):
        BatchSampler("SortedPacking+PosID", drawn(40), options).load_state(state)


@pytest.mark.parametrize("lengths, reason", [([], "no examples"), ([3, 0], "example 1 has 0 tokens"), ([3, 33], "example 1 has 33 tokens, must be 1 to 32")])
def test_lengths_that_cannot_be_are_refused(lengths, reason):
    with pytest.raises(ValueError, match=reason):
        get_way("Multipack+PosID").plan(lengths, BatchOptions(1, MSL))


@pytest.mark.parametrize("make, reason", [
    (lambda: get_way("Sorted"), "'Sorted' is no way to make batches; choose from RandomSampling"),
    (lambda: BatchOptions(0, 4), "batch_size is 0, must be at least 1"),
    (lambda: BatchSampler("FixedLengthPacking", [3], BatchOptions(1, 4, ranks=2), rank=2), "rank is 2, must be 0 to 1"),
])
def test_settings_that_cannot_be_are_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


# ---- the ways by hand --------------------------------------------------------------------------------------------------


def test_fixed_length_packing_cuts_the_stream():
    """Lengths 3, 5, 4 in some order make a stream of 12: rows of 5, 5 and 2, and what runs over a cut goes on in the next."""
    plan = get_way("FixedLengthPacking").plan([3, 5, 4], BatchOptions(3, 5))
    (rows,) = batches(plan)
    assert [sum(piece.stop - piece.start for piece in row) for row in rows] == [5, 5, 2]
    stream = [piece for row in rows for piece in row]
    assert len(stream) > 3
    for before, after in zip(stream, stream[1:]):
        assert after.start in (0, before.stop)
        assert (after.example == before.example) == (after.start != 0)


def test_group_by_length_begins_with_the_longest_and_sorts_within_groups():
    lengths = np.arange(1, 33)
    order = [row[0].example + 1 for batch in batches(get_way("GroupByLength+Padding").plan(lengths, BatchOptions(2, MSL))) for row in batch]
    assert order[0] == 32
    for at in range(0, 32, 8):  # 32 // (4 * 2) = 4 batches of 2 are sorted together
        assert order[at + 1:at + 8] == sorted(order[at + 1:at + 8], reverse=True)


def test_sorted_packing_goes_from_the_longest_to_the_shortest():
    """Bins of 10: 7 | 6 3 | 3 2 2: the 3 that fits beside 6 goes there, the next opens a bin."""
    plan = get_way("SortedPacking+PosID").plan([2, 7, 3, 6, 2, 3], BatchOptions(1, 10))
    found = [[piece.stop for row in batch for piece in row] for batch in batches(plan)]
    assert found == [[7], [6, 3], [3, 2, 2]]


def test_multipack_fills_each_step_as_far_as_first_fit_decreasing_can():
    """Two ranks of 10 tokens and lengths 6 6 4 4 in any order fit one step: first-fit decreasing pairs 6 with 4."""
    plan = get_way("Multipack+PosID").plan([6, 4, 6, 4], BatchOptions(1, 10, ranks=2))
    assert plan.steps == 1
    assert [sorted(piece.stop for row in batch for piece in row) for batch in batches(plan)] == [[4, 6], [4, 6]]


def test_optimal_packing_needs_the_fewest_rows():
    lengths = drawn(400, seed=4)
    rows = {name: len(WAYS[name].plan(lengths, BatchOptions(1, MSL)).rows) - 1 for name in WAYS if "PosID" in name}
    bound = pack(LengthHistogram.from_lengths(lengths, MSL), max_sequences_per_pack=None).lower_bound
    assert bound <= rows["OptimalPacking+PosID"] <= bound + 1
    assert all(rows["OptimalPacking+PosID"] <= rows[name] for name in ("Multipack+PosID", "SortedPacking+PosID", "RandomPacking+PosID"))


def test_optimal_packing_spreads_the_attention_work():
    lengths = drawn(600, seed=5)
    balance = {name: report(WAYS[name], lengths, BatchOptions(4, MSL, ranks=4)).attention_balance
               for name in ("OptimalPacking+PosID", "RandomPacking+PosID", "RandomSampling+Padding")}
    assert balance["OptimalPacking+PosID"] < 1.03
    assert balance["OptimalPacking+PosID"] < balance["RandomPacking+PosID"] < balance["RandomSampling+Padding"]


# ---- collators ---------------------------------------------------------------------------------------------------------

PAPER = [list(range(10, 14)), list(range(20, 28)), list(range(30, 35)), list(range(40, 50)) + [410]]


def test_the_example_of_the_paper():
    """"Enhancing Training Efficiency Using Packing with Flash Attention", section 3.5."""
    batch = PaddingFreeCollator()([{"input_ids": ids} for ids in PAPER])
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13, 20, 21, 22, 23, 24, 25, 26, 27, 30, 31, 32, 33, 34,
                                            40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 410]]
    assert batch["labels"].tolist() == [[-100, 11, 12, 13, -100, 21, 22, 23, 24, 25, 26, 27, -100, 31, 32, 33, 34,
                                         -100, 41, 42, 43, 44, 45, 46, 47, 48, 49, 410]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    assert batch["cumulative_lengths"].tolist() == [0, 4, 12, 17, 28] and batch["cumulative_lengths"].dtype == np.int32
    assert batch["max_length"] == 11


def test_padding_the_example_of_the_paper():
    batch = PaddingCollator(pad_id=9)([{"input_ids": ids} for ids in PAPER[:2]])
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13, 9, 9, 9, 9], PAPER[1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1] * 8]
    assert batch["labels"].tolist() == [[10, 11, 12, 13, -100, -100, -100, -100], PAPER[1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 0, 0, 0], list(range(8))]


def test_labels_of_their_own_are_kept_and_not_changed_in_place():
    labels = np.array([5, -100, 7])
    for collator, expected in ((PaddingFreeCollator(), [[-100, -100, 7]]), (PaddingCollator(), [[5, -100, 7]])):
        assert collator([{"input_ids": [1, 2, 3], "labels": labels}])["labels"].tolist() == expected
    assert labels.tolist() == [5, -100, 7]


@pytest.mark.parametrize("collator", [PaddingFreeCollator(), PaddingCollator()])
def test_no_example_gives_a_token_that_counts_nothing(collator):
    batch = collator([])
    assert batch["input_ids"].shape == (1, 1) and batch["labels"].tolist() == [[-100]] and batch["position_ids"].tolist() == [[0]]


@pytest.mark.parametrize("example", [{"input_ids": []}, {"input_ids": [1, 2], "labels": [1]}])
def test_examples_that_cannot_be_are_refused(example):
    with pytest.raises(ValueError, match="example 0 of the batch has"):
        PaddingFreeCollator()([example])


def test_a_broken_example_counts_from_its_cut_and_predicts_nothing_across_it():
    """Example 0 of six tokens is cut after four: what is behind the cut cannot see what is before it."""
    way, dataset = get_way("FixedLengthPacking+PosID"), [{"input_ids": np.arange(10, 16)}]
    batch = collate(way, ((Piece(0, 0, 4),), (Piece(0, 4, 6),)), dataset)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 11, 12, 13, -100, 15]]
    plain = collate(get_way("FixedLengthPacking"), ((Piece(0, 0, 4),), (Piece(0, 4, 6),)), dataset)
    assert plain["input_ids"].tolist() == [[10, 11, 12, 13], [14, 15, 0, 0]]


@every_way
def test_every_label_but_the_first_is_trained_on(way):
    """Over an epoch: all labels but the first of each piece (padding-free), or of nothing (padded, where the model's own
    shift leaves the first of each row out)."""
    lengths = drawn(50)
    dataset = [{"input_ids": np.full(length, number)} for number, length in enumerate(lengths)]
    plan = way.plan(lengths, BatchOptions(3, MSL, 2))
    trained = sum(int((collate(way, batch, dataset)["labels"] != -100).sum()) for batch in batches(plan))
    assert trained == lengths.sum() - (len(plan.example) if way.padding_free else 0)


# ---- the table ---------------------------------------------------------------------------------------------------------

# kernel, positions, isolated, unbroken, unsorted: what follows from the definition of each way in sections 3 and 4.3 of the paper.
EXPECTED = {
    "RandomSampling+Padding": (False, True, True, True, True),
    "GroupByLength+Padding": (False, True, True, True, False),
    "MiniBatchPacking+PosID": (True, True, True, True, True),
    "FixedLengthPacking": (False, False, False, False, True),
    "FixedLengthPacking+PosID": (True, True, True, False, True),
    "Multipack+PosID": (True, True, True, True, True),
    "SortedPacking+PosID": (True, True, True, True, False),
    "RandomPacking+PosID": (True, True, True, True, True),
    "OptimalPacking+PosID": (True, True, True, True, True),
}


@every_way
@pytest.mark.parametrize("seed", [0, 1])
def test_computed_properties_are_those_of_the_table(way, seed):
    made = report(way, drawn(900, seed), BatchOptions(4, MSL, 2, seed))
    assert made.properties == Properties(*EXPECTED[way.name])
    assert made.tokens == drawn(900, seed).sum() and made.slots >= made.tokens
    assert (made.efficiency == 1) == way.padding_free or made.way == "FixedLengthPacking"


def test_the_report_sees_what_is_wrong():
    """A way whose collator leaks, with positions that run on, and one that loses tokens: computed, not taken from a name."""
    from dataclasses import replace

    lengths, options = drawn(300), BatchOptions(4, MSL)
    leaking = replace(get_way("RandomPacking+PosID"), padding_free=False)
    assert report(leaking, lengths, options).properties == Properties(False, False, False, True, True)

    def losing(lengths, options, rng):
        return get_way("RandomSampling+Padding").group(lengths[:-1], options, rng)

    with pytest.raises(ValueError, match="comes 0 times"):
        report(replace(get_way("RandomSampling+Padding"), group=losing), lengths, options)


def test_the_command_prints_all_nine(capsys):
    assert run_main(main, ["--examples", "200", "--histogram", "squad_1_1_384"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in WAYS)
    assert run_main(main, ["--ranks", "0"]) == 2
