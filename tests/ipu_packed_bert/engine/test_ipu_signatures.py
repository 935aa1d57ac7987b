"""Every use of PopTorch in engine/ipu/ exists in PopTorch 3.1 to 3.4 and fits its signature in 3.4; read from the
source, nothing runs."""

import ast
import inspect
import json
import re

import pytest

from tests.imports import ROOT

API = json.loads((ROOT / "tests" / "data" / "poptorch_api.json").read_text(encoding="utf-8"))
SDK = ROOT / "ipu_packed_bert" / "engine" / "ipu" / "devices.py"
ENGINE = sorted((ROOT / "ipu_packed_bert" / "engine" / "ipu").glob("*.py"))
TOP, OPTIM, OPTIONS = (API["modules"][name] for name in ("poptorch", "poptorch.optim", "poptorch.options"))
SUB_OPTIONS = {entry["reached_through"].split(".")[1]: name for name, entry in OPTIONS.items()}

# What the variables of engine/ipu/ hold, by the name they are read from.
HOLDS = {
    "options": "Options",
    "self._training": "PoplarExecutor",
    "self._evaluation": "PoplarExecutor",
    "executor": "PoplarExecutor",
    "self._accessor": "AsynchronousDataAccessor",
    "self._optimizer": "LAMB",
    "optimizer": "LAMB",
    "optimizer.variable_attrs": "VariableAttributes",
}
# Attributes of torch's optimisers, which PopTorch's inherit.
OF_TORCH = {"param_groups"}


def signature(parameters):
    own, empty = inspect.Parameter, inspect.Parameter.empty
    return inspect.Signature(
        [own(p["name"], getattr(own, p["kind"].upper()), default=p.get("default", empty)) for p in parameters]
    )


def bind(parameters, call):
    """Raises TypeError as the call itself would."""
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(k.arg is None for k in call.keywords):
        # Unpacked arguments: the names given openly must exist, the rest is checked where the stand-in runs it.
        unknown = [
            k.arg
            for k in call.keywords
            if k.arg
            and k.arg not in [p["name"] for p in parameters]
            and not any(p["kind"] == "var_keyword" for p in parameters)
        ]
        if unknown:
            raise TypeError(f"unknown keyword {unknown[0]}")
        return
    signature(parameters).bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords})


def entry_of(kind):
    for module in (TOP, OPTIM, OPTIONS):
        if kind in module:
            return module[kind]
    raise KeyError(kind)


def member(kind, name):
    """(what the member is, its parameters) of a class of PopTorch; AttributeError if there is none of that name."""
    entry = entry_of(kind)
    if name in entry.get("methods", {}):
        return "method", entry["methods"][name]["params"]
    if name in entry.get("properties", ()):
        return "property", None
    if kind == "Options" and name == "_Popart":
        return "property", None
    if kind in OPTIM and kind != "VariableAttributes" and kind != "Optimizer":
        if name == "variable_attrs" or name in OF_TORCH:
            return "property", None
        return member("Optimizer", name)
    raise AttributeError(f"{kind} has no {name}")


class Uses(ast.NodeVisitor):
    """Calls and names of PopTorch in a source, each checked as it is met."""

    def __init__(self):
        self.problems, self.names, self.calls = [], set(), 0

    def problem(self, node, text):
        self.problems.append(f"line {node.lineno}: {text}")

    def kind(self, node):
        """The class of PopTorch that an expression evaluates to, None if it isn't one."""
        text = ast.unparse(node) if hasattr(ast, "unparse") else None
        if isinstance(node, ast.Call):
            called = self.path(node.func)
            if called and len(called) == 1 and called[0] in TOP and TOP[called[0]]["kind"] == "class":
                return called[0]
            if isinstance(node.func, ast.Attribute):
                owner = self.kind(node.func.value)
                # Setters of options return the object.
                return (
                    owner
                    if owner and (owner in SUB_OPTIONS.values() or owner in ("Options", "TensorLocationSettings"))
                    else None
                )
            return None
        if isinstance(node, ast.Attribute):
            owner = self.kind(node.value)
            if owner == "Options" and node.attr in SUB_OPTIONS:
                return SUB_OPTIONS[node.attr]
        return HOLDS.get(text if text is not None else dotted(node))

    def path(self, node):
        """["optim", "LAMB"] for poptorch.optim.LAMB; None for what isn't a name of the module."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        return parts[::-1] if isinstance(node, ast.Name) and node.id == "poptorch" else None

    def visit_Attribute(self, node):
        path = self.path(node)
        if path and path[0] != "__version__":
            self.names.add(".".join(path))
            if path[0] == "optim":
                if len(path) > 1 and path[1] not in OPTIM:
                    self.problem(node, f"poptorch.optim has no {path[1]}")
            elif path[0] not in TOP:
                self.problem(node, f"poptorch has no {path[0]}")
            elif len(path) > 1 and path[1] not in TOP[path[0]].get("members", {}):
                self.problem(node, f"poptorch.{path[0]} has no {path[1]}")
            return
        owner = self.kind(node.value)
        if owner:
            try:
                member(owner, node.attr)
                self.names.add(f"{owner}.{node.attr}")
            except AttributeError as error:
                self.problem(node, str(error))
        self.generic_visit(node)

    def visit_Call(self, node):
        path = self.path(node.func)
        try:
            if path and path[0] != "__version__":  # a text
                entry = OPTIM[path[1]] if path[0] == "optim" else TOP[path[0]]
                if len(path) == 1 or path[0] == "optim":
                    self.calls += 1
                    if entry["kind"] == "class":
                        init = entry["methods"].get("__init__")
                        bind(init["params"] if init else [], node)
                    else:
                        bind(entry["params"], node)
            elif isinstance(node.func, ast.Attribute):
                owner = self.kind(node.func.value)
                if owner:
                    what, parameters = member(owner, node.func.attr)
                    if what == "method":
                        self.calls += 1
                        bind(parameters, node)
            elif self.kind(node.func) == "PoplarExecutor":
                self.calls += 1
                bind(TOP["PoplarExecutor"]["methods"]["__call__"]["params"], node)
        except (TypeError, KeyError, AttributeError) as error:
            self.problem(node, str(error))
        self.generic_visit(node)


def dotted(node):
    """Python 3.8 has no ast.unparse; the expressions in HOLDS are names and attributes."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return inner and inner + "." + node.attr
    return node.id if isinstance(node, ast.Name) else None


