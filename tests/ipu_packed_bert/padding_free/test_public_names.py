"""What `from ipu_packed_bert.padding_free import ...` gives."""

from __future__ import annotations

import subprocess
import sys

from ipu_packed_bert.padding_free.collators import PaddingFreeCollator
from ipu_packed_bert.padding_free.probe import check_no_leak


def test_public_names_are_loaded_on_use():
    """The import that README shows; the package alone loads no torch."""
    from ipu_packed_bert.padding_free import PaddingFreeCollator as collator
    from ipu_packed_bert.padding_free import check_no_leak as found

    assert found is check_no_leak and collator is PaddingFreeCollator
    code = (
        "import sys, ipu_packed_bert.padding_free as package\n"
        "assert 'torch' not in sys.modules\n"
        "assert all(getattr(package, name) for name in package.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
