"""What setup.cfg cannot say: the folder configs/ of a checkout is installed as ipu_packed_bert/configs."""

from setuptools import find_packages, setup

PACKAGES = find_packages(
    include=["ipu_packed_bert", "ipu_packed_bert.*", "pack_data", "pack_data.*"]
)

setup(
    packages=[*PACKAGES, "ipu_packed_bert.configs"],
    package_dir={"ipu_packed_bert.configs": "configs"},
)
