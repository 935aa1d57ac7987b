"""What every command has: options, progress, errors, memory and cores."""