def uses_of(source):
    uses = Uses()
    uses.visit(ast.parse(source))
    return uses


def uses_of_the_engine():
    texts = [path.read_text(encoding="utf-8").replace("from __future__ import annotations\n", "") for path in ENGINE]
    return uses_of("\n".join(texts))


def newer_than(names, release):
    """Names, or the classes of members, that PopTorch got after a release such as "3.3"; not those of torch."""
    changes = API["name_changes_by_release"]
    later = {name for each, changed in changes.items() if each > f"{release}.0" for name in changed["added"]}
    return sorted(name for name in names if later & {name, name.partition(".")[0]})


def test_every_call_fits_its_signature():
    uses = uses_of_the_engine()
    assert uses.problems == []
    # Guard against a reader that finds nothing.
    assert uses.calls > 45
    some = "Options trainingModel inferenceModel BeginBlock optim.LAMB optim.AdamW identity_loss serializedMatMul"
    assert {*some.split(), "recomputationCheckpoint"} <= uses.names


@pytest.mark.parametrize("release", ["3.3", "3.2", "3.1"])
def test_what_the_engine_uses_is_in_older_releases_too(release):
    """3.3, the oldest that engine/ipu/ takes, is the SDK of Argonne's Bow Pod64; 3.1 and 3.2 have other torch."""
    names = uses_of_the_engine().names
    assert {"Options.deviceIterations", "_TrainingOptions.gradientAccumulation", "PoplarExecutor.cycleCount"} <= names
    assert newer_than(names, release) == []
    assert re.search(r"_OLDEST = \((\d), (\d)\)", SDK.read_text(encoding="utf-8")).groups() == ("3", "3")


def test_names_that_an_older_release_lacks_are_found():
    uses = uses_of("poptorch.cond(a, b, c, d, e)\noptions.updatableNamedBuffers([])\nself._training.compilationTime()")
    newer = ["Options.updatableNamedBuffers", "PoplarExecutor.compilationTime", "cond"]
    assert newer_than(uses.names, "3.2") == newer and newer_than(uses.names, "3.3") == []
    assert newer_than({"CommGroupType.All"}, "3.0") and API["name_changes_by_release"]["3.4.0"]["added"] == []


def test_backend_settings_exist():
    """Names given to Options._Popart.set, and the integers given for its enumerations, are PopART's."""
    known = API["backend_options"]
    enums = API["popart_enums"]["values"]
    found = {}
    for node in (node for path in ENGINE for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "set":
            name, value = (ast.literal_eval(argument) for argument in node.args)
            found[name] = value
    assert found
    kinds = {name: kind for kind, names in known.items() for name in names}
    types = {"bool": bool, "uint64": int, "double": float, "string": str, "container": list, "enum_as_uint64": int}
    for name, value in found.items():
        assert isinstance(value, types[kinds[name]]), name
    assert (
        found["accumulateOuterFragmentSettings.schedule"]
        == (enums["AccumulateOuterFragmentSchedule"]["OverlapMemoryOptimized"])
    )
    assert found["subgraphCopyingStrategy"] == enums["SubgraphCopyingStrategy"]["JustInTime"]


@pytest.mark.parametrize(
    "mistake",
    [
        "options.gradientAccumulation(4)",  # is Training's
        "options.anchorMode(poptorch.OutputMode.Sum)",  # until 2.4
        "options.Training.setGradientAccumulation(4)",
        "poptorch.SerializedLinear(1, 2, 3)",
        "options.logCycleCounts(True)",
        "options.device_iterations(4)",
        "options.Precision.setPartialType(torch.half)",
        "poptorch.optim.Lamb([])",
        "options.Training.useOfflineIpuTarget()",
        "poptorch.BeginBlock(layer, 'name', ipu_id=0, recompute=True)",
        "poptorch.OutputMode.Mean",
        "options.deviceIterations()",
        "options.deviceIterations(1, 2)",
        "options.randomSeed(seed=3)",
        "self._training.cycleCounts()",
        "self._training.setOptimizer()",
        "poptorch.TensorLocationSettings().useOnChip(True)",
        "optimizer.variable_attrs.markConstant('weight_decay')",
        "poptorch.serializedMatMul(a, b)",
        "poptorch.optim.LAMB(groups, beta=0.9)",
    ],
)
def test_common_mistakes_are_found(mistake):
    assert uses_of(mistake).problems
