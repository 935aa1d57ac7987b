"""The stand-in for PopTorch: its names are PopTorch's, and it keeps the rules that PopTorch keeps."""

import builtins
import importlib
import inspect

import pytest
import torch
from torch import nn

from tests.fakes import poptorch
from tests.fakes.lowering import API
from tests.fakes.machine import machine
from tests.ipu_runs import plain
from tests.refusals import faults_of_refusals

TOP, OPTIM, OPTIONS = (API["modules"][name] for name in ("poptorch", "poptorch.optim", "poptorch.options"))

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_machine():
    machine.reset(16)


PUBLISHED = {**TOP, **OPTIM, **OPTIONS}


def same_signature(function, parameters, *, method):
    mine = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
    assert [p.name for p in mine] == [p["name"] for p in parameters]
    for parameter, real in zip(mine, parameters):
        assert parameter.kind == getattr(inspect.Parameter, real["kind"].upper()), parameter
        assert ("default" in real) == (parameter.default is not inspect.Parameter.empty), parameter
        if isinstance(real.get("default"), dict):  # a member of an enumeration
            assert f"{type(parameter.default).__name__}.{parameter.default.name}" == real["default"]["expr"]
        elif "default" in real:
            assert parameter.default == real["default"] and type(parameter.default) is type(real["default"]), parameter


def same_bases(kind, name):
    """A published base that the stand-in has too is its base there; torch's and Python's are the same classes."""
    for base in API["bases"].get(name, ()):
        module, _, attribute = base.rpartition(".")
        if module == "_options_impl" or base.startswith("_I"):
            continue  # private to PopTorch
        wanted = PUBLISHED_CLASSES.get(attribute) or getattr(builtins, attribute, None)
        wanted = getattr(importlib.import_module(module), attribute) if module else wanted
        assert issubclass(kind, wanted), base


def own_members(kind):
    """(name, value) of everything that the stand-in's own code puts into a class, its bases included."""
    actual = {}
    for item in reversed(kind.__mro__):
        if item.__module__.startswith("tests.fakes"):
            actual.update(vars(item))
    # torch puts a profiled `step` into the classes of optimisers.
    of_torch = [name for name, value in actual.items() if (getattr(value, "__module__", "") or "").startswith("torch")]
    return [(name, value) for name, value in actual.items() if name not in of_torch]


def known_members(name):
    """(methods, properties) of a published class and of those of its bases that are published."""
    methods = {}
    properties = set()
    for item in [*(base for base in API["bases"].get(name, ()) if base in PUBLISHED), name]:
        methods.update(PUBLISHED[item].get("methods", {}))
        properties.update(PUBLISHED[item].get("properties", ()))
    return methods, properties


def compare_class(kind, name):
    same_bases(kind, name)
    methods, properties = known_members(name)
    compared = 0
    for member, value in own_members(kind):
        if member.startswith("_") and member not in methods:
            continue  # private, or how the stand-in is made
        if isinstance(value, property):
            if (name, member) != ("Options", "_Popart"):
                assert member in properties, f"{name} has no property {member}"
            assert (value.fset is not None) == (f"{name}.{member}" in API["settable_properties"])
            continue
        # A plain value, or a class in the class, would be none of PopTorch's.
        static = isinstance(value, staticmethod)
        assert static or inspect.isfunction(value), f"{name}.{member}"
        assert member in methods, f"{name} has no method {member}"
        assert static == (methods[member]["kind"] == "static_method")
        same_signature(value.__func__ if static else value, methods[member]["params"], method=not static)
        compared += 1
    return compared


def public(module):
    """(name, object) of everything public that a module of the stand-in has."""
    return [(name, value) for name, value in vars(module).items() if not name.startswith("_") and name != "torch"]


STAND_IN = [*public(poptorch), *public(poptorch.optim)]
PUBLISHED_CLASSES = {name: value for name, value in STAND_IN if inspect.isclass(value)}


