"""Where lengths come from: files of many kinds, published histograms, drawn from a distribution; and the options that name them."""
