"""Files and packages: opening, checking, and what a message says of them."""