def test_every_name_is_poptorchs_with_its_kind_values_parameters_and_defaults():
    compared = 0
    for name, value in STAND_IN:
        if inspect.ismodule(value):
            assert f"poptorch.{name}" in API["modules"]
            continue
        assert name in PUBLISHED, f"PopTorch has no {name}"
        entry = PUBLISHED[name]
        if entry["kind"] == "function":
            assert inspect.isfunction(value)
            same_signature(value, entry["params"], method=False)
            compared += 1
            continue
        assert inspect.isclass(value)
        if entry["kind"] == "enum":
            assert {member.name: member.value for member in value} == entry["members"]
        compared += 1
        if entry["kind"] == "class":
            compared += compare_class(value, name)
        else:
            same_bases(value, name)
    assert compared > 80
    assert poptorch.__version__ == API["poptorch_version"]


def test_sub_options_are_poptorchs():
    for name, entry in OPTIONS.items():
        kind = getattr(poptorch, name, None)
        if kind is None:
            assert name == "_JitOptions"  # nothing in it that an application of 3.4 would set
            continue
        assert compare_class(kind, name) > 0
        top, attribute = entry["reached_through"].split(".")
        assert top == "Options"
        assert isinstance(getattr(poptorch.Options(), attribute), kind)


VALUES = {"bool": True, "uint64": 3, "double": 0.5, "string": "text", "container": {}, "enum_as_uint64": 1}


def test_the_backend_takes_every_published_option_with_its_type_alone():
    assert set(API["backend_options"]) == set(VALUES)
    for kind, names in API["backend_options"].items():
        assert len(names) > 4
        for name in names:
            backend = poptorch.Options()._Popart
            backend.set(name, VALUES[kind])
            for value in VALUES.values():
                if type(value) is not type(VALUES[kind]):
                    with pytest.raises(RuntimeError, match="takes"):
                        backend.set(name, value)


