"""The stand-in for PopTorch: its names are PopTorch's, and it keeps the rules that PopTorch keeps."""

import ast
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

TOP, OPTIM, OPTIONS = (API["modules"][name] for name in ("poptorch", "poptorch.optim", "poptorch.options"))


@pytest.fixture(autouse=True)
def fresh_machine():
    machine.reset(16)


PUBLISHED = {**TOP, **OPTIM, **OPTIONS}
# Attributes that torch's optimisers have, and the one of PopTorch's that its methods are reached through.
OF_OPTIMISERS = {"defaults", "param_groups", "state", "variable_attrs"}


def same_signature(function, parameters, *, method):
    mine = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
    assert [p.name for p in mine] == [p["name"] for p in parameters]
    for own, real in zip(mine, parameters):
        assert own.kind == getattr(inspect.Parameter, real["kind"].upper()), own
        assert ("default" in real) == (own.default is not inspect.Parameter.empty), own
        if isinstance(real.get("default"), dict):  # a member of an enumeration
            assert f"{type(own.default).__name__}.{own.default.name}" == real["default"]["expr"]
        elif "default" in real:
            assert own.default == real["default"] and type(own.default) is type(real["default"]), own


def same_bases(kind, name):
    """A published base that the stand-in has too is its base there; torch's and Python's are the same classes."""
    for base in API["bases"].get(name, ()):
        module, _, own = base.rpartition(".")
        if module == "_options_impl" or base.startswith("_I"):
            continue  # private to PopTorch
        wanted = PUBLISHED_CLASSES.get(own) or getattr(builtins, own, None)
        wanted = getattr(importlib.import_module(module), own) if module else wanted
        assert issubclass(kind, wanted), base


def own_members(kind):
    """(name, value) of everything that the stand-in's own code puts into a class, its bases included."""
    found = {}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith("tests.fakes"):
            found.update(vars(each))
    # torch puts a profiled `step` into the classes of optimisers.
    of_torch = [name for name, value in found.items() if (getattr(value, "__module__", "") or "").startswith("torch")]
    return [(name, value) for name, value in found.items() if name not in of_torch]


def known_members(name):
    """(methods, properties) of a published class and of those of its bases that are published."""
    methods, properties = {}, set()
    for each in [*(base for base in API["bases"].get(name, ()) if base in PUBLISHED), name]:
        methods.update(PUBLISHED[each].get("methods", {}))
        properties.update(PUBLISHED[each].get("properties", ()))
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
    assert compared > 90 and poptorch.__version__ == API["poptorch_version"]


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_sub_options_are_poptorchs(name):
    kind = getattr(poptorch, name, None)
    if kind is None:
        assert name == "_JitOptions"  # nothing in it that an application of 3.4 would set
        return
    assert compare_class(kind, name) > 0
    reached = OPTIONS[name]["reached_through"].split(".")
    assert isinstance(getattr(poptorch.Options(), reached[1]), kind) and reached[0] == "Options"


def test_no_object_has_a_public_attribute_of_the_stand_ins_own():
    """Set while an object is made, so that no class shows it."""
    model = Regression()
    executor = poptorch.trainingModel(model, made(), adamw(model))
    objects = [executor, poptorch.Options(), poptorch.TensorLocationSettings(), executor._optimizer.variable_attrs]
    accessor = poptorch.AsynchronousDataAccessor(Numbers())
    objects += [accessor, poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu)]
    for each in objects:
        assert [name for name in vars(each) if not name.startswith("_")] == [], type(each)
    assert set(vars(poptorch.Block())) == {*vars(nn.Module()), "_user_id", "_ipu_id"}
    for optimizer in (adamw(model), poptorch.optim.LAMB(model.parameters())):
        name = type(optimizer).__name__
        known = {*OPTIM[name]["poptorch_only_attributes"], *OF_OPTIMISERS}
        assert {each for each in vars(optimizer) if not each.startswith("_")} <= known
        assert set(optimizer.param_groups[0]) - {"params"} <= {
            *OPTIM[name]["per_group_attributes"],
            *torch.optim.AdamW([nn.Parameter(torch.ones(1))]).param_groups[0],
        }
    executor.destroy()


