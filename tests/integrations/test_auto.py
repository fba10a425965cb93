"""`import mlx_marlin.auto`: every model that mlx-lm loads is converted, or stays."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm import utils

import mlx_marlin
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm import auto as hook
from mlx_marlin.lm import options
from support import auto_hook, quantized_folder
from support.choose import Choose

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _as_before(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(options.ENVIRONMENT, raising=False)
    backend("stock")
    yield
    auto_hook.remove()
    sys.modules.pop("mlx_marlin.auto", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_folder.write(tmp_path_factory.mktemp("models") / "quantized")


def converted(model: nn.Module) -> list[MarlinLinear]:
    return [m for m in model.modules() if isinstance(m, MarlinLinear)]


def test_importing_converts_what_is_loaded_afterwards(folder: Path) -> None:
    before = mlx_lm.load(str(folder))[0]

    importlib.import_module("mlx_marlin.auto")

    assert not converted(before)
    assert len(converted(mlx_lm.load(str(folder))[0])) == 28
    model, config = utils.load_model(folder)
    assert len(converted(model)) == 28
    assert config["model_type"] == "llama"


def test_importing_and_reloading_wraps_once_wherever_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = utils.load_model
    someone: Any = type(sys)("someone")
    someone.load_model = own
    monkeypatch.setitem(sys.modules, "someone", someone)
    auto = importlib.import_module("mlx_marlin.auto")
    wrapped = utils.load_model

    importlib.reload(auto)

    assert someone.load_model is utils.load_model is wrapped is not own
    auto_hook.remove()
    assert utils.load_model is own


def test_options_come_from_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(options.ENVIRONMENT, "layout=marlin, join=true,trace=0")
    hook.install()

    model = utils.load_model(folder)[0]

    assert "joined" in model.layers[0].self_attn.q_proj
    assert model.layers[0].mlp.down_proj.packed is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layout=tiles", "'layout=tiles', expected layout=mlx or marlin"),
        ("join", "'join', expected join=true or false"),
        ("joined=true", "'joined=true', expected one of layout, join, trace,"),
        ("bits=9", "'bits=9', expected bits=1 to 8"),
        ("compute=half", "'compute=half', expected compute=float16"),
        ("warm_up=1+0", "expected warm_up=numbers of rows, such as 1+4+8"),
        ("group_size=²", "expected group_size=a number or channel"),
        ("join=1,join=0", "'join=0', expected join once"),
    ],
)
def test_a_bad_option_names_variable_value_and_expectation(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = utils.load_model
    monkeypatch.setenv(options.ENVIRONMENT, text)

    with pytest.raises(ValueError, match="MLX_MARLIN_OPTIONS=") as caught:
        importlib.import_module("mlx_marlin.auto")

    assert said in str(caught.value)
    assert repr(text) in str(caught.value)
    assert utils.load_model is own


def test_every_option_of_optimize_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (
        "layout=marlin,join=true,trace=false,invariant=0,quantize=1,group_size=channel,"
        "bits=8,warm_up=1+4,progress=false,fuse=gate+norm,"
        "compute=float16,measure=false"
    )
    monkeypatch.setenv(options.ENVIRONMENT, given)

    found = options.from_environment()

    own = {*inspect.signature(mlx_marlin.optimize).parameters}
    assert {*found} == own - {"model", "dry_run"}
    assert (found["warm_up"], found["group_size"]) == ((1, 4), "channel")
    assert {*found["fuse"]} == {"gate", "norm"}


def load_other(path: Path, lazy: bool = False) -> Any:
    return None


def load_more(
    model_path: Path,
    lazy: bool = False,
    strict: bool = True,
    model_config: Any = None,
    get_model_classes: Any = None,
    *,
    device: str,
) -> Any:
    return None


@pytest.mark.parametrize("function", [None, load_other, load_more, 3])
def test_another_mlx_lm_is_left_alone_with_one_warning(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = utils.load_tokenizer
    if function is None:
        monkeypatch.delattr(utils, "load_model")
    else:
        monkeypatch.setattr(utils, "load_model", function)

    with pytest.warns(RuntimeWarning, match="not converted automatically"):
        auto = importlib.import_module("mlx_marlin.auto")
    importlib.reload(auto)  # a second warning would be an error

    assert getattr(utils, "load_model", None) is function
    assert utils.load_tokenizer is tokenizer


def test_without_mlx_lm_the_remedy_is_named() -> None:
    program = "import sys; sys.modules['mlx_lm'] = None; import mlx_marlin.auto"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )

    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: mlx_marlin.auto needs mlx-lm, pip install")


def test_a_model_that_cannot_be_converted_is_loaded_with_one_warning() -> None:
    hook.install()

    with pytest.warns(RuntimeWarning, match="model has no layer to convert") as caught:
        models = [mlx_lm.load(str(quantized_folder.MODEL))[0] for _ in range(2)]

    assert len(caught) == 1
    assert not any(map(converted, models))


def test_tools_that_write_weights_get_mlxs_layers(folder: Path, tmp_path: Path) -> None:
    hook.install({"layout": "marlin", "join": True})

    mlx_lm.convert(str(folder), str(tmp_path / "result"))

    written = mx.load(str(tmp_path / "result" / "model.safetensors"))
    assert {*written} == {*mx.load(str(folder / "model.safetensors"))}


@pytest.mark.parametrize("name", ["mlx_lm.fuse", "mlx_lm.quant.dwq"])
def test_tools_are_known_by_their_modules(folder: Path, name: str) -> None:
    hook.install()
    program = "def main(): return load(folder)[0]"
    started = {"__name__": "__main__", "__spec__": SimpleNamespace(name=name)}
    for names in ({"__name__": name}, started):
        space: dict[str, Any] = {**names, "load": mlx_lm.load, "folder": str(folder)}
        exec(program, space)

        assert not converted(space["main"]())


def test_a_model_that_is_divided_among_machines_stays(folder: Path) -> None:
    hook.install()

    assert not converted(utils.load_model(folder, lazy=True, strict=False)[0])


@pytest.fixture
def vlm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with mlx-vlm's name, and with functions like its own."""
    package = tmp_path / "mlx_vlm"
    package.mkdir()
    (package / "__init__.py").write_text("from .utils import load, load_model\n")
    (package / "utils.py").write_text(UTILS_OF_VLM)
    (package / "convert.py").write_text("from .utils import load_model as read\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_vlm"]:
        del sys.modules[name]


