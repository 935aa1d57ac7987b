"""A Poplar SDK for the length of a test: ``import poptorch`` finds the stand-in, the modules of engine/ipu load
anew."""

import contextlib
import os
import sys

from tests.fakes import poptorch as stand_in
from tests.fakes.machine import machine

_ENGINE = "ipu_packed_bert.engine.ipu"
_MODULES = ("poptorch", "poptorch.optim", "popdist", "popdist.poptorch")


@contextlib.contextmanager
def _in_place(found):
    """Import these modules by their names, None: none, whatever this machine has; as before afterwards."""
    import ipu_packed_bert.engine as package

    loaded = [name for name in sys.modules if name == _ENGINE or name.startswith(_ENGINE + ".")]
    before = {name: sys.modules.pop(name, None) for name in [*_MODULES, *loaded]}
    attribute = package.__dict__.pop("ipu", None)
    sys.modules.update({name: found.get(name) for name in _MODULES})
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name == _ENGINE or name.startswith(_ENGINE + ".")]:
            del sys.modules[name]
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        package.__dict__.pop("ipu", None)
        if attribute is not None:
            package.ipu = attribute


def missing():
    """No Poplar SDK for the length of a test."""
    return _in_place({})


@contextlib.contextmanager
def installed(*, ipus=16, poprun=None):
    """Yields (the package engine.ipu with its modules, stand-in) on a machine with `ipus` IPUs; everything is as before
    afterwards.

    poprun: a `tests.fakes.popdist.PopRun`, in a process that poprun started; `ipus` are then those of the instance.
    """
    actual = {"poptorch": stand_in, "poptorch.optim": stand_in.optim}
    if poprun is not None:
        popdist = poprun.popdist()
        actual.update({"popdist": popdist, "popdist.poptorch": popdist.poptorch})
    variables = {name: os.environ.pop(name, None) for name in ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")}
    machine.reset(ipus)
    machine.poprun = poprun
    try:
        with _in_place(actual):
            from ipu_packed_bert.engine import ipu
            from ipu_packed_bert.engine.ipu import devices, engine, feed, options, program, state  # noqa: F401 (attributes of ipu)

            yield ipu, stand_in
    finally:
        os.environ.update({name: value for name, value in variables.items() if value is not None})