def test_errors_are_of_published_kinds():
    """Return the exceptions that the source of the mock raises: PopTorch's and Python's."""
    kinds = set()
    for module in (poptorch, poptorch.optim):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            raised = node.exc if isinstance(node, ast.Raise) else None
            if raised is not None:
                called = raised.func if isinstance(raised, ast.Call) else raised
                kinds.add(called.id)
    kinds.discard("item")  # what the accessor's reader met
    assert "Error" in kinds
    for name in kinds:
        assert hasattr(builtins, name) or PUBLISHED[name]["kind"] == "exception", name


VALUES = {"bool": True, "uint64": 3, "double": 0.5, "string": "text", "container": {}, "enum_as_uint64": 1}


@pytest.mark.parametrize("kind", sorted(VALUES))
def test_the_backend_takes_every_published_option_with_its_type_alone(kind):
    names = API["backend_options"][kind]
    assert len(names) > 4 and set(API["backend_options"]) == set(VALUES)
    for name in names:
        popart = poptorch.Options()._Popart
        popart.set(name, VALUES[kind])
        for value in VALUES.values():
            if type(value) is not type(VALUES[kind]):
                with pytest.raises(RuntimeError, match="takes"):
                    popart.set(name, value)
        with pytest.raises(RuntimeError, match="unknown backend option"):
            popart.set(name + "s", VALUES[kind])


def test_a_wrong_option_name_fails():
    options = poptorch.Options()
    for wrong in ("gradientAccumulation", "anchorMode", "logCycleCounts"):
        with pytest.raises(AttributeError):
            getattr(options, wrong)
    with pytest.raises(AttributeError):
        options.deviceIterationz = 3
    with pytest.raises(AttributeError):
        _ = options.Precision.setPartialType
    with pytest.raises(RuntimeError, match="unknown backend option"):
        options._Popart.set("disableGradAccumulationTensorStream", True)
    with pytest.raises(RuntimeError, match="takes bool"):
        options._Popart.set("disableGradAccumulationTensorStreams", 1)


@pytest.mark.parametrize("proportion", [{"0": 0.1}, {"IPU0": 1.5}, {"ipu0": 0.1}])
def test_available_memory_proportion_is_checked(proportion):
    with pytest.raises(ValueError):
        poptorch.Options().setAvailableMemoryProportion(proportion)


def test_ipu_model_and_offline_target_exclude_each_other():
    with pytest.raises(poptorch.Error):
        poptorch.Options().useIpuModel(True).useOfflineIpuTarget()


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


def trained(options, rows, *, seed=1, steps=1, **settings):
    torch.manual_seed(0)
    model = Regression()
    optimizer = adamw(model, **settings)
    executor = poptorch.trainingModel(model, options, optimizer)
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 3, generator=generator), torch.randn(rows, 3, generator=generator)
    for _ in range(steps):
        outputs = executor(x, y)
    executor.copyWeightsToHost()
    weight = model.linear.weight.detach().clone()
    executor.destroy()
    return weight, outputs


def test_frozen_options():
    options = poptorch.Options()
    model = Regression()
    poptorch.trainingModel(model, options, adamw(model))
    with pytest.raises(AttributeError, match="frozen"):
        options.deviceIterations(2)
    with pytest.raises(AttributeError, match="frozen"):
        options.Training.gradientAccumulation(2)
    with pytest.raises(AttributeError, match="frozen"):
        options._Popart.set("enableOutlining", True)
    options.clone().deviceIterations(2)


def made(*, accumulation=1, replicas=1, iterations=1, mode=None, reduction=None):
    options = poptorch.Options().replicationFactor(replicas).deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulation)
    if mode is not None:
        options.outputMode(mode)
    if reduction is not None:
        options.Training.accumulationAndReplicationReductionType(reduction)
    return options


@pytest.mark.parametrize("accumulation, replicas", [(4, 1), (1, 4), (2, 2)])
def test_mean_reduction_is_one_large_micro_batch(accumulation, replicas):
    whole, _ = trained(made(), 8)
    parts, _ = trained(made(accumulation=accumulation, replicas=replicas), 8)
    assert torch.allclose(whole, parts, atol=1e-6)


def test_sum_reduction_sums():
    """With beta1 = 0 the first moment is the gradient; the sum of four equal ones is four times their mean."""
    for reduction, factor in ((poptorch.ReductionType.Mean, 1.0), (poptorch.ReductionType.Sum, 4.0)):
        torch.manual_seed(0)
        model = Regression()
        optimizer = adamw(model, betas=(0.0, 0.0))
        executor = poptorch.trainingModel(model, made(accumulation=4, reduction=reduction), optimizer)
        x, y = torch.ones(4, 3), torch.zeros(4, 3)
        executor(x, y)
        expected = 2.0 * model.linear(x).detach()[0][:, None].expand(3, 3)  # before the update: the host's are stale
        moment = optimizer.state_dict()["ipu_state"]["Accl1___model.linear.weight"]
        assert torch.allclose(moment, factor * expected, atol=1e-5)
        executor.destroy()