class Regression(nn.Module):
    """x, y [rows, 3] -> loss: mean over the rows of |weight x - y|^2; and the number of rows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)

    def forward(self, x, y):
        error = ((self.linear(x) - y) ** 2).sum(1).mean()
        return poptorch.identity_loss(error, reduction="none"), x[:, 0]


def adamw(model, **settings):
    return poptorch.optim.AdamW(model.parameters(), **{"lr": 0.1, "weight_decay": 0.0, **settings})


def options_of(*, accumulation=1, replicas=1):
    options = poptorch.Options().replicationFactor(replicas)
    options.Training.gradientAccumulation(accumulation)
    return options


def executor_of(model=None, options=None):
    model = model or Regression()
    return poptorch.trainingModel(model, options or options_of(), adamw(model))


def compile_training(forward, *inputs, options=None):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("counts", torch.zeros(3, dtype=torch.int32))

        def forward(self, *fields):
            return forward(self, *fields)

    model = Model()
    executor = poptorch.trainingModel(model, options or options_of(), adamw(model))
    executor.compile(*inputs)
    return executor


def loss_of(tensor):
    return poptorch.identity_loss(tensor.float(), reduction="sum")


class Chain(nn.Module):
    """A block on each IPU listed, one after the other."""

    def __init__(self, ipus, tie=None):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in ipus)
        if tie:
            self.parts[tie[1]].weight = self.parts[tie[0]].weight
        for number, ipu in enumerate(ipus):
            poptorch.BeginBlock(self.parts[number], f"block {number}", ipu_id=ipu)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return poptorch.identity_loss(x, reduction="mean")


def chain(ipus, *, accumulation, replicas=1, auto=poptorch.AutoStage.AutoIncrement, tie=None):
    model = Chain(ipus, tie)
    options = options_of(accumulation=accumulation, replicas=replicas)
    options.setExecutionStrategy(poptorch.PipelinedExecution(auto))
    executor = poptorch.trainingModel(model, options, adamw(model))
    executor.compile(torch.ones(accumulation * replicas, 3))
    return executor


ARGUMENTS = {  # of a setting, where it is not one flag
    "deviceIterations": (2,),
    "enableExecutableCaching": ("cache",),
    "enableProfiling": ("profile",),
    "modelName": ("name",),
    "outputMode": (poptorch.OutputMode.All,),
    "randomSeed": (3,),
    "replicationFactor": (2,),
    "setAvailableMemoryProportion": ({"IPU0": 0.1},),
    "setExecutionStrategy": (poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement),),
    "useOfflineIpuTarget": (2,),
    "Distributed.configureProcessId": (1, 2),
    "Precision.setPartialsType": (torch.float16,),
    "Training.accumulationAndReplicationReductionType": (poptorch.ReductionType.Sum,),
    "Training.gradientAccumulation": (2,),
    "_Popart.set": ("enableExplicitIR", True),
    "_Popart.setEngineOptions": ({"autoReport.all": "true"},),
    "_Popart.setPatterns": ({"TiedGather": True},),
}
SUB_OPTIONS = ("", "Distributed", "Precision", "TensorLocations", "Training", "_Popart")


def dictionary(setting=None):
    options = poptorch.Options().outputMode(poptorch.OutputMode.Sum)
    if setting is not None:
        part, _, name = setting.rpartition(".")
        flag = poptorch.TensorLocationSettings() if part == "TensorLocations" else False
        getattr(getattr(options, part) if part else options, name)(*ARGUMENTS.get(setting, (flag,)))
    return plain(options.toDict())


def test_the_dictionary_of_the_backend_is_poptorchs():
    """The whole of it before anything is set, and what each setting of the stand-in adds: neither more nor less."""
    facts = API["option_dictionary"]
    options = poptorch.Options()
    assert dictionary() == facts["defaults"]
    settings = [
        f"{part}.{name}".lstrip(".")
        for part in SUB_OPTIONS
        for name, value in vars(type(getattr(options, part) if part else options)).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    settings = set(settings) - {"toDict", "defaultOutputMode"}
    assert len(settings) > 15
    for setting in settings:
        added = facts["added_by"][setting]
        removed = {"compilation_progress_bar_fn"} if setting == "showCompilationProgressBar" else set()
        assert set(dictionary(setting)) == {*facts["defaults"], *added} - removed, setting


def reassigned(model, rows):
    model.counts = model.counts + 1
    return loss_of(rows * model.weight)


def after_a_call(call):
    """Call a method of an executor that has made an update."""
    executor = executor_of()
    executor(torch.zeros(1, 3), torch.zeros(1, 3))
    return call(executor)


def frozen(change):
    """Change options that an executor uses."""
    options = options_of()
    executor_of(options=options)
    return change(options)


def with_another_constant(executor):
    """Change a coefficient that is compiled in."""
    executor._optimizer.param_groups[0]["eps"] = 1e-4
    return executor.setOptimizer(executor._optimizer)


ROWS = torch.ones(2, 3)
OF_TORCH = torch.optim.AdamW(Regression().parameters()).state_dict()
ZEROS = torch.zeros(6, 3)
REFUSED = [
    ("poptorch.Options().anchorMode", ["anchorMode"], AttributeError),
    ("setattr(poptorch.Options(), 'deviceIterationz', 3)", ["deviceIterationz"], AttributeError),
    ("poptorch.Options()._Popart.set('noSuchOption', True)", ["unknown", "noSuchOption"], RuntimeError),
    ("poptorch.Options().setAvailableMemoryProportion({'ipu0': 0.1})", ["ipu0"]),
    ("poptorch.Options().setAvailableMemoryProportion({'IPU0': 1.5})", ["1.5"]),
    ("poptorch.Options().useIpuModel(True).useOfflineIpuTarget()", ["."], poptorch.Error),
    ("frozen(lambda options: options.deviceIterations(2))", ["frozen"], AttributeError),
    ("frozen(lambda options: options.Training.gradientAccumulation(2))", ["frozen"], AttributeError),
    ("frozen(lambda options: options._Popart.set('enableOutlining', True))", ["frozen"], AttributeError),
    ("executor_of(options=options_of(accumulation=4))(ZEROS, ZEROS)", ["multiple"], AssertionError),
    ("after_a_call(lambda executor: executor(ROWS, ROWS))", ["compiled for"], poptorch.Error),
    ("after_a_call(with_another_constant)", ["eps"], poptorch.Error),
    ("after_a_call(lambda executor: executor.cycleCount())", ["disabled"], poptorch.Error),
    ("adamw(Regression()).load_state_dict(OF_TORCH)", ["IPU optimizer"], RuntimeError),
    ("compile_training(lambda m, x: loss_of((x * m.weight)[x > 0]), ROWS)", ["cannot lower"], RuntimeError),
    ("compile_training(lambda m, x: loss_of(m.weight * torch.nonzero(x).shape[0]), ROWS)", ["lower"], RuntimeError),
    ("compile_training(lambda m, x: loss_of(m.weight * x.sum().item()), ROWS)", ["cannot lower"], RuntimeError),
    ("compile_training(lambda m, x: loss_of(m.weight) if x.sum() > 0 else 0, ROWS)", ["cannot lower"], RuntimeError),
    ("compile_training(lambda m, x: loss_of(torch.tril(x * m.weight)), ROWS)", ["cannot lower"], RuntimeError),
    ("compile_training(lambda m, x: loss_of((x * m.weight).to(torch.bfloat16)), ROWS)", ["lower"], RuntimeError),
    ("compile_training(lambda m, x, t=torch.ones(3): loss_of(x * m.weight * t), ROWS)", ["lower"], RuntimeError),
    ("compile_training(lambda m, x: loss_of(x * m.weight * torch.tensor([1.0, 2, 3])), ROWS)", ["lower"], RuntimeError),
    ("compile_training(lambda m, x: (x * m.weight).sum(), ROWS)", ["exactly one final loss"], poptorch.Error),
    ("compile_training(lambda m, x: (loss_of(x * m.weight), loss_of(m.weight)), ROWS)", ["one"], poptorch.Error),
    ("compile_training(reassigned, ROWS)", ["reassigned"], poptorch.Error),
    ("compile_training(lambda m, x: loss_of(x * m.weight), [1.0, 2.0])", ["tensors"], TypeError),
    ("[executor_of(model) for model in [Regression()] * 2]", ["already been wrapped"], RuntimeError),
    ("chain([0, 1, 2, 3, 0], accumulation=8)", ["at least 9"], poptorch.Error),
    ("chain([0, 1, 0], accumulation=9, auto=poptorch.AutoStage.SameAsIpu)", ["returns"], poptorch.Error),
    ("chain([0, 1, 2], accumulation=9)", ["power of two"], poptorch.Error),
    ("chain([0, 1, 0, 1], accumulation=9, tie=(0, 1))", ["tied"], poptorch.Error),
    ("[poptorch.BeginBlock(layer, 'a', ipu_id=0) for layer in [nn.Linear(3, 3)] * 2]", ["already"], poptorch.Error),
    ("poptorch.inferenceModel(Regression(), options_of(accumulation=2))", ["inference"], AssertionError),
    ("executor_of(options=options_of().useOfflineIpuTarget())(ROWS[:1], ROWS[:1])", ["offline"], AssertionError),
    ("poptorch.AsynchronousDataAccessor(number for number in range(3))", ["pickle"], TypeError),
]


def test_what_poptorch_refuses_is_refused():
    faults = []
    for row in REFUSED:
        machine.reset(16)
        faults += faults_of_refusals([row], globals())
    assert not faults, "\n".join(faults)
