"""The static graphs that an engine needs, counted from outside."""

from ipu_packed_bert.engine.host import engine as host
from ipu_packed_bert.model.packed import PackedBertForPreTraining


def count_graphs(monkeypatch, backend="eager"):
    """Have torch.compile use a backend, by default one that runs graphs as they are; return the list of its graphs."""
    graphs = []

    def build(graph, inputs):
        graphs.append(graph)
        if backend == "eager":
            return graph.forward
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend(backend)(graph, inputs)

    monkeypatch.setattr(host, "_BACKEND", build)
    return graphs


def graphs_of(network):
    """Return the graphs that one mode of a network has: one of each kind of part, whatever the number of layers."""
    if not host._shares_graphs():
        return 1
    return 4 if isinstance(network, PackedBertForPreTraining) else 2


def count_programs(network):
    """Return the set that collects mode and shapes of each call of a network: a static engine compiles one for each."""
    programs = set()
    network.register_forward_pre_hook(
        lambda module, fields: programs.add((module.training, tuple(field.shape for field in fields)))
    )
    return programs