def test_iterations_are_updates():
    one, _ = trained(made(), 2, steps=1)
    three, _ = trained(made(), 2, steps=3)
    torch.manual_seed(0)
    model = Regression()
    executor = poptorch.trainingModel(model, made(iterations=3), adamw(model))
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 3, generator=generator), torch.randn(2, 3, generator=generator)
    executor(x.repeat(3, 1), y.repeat(3, 1))
    executor.copyWeightsToHost()
    assert torch.allclose(model.linear.weight, three, atol=1e-6)
    assert not torch.allclose(one, three, atol=1e-3)


@pytest.mark.parametrize(
    "mode, losses, rows",
    [(poptorch.OutputMode.All, 12, 24), (poptorch.OutputMode.Sum, 2, 4), (poptorch.OutputMode.Final, 2, 4)],
)
def test_output_modes(mode, losses, rows):
    """3 micro-batches x 2 replicas x 2 iterations of 2 rows."""
    _, (loss, first) = trained(made(accumulation=3, replicas=2, iterations=2, mode=mode), 24)
    assert loss.shape == (losses,) and first.shape == (rows,)


def test_rows_lie_replica_first_then_time():
    """Replica 0 sees rows 0..5, replica 1 rows 6..11, in order: Final keeps the last micro-batch of each."""
    model = Regression()
    executor = poptorch.trainingModel(model, made(accumulation=3, replicas=2), adamw(model))
    x = torch.arange(12.0)[:, None].expand(12, 3).contiguous()
    _, first = executor(x, torch.zeros(12, 3))
    assert first.tolist() == [4.0, 5.0, 10.0, 11.0]


def test_scalars_of_one_replica_stay_scalars():
    _, (loss, _) = trained(made(accumulation=2, mode=poptorch.OutputMode.Sum), 4)
    assert loss.dim() == 0


def test_rows_must_divide():
    model = Regression()
    executor = poptorch.trainingModel(model, made(accumulation=2, replicas=2), adamw(model))
    with pytest.raises(AssertionError, match="multiple"):
        executor(torch.zeros(6, 3), torch.zeros(6, 3))


def test_another_shape_after_compilation_is_an_error():
    model = Regression()
    executor = poptorch.trainingModel(model, made(accumulation=2), adamw(model))
    executor(torch.zeros(4, 3), torch.zeros(4, 3))
    with pytest.raises(poptorch.Error, match="compiled for"):
        executor(torch.zeros(8, 3), torch.zeros(8, 3))


def test_a_rate_reaches_the_device_through_set_optimizer_only():
    weights = {}
    for told in (False, True):
        torch.manual_seed(0)
        model = Regression()
        optimizer = adamw(model)
        executor = poptorch.trainingModel(model, made(), optimizer)
        before = model.linear.weight.detach().clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        if told:
            executor.setOptimizer(optimizer)
        executor(torch.ones(1, 3), torch.zeros(1, 3))
        executor.copyWeightsToHost()
        weights[told] = torch.equal(before, model.linear.weight)
        executor.destroy()
    assert weights == {False: False, True: True}


def test_constants_may_not_change_after_compilation():
    model = Regression()
    optimizer = adamw(model)  # eps is left at its default: a constant
    executor = poptorch.trainingModel(model, made(), optimizer)
    optimizer.param_groups[0]["eps"] = 1e-3
    executor.setOptimizer(optimizer)  # not compiled yet: allowed
    executor(torch.ones(1, 3), torch.zeros(1, 3))
    optimizer.param_groups[0]["eps"] = 1e-4
    with pytest.raises(poptorch.Error, match="eps"):
        executor.setOptimizer(optimizer)


def test_marking_decides_what_is_constant():
    model = Regression()
    optimizer = adamw(model, eps=1e-6)
    assert not optimizer.variable_attrs.isConstant("eps")
    optimizer.variable_attrs.markAsConstant("eps")
    assert optimizer.variable_attrs.isConstant("eps")
    with pytest.raises(AssertionError):
        optimizer.variable_attrs.markAsConstant("epsilon")


