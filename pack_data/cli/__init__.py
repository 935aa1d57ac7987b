"""Parts that all commands share: options, progress, errors, memory and cores."""
