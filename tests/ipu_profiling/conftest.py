"""Fixtures shared with the tests of the training package: the modelled machine, and runs without a picture."""

from tests.ipu_packed_bert.conftest import cycle_cache, load, machine, picture_of_a_run  # noqa: F401
