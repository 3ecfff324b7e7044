"""Sequence projections for Keras: shorten keys and values from s positions to k slots, as ``linformers.projections`` does.

Axes: b batch, h heads, s key positions, k slots, w positions of a frame, c channels, e channels of a head.
Masks: ``keep`` is True where a token (or a slot) is real.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from linformers.checks import one_of
from linformers.notice import warn_of_slots
from linformers.projections.base import KEY, NO_LIMIT, VALUE
from linformers.projections.content import FEWEST_TOKENS, SPREAD
from linformers.projections.dense import STARTS, averaging_matrix
from linformers.projections.make import METHODS, SHARINGS

__all__ = ["KEY", "VALUE", "Projection", "Slots", "Tensor", "blank", "single"]

Tensor = Any  # of the backend in use


class Slots(NamedTuple):
    """A shortened sequence.

    Attributes:
        content: ``(b, k, c)``, or ``(b, k, h, e)`` if every head has a projection of its own.
        mass: ``(b or 1, k)``, what a sequence of ones becomes: the factor of a bias added before shortening. None stands for
            ones.
        keep: ``(b or 1, k)``, or ``(b, h or 1, k)`` for content slots: False where a slot holds no real token; None if
            all take part.
        log_count: ``(b, h or 1, k)``, added to the logits: the logarithm of how many tokens a slot stands for; None for zeros.
    """

    content: Tensor
    mass: Tensor | None
    keep: Tensor | None
    log_count: Tensor | None = None


@keras.saving.register_keras_serializable(package="linformers")
class Projection(keras.layers.Layer):
    """The weights that shorten sequences, for one attention layer or for several, to which it is passed as ``projection``.

    Position i always uses row i of E, whatever the input's length; segment j of k starts at ``floor(j * max_length / k)``.

    Args:
        max_length: the longest input; None for any length, with ``"content"``.
        projection_dim: the number of slots k.
        num_heads: the number of attention heads; used by ``sharing="none"``.
        sharing: ``"none"``, every head has its own E and F; ``"headwise"``, the heads share them; ``"kv"``, E and F are one
            matrix; ``"layerwise"``, the same, for a projection that is passed to several layers.
        method: ``"learnable"``; ``"convolution"``, a kernel as wide as a segment; ``"mean"`` and ``"max"`` of each segment;
            ``"no_params"``, random and not trained; ``"content"``, each token is assigned to slots by its features, and a slot is the
            weighted mean of its tokens. Keys and values share the assignment, and so do the heads unless ``sharing`` is ``"none"``.
        channels: of the keys that the layer is given; needed by ``"content"``.
        start: initial values of E and F: ``"random"``, N(0, 1 / max_length), with which compressed keys keep their scale at full length;
            or ``"segments"``, with which each slot averages its own segment, plus a little noise.

    Example:
        >>> shared = Projection(max_length=512, projection_dim=64, sharing="layerwise")
        >>> first = LinearMultiHeadAttention(num_heads=4, key_dim=32, projection=shared)
        >>> second = LinearMultiHeadAttention(num_heads=4, key_dim=32, projection=shared)
    """

    def __init__(
        self,
        max_length: int | None,
        projection_dim: int,
        *,
        num_heads: int = 1,
        sharing: str = "headwise",
        method: str = "learnable",
        start: str = "random",
        channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.sharing, self.method = one_of("sharing", sharing, SHARINGS), one_of("method", method, METHODS)
        self.start = one_of("start", start, STARTS)
        if max_length is None and method != "content":
            raise ValueError(
                f"method={method!r} needs a maximum length; pass max_length, or use method='content', which has none"
            )
        sizes = {
            "max_length": max_length,
            "projection_dim": projection_dim,
            "num_heads": num_heads,
            "channels": channels,
        }
        for name, value in sizes.items():
            left_out = value is None and name in ("max_length", "channels")
            if not left_out and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        self.max_length, self.projection_dim, self.num_heads = max_length, projection_dim, num_heads
        self.channels = channels
        warn_of_slots("projection_dim", projection_dim, self.limit)
        pooling = method in ("mean", "max")
        self.parts = 1 if pooling or method == "content" or sharing in ("kv", "layerwise") else 2
        self.heads = num_heads if sharing == "none" and not pooling else 1
        longest = self.limit
        match method:
            case "content":
                if channels is None:
                    raise ValueError("method='content' needs channels, the number of channels of the keys")
                self.matrices = self.add_weight(
                    name="weight",
                    shape=(channels, self.heads * projection_dim),  # the slots of one head side by side
                    initializer=Start(SPREAD * channels**-0.5),
                )
            case "learnable" | "no_params":
                means = averaging_matrix(longest, projection_dim).numpy()
                self.matrices = self.add_weight(
                    name="matrices",
                    shape=(self.parts, self.heads, longest, projection_dim),
                    initializer=Start(longest**-0.5) if start == "random" else Start(0.1 * means.std(), means),
                    trainable=method == "learnable",
                )
            case "convolution":
                width = -(-longest // projection_dim)
                self.matrices = self.add_weight(
                    name="kernels",
                    shape=(self.parts, self.heads, width),
                    initializer=Start(width**-0.5) if start == "random" else Start(0.1 / width, 1 / width),
                )
            case _:
                self.matrices = None
        self.built = True

    @property
    def linear(self) -> bool:
        """Whether it commutes with a linear map of the channels, so that either may come first."""
        return bool(self.method != "max")

    @property
    def limit(self) -> int:
        """The longest input, as a number also if there is no limit."""
        return NO_LIMIT if self.max_length is None else self.max_length

    def cost(self, length: int) -> int:
        """Multiplications per channel of shortening ``length`` positions once."""
        return length * self.projection_dim if self.method in ("learnable", "no_params", "content") else length

    def check_length(self, length: int | None) -> None:
        """Raise a ValueError unless ``1 <= length <= max_length``; None, a length known only later, passes."""
        if length == 0:
            raise ValueError("got an empty sequence of keys; give at least one position")
        if length is not None and length > self.limit:
            raise ValueError(
                f"got a sequence of {length}, but this projection was built for at most {self.max_length}; "
                f"build the layer with max_length={length} or more, or shorten the input"
            )

    def check_channels(self, channels: int) -> None:
        """Raise a ValueError if content slots were built for keys of another width."""
        if self.method == "content" and channels != self.channels:
            raise ValueError(
                f"these content slots were built for keys of {self.channels} channels, got {channels}; "
                f"build the projection with channels={channels}"
            )

    def choose(self, key: Tensor, keep: Tensor | None) -> Tensor | None:
        """The share of each token in each content slot; None for other methods, whose slots depend on positions.

        Args:
            key: ``(b, s, c)``, the input of the layer, before its linear maps.
            keep: ``(b or 1, s)``, True where the token is real.

        Returns:
            ``(b, s, heads, k)`` in float32; zeros where a token is not real.
        """
        if self.method != "content":
            return None
        logits = ops.matmul(single(blank(key, keep)), single(self.matrices))  # (b, s, heads * k)
        batch, length, _ = ops.shape(logits)
        logits = ops.reshape(logits, (batch, length, self.heads, self.projection_dim))
        shares = ops.exp(ops.log_softmax(logits, axis=-1))  # Keras' softmax warns of a single slot
        return blank(shares, keep)

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, shares: Tensor | None = None) -> Slots:
        """Shorten ``x``.

        Args:
            x: ``(b, s, c)``, or ``(b, s, h, e)`` if ``heads`` is more than 1.
            keep: ``(b or 1, s)``, True where the token is real; nothing else has any influence.
            part: ``KEY`` or ``VALUE``.
            shares: the result of :meth:`choose` for the keys; None computes the shares of content slots from ``x``.

        Raises:
            ValueError: if ``x`` is empty or longer than ``max_length``.
        """
        self.check_length(x.shape[1])
        x, part = blank(x, keep), min(part, self.parts - 1)
        match self.method:
            case "learnable" | "no_params":
                return self._multiply(x, keep, part)
            case "convolution":
                return self._convolve(x, keep, part)
            case "content":
                return self._average(x, self.choose(x, keep) if shares is None else shares)
            case _:
                return self._pool(x, keep)

    def _average(self, x: Tensor, shares: Tensor) -> Slots:
        """The mean of the tokens of each content slot, weighted by their shares; sums and divisions in float32."""
        count = ops.sum(shares, axis=1)  # (b, heads, k)
        safe = ops.maximum(count, FEWEST_TOKENS)
        root = ops.transpose(ops.sqrt(safe), (0, 2, 1))  # (b, k, heads)
        if self.heads > 1:
            total, root = ops.einsum("bshk,bshe->bkhe", shares, single(x)), root[..., None]
        else:
            total = ops.matmul(ops.transpose(shares[:, :, 0], (0, 2, 1)), single(x))  # (b, k, c)
        # Divided twice by the root: JAX's gradient of a quotient has the inverse square of the divisor, which overflows float32.
        content = ops.cast(total / root / root, x.dtype)
        return Slots(content, None, count >= FEWEST_TOKENS, ops.log(safe))

    def _multiply(self, x: Tensor, keep: Tensor | None, part: int) -> Slots:
        matrix = self.matrices[part][:, : ops.shape(x)[1]]  # (heads, s, k)
        if self.heads > 1:
            return Slots(ops.einsum("hsk,bshe->bkhe", matrix, x), None, None)
        matrix = matrix[0]
        if keep is None:
            mass = ops.sum(single(matrix), axis=0, keepdims=True)  # (1, k)
        else:
            mass = ops.matmul(ops.cast(keep, matrix.dtype), matrix)  # (b, k)
        return Slots(ops.matmul(ops.transpose(matrix), x), mass, None)

    def _convolve(self, x: Tensor, keep: Tensor | None, part: int) -> Slots:
        kernel = self.matrices[part]  # (heads, w)
        frames, real = self._frames(x), self._frames(self._real(x, keep))
        slot_keep = self._filled(real, x, keep)
        if self.heads > 1:
            return Slots(ops.einsum("hw,bkwhe->bkhe", kernel, frames), None, slot_keep)
        mass = ops.matmul(ops.cast(real, kernel.dtype), kernel[0])  # (b or 1, k)
        return Slots(ops.einsum("w,bkwc->bkc", kernel[0], frames), mass, slot_keep)

    def _pool(self, x: Tensor, keep: Tensor | None) -> Slots:
        frames = self._frames(x)  # (b, k, w, c)
        member = ops.logical_and(self._own_positions(frames.shape[1]), self._frames(self._real(x, keep)))
        if self.method == "mean":
            frames = single(frames)
            share = ops.cast(member, frames.dtype)
            share = share / ops.maximum(ops.sum(share, axis=-1, keepdims=True), 1)
            content = ops.cast(ops.matmul(share[:, :, None], frames)[:, :, 0], x.dtype)  # (b, k, c)
        else:
            content = ops.max(ops.where(member[..., None], frames, -np.inf), axis=2)
            content = ops.where(ops.any(member, axis=-1)[..., None], content, 0.0)
        return Slots(content, None, self._filled(member, x, keep))

    def _frames(self, x: Tensor) -> Tensor:
        """Cut ``(b, s, ...)`` into the frames of its segments, ``(b, used, w, ...)``, zero or False past the end of ``x``.

        A frame is the ``ceil(max_length / k)`` positions from the start of its segment on. Segments that begin past the end
        are left out, unless the length is known only when the graph runs: then there are k.
        """
        length, k = x.shape[1], self.projection_dim
        used = k if length is None else -(-length * k // self.limit)
        index = self._frame_positions(used)
        total = int(index[-1, -1]) + 1
        batch, known_length, *rest = ops.shape(x)
        if length != total:  # in a graph, a negative size stops a sequence that is too long
            gap = (batch, total - known_length, *rest)
            x = ops.concatenate([x, ops.zeros(gap, dtype=keras.backend.standardize_dtype(x.dtype))], axis=1)
        if self.limit % k:  # otherwise the frames do not overlap
            x = ops.take(x, index.reshape(-1), axis=1)
        return ops.reshape(x, (batch, *index.shape, *rest))

    def _frame_positions(self, used: int) -> np.ndarray:
        """The position of every place of every frame: ``(used, w)``."""
        starts = np.arange(used) * self.limit // self.projection_dim
        return starts[:, None] + np.arange(-(-self.limit // self.projection_dim))

    def _own_positions(self, used: int) -> np.ndarray:
        """Which places of the frames lie in their own segment, not in the next one: ``(used, w)``."""
        ends = np.arange(1, used + 1) * self.limit // self.projection_dim
        return self._frame_positions(used) < ends[:, None]

    def _real(self, x: Tensor, keep: Tensor | None) -> Tensor:
        return ops.ones((1, ops.shape(x)[1]), dtype="bool") if keep is None else keep

    def _filled(self, real: Tensor, x: Tensor, keep: Tensor | None) -> Tensor | None:
        """Which slots hold a token, from their frames ``(b or 1, k, w)``; None if all certainly do."""
        certain = keep is None and x.shape[1] is not None
        if certain and (self.method == "convolution" or self.projection_dim <= self.limit):
            return None
        return ops.any(real, axis=-1)

    def get_config(self) -> dict[str, Any]:
        names = ("max_length", "projection_dim", "num_heads", "sharing", "method", "start", "channels")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


class Start(keras.initializers.Initializer):
    """Normally distributed values around ``means``, a number or an array that broadcasts to the last axes."""

    def __init__(self, spread: float, means: float | np.ndarray = 0.0) -> None:
        self.noise, self.means = keras.initializers.RandomNormal(stddev=float(spread)), means

    def __call__(self, shape: tuple[int, ...], dtype: str | None = None) -> Tensor:
        noise = self.noise(shape, dtype=dtype)
        return noise + ops.cast(self.means, noise.dtype)


def single(x: Tensor) -> Tensor:
    """``x`` in float32, or unchanged if its type is larger: the type to add up in. In float16, TensorFlow's sums lose all later terms."""
    return ops.cast(x, keras.backend.result_type(keras.backend.standardize_dtype(x.dtype), "float32"))


def blank(x: Tensor, keep: Tensor | None) -> Tensor:
    """Zero what is not kept: ``(b, s, ...)`` with ``(b or 1, s)``. A selection, not a product: even NaN in padding is harmless.

    The result carries no Keras mask, which layers without masking would complain about.
    """
    if keep is None:
        return x
    for _ in x.shape[2:]:
        keep = ops.expand_dims(keep, -1)
    return ops.where(keep, x, ops.zeros((), dtype=keras.backend.standardize_dtype(x.dtype)))