UTILS_OF_VLM = """
import mlx.nn as nn

from support.models import Layers


def load_model(model_path, lazy=False, **kwargs):
    return Layers(nn.QuantizedLinear(64, 64))


def load(path, **kwargs):
    return load_model(path, kwargs.get("lazy", False)), "processor"
"""


@pytest.mark.parametrize("first", ["mlx_vlm", "auto"])
@pytest.mark.usefixtures("vlm")
def test_models_of_mlx_vlm_are_converted_too(first: str) -> None:
    if first == "mlx_vlm":
        importlib.import_module("mlx_vlm")
    hook.install({"layout": "marlin"})
    assert ("mlx_vlm" in sys.modules) == (first == "mlx_vlm")  # which takes seconds
    package = importlib.import_module("mlx_vlm")

    model, processor = package.load("anywhere")

    assert processor == "processor"
    for each in (model, package.load_model("anywhere", strict=True)):
        assert [layer.layout for layer in converted(each)] == ["marlin"]
    space: dict[str, Any] = {"__name__": "mlx_vlm.convert", "load": package.load}
    exec("stock = load('anywhere')[0]", space)
    assert not converted(space["stock"])
    auto_hook.remove()
    assert not converted(package.load("anywhere")[0])
    assert hook._on_import not in sys.meta_path


def test_another_mlx_vlm_is_left_alone_with_one_warning(vlm: Path) -> None:
    file = vlm / "utils.py"
    file.write_text(file.read_text().replace("lazy=False", "eager=True"))
    hook.install()

    with pytest.warns(RuntimeWarning, match="mlx_vlm.utils.load_model has other par"):
        package = importlib.import_module("mlx_vlm")

    assert not converted(package.load("anywhere")[0])
    assert hasattr(utils.load_model, hook._ORIGINAL)


@pytest.mark.parametrize("name", ["model.gguf", "gptq", "ours"])
def test_every_checkpoint_that_load_reads_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "import_weights")
    module = "gguf_file" if name == "model.gguf" else "gptq"
    monkeypatch.delitem(sys.modules, module, raising=False)
    path = tmp_path / ("gptq" if name == "ours" else name)
    importlib.import_module(module).write(quantized_folder.MODEL, path)
    expected, words = mlx_marlin.load(path)
    if name == "ours":
        path = tmp_path / name
        mlx_marlin.save(path, expected, words)
    hook.install()

    model, tokenizer, config = mlx_lm.load(str(path), return_config=True)

    assert converted(model)
    tokens = mx.array([tokenizer.encode("def main():")])
    assert tokens.tolist() == [words.encode("def main():")]
    assert tokenizer.eos_token_ids == words.eos_token_ids
    assert config["model_type"] == "llama"
    assert mx.allclose(model(tokens), expected(tokens), rtol=1e-2, atol=1e-2)
