"""Pre-training put together as the commands do it: its network, engines, batches and placement of a configuration."""

from ipu_packed_bert.data.global_batches import GlobalBatches, StoredPacks
from ipu_packed_bert.engine.base import build_network
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.placement import place
from ipu_packed_bert.tasks.pretraining import Pretraining


def initial_network(config, *, attention="eager"):
    """With its initial weights."""
    return build_network(Pretraining(config), config.run.seed, attention=attention)


def host_engine(config, schema=None, *, packing_factor=1.0, **options):
    return HostEngine(config, Pretraining(config, schema), packing_factor=packing_factor, **options)


def ipu_engine(sdk, config, schema, *, packing_factor=1.0, **options):
    """sdk: the modules that `tests.fakes.sdk.installed` gives, or the real `engine.ipu`."""
    device = sdk.devices.find_device(config)
    return sdk.engine.IpuEngine(config, Pretraining(config, schema), device, packing_factor=packing_factor, **options)


def global_batches(
    store,
    config,
    *,
    packing_factor=1.0,
    evaluation=None,
    **options,
):
    layout = Pretraining(config, store.schema).layout(config, packing_factor)
    held_out = None if evaluation is None else StoredPacks(evaluation)
    return GlobalBatches(StoredPacks(store, seed=config.run.seed), layout, held_out=held_out, **options)


def count(batch):
    return Pretraining(Config()).count(batch)


def placed(config):
    return place(config.placement, Pretraining(config).heads)
