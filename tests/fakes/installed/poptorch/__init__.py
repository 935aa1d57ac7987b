"""The stand-in for PopTorch as an installed package: with this folder on PYTHONPATH, `import poptorch` finds it.

TEST_IPUS is the number of IPUs of the machine, 16 without it.
"""

import os
import sys

from tests.fakes import poptorch
from tests.fakes.machine import machine

machine.reset(int(os.environ.get("TEST_IPUS", "16")))
sys.modules["poptorch.optim"] = poptorch.optim
sys.modules["poptorch"] = poptorch
