"""Analytic cycle model of the Graphcore Mk2 and Bow IPUs; it needs neither an IPU nor the Poplar SDK.

Reading order: target (the machine, data between tiles), vertices (on-tile cycles of single operations),
matmul (the plan search), layout (which tensors must be rearranged), tracing (which graphs are compared, and each of
them operator by operator), lowering (graph to costs), pipeline (costs to cycles of one pipeline cycle),
workload (a configuration as a graph on IPUs), points (published measurements), calibration (five fitted parameters).

The estimators restate the published cycle estimators of the poplibs libraries (SDK 3.4 line, MIT licence) as formulas;
no code of theirs is used. Estimated here, because they are not public: Poplar's exchange schedule, sync costs, copy and
transpose codelets, and the collectives.
"""
