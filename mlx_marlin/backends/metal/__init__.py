"""The Metal back end, for Apple GPUs and the emulator."""
