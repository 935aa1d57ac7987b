"""Calls that engines refuse, in one line that names the field, the value and the way out."""

# ruff: noqa: F401  The calls are texts, whose names ruff does not see.
import sys

import pytest
import torch
from torch import nn

from ipu_packed_bert.engine import choose_engine
from ipu_packed_bert.engine.host.devices import find_device
from ipu_packed_bert.engine.host.dropout import PackNoise
from ipu_packed_bert.engine.ipu.feed import BatchesAhead
from ipu_packed_bert.engine.ipu.poprun import _meeting_point
from ipu_packed_bert.processes.ranks import refuse_several
from ipu_packed_bert.settings.config import ConfigError
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.store.packs import PackSchema
from tests.fakes.machine import machine
from tests.fakes.sdk import installed
from tests.imports import CONFIGS
from tests.ipu_runs import SLOTS, make_batch, make_config, schema
from tests.pretraining import host_engine, ipu_engine
from tests.refusals import faults_of_refusals, rows_of
from tests.update_batches import change

CONFIG = make_config()
PIPELINE = make_config(layers_per_ipu=(1, 1), accumulation=5)
BATCH = make_batch(CONFIG)
POD64 = load_config("configs/packed_phase2_pod64.yml", ["engine.kind=ipu"])
SEVERAL_HOSTS = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
TWO_PROCESSES = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def rows(number):
    """Return the first rows of the batch."""
    return {name: field[:number] for name, field in BATCH.items()}


def without(field):
    """Return the batch without a field."""
    return {name: BATCH[name] for name in BATCH if name != field}


def host():
    return host_engine(CONFIG, packing_factor=1.0, device="cpu")


def with_another_bias(engine):
    state = engine.state()
    state["model"]["cls.predictions.bias"] = torch.zeros(5)
    return state


def evaluated_twice(first, second):
    """Evaluate batches of two sizes with one engine."""
    engine = ipu(PIPELINE)
    engine.evaluate(rows(first))
    engine.evaluate(rows(second))


def ipu(config=CONFIG, data_schema=None, **options):
    """Return an engine on the mock of PopTorch."""
    modules = sys.modules["ipu_packed_bert.engine.ipu"]
    return ipu_engine(modules, config, data_schema or schema(), **options)


def larger_than_a_program():
    device = sys.modules["ipu_packed_bert.engine.ipu"].devices.Device("ipu", "")
    config = POD64.changed("placement", replicas=64)
    engine = sys.modules["ipu_packed_bert.engine.ipu"].engine
    return engine.IpuEngine(config, Pretraining(config), device, packing_factor=1.0)


def dropped(values):
    network = nn.Sequential(nn.Dropout(0.5))
    PackNoise(network).begin([1], 0, torch.ones(2, 3).numpy())
    return network(values)


def killed(reader):
    raise AssertionError("An error occurred in the data fetcher")


class Packs:
    """Batches of which only the reading process is tested."""

    layout = share = updates_per_epoch = None

    def __init__(self):
        self.packs = self

    def again(self):
        return None

    def state(self):
        return {}


REFUSED = rows_of(
    """
host().step(rows(3), 1e-2) => 3 packs | batch.micro_batch 2
host().step(without('positions'), 1e-2) => positions
host().load_state(with_another_bias(host())) => model state | cls.predictions.bias
host_engine(CONFIG.changed('engine', precision='tf32'), device='cpu') => tf32 | float32
host_engine(CONFIG.changed('engine', attention='varlen', compile=True)) => engine.attention | engine.compile
find_device(CONFIG.changed('engine', device='cuda').engine) => engine.device | engine.device=cpu
dropped(torch.ones(3, 5)) => dropout layer 0 | [3, 5] | 2 packs
choose_engine(load_config(CONFIGS / 'packed_phase2_gpu1.yml')) => cuda | engine.device=cpu
ipu().step(rows(7), 0.01) => 7 packs | batch.micro_batch
ipu().step(rows(6), 0.01) => 3 micro-batches | needs 4
evaluated_twice(8, 6) => 3 micro-batches | needs 4
ipu().predict(BATCH) => cannot predict | --engine host
ipu(PIPELINE).evaluate(rows(2)) => 1 micro-batches | stages
ipu().load_state(with_another_bias(host())) => model state | cls.predictions.bias
ipu(data_schema=PackSchema(16, 3, 8)) => 16 slots | 24
ipu(data_schema=PackSchema(SLOTS, 4, 9)) => depth 4 | 3
ipu(data_schema=PackSchema(SLOTS, 2, 7)) => depth 2 | 3
ipu(data_schema=PackSchema(SLOTS, 3, 4)) => 4 masked tokens | 5
ipu(change(PIPELINE, batch={'gradient_accumulation': 8}), packing_factor=2.0) => 5 stages => ConfigError
larger_than_a_program() => 256 IPUs | 64 | --num-instances 4 --num-replicas 64
next(BatchesAhead(Packs(), read_ahead=killed)) => data fetcher | engine.asynchronous_loading=false
refuse_several('it', {'POPDIST_X': '1'}) => poprun | would repeat it
refuse_several('it', TWO_PROCESSES) => torchrun | would repeat it
_meeting_point(1, 2, SEVERAL_HOSTS) => 2 instances | MASTER_ADDR
_meeting_point(0, 2, {**SEVERAL_HOSTS, 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '-1'}) => 127.0.0.1:-1 | MASTER_PORT
"""
)


def test_calls_are_refused():
    with installed(ipus=16):
        faults = faults_of_refusals(REFUSED, globals())
        assert machine.compilations == ["inference"]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("version", ["2.6.0", "3.2.1"])
def test_too_old_a_poptorch(monkeypatch, version):
    from tests.fakes import poptorch as stand_in

    monkeypatch.setattr(stand_in, "__version__", version)
    with pytest.raises(ImportError, match=rf"{version}.*1\.13\.1"), installed():
        pass
