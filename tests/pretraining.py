"""Pre-training put together as the commands do it: its network, engines, batches and placement of a configuration."""

from typing import Any, Optional

import torch

from ipu_packed_bert.data.global_batches import GlobalBatches, StoredPacks
from ipu_packed_bert.engine.base import build_network
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.placement import Placement, place
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.store.data_set import PackStore
from pack_data.store.packs import PackSchema


def initial_network(config: Config, *, attention: str = "eager") -> torch.nn.Module:
    """With its initial weights."""
    return build_network(Pretraining(config), config.run.seed, attention=attention)


def host_engine(
    config: Config, schema: Optional[PackSchema] = None, *, packing_factor: float = 1.0, **options: Any
) -> HostEngine:
    return HostEngine(config, Pretraining(config, schema), packing_factor=packing_factor, **options)


def ipu_engine(sdk: Any, config: Config, schema: PackSchema, *, packing_factor: float = 1.0, **options: Any) -> Any:
    """sdk: the modules that `tests.fakes.sdk.installed` gives, or the real `engine.ipu`."""
    device = sdk.devices.find_device(config)
    return sdk.engine.IpuEngine(config, Pretraining(config, schema), device, packing_factor=packing_factor, **options)


def global_batches(
    store: PackStore,
    config: Config,
    *,
    packing_factor: float = 1.0,
    evaluation: Optional[PackStore] = None,
    **options: Any,
) -> GlobalBatches:
    layout = Pretraining(config, store.schema).layout(config, packing_factor)
    held_out = None if evaluation is None else StoredPacks(evaluation)
    return GlobalBatches(StoredPacks(store, seed=config.run.seed), layout, held_out=held_out, **options)


def count(batch: Any) -> Any:
    return Pretraining(Config()).count(batch)


def placed(config: Config) -> Placement:
    return place(config.placement, Pretraining(config).heads)
