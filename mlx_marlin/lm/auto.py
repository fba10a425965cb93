"""Replaces the loading functions of mlx-lm and mlx-vlm by ones that convert."""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.checkpoints.folder import read_json
from mlx_marlin.checkpoints.location import gguf_file
from mlx_marlin.lm.checkpoints import loading
from mlx_marlin.lm.optimize import optimize
from mlx_marlin.lm.options import from_environment
from mlx_marlin.lm.report.model_report import report
from mlx_marlin.versions import describe
from mlx_marlin.warn_once import warn_once

LM, VLM = "mlx_lm.utils", "mlx_vlm.utils"
PARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    LM: {
        "load_model": (
            "model_path",
            "lazy",
            "strict",
            "model_config",
            "get_model_classes",
        ),
        "load_tokenizer": ("model_path", "tokenizer_config_extra", "eos_token_ids"),
    },
    VLM: {"load_model": ("model_path", "lazy")},
}
"""Module -> its functions that are replaced -> the first parameters that they need."""
DISTRIBUTIONS = {LM: "mlx-lm", VLM: "mlx-vlm"}
ROWS = (1, 2, 4, 8, 16)
"""Rows in the line that says who serves a model."""
READS_STOCK = (
    "mlx_lm.convert",
    "mlx_lm.fuse",
    "mlx_lm.quant",
    "mlx_vlm.convert",
    "mlx_vlm.quant",
    "mlx_vlm.split_mtp",
    "mlx_vlm.train",
    "mlx_vlm.trainer",
)
"""Modules and packages that write a model or change its weights: they get it plain."""
_ORIGINAL = "_mlx_marlin_original"
"""Attribute of our functions: the one of mlx-lm that it calls."""
_overrides: dict[str, Any] = {}
_listeners: list[Callable[[str], None]] = []
_heads: list[Callable[[nn.Module, Path], nn.Module]] = []


def install(
    options: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] | None = None,
    head_of: Callable[[nn.Module, Path], nn.Module] | None = None,
) -> bool:
    """Converts all models that mlx-lm and mlx-vlm load from now on.

    mlx-vlm's function is replaced when mlx-vlm is imported, which this does not do.
    Installing it again changes the options only.

    `head_of`: loads a head of a model, which was read from a folder; it is converted.
    """
    from_environment()  # a mistake is found now, not at the first model
    try:
        from mlx_lm import utils
    except ImportError as error:
        raise ImportError(
            f"mlx_marlin.auto needs mlx-lm, pip install mlx-lm: {error}", name="mlx_lm"
        ) from error
    _overrides.clear()
    _overrides.update(options or {})
    _listeners[:] = [] if tell is None else [tell]
    _heads[:] = [] if head_of is None else [head_of]
    if VLM in sys.modules:
        _wrap(sys.modules[VLM])
    elif _on_import not in sys.meta_path:
        sys.meta_path.insert(0, _on_import)
    return _wrap(utils)


class _OnImport(MetaPathFinder):
    """Replaces mlx-vlm's function after the import of its module.

    To import it for this would take mlx-lm's users seconds.
    """

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Returns the module's own spec, whose loader then replaces the function."""
        if name != VLM:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            own = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                own(module)
                _wrap(module)

            loader.exec_module = exec_module
        return spec


_on_import = _OnImport()


def _wrap(utils: ModuleType) -> bool:
    """Replaces a module's functions; returns whether they are as expected."""
    names = PARAMETERS[utils.__name__]
    changed = next(filter(None, (_changed(utils, name) for name in names)), None)
    if changed:
        warn_once(
            f"not automatic: {changed}",
            f"models are not converted automatically, because {changed} "
            f"({describe(DISTRIBUTIONS[utils.__name__])}); call "
            f"mlx_marlin.optimize(model)",
        )
        return False
    for name in names:
        original = getattr(utils, name)
        if not hasattr(original, _ORIGINAL):
            _replace(name, original, _WRAPPERS[name](original))
    return True


