"""Several instances of poprun make the updates of one process: the same weights, records, ends, whatever their number.

They are real processes, on stand-ins for PopTorch and popdist (tests/instances_at_work.py).
"""

import importlib.util
import re

import pytest
import torch

from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.engine import build_engine, choose_engine
from ipu_packed_bert.model.packed import BATCH_FIELDS
from ipu_packed_bert.processes.ranks import joined
from ipu_packed_bert.run_files.checkpoints import newest_checkpoint
from ipu_packed_bert.run_files.folder import CHECKPOINTS, EVALUATIONS, LOG, read_log
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.store.data_set import PackStore
from tests.fakes.popdist import PopRun
from tests.fakes.sdk import installed
from tests.fine_tuning_files import tiny_checkpoint, training_file
from tests.fine_tuning_files import tiny_config as fine_tuning_config
from tests.instances_at_work import ENVIRONMENT, ON_IPUS, at_work, exchanged, fine_tuned, ran, trained
from tests.pretraining import global_batches, ipu_engine
from tests.ranks_at_work import Job
from tests.refusals import refusal_of, refused
from tests.tiny_runs import logged, tiny_config, tiny_data
from tests.tolerances import same_records, same_state

LEGS = (2, 4, 1)  # instances of a run that is resumed three times
SAVED = 2  # update after which a run gets a signal
STEPS = 4  # updates of a whole run
HAS_SAFETENSORS = importlib.util.find_spec("safetensors") is not None
DROPOUT = ["model.hidden_dropout=0.3"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """(folder, what the instances said by job): all runs of this file, made by four processes that start once."""
    folder = tmp_path_factory.mktemp("instances")
    data = tiny_data(folder / "data", sequences=24)  # 17 packs; an update has 12, so that every other one is incomplete
    tiny = tiny_config(folder / "tiny.yml", data)
    jobs = [Job(f"{size} straight", size, trained, dict(data=data, steps=3)) for size in (1, 4)]
    previous = None
    for leg, size in enumerate(LEGS):
        jobs.append(Job(f"leg {leg}", size, trained, dict(data=data, steps=1, after=previous)))
        previous = f"leg {leg}"
    for name, steps, after in (
        ("dropout", 2, None),
        ("first half", 1, None),
        ("second half", 1, "first half"),
    ):
        jobs.append(
            Job(
                name,
                2,
                trained,
                dict(data=data, steps=steps, after=after, overrides=DROPOUT),
            )
        )
    if HAS_SAFETENSORS:
        config = fine_tuning_config(
            tiny_checkpoint(folder / "bert"),
            training_file(folder, "squad"),
            task="squad",
            engine={
                "kind": "ipu",
                "half_weights": False,
                "stochastic_rounding": False,
                "loss_scaling": 16.0,
            },
            placement={"replicas": 4},
            batch={"sequences_per_update": 24, "micro_batch": 1},
        )
        jobs += [Job(f"squad, {size}", size, fine_tuned, dict(config=config, steps=2)) for size in (1, 2)]
    settings = [word for item in [*ON_IPUS, f"run.steps={STEPS}"] for word in ("--set", item)]

    def new(name, *more):
        return ["--config", str(tiny), *settings, "--out", str(folder / name), *more]

    program = [f"--set=engine.{item}={folder / 'program'}" for item in ("offline_export", "executable")]
    jobs += [
        Job("stopped", 2, ran, dict(arguments=new("run"), at=SAVED - 1, happens="signal")),
        Job("resumed", 4, ran, dict(arguments=["--resume", str(folder / "run")])),
        Job("nan", 2, ran, dict(arguments=new("nan"), at=SAVED + 1, happens="nan")),
        Job("mistake", 2, ran, dict(arguments=new("mistake"), at=SAVED, happens="mistake")),
        Job("exported", 2, ran, dict(arguments=new("exported", program[0]))),
        Job("loaded", 2, ran, dict(arguments=new("loaded", program[1]))),
        Job("exchanged", 3, exchanged, {}),
    ]
    return folder, at_work(folder, jobs)


@pytest.fixture(scope="module")
def folder(work):
    return work[0]


@pytest.fixture(scope="module")
def found(work):
    return work[1]


def test_instances_make_the_updates_of_one_process(found):
    (alone,) = found["1 straight"]
    several = found["4 straight"]
    assert len(several) == 4
    for item in several:  # weights, records and the place in the data are the same in all of them
        same_state(alone, item)
        assert item["batches"] == alone["batches"]
        assert item["log"] == several[0]["log"]
        same_records([*alone["log"], alone["held_out"]], [*item["log"], item["held_out"]])
        assert item["compilations"] == ["training", "inference"]
    assert {record["packs"] for record in alone["log"]} == {12, 5}
    assert alone["held_out"]["packs"] > 0


def test_a_run_goes_on_with_any_number_of_instances(found):
    (straight,) = found["1 straight"]
    legs = [found[f"leg {leg}"] for leg in range(len(LEGS))]
    assert [len(leg) for leg in legs] == list(LEGS)
    same_state(straight, legs[-1][0])
    assert legs[-1][0]["batches"] == straight["batches"]
    same_records(straight["log"], [record for leg in legs for record in leg[0]["log"]])


def test_random_streams_go_on_exactly_with_the_same_number_of_instances(found):
    whole, first, second = (found[name][0] for name in ("dropout", "first half", "second half"))
    assert whole["log"] == first["log"] + second["log"]
    streams = whole["engine"]["ipu_random"]
    assert len(streams) == 2
    assert not torch.equal(streams[0], streams[1])
    assert torch.equal(streams, second["engine"]["ipu_random"])


@pytest.mark.skipif(not HAS_SAFETENSORS, reason="Hugging Face's files: pip install safetensors")
def test_fine_tuning_in_instances_is_that_of_one_process(found):
    (alone,) = found["squad, 1"]
    assert alone["held_out"]["sequences"] > 1
    for item in found["squad, 2"]:
        same_state(alone, item)
        assert item["held_out"] == alone["held_out"]
        same_records(alone["log"], item["log"])
        for ours, theirs in zip(alone["outputs"], item["outputs"]):
            torch.testing.assert_close(theirs, ours, rtol=1e-9, atol=1e-9)


def ends(said):
    return [item["status"] for item in said]


def test_a_signal_to_one_instance_ends_all_after_the_same_update_and_the_run_goes_on(found, folder):
    assert ends(found["stopped"]) == [143, 143]
    assert f"SIGTERM after update {SAVED}" in found["stopped"][0]["out"]
    assert ends(found["resumed"]) == [0] * 4
    for instance in (*found["stopped"][1:], *found["resumed"][1:]):
        assert instance["out"] + instance["error"] == ""
    for file, fewest in ((LOG, STEPS), (EVALUATIONS, 1)):
        undisturbed = read_log(folder / "loaded" / file)
        resumed = read_log(folder / "run" / file)
        assert len(undisturbed) >= fewest
        same_records(undisturbed, resumed, rel=1e-5)
    assert newest_checkpoint(folder / "run" / CHECKPOINTS).name.endswith(f"{STEPS:08d}")


def test_a_loss_of_one_instance_that_is_not_finite_ends_all(found, folder):
    first, second = found["nan"]
    assert ends([first, second]) == [3, 3]
    assert f"update {SAVED + 2}: the loss is nan" in first["error"]
    assert not second["error"]
    losses = logged(folder / "nan", "loss")
    assert len(losses) == SAVED + 2
    assert losses.index(None) == SAVED + 1


def test_a_mistake_that_one_instance_meets_ends_all_before_the_next_update(found, folder):
    first, second = found["mistake"]
    assert ends([first, second]) == [2, 2]
    assert not first["error"]
    assert re.fullmatch("error: rank 1 on .*: the file ends in the middle of a pack\n", second["error"])
    assert len(read_log(folder / "mistake" / LOG)) == SAVED


def test_each_instance_has_a_program_of_its_own(found, folder):
    """Programs may differ by the instance: none overwrites another's, and each finds its own again."""
    assert ends(found["exported"]) == [0, 0]
    assert ends(found["loaded"]) == [0, 0]
    files = {path.name for path in folder.glob("program*")}
    assert files == {f"program-{index}-of-2{end}" for index in (0, 1) for end in ("", ".json")}
    assert len(read_log(folder / "loaded" / LOG)) == STEPS


def test_numbers_and_objects_travel(found):
    for rank, output in enumerate(found["exchanged"]):
        assert output["sum"] == [3.0, 3.0, 3 * 2.0**40 + 3]
        assert output["share"] == (rank, 3)
        assert output["all"] == ["", "x", "xx"]
        first = output["first"]
        assert first["numbers"] == [1, 2]
        assert torch.equal(first["half"], torch.arange(3).half())
        assert first["one"] == 7
        assert first["none"].shape == (0,)


@pytest.fixture
def by_poprun(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


POD16 = ["engine.kind=ipu"]


def pod16(*overrides):
    return load_config("configs/packed_phase2_pod16.yml", [*POD16, *overrides])


def test_an_instance_looks_for_its_own_ipus(by_poprun):
    instance = PopRun(index=1, instances=2, replicas=4)
    with installed(ipus=8, poprun=instance):
        choice = choose_engine(pod16())
        assert choice.hardware
        assert choice.reason == "IPU hardware: 16 IPUs (4 x 4) in 2 instances of 8 IPUs (2 x 4)"
    for attached, kind in ((4, "ipu"), (0, "auto")):
        config = pod16(f"engine.kind={kind}")
        names = ("instance 1 of 2", "8 IPUs", f"has {attached} IPU")
        with installed(ipus=attached, poprun=PopRun(index=1, instances=2, replicas=4)), refused(*names):
            choose_engine(config)
    simulated = pod16().changed("engine", ipu_model=True)
    for poprun, names in (
        (dict(replicas=4), ["engine.ipu_model", "2 instances"]),
        (dict(replicas=2), ["2 replicas", "placement.replicas is 4"]),
        (dict(replicas=4, local_replicas=1), ["1 of 4 replicas", "--num-instances"]),
    ):
        with installed(ipus=8, poprun=PopRun(index=0, instances=2, **poprun)), refused(*names):
            choose_engine(simulated)


def test_an_engine_has_the_processes_of_its_launcher(by_poprun):
    config = pod16()
    with installed(ipus=8, poprun=PopRun(index=0, instances=2, replicas=4)) as (sdk, _):
        from ipu_packed_bert.engine.ipu import poprun

        with refused("packed_phase2_pod16.yml", "poprun"):
            sdk.devices.inventory(config)
        with refused("2 instances", "processes.joined"):
            build_engine(config, Pretraining(config), choose_engine(config), packing_factor=2.0)
        host = pod16("engine.kind=host")
        ranks = poprun.Instances(None, 0, 2, 0)
        with refused("2 instances", "torchrun"):
            build_engine(
                host,
                Pretraining(host),
                choose_engine(host),
                packing_factor=2.0,
                processes=ranks,
            )


def test_one_instance_is_one_process(by_poprun):
    with installed(ipus=16, poprun=PopRun(index=0, instances=1, replicas=4)):
        from ipu_packed_bert import engine

        with joined(instances=engine.instances) as processes:
            assert (processes.rank, processes.size) == (0, 1)
            assert choose_engine(pod16()).reason == "IPU hardware: 16 IPUs (4 x 4)"


def test_poprun_without_popdist_is_one_line(by_poprun, capsys):
    with installed():
        refusal_of(pretrain.main, ["--config", "packed_host"], capsys, "poprun", "popdist")


def test_options_and_rows_of_an_instance(by_poprun, tmp_path):
    """Its replicas, the seed of all; the rows of all instances are the global batch, scales included."""
    data = tiny_data(tmp_path / "data")
    config = load_config(
        tiny_config(tmp_path / "tiny.yml", data),
        [*ON_IPUS, "engine.profile_directory=profile"],
    )
    parts = []
    with PackStore.open(data) as store:
        whole = next(global_batches(store, config))
        for index in range(2):
            with installed(ipus=2, poprun=PopRun(index=index, instances=2, replicas=4)) as (sdk, _):
                from ipu_packed_bert.engine.ipu import poprun

                ranks = poprun.Instances(None, index, 2, index)
                engine = ipu_engine(sdk, config, store.schema, processes=ranks)
                values = engine._training.options.toDict()
                assert (
                    values["replication_factor"],
                    values["num_distributed_processes"],
                ) == (2, 2)
                assert (values["distributed_process_id"], values["random_seed"]) == (
                    index,
                    config.run.seed,
                )
                assert values["engineOptions"]["autoReport.directory"] == f"profile-{index}-of-2"
                parts.append(next(global_batches(store, config, share=engine.share)))
    for name in BATCH_FIELDS:
        assert torch.equal(
            torch.from_numpy(whole[name]),
            torch.cat([torch.from_numpy(part[name]) for part in parts]),
        )
