"""What `mlx-marlin bench` times by default: products of real models, and streams."""

ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512)
"""Default rows."""
QUICK_ROWS = (1, 8)
STREAMS = (1, 2, 4, 8, 16, 32)
"""Default numbers of prompts at a time."""
PROMPT, NEW = 128, 64
"""Default tokens of a prompt, and tokens generated for each."""
SHAPES = (
    (4096, 4096),  # Llama 3.1 8B, attention output
    (4096, 14336),  # Llama 3.1 8B, gate and up
    (14336, 4096),  # Llama 3.1 8B, down
    (2560, 9728),  # Qwen3 4B, gate and up
    (9728, 2560),  # Qwen3 4B, down
    (5120, 17408),  # Qwen3.5 27B, gate and up
    (17408, 5120),  # Qwen3.5 27B, down
)
"""k and n of large layers of models of 4, 8 and 27 billion weights."""
QUICK_SHAPES = ((512, 256),)
"""What the emulator computes in a second."""
