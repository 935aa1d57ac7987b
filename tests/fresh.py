"""Programs in clean processes: forked from one interpreter that has loaded only what takes long to load.

A process of its own costs the start of Python and of NumPy, a fork of one that has both a tenth of that.
"""

import json
import subprocess
import sys
from typing import NamedTuple

from tests.imports import ROOT

_SERVER = """
import json, os, sys, tempfile, traceback
import numpy, yaml

def run(program, arguments):
    sys.argv = ["-c", *arguments]
    sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
    status = 0
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for program, arguments in json.load(sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            run(program, arguments)
        status = os.waitpid(child, 0)[1]
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        print(json.dumps([os.WEXITSTATUS(status), *texts]), flush=True)
"""


class Finished(NamedTuple):
    """Exit status and output of a program."""

    returncode: int
    stdout: str
    stderr: str


def run_fresh(program, command_lines):
    """Run a program text once with each list of arguments, in processes that have loaded NumPy, PyYAML and no more."""
    calls = json.dumps([[program, list(map(str, arguments))] for arguments in command_lines])
    done = subprocess.run(
        [sys.executable, "-c", _SERVER], cwd=ROOT, input=calls, check=True, stdout=subprocess.PIPE, text=True
    )
    finished = [Finished(*json.loads(line)) for line in done.stdout.splitlines()]
    assert len(finished) == len(command_lines)
    return finished
