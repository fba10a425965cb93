"""Undoes what `mlx_marlin.auto` does to mlx-lm and mlx-vlm."""

import sys

from mlx_marlin.lm import auto as hook


def remove() -> None:
    """Gives both packages their own functions back; loaded models stay as they are."""
    if hook._on_import in sys.meta_path:
        sys.meta_path.remove(hook._on_import)
    for module, names in hook.PARAMETERS.items():
        for name in names:
            ours = getattr(sys.modules.get(module), name, None)
            original = getattr(ours, hook._ORIGINAL, None)
            if original is not None:
                hook._replace(name, ours, original)
