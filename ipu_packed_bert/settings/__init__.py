"""Settings of runs: the reader, the sections and rules, and the configurations that come with the program."""
