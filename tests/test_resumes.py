"""A sample of three resumes in a row; all of them: python -m tests.resumes all."""

import random

import pytest

from tests.resumes import Opened, cases, faults, triples, undisturbed


@pytest.mark.parametrize("name", [name for name, _ in cases(None)])
def test_three_resumes_change_nothing(tmp_path, name):
    case = dict(cases(tmp_path))[name]()
    whole = undisturbed(case)
    places = random.Random(name).sample(triples(len(whole)), 3)
    assert len(whole) > 1 and list(faults(case, whole, places, name)) == [""] * 3


@pytest.mark.parametrize("seed", ["0", "5"])  # without workers throughout, and with some in the end
def test_the_loop_by_updates_goes_on_at_the_end_of_an_epoch(tmp_path, seed):
    case = dict(cases(tmp_path))["MicroBatchSampler, by updates"]()
    whole = undisturbed(case)
    epochs = [epoch for (epoch, _, _), _ in whole]
    ends = [epochs.index(1), len(whole)]
    assert list(faults(case, whole, [(end,) * 3 for end in ends], seed)) == ["", ""]


def test_the_table_notices_a_state_that_loses_or_repeats_an_item():
    def case(shift):
        def opened(state, rng):
            place = [max(0, (state or 0) + shift)]

            def items():
                while place[0] < 6:
                    place[0] += 1
                    yield [place[0]]

            return Opened(items(), lambda: place[0])

        return opened

    for shift in (-1, 0, 1):
        outcomes = list(
            faults(
                case(shift),
                [[number] for number in range(1, 7)],
                [(1, 2, 2)],
                "",
            )
        )
        assert (outcomes == [""]) is (shift == 0)


# Pre-training in one process and in two ranks, and fine-tuning in 2, 3, 2 and 1 ranks.
@pytest.mark.parametrize("seed, first", [(5, 0), (4, 1), (3, 3)])
def test_runs_that_are_killed_three_times_end_as_undisturbed(tmp_path, seed, first):
    pytest.importorskip("torch")
    from tests.resumed_runs import try_runs

    assert list(try_runs(tmp_path, number=1, seed=seed, first=first)) == [(3, "")]