def _changed(utils: ModuleType, name: str) -> str | None:
    """Returns how a function differs from what we call, or None."""
    function = getattr(utils, name, None)
    if not callable(function):
        return f"{utils.__name__} has no function {name}"
    function = getattr(function, _ORIGINAL, function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return f"{utils.__name__}.{name} has no signature"
    expected = PARAMETERS[utils.__name__][name]
    first = (*signature.parameters,)[: len(expected)]
    try:
        signature.bind(*expected)  # no other parameter is required
    except TypeError:
        first = ()
    return (
        None if first == expected else f"{utils.__name__}.{name} has other parameters"
    )


def _replace(name: str, old: Any, new: Any) -> None:
    """Replaces a function in each module that has imported it by its name."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(name) is old:
            setattr(module, name, new)


def _converting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `load_model` followed by `optimize`."""
    signature = inspect.signature(original)

    @wraps(original)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        # Without `strict` the model is about to be divided among machines.
        if not given.get("strict", True) or _is_for_stock(sys._getframe(1)):
            return original(*args, **kwargs)
        options = {**from_environment(), **_overrides}
        own = _imported(given, signature) if "model_config" in given else None
        result = own or original(*args, **kwargs)
        path = Path(given["model_path"])
        _convert(result, options, path.name)
        for head_of in _heads:
            model = result[0] if isinstance(result, tuple) else result
            _convert(head_of(model, path), options, f"head of {path.name}")
        return result

    setattr(load_model, _ORIGINAL, original)
    return load_model


def _reading_gguf(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns mlx-lm's `load_tokenizer` that also takes a GGUF file."""

    @wraps(original)
    def load_tokenizer(model_path: Any, *args: Any, **kwargs: Any) -> Any:
        file = gguf_file(Path(model_path))
        if file is None or not file.is_file():
            return original(model_path, *args, **kwargs)
        with loading.tokenizer_folder(loading.open_source(file)) as folder:
            return original(folder, *args, **kwargs)

    setattr(load_tokenizer, _ORIGINAL, original)
    return load_tokenizer


_WRAPPERS = {"load_model": _converting, "load_tokenizer": _reading_gguf}


def _imported(
    given: Mapping[str, Any], signature: inspect.Signature
) -> tuple[nn.Module, dict[str, Any]] | None:
    """Returns a model that mlx-lm cannot read exactly, and its config, or None."""
    path = Path(given["model_path"])
    config = given["model_config"] or {}
    own_classes = signature.parameters["get_model_classes"].default
    if given["get_model_classes"] is not own_classes or any(config.values()):
        return None  # settings of the caller, which only mlx-lm's function respects
    if not loading.needs_import(path):
        return None
    try:
        source = loading.open_source(path)
        model = loading.load_model(source)
    except ValueError as error:
        if not _is_of_mlx(path):
            raise  # mlx-lm would take the codes for those of another format
        warn_once(f"not imported: {error}", f"mlx-lm reads the model alone: {error}")
        return None
    if not given["lazy"]:
        mx.eval(model.parameters())
    return model, {**source.config, "eos_token_id": loading.end_tokens(source)}


def _is_of_mlx(path: Path) -> bool:
    """Returns whether a folder is in MLX's own format, which mlx-lm reads too."""
    if gguf_file(path) is not None:
        return False
    config = read_json(path / "config.json")
    return "quantization" in config and "mlx_marlin" not in config


def _convert(result: Any, options: Mapping[str, Any], name: str) -> None:
    """Converts a loaded model in place. If that fails, it stays as it is."""
    model = result[0] if isinstance(result, tuple) and result else result
    try:
        optimize(model, **options)
    except Exception as error:  # a model that runs is better than none
        warn_once(
            f"not converted: {error}",
            f"a model is not converted, stock MLX serves it: {error}",
        )
        return
    for tell in _listeners:
        tell(f"{name}: {report(model, ROWS).summary()}")


def _is_for_stock(frame: FrameType | None) -> bool:
    """Returns whether a tool that needs MLX's own layers has called this frame."""
    while frame is not None:
        spec = frame.f_globals.get("__spec__")  # `python -m` renames the module
        name = str(getattr(spec, "name", None) or frame.f_globals.get("__name__", ""))
        if any(name == tool or name.startswith(f"{tool}.") for tool in READS_STOCK):
            return True
        frame = frame.f_back
    return False
