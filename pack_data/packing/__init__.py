"""Values: a histogram of lengths, a packing of it, and the certificate that proves its lower bound."""

PUBLISHED = ("wikipedia_512", "squad_1_1_384")  # histograms of the paper
