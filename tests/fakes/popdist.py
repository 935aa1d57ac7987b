"""A stand-in for popdist in one of several real processes, which exchange numbers by torch's gloo.

Its surface is what published applications call, and no more. Strict: `popdist.init` comes before anything of PopTorch,
and once; an instance has the IPUs of its own replicas alone; what all devices wait for and not all
instances do, or not in the same order, is an error, after `seconds` where somebody does not come.
"""

import types
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.fakes import poptorch as stand_in

_SECONDS = 600.0  # beyond which somebody has not come, also on a busy machine


class Exchange:
    """Exchange between instances, in a process group of their own.

    seconds: how long one waits for the others in an exchange; until they have met, however busy the machine is.
    """

    def __init__(self, name, store, index, instances, seconds):
        self.name = name
        self.index = index
        self.instances = instances
        self.seconds = seconds
        self._group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), index, instances, timedelta(minutes=10))

    def _end(self, work):
        work.wait(timedelta(seconds=self.seconds))

    def gathered(self, tensor):
        """[instances, ...]."""
        actual = [torch.empty_like(tensor) for _ in range(self.instances)]
        self._end(self._group.allgather([actual], [tensor]))
        return torch.stack(actual)

    def together(self, what):
        marks = self.gathered(torch.tensor([zlib.crc32(what.encode())]))
        if len(set(marks.flatten().tolist())) > 1:
            raise stand_in.Error(f"{self.name}: instance {self.index} does {what!r}, another one something else")

    def summed(self, tensors):
        """The tensors by name, each summed over the instances."""
        flat = torch.cat([torch.as_tensor(tensor).reshape(-1) for tensor in tensors.values()])
        self._end(self._group.allreduce([flat]))
        parts = flat.split([tensor.numel() for tensor in tensors.values()])
        return {name: part.reshape(tensor.shape) for (name, tensor), part in zip(tensors.items(), parts)}


class PopRun:
    """Environment of a process under poprun: instance `index` of `instances` with `replicas` in total.

    store: of torch.distributed, the same in all instances; None: they are never to exchange anything.
    """

    def __init__(self, *, index, instances, replicas, local_replicas=None, store=None):
        self.index = index
        self.instances = instances
        self.replicas = replicas
        self.local_replicas = replicas // instances if local_replicas is None else local_replicas
        self.ready = False
        self.device = None
        self._store = store

    def exchange(self, name):
        if self._store is None or self.instances == 1:
            return None
        return Exchange(name, self._store, self.index, self.instances, _SECONDS)

    def popdist(self):
        """The module `popdist`."""

        def after_init(value):
            if not self.ready:
                raise stand_in.Error("popdist.init() was not called")
            return value

        def init():
            if self.ready:
                raise stand_in.Error("popdist.init() was called twice")
            self.device = self.exchange("device")
            self.ready = True

        def options(ipus_per_replica=1):
            built = stand_in.Options()
            built.replicationFactor(self.local_replicas)
            built.Distributed.configureProcessId(self.index, self.instances)
            return built

        actual = types.ModuleType("popdist")
        actual.init = init
        actual.isPopdistEnvSet = lambda: True
        actual.getNumInstances = lambda: after_init(self.instances)
        actual.getInstanceIndex = lambda: after_init(self.index)
        actual.getNumTotalReplicas = lambda: after_init(self.replicas)
        actual.getNumLocalReplicas = lambda: after_init(self.local_replicas)
        actual.poptorch = types.ModuleType("popdist.poptorch")
        actual.poptorch.Options = options
        return actual
