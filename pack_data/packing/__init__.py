"""Values: a histogram of lengths, a packing of it, and the certificate that proves its lower bound."""
