"""Where lengths come from: files, published histograms, distributions; and the command-line options that name them."""
