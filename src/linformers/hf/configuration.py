"""``LinformerConfig``: the sizes and options of a model, under transformers' names.

Axes: n positions, k slots.
"""

import copy
import difflib
from dataclasses import fields
from typing import Any, Self

from transformers import PreTrainedConfig

from linformers import limits
from linformers.checks import one_of, positive
from linformers.files.checked import of_type, whole
from linformers.models.options import CHOICES, Shared
from linformers.ops.blocks import block_sizes

DEFAULT_SLOTS = 256
FORMAT = 1  # of the options; a larger number in a file means options that this version would silently ignore


class LinformerConfig(Shared, PreTrainedConfig):
    """The configuration of every model in :mod:`linformers.hf`.

    Args:
        vocab_size: how many tokens there are.
        hidden_size: channels of the model.
        num_hidden_layers: layers.
        num_attention_heads: heads of a layer.
        num_key_value_heads: key/value heads; None means one for each head. Divides ``num_attention_heads``.
        head_dim: channels of a head; None means ``hidden_size // num_attention_heads``.
        intermediate_size: hidden channels of the feed-forward layers.
        hidden_act: ``"gelu"``, ``"relu"`` or ``"silu"``.
        gated: gated feed-forward layers.
        attention_bias: whether queries, keys and values have a bias.
        max_position_embeddings: the longest input n; None for any length, with ``method="content"`` and positions that are not learned.
        position_embedding_type: ``"sinusoidal"``, ``"learned"``, ``"rotary"`` or ``"none"``.
        type_vocab_size: kinds of tokens (``token_type_ids``); 0 for none.
        hidden_dropout_prob: on the embeddings and in the feed-forward layers.
        attention_probs_dropout_prob: on the attention weights and on the output of attention.
        classifier_dropout: before a classifier; None means ``hidden_dropout_prob``.
        embedding_scale: standard deviation of the initial embeddings, unless ``initializer_range`` is given, and amplitude of sinusoidal positions.
        initializer_range: standard deviation of the initial weights of linear maps and embeddings; None initialises every module
            as :class:`linformers.Linformer` does.
        layer_norm_eps: added to the variance by the norms.
        norm: ``"pre"`` or ``"post"``, the place of the norms.
        pooling: how a sequence classifier makes one vector of many: ``"mean"``, ``"first"`` or ``"attention"``.

        proj_k: the slots k, or a list with those of each layer; None means 256, or n if that is less.
        sharing: which projections are shared: ``"none"``, ``"headwise"``, ``"kv"`` or ``"layerwise"``.
        method: ``"learnable"``, ``"convolution"``, ``"mean"``, ``"max"``, ``"no_params"`` or ``"content"``.
        start: initial values of learned projections, ``"random"`` or ``"segments"``.
        block_size: positions of a block of a causal model; None chooses one.
        local_kernel: width of a depthwise convolution before attention; 0 for none.
        local_window: also see the exact keys of the query's own and the neighbouring blocks of this many positions; 0 for none. Not
            for causal models, which always see them.
        open_slots: each query opens this many of its best slots to the exact keys they stand for; with ``method="mean"``.
        open_reach: how many positions back a causal model can open slots, and its cache keeps exact keys; None for all.
        attention: ``"linformer"``, ``"full"``, ``"local"`` or ``"none"``.

        is_decoder: causal; the causal language model sets it.
        is_encoder_decoder: the sequence-to-sequence model sets it, and those of the following options that it needs.
        decoder_layers: layers of its decoder; None means ``num_hidden_layers``.
        decoder_attention_heads: heads of its decoder; None means ``num_attention_heads``.
        decoder_ffn_dim: feed-forward channels of its decoder; None means ``intermediate_size``.
        decoder_proj_k: slots of its decoder, for the target; None means ``proj_k``, as far as they fit.
        cross_proj_k: slots in which its decoder sees the source; None means ``decoder_proj_k``, as far as they fit.
        cross_attention: how its decoder sees the source: ``"linformer"``, in slots; ``"full"``, every position; ``"same"``, in
            slots if ``attention`` is ``"linformer"``, and otherwise every position.
        max_target_positions: the longest target; None means ``max_position_embeddings``.
        decoder_start_token_id: the first token of a target; None means ``bos_token_id``, or else ``pad_token_id``.

        pad_token_id: of padding; like the next two, None where there is no such token.
        bos_token_id: of the beginning of a text.
        eos_token_id: of the end of a text.
        tie_word_embeddings: use the matrix of the embedding for the output of a language model.
        use_cache: whether causal models return the decoding state.
        linformers_format: of the options, as saved; one of a newer version of this package is refused.

    Raises:
        ValueError: for values that are not allowed, and for unknown names that resemble an option.
    """

    model_type = "linformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 30522
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 2048
    hidden_act: str = "gelu"
    attention_bias: bool = False
    max_position_embeddings: int | None = 512
    position_embedding_type: str = "sinusoidal"
    type_vocab_size: int = 0
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    embedding_scale: float = 1.0
    initializer_range: float | None = None
    layer_norm_eps: float = 1e-5
    norm: str = "pre"
    pooling: str = "mean"

    proj_k: int | list[int] | None = None
    sharing: str = "layerwise"
    local_kernel: int = 5

    is_decoder: bool = False
    decoder_layers: int | None = None
    decoder_attention_heads: int | None = None
    decoder_ffn_dim: int | None = None
    decoder_proj_k: int | list[int] | None = None
    cross_proj_k: int | None = None
    max_target_positions: int | None = None
    decoder_start_token_id: int | None = None

    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True
    linformers_format: int = FORMAT

    def __post_init__(self, **kwargs: Any) -> None:
        names = [f.name for f in fields(type(self))]
        for name in kwargs:
            if meant := difflib.get_close_matches(name, names, 1, cutoff=0.9):
                raise ValueError(f"LinformerConfig has no option {name!r}; did you mean {meant[0]!r}?")
        for name in ("proj_k", "decoder_proj_k"):
            if isinstance(slots := getattr(self, name), tuple):
                setattr(self, name, list(slots))  # as it is after saving and loading
        self._check_types()  # before the sizes are used below
        if self.linformers_format > FORMAT:
            raise ValueError(
                f"this configuration has format {self.linformers_format}, and this version of linformers reads up to {FORMAT}; "
                "install a newer one: pip install --upgrade linformers"
            )
        whole(0, limits.VOCABULARY)(kwargs.get("num_labels", 0), "num_labels")  # transformers makes a table of them
        self.proj_k = self.slots
        super().__post_init__(**kwargs)
        if self.is_encoder_decoder:
            self._complete_decoder()
        self.check()

    @property
    def slots(self) -> int | list[int]:
        """``proj_k``, which is never None after ``__post_init__``."""
        if self.proj_k is not None:
            return self.proj_k
        return min(DEFAULT_SLOTS, self.max_position_embeddings or DEFAULT_SLOTS)

    def causal(self) -> Self:
        """The configuration itself if it is causal, otherwise a causal copy."""
        if self.is_encoder_decoder:
            raise ValueError("this configuration has is_encoder_decoder=True; a causal language model has no encoder")
        if self.is_decoder:
            return self
        config = copy.deepcopy(self)
        config.is_decoder = True
        return config

    def encoder_decoder(self) -> Self:
        """The configuration itself if it is for a sequence-to-sequence model, otherwise a copy; with all fields that such a model needs."""
        if self.type_vocab_size:
            raise ValueError(
                f"type_vocab_size={self.type_vocab_size} is not for sequence-to-sequence models; leave it 0"
            )
        config = self if self.is_encoder_decoder else copy.deepcopy(self)
        config.is_encoder_decoder = True
        config._complete_decoder()
        return config

    def encoder_side(self) -> Self:
        """The configuration of the encoder of a sequence-to-sequence model."""
        config = copy.deepcopy(self)
        config.is_encoder_decoder = config.is_decoder = False
        config.tie_word_embeddings = False  # the whole model ties them
        return config

    def decoder_side(self) -> Self:
        """The configuration of the decoder of a sequence-to-sequence model."""
        config = self.encoder_side()
        config.is_decoder, config.local_window = True, 0
        for own, name in (
            ("num_hidden_layers", "decoder_layers"),
            ("num_attention_heads", "decoder_attention_heads"),
            ("intermediate_size", "decoder_ffn_dim"),
            ("proj_k", "decoder_proj_k"),
            ("max_position_embeddings", "max_target_positions"),
        ):
            setattr(config, own, getattr(self, name))
        return config

    def _complete_decoder(self) -> None:
        """Fill unset fields that a sequence-to-sequence model needs."""
        for name, value in (
            ("decoder_layers", self.num_hidden_layers),
            ("decoder_attention_heads", self.num_attention_heads),
            ("decoder_ffn_dim", self.intermediate_size),
            ("max_target_positions", self.max_position_embeddings),
            ("pad_token_id", 0),
            ("eos_token_id", 1),
        ):
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.pad_token_id if self.bos_token_id is None else self.bos_token_id
        if self.decoder_proj_k is None:
            room, k = self.max_target_positions, self.slots
            if room is not None:
                k = min(k, room) if isinstance(k, int) else [min(one, room) for one in k]
            self.decoder_proj_k = k

    def _check_types(self) -> None:
        for name, hint in TYPES.items():
            of_type(hint)(getattr(self, name), name)

    def about_parameters(self) -> int:
        """The approximate number of parameters of a model of these sizes.

        Raises:
            ValueError: for a size above its limit.
        """
        sides = [("num_hidden_layers", "intermediate_size", "proj_k", "max_position_embeddings", self.is_decoder)]
        if self.is_encoder_decoder:
            sides.append(("decoder_layers", "decoder_ffn_dim", "decoder_proj_k", "max_target_positions", True))
        count = 0
        for *names, causal in sides:
            for name, most in zip(names, (limits.LAYERS, limits.SIZE, limits.SIZE, limits.SIZE), strict=True):
                limits.at_most(name, getattr(self, name), most)
            layers, feedforward, slots, n = (getattr(self, name) for name in names)
            k = max(slots) if isinstance(slots, list) else slots
            own_heads = self.num_attention_heads if self.sharing == "none" else 1
            if self.attention == "linformer" and self.method == "content":
                count += self.hidden_size * k * own_heads * (1 if self.sharing == "layerwise" else layers)
            k = k if self.attention == "linformer" and self.method in ("learnable", "no_params") else 0
            count += limits.parameters(
                vocabulary=self.vocab_size,
                n=n or 1,
                width=self.hidden_size,
                layers=layers,
                feedforward=feedforward,
                heads=self.num_attention_heads,
                k=k,
                sharing=self.sharing,
                block=block_sizes(n, k, self.block_size)[0] if causal and k else None,
                tied=self.tie_word_embeddings,
                gated=self.gated,
                kernel=self.local_kernel,
            )
        return count + self.type_vocab_size * self.hidden_size

    def check(self) -> None:
        """Raise a ValueError for values that are not allowed; models call it again, because attributes can be changed."""
        self._check_types()
        self.check_shared()
        for name, choice in (
            ("hidden_act", "activation"),
            ("position_embedding_type", "positions"),
            ("pooling", "pooling"),
            ("sharing", "parameter_sharing"),
            ("method", "method"),  # matrices and modules cannot be written into a configuration
        ):
            one_of(name, getattr(self, name), CHOICES[choice])
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {share}")
        positive(embedding_scale=self.embedding_scale)
        if self.type_vocab_size < 0:
            raise ValueError(f"type_vocab_size must not be negative, got {self.type_vocab_size}; 0 means none")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "cross_proj_k"):
            self._at_least_one(name)
        self._check_side(
            "num_hidden_layers", "num_attention_heads", "proj_k", "max_position_embeddings", self.is_decoder
        )
        if self.is_encoder_decoder:
            self._at_least_one("decoder_ffn_dim")
            self._check_side(
                "decoder_layers", "decoder_attention_heads", "decoder_proj_k", "max_target_positions", True
            )
        limits.check_configuration(self)
        if self.is_decoder and self.local_window:
            raise ValueError(
                f"local_window={self.local_window} is not for causal models, which always attend to their neighbours; use block_size"
            )

    def _check_side(self, layers: str, heads: str, slots: str, length: str, causal: bool) -> None:
        """Check the sizes of an encoder or a decoder, whose attributes have these names."""
        for name in (layers, heads, slots, length):
            self._at_least_one(name)
        count = getattr(self, heads)
        if self.head_dim is None and self.hidden_size % count:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of {heads}={count}; change one of them, or give head_dim"
            )
        if self.num_key_value_heads is not None and (self.num_key_value_heads < 1 or count % self.num_key_value_heads):
            raise ValueError(f"num_key_value_heads={self.num_key_value_heads} does not divide {heads}={count}")
        k, n = getattr(self, slots), getattr(self, length)
        if isinstance(k, list) and len(k) != getattr(self, layers):
            raise ValueError(
                f"{slots} lists {len(k)} sizes for {layers}={getattr(self, layers)}; give one for each layer"
            )
        if n is None and not (self.attention == "linformer" and self.method == "content"):
            raise ValueError(
                f"{length}=None, for inputs of any length, needs attention='linformer' and method='content'"
            )
        if n is None and self.position_embedding_type == "learned":
            raise ValueError(
                f"position_embedding_type='learned' needs a maximum length, got {length}=None; give a number"
            )
        if causal and self.attention == "linformer" and self.method != "content":
            block = None
            for one in k if isinstance(k, list) else [k]:
                block = block_sizes(n, one, block or self.block_size)[0]

    def _at_least_one(self, name: str) -> None:
        value = getattr(self, name)
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


TYPES = {
    name: hint
    for name, hint in (Shared.__annotations__ | LinformerConfig.__annotations__).items()
    if hint is not Any  # of `method`, whose choices are checked
}
