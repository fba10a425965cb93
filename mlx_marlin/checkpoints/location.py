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
POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of the files that Git leaves in place of those that LFS has."""
LARGEST_POINTER = 1024
"""Bytes of a pointer, by the specification of Git LFS."""
DOWNLOAD = "from the Hugging Face Hub: hf download REPOSITORY --local-dir FOLDER"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""Name of a part of a divided GGUF file (llama.cpp's `llama_split_path`)."""
PROJECTOR = re.compile(r"(.*[-_.])?mmproj([-_.].*)?\.gguf", re.IGNORECASE)
"""Name of a file with the part of a model for images, as llama.cpp's tools give it."""


def gguf_file(path: Path) -> Path | None:
    """Returns the GGUF file that a path stands for; None for other checkpoints.

    A folder without safetensors files stands for the one GGUF file in it, or for the
    first part of a divided one. The part of a model for images is not such a file.
    """
    if not path.is_dir():
        return path if path.suffix == ".gguf" else None
    if any(path.glob("*.safetensors")):
        return None
    firsts = [
        file
        for file in sorted(path.glob("*.gguf"))
        if not PROJECTOR.fullmatch(file.name) and not _is_later_part(file)
    ]
    if len(firsts) > 1:
        raise ValueError(
            f"{path} holds {len(firsts)} GGUF files, expected one: give the path of "
            f"one, such as {firsts[0]}"
        )
    return firsts[0] if firsts else None


def projectors(file: Path) -> list[Path]:
    """Returns the files beside a GGUF file that hold a model's part for images."""
    return [one for one in file.parent.glob("*.gguf") if PROJECTOR.fullmatch(one.name)]


def _is_later_part(file: Path) -> bool:
    parts = PART.fullmatch(file.name)
    return parts is not None and int(parts[2]) > 1


def check_location(path: Path) -> None:
    """Checks that a path is a folder with a config and weights, or a GGUF file."""
    if (file := gguf_file(path)) is not None:
        if not file.exists():
            raise FileNotFoundError(f"{file}: no such file, expected a GGUF file")
        regular_files.check(file)
        _check_pointer(file)
        return
    if path.exists() and not path.is_dir():
        raise ValueError(_why_no_model(path))
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}: no such folder, expected one with config.json, safetensors "
            f"files, or a .gguf file ({DOWNLOAD})"
        )
    if not any(path.iterdir()):
        raise FileNotFoundError(
            f"{path} is an empty folder, expected one with config.json and safetensors "
            f"files, or a .gguf file ({DOWNLOAD})"
        )
    for pattern, missing in CONTENTS.items():
        if not any(path.glob(pattern)):
            raise FileNotFoundError(
                f"{path}: no {missing}, expected a folder with config.json and "
                f"safetensors files"
            )
    check_files(path)


def _why_no_model(file: Path) -> str:
    """Returns what is wrong with a file whose name does not end in .gguf."""
    with regular_files.open_file(file) as stream:
        is_gguf = stream.read(4) == b"GGUF"
    if is_gguf:
        return f"{file} is a GGUF file, expected a name that ends in .gguf: rename it"
    if file.suffix == ".safetensors":
        return f"{file} is one file of a model, expected its folder: {file.parent}"
    return f"{file} is a file, expected a folder or a .gguf file"


def _check_pointer(file: Path) -> None:
    """Raises a ValueError if a regular file is a pointer of Git LFS."""
    if not 0 < file.stat().st_size <= LARGEST_POINTER:
        return
    with regular_files.open_file(file) as stream:
        is_pointer = stream.read(len(POINTER)) == POINTER
    if is_pointer:
        raise ValueError(
            f"{file} is a pointer of Git LFS, expected the file itself: run `git lfs "
            f"pull` in its folder ({DOWNLOAD})"
        )


def check_files(folder: Path) -> None:
    """Checks the files that mlx-lm and transformers will open by their names."""
    for file in sorted([*folder.iterdir(), *(folder / TEMPLATES).glob("*")]):
        # Whoever reads a link that leads nowhere says that the file is missing.
        if file.exists() and not file.is_dir():
            is_text = file.suffix in TEXTS
            regular_files.check(file, regular_files.LARGEST_JSON if is_text else None)
            if is_text or file.suffix == ".safetensors":
                _check_pointer(file)


def check_name(name: str) -> bool:
    """Checks a model's name, and returns whether it has to be downloaded."""
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
