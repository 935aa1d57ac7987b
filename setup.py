"""What setup.cfg cannot say: the folder configs/ of a checkout is installed as ipu_packed_bert/configs."""

from setuptools import find_packages, setup

TOP_LEVEL = ("pack_data", "padding_free", "ipu_packed_bert", "ipu_profiling")
PACKAGES = find_packages(include=[f"{name}{below}" for name in TOP_LEVEL for below in ("", ".*")])

setup(
    packages=[*PACKAGES, "ipu_packed_bert.configs"],
    package_dir={"ipu_packed_bert.configs": "configs"},
)
