"""The computer that the PopTorch stand-in pretends to run on, and what was done on it: read by tests, unknown to
PopTorch."""

from typing import Any, Dict, List, NamedTuple


class CompiledProgram(NamedTuple):
    kind: str  # "training" or "inference"
    graph: Any  # what was traced: blocks, losses, checkpoints, serialised products, operators
    stages: List[int]  # IPU of each forward stage
    homes: Dict[str, int]  # IPU of each weight


class Machine:
    def __init__(self):
        self.reset()

    def reset(self, ipus=16):
        self.ipus = ipus  # 0: no hardware
        self.float64 = False  # as if IPUs had it, and kept gradients and moments in it: for equalities without rounding
        self.attached = 0  # IPUs in use
        self.cycles = None  # of a call; None: as long as it takes here
        self.tile_bytes = None  # of a tile; None: as many as there are
        self.attachments: List[str] = []  # kinds of the programs that took IPUs, in their order
        self.uploads = 0  # weights copied to a program that is attached
        self.programs: List[CompiledProgram] = []
        self.poprun: Any = None  # what poprun tells this process, where it started it: tests/fakes/popdist.py

    @property
    def compilations(self):
        """Kinds of the programs made, in their order."""
        return [program.kind for program in self.programs]


machine = Machine()
