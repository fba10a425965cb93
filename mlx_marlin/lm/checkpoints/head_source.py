"""Reads a model's head from the files that it is kept in."""

from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.checkpoints.folder import INDEX, weight_map
from mlx_marlin.checkpoints.location import REPOSITORY
from mlx_marlin.checkpoints.settings import check_code, method_of
from mlx_marlin.lm.checkpoints.folder_source import FolderSource
from mlx_marlin.lm.checkpoints.head_folder import FILE, HeadFolder, check_found
from mlx_marlin.lm.checkpoints.loading import FOLDER, load_model
from mlx_marlin.lm.drafts.heads import (
    DraftHead,
    HeadFamily,
    Trunk,
    config_of,
    family_of,
    new_block,
    places_in,
)

AUTO = "auto"
BITS = (2, 3, 4, 5, 6, 8)
GROUP = 64
SHIFTED = 0.5
"""Mean of the norm before attention, from which on a file holds 1 + w instead of w."""
TELLING = ("input_layernorm.weight", "post_attention_layernorm.weight")


def load_heads(path: str | Path, model: nn.Module, bits: int | None = 4) -> DraftHead:
    """Loads the head that ships with a model, which drafts its next tokens.

    Args:
        path: A folder or a repository on the Hugging Face Hub: the original's, of which
            only the files that hold the head are fetched, one of heads alone, or the
            model's own. "auto": the folder that `load` read the model from.
        model: The model that it drafts for.
        bits: Bits of affine codes that the head's plain weights get, in groups of 64;
            None leaves them plain. Weights that are stored as codes stay.

    Returns:
        What `stream_generate` takes as `draft_model`, and `optimize` converts.

    Raises:
        OSError: If a file is missing or cannot be read or fetched.
        ValueError: If there is no head, the model is of another kind than the head, or
            a file is malformed.
    """
    if bits is not None and bits not in BITS:
        raise ValueError(f"bits={bits!r}, expected None or one of {BITS}")
    trunk, family = family_of(model)
    source = HeadSource(_folder(path, model, trunk, family), trunk, family)
    block = load_model(source)
    if bits is not None:
        _quantize(block, bits)
    mx.eval(block.parameters())
    return DraftHead(block, trunk, family)


class HeadSource(FolderSource):
    """A head as a model of mlx-lm's."""

    def __init__(self, path: Path, trunk: Trunk, family: HeadFamily) -> None:
        self.path, self._family, self._trunk = path, family, trunk
        self._folder = folder = HeadFolder(path, family, trunk.layers)
        check_found(path, folder.places, family, trunk.layers)
        self._places = {*folder.places.values()}
        check_code(folder.config, str(path / "config.json"))
        has_experts = any(
            ".experts." in name or ".switch_mlp." in name for name in folder.places
        )
        self.config = config_of(trunk, family, has_experts)
        folder.place(places_in(self.model))
        self._method, self._settings = method_of(folder)
        self._check_values = True
        self._plain_dtype: mx.Dtype | None = None
        self.computed: dict[str, float] = {}

    @cached_property
    def model(self) -> nn.Module:
        """The head's model."""
        given = self._trunk, self._family, self.config, self._places
        block: nn.Module = new_block(*given)
        return block

    def sanitized(
        self, arrays: dict[str, mx.array], model: nn.Module | None = None
    ) -> dict[str, mx.array]:
        """Returns arrays after mlx-lm's `sanitize`, but norms shifted once, by us."""
        norms = {
            name: array
            for name, array in arrays.items()
            if name.endswith("norm.weight") and array.ndim == 1
        }
        found = super().sanitized(arrays, model)
        is_less = self._family.zero_centred and self._is_less_one(norms)
        shift = {name: norm + 1 for name, norm in norms.items()} if is_less else norms
        return found | shift

    def _is_less_one(self, norms: dict[str, mx.array]) -> bool:
        """Returns whether norms are stored less 1, as the layer's own two say."""
        means = {
            name: float(cast(float, mx.mean(norm.astype(mx.float32)).item()))
            for name, norm in norms.items()
            if name.endswith(TELLING)
        }
        are_less = {mean < SHIFTED for mean in means.values()}
        if len(are_less) > 1:
            raise ValueError(
                f"{self.path}: means of norms {means}, expected all near 0 or all near "
                f"1: some are stored as 1 + w and some as w"
            )
        return True in are_less


def _quantize(block: Any, bits: int) -> None:
    """Quantizes a head's plain weights, except what mlx-lm's model excludes."""
    own = getattr(block, "quant_predicate", None)

    def chosen(path: str, layer: nn.Module) -> Any:
        if not hasattr(layer, "to_quantized") or layer.weight.shape[-1] % GROUP:
            return False
        return True if own is None else own(path, layer)

    nn.quantize(block, GROUP, bits, class_predicate=chosen)


def _folder(
    path: str | Path, model: nn.Module, trunk: Trunk, family: HeadFamily
) -> Path:
    """Returns the folder of a head's files, which are fetched if they are not here."""
    if path == AUTO:
        path = vars(model).get(FOLDER, "")
        if not path:
            raise ValueError(
                "path='auto' needs a model that mlx_marlin.load has read, expected a "
                "folder or a repository"
            )
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists() or not REPOSITORY.fullmatch(str(path)) or "/" not in str(path):
        raise ValueError(
            f"path={str(path)!r}, expected a folder, OWNER/NAME of a repository on the "
            f"Hugging Face Hub, or 'auto'"
        )
    return _fetched(str(path), family, trunk.layers)


def _fetched(name: str, family: HeadFamily, layers: int) -> Path:
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(name, allow_patterns=["config.json", INDEX, FILE]))
    if (folder / FILE).exists():  # as `convert` leaves it, in no index
        return folder
    files = {"*.safetensors"}
    if (folder / INDEX).exists():
        known = weight_map(folder)
        places = family.names(known, layers)
        check_found(name, places, family, layers)
        files = {escape(known[tensor]) for tensor in places}
    return Path(snapshot_download(name, allow_patterns=[*sorted(files)]))
