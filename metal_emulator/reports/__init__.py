"""Error messages of the emulator."""
