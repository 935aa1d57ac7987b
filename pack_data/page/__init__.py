"""Self-contained pages: pictures and tables as values, written as HTML with SVG, without a network or a framework."""
