"""From cycle counts to the paper's tables and pictures: run logs, profiles, the cycle model (`cycles`)."""
