"""The stand-in for PopVision's analysis library, which an enabled SDK puts on PYTHONPATH."""

from tests.fakes.pva import openReport  # noqa: F401
