"""Rounds: every side once in each, in alternating order, and the first one is not counted."""

import numpy as np
import pytest

from ipu_packed_bert.engine.timing import quartiles, rounds_in_turn, seconds_in_turn


class Clock:
    """Goes on only where work says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def work(self, *seconds):
        left = iter(seconds)

        def run():
            self.now += next(left)

        return run


def test_each_round_has_every_side_and_every_second_one_is_reversed():
    states = []
    sides = {name: lambda number, name=name: states.append((number, name)) or name.upper() for name in "abc"}
    rounds = list(rounds_in_turn(sides, 2))
    assert states == [
        (0, "a"),
        (0, "b"),
        (0, "c"),
        (1, "c"),
        (1, "b"),
        (1, "a"),
        (2, "a"),
        (2, "b"),
        (2, "c"),
    ]
    assert rounds == [(number, {"a": "A", "b": "B", "c": "C"}) for number in range(3)]


def test_the_first_round_warms_up():
    clock = Clock()
    seconds = seconds_in_turn({"a": clock.work(9, 1, 2), "b": clock.work(8, 3, 4)}, 2, clock)
    assert {side: values.tolist() for side, values in seconds.items()} == {"a": [1, 2], "b": [3, 4]}
    seconds = seconds_in_turn({"a": clock.work(9, 1)}, 2, clock, warm_up=False)
    assert seconds["a"].tolist() == [9, 1]


def test_rounds_end_when_their_time_is_over_but_not_before_two():
    clock = Clock()
    assert seconds_in_turn({"a": clock.work(1, 5, 5, 5)}, 9, clock, at_most=3)["a"].tolist() == [
        5,
        5,
    ]
    assert seconds_in_turn({"a": clock.work(1, 1, 1, 1, 1)}, 9, clock, at_most=3)["a"].tolist() == [
        1,
        1,
        1,
    ]


def test_quartiles_stand_around_the_median():
    values = quartiles(np.array([2.0, 1.6, 2.0]))
    assert values == pytest.approx((1.8, 2.0, 2.0)) and str(values) == "2.000 (1.800..2.000)"
