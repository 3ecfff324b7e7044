"""The list of all options: their defaults, their checks, and the fronts that take them.

A new option is a field here, the place that uses it, and its documentation: :class:`Shared` is inherited by the stacks, by the Hugging
Face configuration and by the settings of training; :class:`StackOptions` by the stacks and the text models alone.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

from linformers.checks import at_least, at_least_one, not_negative, of_types, one_of, positive, share
from linformers.limits import LAYERS, SIZE, at_most, check_parameters, parameters
from linformers.nn.feedforward import ACTIVATIONS
from linformers.projections.dense import STARTS
from linformers.projections.make import METHODS, SHARINGS, Method

AttentionKind = Literal["linformer", "full", "none", "local"]
Norm = Literal["pre", "post"]
Positions = Literal["sinusoidal", "learned", "rotary", "none"]
Pooling = Literal["mean", "first", "attention"]

CHOICES: dict[str, tuple[str, ...]] = {
    "attention": get_args(AttentionKind),
    "cross_attention": ("same", "linformer", "full"),
    "method": METHODS,
    "start": STARTS,
    "norm": get_args(Norm),
    "activation": tuple(ACTIVATIONS),
    "checkpoint_level": ("C0", "C1", "C2"),
    "parameter_sharing": SHARINGS,
    "positions": get_args(Positions),
    "pooling": get_args(Pooling),
}

# The smallest value of each number in `Shared`.
LEAST = {"block_size": 1, "local_kernel": 0, "local_window": 0, "open_slots": 0, "open_reach": 1}

P = ParamSpec("P")
Options = TypeVar("Options")
Model = TypeVar("Model")


@dataclass(kw_only=True, repr=False)
class Shared:
    """Options that every front has under the same name. Their meaning is documented in :class:`linformers.Linformer`."""

    attention: str = "linformer"
    cross_attention: str = "same"
    method: Any = "learnable"  # a name; stacks also take matrices and modules
    start: str = "random"
    block_size: int | None = None
    local_kernel: int = 0
    local_window: int = 0
    open_slots: int = 0
    open_reach: int | None = None
    norm: str = "post"
    gated: bool = False

    def shared(self) -> dict[str, Any]:
        """The values of these options, to pass to another front."""
        return {field.name: getattr(self, field.name) for field in fields(Shared)}

    def check_shared(self) -> None:
        """Raise a ValueError for values that are not allowed."""
        for field in fields(Shared):
            if field.name in CHOICES and isinstance(value := getattr(self, field.name), str):
                one_of(field.name, value, CHOICES[field.name])
        for name, least in LEAST.items():
            at_least(least, **{name: getattr(self, name)})
        if self.open_slots and isinstance(self.method, str) and self.method != "mean":
            raise ValueError(
                f"open_slots={self.open_slots} needs slots that are means of segments, and those of method={self.method!r} are not; "
                "use method='mean'"
            )
        if self.open_reach is not None and not self.open_slots:
            raise ValueError(f"open_reach={self.open_reach} has no meaning without open_slots")


def unset(cls: type[Options]) -> type[Options]:
    """Give a class, before it becomes a dataclass, the options of :class:`Shared` that it does not name itself, all None."""
    for field in fields(Shared):
        if field.name not in cls.__annotations__:
            choices = CHOICES.get(field.name)
            cls.__annotations__[field.name] = Literal[choices] if choices else field.type
            setattr(cls, field.name, None)
    return cls


# Options of a stack alone that are sizes.
SIZES = (
    *("input_size", "channels", "dim_ff", "dim_d", "nhead", "depth", "kv_heads", "w_o_intermediate_dim"),
    *("ff_intermediate", "context_size", "context_channels", "context_k"),
)


@dataclass
class StackOptions(Shared):
    """Everything that :class:`linformers.Linformer` takes; documented there."""

    input_size: int | None
    channels: int
    dim_k: int | Sequence[int]
    _: KW_ONLY
    dim_ff: int = 256
    dim_d: int | None = None
    nhead: int = 4
    depth: int = 1
    one_kv_head: bool = False
    kv_heads: int | None = None
    w_o_intermediate_dim: int | None = None
    ff_intermediate: int | None = None
    qkv_bias: bool = False
    full_attention: bool = False
    parameter_sharing: str = "layerwise"
    k_reduce_by_layer: int = 0
    causal: bool = False
    include_ff: bool = True
    activation: str = "gelu"
    norm_eps: float = 1e-5
    rotary: bool = False
    dropout: float = 0.1
    dropout_ff: float = 0.15
    checkpoint_level: str = "C0"
    reversible: bool = False
    context_size: int | None = None
    context_channels: int | None = None
    context_k: int | None = None
    method: Method = "learnable"

    def __post_init__(self) -> None:
        of_types(self)
        at_least_one(dim_k=self.dim_k if isinstance(self.dim_k, int) else min(self.dim_k, default=1))
        at_least_one(**{name: getattr(self, name) for name in SIZES})
        not_negative(k_reduce_by_layer=self.k_reduce_by_layer, norm_eps=self.norm_eps)
        share(dropout=self.dropout, dropout_ff=self.dropout_ff)
        self.check_shared()
        self._check_sizes()
        for name in ("activation", "checkpoint_level", "parameter_sharing"):
            one_of(name, getattr(self, name), CHOICES[name])
        for wrong, message in self._contradictions():
            if wrong:
                raise ValueError(message)

    def _check_sizes(self, vocabulary: int = 0) -> None:
        """Raise a ValueError for a stack that is too large for any machine, before anything is allocated."""
        at_most("depth", self.depth, LAYERS)
        for field in fields(self):
            value = getattr(self, field.name)
            given = value if isinstance(value, list | tuple) else [value]
            at_most(field.name, [one for one in given if isinstance(one, int)], SIZE)  # not of a pair of projections
        k = self.dim_k if isinstance(self.dim_k, int) else max(self.dim_k, default=0)
        sizes: dict[str, Any] = {
            "vocabulary": vocabulary,
            "n": self.input_size or 0,
            "width": self.channels,
            "layers": self.depth,
        }
        learned = isinstance(self.method, str) and self.method == "learnable"
        slots = k if learned and self.kind == "linformer" and not self.causal else 0
        check_parameters(
            parameters(**sizes, feedforward=self.dim_ff, heads=self.groups, k=slots, sharing=self.parameter_sharing)
        )

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.channels // self.nhead if self.dim_d is None else self.dim_d

    @property
    def groups(self) -> int:
        """Key/value heads."""
        return 1 if self.one_kv_head else self.kv_heads or self.nhead

    @property
    def kind(self) -> str:
        """The kind of attention, with ``full_attention`` resolved."""
        return "full" if self.full_attention else self.attention

    @property
    def has_context(self) -> bool:
        """Whether there is cross-attention; to a context of any length if only its channels are given."""
        return self.context_size is not None or self.context_channels is not None

    @property
    def cross_kind(self) -> str:
        """``cross_attention``, with ``"same"`` resolved."""
        if self.cross_attention != "same":
            return self.cross_attention
        return "linformer" if self.kind == "linformer" else "full"

    def _contradictions(self) -> list[tuple[object, str]]:
        """Conditions under which options contradict each other, each with its error message."""
        own_method = not isinstance(self.method, str)
        by_content = isinstance(self.method, str) and self.method == "content"
        content = self.kind == "linformer" and by_content
        return [
            (
                self.input_size is None and not content,
                "input_size=None, for inputs of any length, needs attention='linformer' and method='content'; give the longest input",
            ),
            (
                content and self.parameter_sharing == "layerwise" and self.ff_intermediate not in (None, self.channels),
                f"method='content' with parameter_sharing='layerwise' needs one width throughout, got channels={self.channels} and "
                f"ff_intermediate={self.ff_intermediate}; use parameter_sharing='kv'",
            ),
            (
                self.full_attention and self.attention not in ("linformer", "full"),
                f"full_attention=True contradicts attention={self.attention!r}; give one of them",
            ),
            (
                self.dim_d is None and self.channels % self.nhead,
                f"channels={self.channels} is not a multiple of nhead={self.nhead}; change one of them, or give dim_d",
            ),
            (
                self.one_kv_head and self.kv_heads not in (None, 1),
                f"one_kv_head=True contradicts kv_heads={self.kv_heads}; give one of them",
            ),
            (self.nhead % self.groups, f"kv_heads={self.groups} does not divide nhead={self.nhead}"),
            (
                self.rotary and self.head_dim % 2,
                f"rotary=True needs an even number of channels a head, got {self.head_dim}; change dim_d",
            ),
            (
                self.local_window and self.causal,
                f"local_window={self.local_window} is for encoders; with causal=True, use block_size",
            ),
            (
                self.local_window and self.kind in ("full", "none"),
                f"local_window={self.local_window} has no meaning with attention={self.kind!r}",
            ),
            (
                self.attention == "local" and not self.causal and not self.local_window,
                "attention='local' needs local_window, the positions of a block",
            ),
            (
                self.block_size is not None and not self.causal,
                f"block_size={self.block_size} is for causal=True; for encoders, use local_window",
            ),
            (
                self.open_reach is not None and not self.causal,
                f"open_reach={self.open_reach} is for causal=True: an encoder has all keys at once",
            ),
            (
                self.open_slots and "linformer" not in (self.kind, self.cross_kind if self.has_context else ""),
                f"open_slots={self.open_slots} has no meaning with attention={self.kind!r}, which has no slots",
            ),
            (self.reversible and self.norm != "pre", f"reversible=True needs norm='pre', got norm={self.norm!r}"),
            (
                self.reversible and self.ff_intermediate is not None,
                f"reversible=True needs one width throughout, got ff_intermediate={self.ff_intermediate}",
            ),
            (
                self.reversible and self.checkpoint_level == "C1",
                "reversible=True recomputes each branch already; use checkpoint_level='C0', or 'C2' for each head too",
            ),
            (
                own_method and self.parameter_sharing != "layerwise",
                "a user-defined method serves all layers, got "
                f"parameter_sharing={self.parameter_sharing!r}; use 'layerwise'",
            ),
            (
                self.cross_attention != "same" and not self.has_context,
                f"cross_attention={self.cross_attention!r} has no meaning without a context; give context_size",
            ),
            (
                self.context_k is not None and not self.has_context,
                f"context_k={self.context_k} has no meaning without a context; give context_size",
            ),
            (
                self.context_size is None and self.has_context and self.cross_kind == "linformer" and not by_content,
                f"context_channels={self.context_channels} without context_size, for a context of any length, needs method='content' or "
                "cross_attention='full'; give context_size, the longest context",
            ),
            (
                own_method and self.has_context and self.cross_attention != "full",
                f"a user-defined method is for self-attention, got context_size={self.context_size}; use a named method, or "
                "cross_attention='full'",
            ),
            (
                self.ff_intermediate is not None and not self.include_ff,
                f"ff_intermediate={self.ff_intermediate} has no meaning with include_ff=False",
            ),
        ]


@dataclass
class _Tokens:
    num_tokens: int


@dataclass
class _Classes(_Tokens):
    num_classes: int


# The bases are in this order because a dataclass takes the arguments of its last base first.
@dataclass
class TokenOptions(StackOptions, _Tokens):
    """Everything that the text models take; documented in :class:`linformers.LinformerLM`."""

    dim_k: int | Sequence[int] = 64
    _: KW_ONLY
    norm: str = "pre"
    local_kernel: int = 5
    emb_dim: int | None = None
    positions: str = "sinusoidal"
    embedding_scale: float = 1.0
    dropout_tokens: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(num_tokens=self.num_tokens, emb_dim=self.emb_dim)
        share(dropout_tokens=self.dropout_tokens)
        positive(embedding_scale=self.embedding_scale)
        self._check_sizes(self.num_tokens)
        one_of("positions", self.positions, CHOICES["positions"])
        self.rotary = self.rotary or self.positions == "rotary"


@dataclass
class LanguageOptions(TokenOptions):
    """Everything that :class:`linformers.LinformerLM` takes."""

    _: KW_ONLY
    return_emb: bool = False
    tie_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.return_emb and self.tie_weights:
            raise ValueError(
                "tie_weights=True needs the output weights, which return_emb=True leaves out; give one of them"
            )


@dataclass
class ClassifierOptions(TokenOptions, _Classes):
    """Everything that :class:`linformers.LinformerClassifier` takes."""

    _: KW_ONLY
    pooling: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(num_classes=self.num_classes)
        one_of("pooling", self.pooling, CHOICES["pooling"])


def arguments(options: object, kind: type) -> dict[str, Any]:
    """The values in ``options`` for the fields of ``kind``, another class of options, as keyword arguments."""
    return {field.name: getattr(options, field.name) for field in fields(kind)}


def takes(
    options: Callable[P, Options],
) -> Callable[[Callable[[Model, Options], None]], Callable[Concatenate[Model, P], None]]:
    """Let a constructor that expects one ``options`` object take them as arguments, with their names and defaults."""
    signature = inspect.signature(options)

    def decorate(init: Callable[[Model, Options], None]) -> Callable[Concatenate[Model, P], None]:
        @wraps(init)
        def constructor(self: Model, /, *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}: {error}") from None
            init(self, options(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        shown = signature.replace(parameters=[own, *signature.parameters.values()], return_annotation=None)
        constructor.__signature__ = shown  # type: ignore[attr-defined]
        return constructor

    return decorate