def test_loss_scaling_cancels():
    plain, _ = trained(made(accumulation=2), 4, steps=3)
    scaled, _ = trained(made(accumulation=2), 4, steps=3, loss_scaling=4096.0)
    assert torch.allclose(plain, scaled, atol=1e-6)


def test_half_accumulators_lose_what_half_loses():
    plain, _ = trained(made(accumulation=4), 8)
    half, _ = trained(made(accumulation=4), 8, accum_type=torch.float16, betas=(0.0, 0.5))
    assert not torch.equal(plain, half)


def test_only_states_of_ipus_are_loaded():
    model = Regression()
    optimizer = adamw(model)
    with pytest.raises(RuntimeError, match="Only IPU optimizer states"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())


def compile_training(forward, *inputs, options=None):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("counts", torch.zeros(3, dtype=torch.int32))

        def forward(self, *fields):
            return forward(self, *fields)

    model = Model()
    executor = poptorch.trainingModel(model, options or made(), adamw(model))
    executor.compile(*inputs)
    return executor


def loss_of(tensor):
    return poptorch.identity_loss(tensor.float(), reduction="sum")


@pytest.mark.parametrize(
    "name, forward",
    [
        ("boolean mask", lambda m, x: loss_of((x * m.weight)[x > 0])),
        ("nonzero", lambda m, x: loss_of(m.weight * torch.nonzero(x).shape[0])),
        ("masked_select", lambda m, x: loss_of(torch.masked_select(x * m.weight, x > 0))),
        ("item", lambda m, x: loss_of(m.weight * x.sum().item())),
        ("if on a value", lambda m, x: loss_of(m.weight * x) if x.sum() > 0 else loss_of(m.weight)),
        ("tril", lambda m, x: loss_of(torch.tril(x * m.weight))),
        ("bfloat16", lambda m, x: loss_of((x * m.weight).to(torch.bfloat16))),
        ("captured tensor", lambda m, x, t=torch.ones(3): loss_of(x * m.weight * t)),  # noqa: B008
        ("literal tensor", lambda m, x: loss_of(x * m.weight * torch.tensor([1.0, 2.0, 3.0]))),
    ],
)
def test_what_cannot_be_lowered_is_refused(name, forward):
    with pytest.raises(RuntimeError, match="cannot lower"):
        compile_training(forward, torch.ones(2, 3))


def test_assigning_through_a_mask_and_int_gathers_are_allowed():
    def forward(model, x):
        chosen = torch.gather(x * model.weight, 1, torch.zeros(x.shape, dtype=torch.int64, device=x.device))
        return loss_of(torch.where(x > 0, chosen, torch.zeros_like(chosen)))

    compile_training(forward, torch.ones(2, 3))


def test_exactly_one_loss():
    with pytest.raises(poptorch.Error, match="exactly one final loss"):
        compile_training(lambda m, x: (x * m.weight).sum(), torch.ones(2, 3))
    with pytest.raises(poptorch.Error, match="exactly one final loss"):
        compile_training(lambda m, x: (loss_of(x * m.weight), loss_of(m.weight)), torch.ones(2, 3))
    with pytest.raises(poptorch.Error, match="scalar"):
        compile_training(lambda m, x: poptorch.identity_loss(x * m.weight, reduction="none"), torch.ones(2, 3))


def test_int64_comes_back_as_int32():
    executor = compile_training(
        lambda m, x, i: (loss_of(x * m.weight), i, torch.argmax(x, 1)),
        torch.ones(2, 3),
        torch.zeros(2, dtype=torch.int64),
    )
    _, given, largest = executor(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))
    assert given.dtype == largest.dtype == torch.int32


def test_buffers_are_not_reassigned():
    def forward(model, x):
        model.counts = model.counts + 1
        return loss_of(x * model.weight)

    with pytest.raises(poptorch.Error, match="reassigned"):
        compile_training(forward, torch.ones(2, 3))


def test_inputs_are_tensors():
    with pytest.raises(TypeError, match="tensors"):
        compile_training(lambda m, x: loss_of(x * m.weight), [1.0, 2.0])


def test_a_model_is_trained_by_one_executor():
    model = Regression()
    first = poptorch.trainingModel(model, made(), adamw(model))
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(model, made(), adamw(model))
    poptorch.inferenceModel(model, made())
    first.destroy()
    poptorch.trainingModel(model, made(), adamw(model))


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
    options = made(accumulation=accumulation, replicas=replicas)
    options.setExecutionStrategy(poptorch.PipelinedExecution(auto))
    executor = poptorch.trainingModel(model, options, adamw(model))
    executor.compile(torch.ones(accumulation * replicas, 3))
    return executor


