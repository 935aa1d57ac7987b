"""PopTorch, loaded and checked once: `from ipu_packed_bert.engine.ipu.sdk import poptorch`."""

import re

try:
    import poptorch
except AssertionError as error:  # while it is imported, PopTorch asserts that torch is the version it was built with
    raise ImportError(str(error)) from None

_OLDEST = (3, 1)  # names used here exist since PopTorch 3.1; 3.4 is what they are checked against

if tuple(int(part) for part in re.findall(r"\d+", poptorch.__version__)[:2]) < _OLDEST:
    raise ImportError(f"PopTorch {poptorch.__version__} is too old, 3.4 is wanted")
