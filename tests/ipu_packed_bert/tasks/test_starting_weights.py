"""Starting weights: a fine-tuned model keeps the length that they were trained on."""

import json

from ipu_packed_bert.run_files.checkpoints import load_newest, save_checkpoint
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.settings.yaml_files import parse_yaml
from ipu_packed_bert.training.examples import prepare
from ipu_packed_bert.training.export import import_folder
from tests.fine_tuning_files import tiny_checkpoint, tiny_config, tiny_table


def of_length(tokenizer, length):
    """Write the length to which a tokenizer truncates."""
    about = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps({**about, "model_max_length": length}))


def exported_length(start, training, slots):
    """Fine-tune from a checkpoint of 64 positions in rows of some slots; return the length of the exported model."""
    run = prepare(tiny_config(start, training, task="single_label", data={"max_sequence_length": slots}))
    run.write_model(training.parent / "model")
    run.batches.close()
    return json.loads((training.parent / "model" / "tokenizer_config.json").read_text())["model_max_length"]


def test_a_model_fine_tuned_from_short_rows_truncates_as_its_start(tmp_path):
    """It had the length of all positions, most of which were never trained."""
    training = tiny_table(tmp_path / "t.csv", "single_label", texts=4)
    checkpoint = tiny_checkpoint(tmp_path / "bert")
    lengths = {}
    for slots in (16, 32):
        for length in (24, 64, 10**30, None):  # of all positions, as transformers writes an unknown length
            of_length(checkpoint / "tokenizer_config.json", length)
            lengths[slots, length] = exported_length(checkpoint, training, slots)
    assert lengths == {
        (16, 24): 24,
        (32, 24): 32,  # longer rows have trained further positions
        **{(slots, length): 64 for slots in (16, 32) for length in (64, 10**30, None)},
    }
    # A pre-training run of rows of 24 slots, after its seventh update.
    run = tmp_path / "run"
    import_folder(checkpoint, run)
    imported = load_newest(run / "checkpoints")
    config = config_from_tree(parse_yaml(imported.config, "run"), "run").changed("data", max_sequence_length=24)
    save_checkpoint(run / "checkpoints", imported._replace(step=7, config=config.to_yaml()), keep=1)
    assert [exported_length(run, training, slots) for slots in (16, 32)] == [24, 32]
