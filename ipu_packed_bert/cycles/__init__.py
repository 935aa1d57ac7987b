"""Analytic cycle model of the Graphcore Mk2 and Bow IPUs, for machines with neither IPU nor Poplar SDK.

Reading order: target (the machine as data), vertices (on-tile cycles of single operations), exchange (data movement),
matmul (the plan search), layout (which tensors must be rearranged), tracing (the model's real training graph),
lowering (graph to costs), pipeline (costs to cycles of one pipeline cycle), calibration (two fitted parameters).

The estimators restate the published cycle estimators of the poplibs libraries (SDK 3.4 line, MIT licence) as formulas;
no code of theirs is used. What is not public, and therefore estimated here: Poplar's exchange schedule, sync costs,
copy and transpose codelets, and the collectives.
"""
