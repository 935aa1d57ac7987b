"""A Poplar SDK for the length of a test: ``import poptorch`` finds the stand-in, the modules of engine/ipu load
anew."""

import contextlib
import os
import sys
import types

from tests.fakes import poptorch as stand_in
from tests.fakes.machine import machine

_ENGINE = "ipu_packed_bert.engine.ipu"


def fake_popdist(*, index: int, instances: int, replicas: int):
    """popdist in a process that poprun started: number `index` of `instances`, `replicas` in all."""

    def options(ipus_per_replica=1):
        made = stand_in.Options()
        made.replicationFactor(replicas // instances)
        made.Distributed.configureProcessId(index, instances)
        return made

    popdist = types.ModuleType("popdist")
    popdist.isPopdistEnvSet = lambda: True
    popdist.getInstanceIndex = lambda: index
    popdist.getNumInstances = lambda: instances
    popdist.getNumTotalReplicas = lambda: replicas
    popdist.getNumLocalReplicas = lambda: replicas // instances
    popdist.poptorch = types.ModuleType("popdist.poptorch")
    popdist.poptorch.Options = options
    return popdist


@contextlib.contextmanager
def installed(*, ipus: int = 16, popdist=None):
    """Yields (the package engine.ipu with its modules, stand-in) on a machine with `ipus` IPUs; everything is as before
    afterwards."""
    import ipu_packed_bert.engine as package

    loaded = [name for name in sys.modules if name == _ENGINE or name.startswith(_ENGINE + ".")]
    names = ["poptorch", "poptorch.optim", "popdist", "popdist.poptorch", *loaded]
    before = {name: sys.modules.pop(name, None) for name in names}
    variables = {name: os.environ.pop(name, None) for name in ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")}
    attribute = package.__dict__.pop("ipu", None)
    sys.modules["poptorch"], sys.modules["poptorch.optim"] = stand_in, stand_in.optim
    if popdist is not None:
        sys.modules["popdist"], sys.modules["popdist.poptorch"] = popdist, popdist.poptorch
    machine.reset(ipus)
    try:
        from ipu_packed_bert.engine import ipu
        from ipu_packed_bert.engine.ipu import devices, engine, feed, options, program, state  # noqa: F401 (attributes of ipu)

        yield ipu, stand_in
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
        os.environ.update({name: value for name, value in variables.items() if value is not None})
