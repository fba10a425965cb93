"""Heads that draft: layers that ship with a model and predict a token further on.

A head joins the embedding of a token and the model's hidden state of the token before
it, W · cat(norm(embedding), norm(hidden)), and what follows is one layer of the model
and a final norm. So a head is mlx-lm's own model of one layer, whose embedding passes
on what was joined. Its logits are the output head's of the model that it drafts for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.checkpoints.folder import new_model

Config = dict[str, Any]
EMBEDDING_NORM, HIDDEN_NORM = "{join}.embedding_norm", "{join}.hidden_norm"
WEIGHT, NORM, LAYER = "{join}.weights", "{inner}.{norm}", "{inner}.layers.0"
OUTPUT = "output"
WRAPPERS = ("", "language_model.", "model.language_model.", "model.")
"""What may come before the names of a head's tensors."""


@dataclass(frozen=True, kw_only=True)
class HeadFamily:
    """What differs between the heads of mlx-lm's models.

    A part is a beginning of a tensor's name after the prefix; the longest counts. It
    has a place in the head's model, or none if the model that it drafts for has it.
    """

    prefix: str  # Of the names; {n} is the number of the model's layers
    parts: Mapping[str, str | None]  # Part -> place
    # From the model's settings, its number of layers and whether the head has experts
    # to what differs in the settings of the head
    settings: Callable[[Config, int, bool], Config] = lambda *_: {}
    module: str = ""  # Of mlx-lm, if it is not the model's
    embedding_first: bool = True  # In what W multiplies
    # Whether hidden states, the model's and the head's own, are those before the final
    # norm
    before_norm: bool = False
    zero_centred: bool = False  # Whether originals store norms less 1

    def names(self, known: Iterable[str], layers: int) -> dict[str, str]:
        """Returns the places by the names of a head's tensors, {} if there is none.

        `layers`: the number of the model's layers.
        """
        known = [*known]
        prefix = self.prefix.format(n=layers)
        mark = next(part for part, place in self.parts.items() if place == WEIGHT)
        starts = [f"{wrapper}{prefix}" for wrapper in WRAPPERS]
        for start in (*starts, ""):  # repositories of heads alone have no prefix
            if any(name.startswith(f"{start}{mark}.") for name in known):
                own = [name for name in known if name.startswith(start)]
                places = {name: self._place(name[len(start) :]) for name in own}
                return {name: place for name, place in places.items() if place}
        return {}

    def _place(self, name: str) -> str | None:
        for part in sorted(self.parts, key=len, reverse=True):
            if not part or name == part or name.startswith(f"{part}."):
                place, rest = self.parts[part], name[len(part) :].lstrip(".")
                return place and f"{place}.{rest}"
        return None


def _parts(
    embedding_norm: str,
    hidden_norm: str,
    weights: str,
    norm: str = "",
    layer: str = "",
    **others: str,
) -> dict[str, str | None]:
    """Returns the places by the parts that tensors' names begin with."""
    own = {embedding_norm: EMBEDDING_NORM, hidden_norm: HIDDEN_NORM, weights: WEIGHT}
    named = {name.replace("__", "."): place for name, place in others.items()}
    return {**own, **({norm: NORM} if norm else {}), layer: LAYER, **named}


def _exaone(config: Config, _: int, has_experts: bool) -> Config:
    # Full attention, without positions if other layers have windows.
    kinds = ["full_attention", *config["layer_types"]]
    return {"layer_types": kinds, "is_moe_layer": [has_experts]}


