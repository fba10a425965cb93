"""Looks at a checkpoint's folder or file before anything is read or imported."""

import re
from pathlib import Path

from mlx_marlin import regular_files

REPOSITORY = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
"""Name of a repository on the Hugging Face Hub; only old ones have no owner."""
CONTENTS = {"config.json": "config.json", "*.safetensors": "safetensors file"}
"""Pattern of what a folder has to contain -> what it is called."""
TEXTS = (".jinja", ".json", ".model", ".tiktoken", ".txt")
"""Suffixes of what mlx-lm and transformers read whole."""
TEMPLATES = "additional_chat_templates"
"""The only subfolder that transformers reads."""


def check_location(path: Path) -> None:
    """Checks that a path is a folder with a config and weights, or a GGUF file.

    Raises:
        OSError: If a file is missing.
        ValueError: If it is a file of another kind, or a file in the folder is not a
            regular one or too large to be read.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file, expected a GGUF file")
        regular_files.check(path)
        return
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, expected a folder or a .gguf file")
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}: no such folder, expected one with config.json, safetensors "
            f"files, or a .gguf file (from the Hugging Face Hub: hf download "
            f"REPOSITORY --local-dir FOLDER)"
        )
    for pattern, missing in CONTENTS.items():
        if not any(path.glob(pattern)):
            raise FileNotFoundError(
                f"{path}: no {missing}, expected a folder with config.json and "
                f"safetensors files"
            )
    check_files(path)


def check_files(folder: Path) -> None:
    """Checks the files that mlx-lm and transformers will open by their names.

    Raises:
        ValueError: If one is not a regular file, or too large.
    """
    for file in sorted([*folder.iterdir(), *(folder / TEMPLATES).glob("*")]):
        # Whoever reads a link that leads nowhere says that the file is missing.
        if file.exists() and not file.is_dir():
            is_text = file.suffix in TEXTS
            regular_files.check(file, regular_files.LARGEST_JSON if is_text else None)


def check_name(name: str) -> bool:
    """Checks a model's name, and returns whether it has to be downloaded.

    Args:
        name: A folder, a GGUF file, or a repository on the Hugging Face Hub.

    Raises:
        OSError: If it is none of them, or a file is missing.
        ValueError: As for `check_location`.
    """
    path = Path(name)
    if path.exists() or path.suffix == ".gguf":
        check_location(path)
        return False
    is_repository = REPOSITORY.fullmatch(name) is not None
    if is_repository and _is_downloaded(name):
        return False
    if not is_repository or "/" not in name:
        raise FileNotFoundError(
            f"{name}: no such folder or file, and not OWNER/NAME of a repository on "
            f"the Hugging Face Hub"
        )
    return True


def _is_downloaded(name: str) -> bool:
    try:
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except (ImportError, ValueError, OSError):  # not the name of a repository
        return False