def test_stages_are_runs_of_blocks_on_one_ipu():
    chain([0, 0, 1, 2, 3, 3, 0], accumulation=9)
    assert machine.programs[-1].stages == [0, 1, 2, 3, 0]


def test_accumulation_covers_the_pipeline():
    with pytest.raises(poptorch.Error, match="at least 9"):
        chain([0, 1, 2, 3, 0], accumulation=8)


def test_same_as_ipu_never_returns():
    with pytest.raises(poptorch.Error, match="returns"):
        chain([0, 1, 0], accumulation=9, auto=poptorch.AutoStage.SameAsIpu)


def test_ipus_are_a_power_of_two():
    with pytest.raises(poptorch.Error, match="power of two"):
        chain([0, 1, 2], accumulation=9)


def test_tied_weights_share_an_ipu():
    chain([0, 1, 0, 1], accumulation=9, tie=(0, 2)).destroy()
    with pytest.raises(poptorch.Error, match="tied"):
        chain([0, 1, 0, 1], accumulation=9, tie=(0, 1))


def test_a_module_begins_one_block():
    layer = poptorch.BeginBlock(nn.Linear(3, 3), "a", ipu_id=0)
    with pytest.raises(poptorch.Error, match="already"):
        poptorch.BeginBlock(layer, "b", ipu_id=0)
    poptorch.removeBlocks(layer)
    assert type(layer) is nn.Linear


def test_the_machine_has_so_many_ipus():
    machine.reset(4)
    first = chain([0, 1], accumulation=3)
    second = chain([0, 1], accumulation=3)
    with pytest.raises(poptorch.Error, match="no device"):
        chain([0, 1], accumulation=3)
    second.destroy()
    chain([0, 1], accumulation=3)
    assert first.isAttachedToDevice()


def test_inference_takes_no_accumulation_and_gives_all():
    with pytest.raises(AssertionError, match="inference"):
        poptorch.inferenceModel(Regression(), made(accumulation=2))
    executor = poptorch.inferenceModel(Regression(), made(iterations=4))
    loss, _ = executor(torch.ones(8, 3), torch.zeros(8, 3))
    assert loss.shape == (4,)


def test_offline_programs_do_not_run(tmp_path):
    model = Regression()
    executor = poptorch.trainingModel(model, made().useOfflineIpuTarget(ipu_version=2), adamw(model))
    executor.compileAndExport(str(tmp_path / "x.poptorch"), torch.ones(1, 3), torch.zeros(1, 3), export_model=False)
    assert (tmp_path / "x.poptorch").stat().st_size > 0
    with pytest.raises(AssertionError, match="offline"):
        executor(torch.ones(1, 3), torch.zeros(1, 3))


@pytest.mark.parametrize("damage", [None, "options", "constants", "version", "bytes", "twice"])
def test_an_executable_is_that_of_its_program(tmp_path, monkeypatch, damage):
    model, file = Regression(), str(tmp_path / "x.poptorch")
    inputs = torch.ones(1, 3), torch.zeros(1, 3)
    poptorch.trainingModel(model, made().useOfflineIpuTarget(), adamw(model)).compileAndExport(file, *inputs)
    model = Regression()
    optimizer = adamw(model)
    if damage == "constants":
        optimizer.variable_attrs.markAsConstant("weight_decay")
    executor = poptorch.trainingModel(model, made(accumulation=2 if damage == "options" else 1), optimizer)
    if damage == "version":
        monkeypatch.setattr(poptorch, "__version__", "3.3.0")
    elif damage == "bytes":
        (tmp_path / "x.poptorch").write_bytes(b"PK")
    elif damage == "twice":
        executor.compile(*inputs)
    if damage:
        with pytest.raises((poptorch.Error, AssertionError)):
            executor.loadExecutable(file)
        return
    executor.loadExecutable(file)
    assert executor.isCompiled() and executor.isAttachedToDevice() and machine.compilations == ["training"]
    before = [parameter.clone() for parameter in model.parameters()]
    executor(*inputs)
    executor.copyWeightsToHost()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters()))
    with pytest.raises(poptorch.Error, match="compiled for"):
        executor(torch.ones(2, 3), torch.zeros(2, 3))