def _mimo_v2(_: Config, __: int, has_experts: bool) -> Config:
    return {"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [int(has_experts)]}


def _nemotron(_: Config, __: int, has_experts: bool) -> Config:
    pattern = ["*", "E" if has_experts else "-"]
    others = {"layers_block_type": None, "layer_types": None, "num_hidden_layers": 2}
    return {"hybrid_override_pattern": pattern, **others}


def _step(config: Config, layers: int, has_experts: bool) -> Config:
    """Returns settings whose lists begin with what they say of the head's layer."""
    lists = ("layer_types", "partial_rotary_factors", "swiglu_limits", "rope_theta")
    found: Config = {"moe_layers_enum": "0" if has_experts else ""}
    for key in (*lists, "swiglu_limits_shared"):
        if isinstance(values := config.get(key), list) and values:
            found[key] = values[layers:] or values[-1:]
    return found


_MTP = _parts("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0")
_JOINING = ("enorm", "hnorm", "eh_proj")
_QWEN = HeadFamily(prefix="mtp.", parts=_MTP, zero_centred=True)
_IGNORED: dict[str, str | None] = {"shared_head.head": None, "embed_tokens": None}
_APPENDED = HeadFamily(
    prefix="model.layers.{n}.", parts=_parts(*_JOINING, "shared_head.norm") | _IGNORED
)
_BAILING = HeadFamily(
    prefix="model.layers.{n}.", parts=_parts(*_JOINING, "final_layernorm")
)
FAMILIES = {
    "qwen3_next": _QWEN,
    "qwen3_5": replace(_QWEN, module="qwen3_5_moe"),
    "exaone_moe": HeadFamily(prefix="mtp.", parts=_MTP, settings=_exaone),
    "deepseek_v3": _APPENDED,
    "deepseek_v32": _APPENDED,
    "glm4_moe": _APPENDED,
    "glm4_moe_lite": _APPENDED,
    "glm_moe_dsa": _APPENDED,
    "bailing_moe": _BAILING,
    "bailing_moe_linear": _BAILING,
    "bailing_hybrid": _BAILING,
    "bailing_moe_v3": _BAILING,
    "mimo": HeadFamily(
        prefix="model.mtp_layers.0.",
        parts=_parts(
            "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"
        ),
        embedding_first=False,
    ),
    "mimo_v2_flash": HeadFamily(
        prefix="model.mtp.layers.0.",
        parts=_parts(
            *_JOINING,
            "final_layernorm",
            pre_mlp_layernorm=f"{LAYER}.post_attention_layernorm",
        ),
        settings=_mimo_v2,
        before_norm=True,
    ),
    "step3p5": HeadFamily(
        prefix="model.layers.{n}.",
        parts=_parts(
            *_JOINING,
            "transformer.shared_head.norm",
            transformer__shared_head__output=OUTPUT,
        ),
        settings=_step,
        before_norm=True,
        zero_centred=True,
    ),
    "ernie4_5_moe": HeadFamily(
        prefix="model.",
        parts=_parts(
            "mtp_emb_norm.0",
            "mtp_hidden_norm.0",
            "mtp_linear_proj.0",
            "",
            "mtp_block.0",
        ),
    ),
    "nemotron_h": HeadFamily(
        prefix="mtp.layers.",
        parts=_parts(
            *("0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm"),
            layer="0",
            **{"1": "{inner}.layers.1"},
        ),
        settings=_nemotron,
    ),
}
"""mlx-lm's module -> its models' heads. Step and MiMo-V2 have three, each for one token
further; the first drafts all here."""
REFUSED = {
    "longcat_flash": "its head's layer is of another kind than the model's, which "
    "mlx-lm does not have",
    "minimax": "its config announces heads, but none were published",
    "minimax_m2": "its config announces heads, but none were published",
}


class Trunk:
    """The parts of a model that its head needs; looked up anew at each use.

    `optimize` replaces layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.text: Any = getattr(model, "language_model", model)
        self.module = type(self.text).__module__.rpartition(".")[2]
        self.inner: Any = getattr(self.text, "model", None)
        self.inner_name = "model"
        if self.inner is None:
            self.inner_name = "backbone"
            self.inner = getattr(self.text, "backbone", None)
        self.embedding_name, self.norm_name = (
            next((name for name in names if name in (self.inner or {})), "")
            for names in (
                ("embed_tokens", "word_embeddings", "embeddings"),
                ("norm", "norm_f"),
            )
        )

    @property
    def layers(self) -> int:
        """The number of layers."""
        count: int = self.text.args.num_hidden_layers
        return count

    @property
    def norm(self) -> nn.Module:
        """The final norm."""
        found: nn.Module = self.inner[self.norm_name]
        return found

    def embedded(self, tokens: mx.array) -> mx.array:
        """Returns the embeddings of tokens."""
        found: mx.array = self.inner[self.embedding_name](tokens)
        return found

    def logits(self, hidden: mx.array) -> mx.array:
        """Returns the logits of hidden states after the final norm."""
        head = self.text.get("lm_head")
        if head is None:
            head = self.inner[self.embedding_name].as_linear
        found: mx.array = head(hidden)
        return found


class Join(nn.Module):
    """Stands where a head's model has its embedding, and passes on what was joined."""

    def __init__(self, size: int, eps: float, embedding_first: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding_norm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.weights = nn.Linear(2 * size, size, bias=False)
        self._embedding_first = embedding_first

    def __call__(self, joined: mx.array) -> mx.array:
        """Returns what it is given."""
        return joined

    def join(self, embedded: mx.array, hidden: mx.array) -> mx.array:
        """Returns W · cat(norm(embedded), norm(hidden)) in the dtype of the head."""
        dtype = self.embedding_norm.weight.dtype
        parts = [
            self.embedding_norm(embedded.astype(dtype)),
            self.hidden_norm(hidden.astype(dtype)),
        ]
        joined = parts if self._embedding_first else parts[::-1]
        found: mx.array = self.weights(mx.concatenate(joined, axis=-1))
        return found


class DraftHead(nn.Module):
    """A head that drafts for a model; `load_heads` returns it."""

    def __init__(self, block: nn.Module, trunk: Trunk, family: HeadFamily) -> None:
        """Keeps a head's model and the model that it drafts for."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.block = block
        # No module, so that the model is not converted with its head.
        self.trunk, self.family = trunk, family

    def __call__(
        self, tokens: mx.array, hidden: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        """Returns the logits [..., vocabulary] of the tokens after the given ones.

        `hidden`: the model's hidden state of the token before each, zeros if it is not
        given: as long as only the time matters.
        """
        trunk, own = self.trunk, Trunk(self.block)
        embedded = trunk.embedded(tokens)
        hidden = mx.zeros_like(embedded) if hidden is None else hidden
        join: Join = own.inner[own.embedding_name]
        # Some models look for the cache of a kind of layers that a head does not have.
        caches = [*(cache or [None] * len(own.inner.layers)), None]
        states: mx.array = own.inner(join.join(embedded, hidden), cache=caches)
        output = self.block.get(OUTPUT)
        if output is not None:
            logits: mx.array = output(states)
            return logits
        return trunk.logits(states.astype(embedded.dtype))

    @property
    def norm(self) -> nn.Module:
        """The head's own final norm."""
        return Trunk(self.block).norm

    def make_cache(self) -> list[Any]:
        """Returns a cache of the head's layer."""
        from mlx_lm.models.cache import make_prompt_cache  # here: it takes seconds

        cache: list[Any] = make_prompt_cache(self.block)
        return cache


def family_of(model: nn.Module) -> tuple[Trunk, HeadFamily]:
    """Returns what a model's heads are like."""
    trunk = Trunk(model)
    name = trunk.module
    if name in REFUSED:
        raise ValueError(f"heads of a {name} model are not read: {REFUSED[name]}")
    if name not in FAMILIES:
        raise ValueError(
            f"a model of {type(trunk.text).__module__} has no heads that are known, "
            f"expected one of {[*FAMILIES]}"
        )
    return trunk, FAMILIES[name]


def config_of(trunk: Trunk, family: HeadFamily, has_experts: bool) -> Config:
    """Returns the settings of a head's model: those of one layer, with attention.

    mlx-lm's modules ignore the settings that they do not have.
    """
    config = asdict(trunk.text.args)
    dense = int(not has_experts)
    own = {
        "model_type": family.module or trunk.module,
        "num_hidden_layers": 1,
        "full_attention_interval": 1,
        "layer_group_size": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0] * dense,
        "first_k_dense_replace": dense,
        "moe_layer_start_index": dense,
        "moe_layer_interval": 1,
        "norm_head": False,
    }
    if dense:
        own["num_experts"] = 0
    return {**config, **own, **family.settings(config, trunk.layers, has_experts)}


def new_block(trunk: Trunk, family: HeadFamily, config: Config, names: set[str]) -> Any:
    """Returns a head's model, whose random parameters are never computed.

    `names`: the names that its tensors will have.
    """
    block: Any = new_model(config)
    own = Trunk(block)
    size, norm = config["hidden_size"], own.norm
    own.text.pop("lm_head", None)
    own.inner[own.embedding_name] = Join(size, norm.eps, family.embedding_first)
    if NORM not in family.parts.values():
        own.inner[own.norm_name] = nn.Identity()
    for index in ("ssm_idx", "gla_idx"):  # of layers that a head does not have
        if hasattr(own.inner, index):
            setattr(own.inner, index, 1)
    if any(name.startswith(f"{OUTPUT}.") for name in names):
        block[OUTPUT] = nn.Linear(size, config["vocab_size"], bias=False)
    return block


def places_in(block: nn.Module) -> dict[str, str]:
    """Returns what the places of a family's parts are called in a head's model."""
    own = Trunk(block)
    start = "language_model." if own.text is not block else ""
    inner = f"{start}{own.inner_name}"
    join = f"{inner}.{own.embedding_name}"
    return {"inner": inner, "norm": own.norm_name, "join": join}
