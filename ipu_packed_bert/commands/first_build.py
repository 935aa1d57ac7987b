"""The build of a data set that a configuration describes and that is missing."""

from __future__ import annotations

from ipu_packed_bert.settings.config import Config


def build_missing(config: Config) -> None:
    """Build the data set of a configuration, keep it and its held-out data set, and print a line.

    Args:
        config: the configuration of pre-training.

    Raises:
        ValueError: the corpus cannot be read, or the directory has other files.
    """
    from pack_data.building.command import BuildOptions, build_and_report

    data = config.data
    source = "the embedded corpus" if data.corpus == "embedded" else data.corpus
    print(
        f"data      {data.directory} is missing: building it from {source}; kept for the next run",
        flush=True,
    )
    options = BuildOptions(data.directory, workers=None, **data.build_options)
    built = build_and_report(options)
    built.store.close()
    for remark in built.remarks:
        print(f"note      {remark}")