@pytest.mark.parametrize("variables", [{}, {"POPTORCH_IPU_MODEL": "1"}, {"POPTORCH_SMALL_IPU_MODEL": "1"}])
def test_hardware_is_not_looked_for_with_a_simulated_device(variables, monkeypatch):
    for name in ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"):
        monkeypatch.setenv(name, variables.get(name, "0"))
    machine.reset(4)
    found = [number for number in range(1, 9) if poptorch.ipuHardwareIsAvailable(number)]
    assert found == ([] if variables else [1, 2, 4])


def test_cycles_are_counted_on_hardware_only():
    model = Regression()
    executor = poptorch.trainingModel(model, made(), adamw(model))
    with pytest.raises(poptorch.Error, match="disabled"):
        executor.cycleCount()
    model = Regression()
    executor = poptorch.trainingModel(model, made().useIpuModel(True).logCycleCount(True), adamw(model))
    executor(torch.ones(1, 3), torch.zeros(1, 3))
    with pytest.raises(poptorch.Error, match="hardware"):
        executor.cycleCount()


@pytest.mark.parametrize(
    "mode, factor, shapes",
    [
        (poptorch.MatMulSerializationMode.OutputChannels, 4, ((5, 6), (6, 8))),
        (poptorch.MatMulSerializationMode.InputChannels, 5, ((5, 6), (6, 8))),
        (poptorch.MatMulSerializationMode.ReducingDim, 3, ((5, 6), (6, 8))),
        (poptorch.MatMulSerializationMode.Disabled, 0, ((5, 6), (6, 8))),
    ],
)
def test_serialised_products_are_products(mode, factor, shapes):
    a, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    assert torch.allclose(poptorch.serializedMatMul(a, b, mode, factor), a @ b)
    if factor:
        with pytest.raises(poptorch.Error, match="divide"):
            poptorch.serializedMatMul(a, b, mode, 7)


class Numbers:
    def __len__(self):
        return 3

    def __iter__(self):
        return iter([(torch.full((2,), float(number)),) for number in range(3)])


def test_the_accessor_reads_ahead_and_around():
    accessor = poptorch.AsynchronousDataAccessor(Numbers(), load_indefinitely=True)
    assert len(accessor) == 3
    for _ in range(2):
        assert [float(item[0][0]) for item in accessor] == [0.0, 1.0, 2.0]
    accessor.terminate()


class Failing:
    def __init__(self, good):
        self.good = good

    def __iter__(self):
        for _ in range(self.good):
            yield (torch.zeros(1),)
        raise SystemExit(1)


def test_an_accessor_whose_process_dies_says_that_and_no_more():
    with pytest.raises(poptorch.Error, match="failed to start"):
        poptorch.AsynchronousDataAccessor(Failing(0))
    accessor = iter(poptorch.AsynchronousDataAccessor(Failing(2)))
    assert len([next(accessor), next(accessor)]) == 2
    with pytest.raises(AssertionError, match="An error occurred in the data fetcher"):
        next(accessor)
    accessor.terminate()


def test_the_accessor_wants_what_can_travel():
    with pytest.raises(TypeError, match="pickle"):
        poptorch.AsynchronousDataAccessor(number for number in range(3))


ARGUMENTS = {  # of a setting, where it is not one flag
    "connectionType": (poptorch.ConnectionType.OnDemand,),
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
    "Distributed.disable": (),
    "Precision.setPartialsType": (torch.float16,),
    "Training.accumulationAndReplicationReductionType": (poptorch.ReductionType.Sum,),
    "Training.gradientAccumulation": (2,),
    "Training.setMeanAccumulationAndReplicationReductionStrategy": (poptorch.MeanReductionStrategy.Running,),
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
    """The whole of it before anything is set, and what each setting adds: neither more nor less."""
    facts, options = API["option_dictionary"], poptorch.Options()
    assert dictionary() == facts["defaults"]
    settings = [
        f"{part}.{name}".lstrip(".")
        for part in SUB_OPTIONS
        for name, value in vars(type(getattr(options, part) if part else options)).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    assert set(settings) - {"clone", "toDict", "defaultOutputMode"} == set(facts["added_by"])
    for setting, added in facts["added_by"].items():
        removed = {"compilation_progress_bar_fn"} if setting == "showCompilationProgressBar" else set()
        assert set(dictionary(setting)) == {*facts["defaults"], *added} - removed, setting
