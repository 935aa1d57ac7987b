"""The module that adds varlen_attn to CPUs registers once, and says in one line which torch it needs."""

import subprocess
import sys

import pytest

MODULE = "padding_free.varlen_on_cpu"


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.returncode, done.stderr.splitlines()


def test_a_torch_without_varlen_attn_is_refused_in_one_line():
    """Torch 2.0 has no torch.nn.attention; a newer one is made to have none."""
    program = f"import sys, torch; sys.modules['torch.nn.attention'] = None; import {MODULE}"
    status, lines = run(program)
    assert status == 1 and lines[-1].startswith("ImportError: ") and "needs torch 2.13" in lines[-1]
    assert not any("During handling" in line for line in lines)


def test_registered_twice_it_steps_aside_with_one_line():
    pytest.importorskip("torch.nn.attention.varlen", reason="needs torch 2.13")
    status, lines = run(f"import importlib; module = importlib.import_module('{MODULE}'); importlib.reload(module)")
    assert status == 0 and len(lines) == 1 and "has a kernel for CPUs already" in lines[0]
