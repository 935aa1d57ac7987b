"""From cycle counts to the paper's tables and pictures: run logs, profiles, the cycle model (`cycles`)."""

DEFAULT = "packed_phase2_pod16"  # the configuration
TABLES = ("1", "2", "breakdown", "points")
FIGURES = ("1", "2", "5")
