"""Sequence projections for Keras: shorten keys and values from s positions to k slots, as ``linformers.projections`` does.

Axes: b batch, h heads, s key positions, k slots, w positions of a window, c channels, e channels of a head.
Masks: ``keep`` is True where a token (or a slot) is real.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from linformers.checks import one_of
from linformers.notice import warn_of_slots
from linformers.projections.base import KEY, VALUE
from linformers.projections.dense import STARTS, segment_means
from linformers.projections.make import METHODS, SHARINGS

__all__ = ["KEY", "VALUE", "Projection", "Slots", "Tensor", "blank", "single"]

Tensor = Any  # of whichever backend runs


class Slots(NamedTuple):
    """A shortened sequence.

    Attributes:
        content: ``(b, k, c)``, or ``(b, k, h, e)`` if every head has a projection of its own.
        mass: ``(b or 1, k)``, what a sequence of ones becomes: the factor of a bias added before shortening. None stands for
            ones.
        keep: ``(b or 1, k)``, False where a slot holds no real token; None if all take part.
    """

    content: Tensor
    mass: Tensor | None
    keep: Tensor | None


@keras.saving.register_keras_serializable(package="linformers")
class Projection(keras.layers.Layer):
    """The weights that shorten sequences, for one attention layer or, handed to several as ``projection``, for all of them.

    Position i always uses row i of E, whatever the input's length; segment j of k starts at ``floor(j * max_length / k)``.

    Args:
        max_length: the longest input.
        projection_dim: the number of slots k.
        num_heads: the number of heads of the attention; matters to ``sharing="none"``.
        sharing: ``"none"``, every head has its own E and F; ``"headwise"``, the heads share them; ``"kv"``, E and F are one
            matrix; ``"layerwise"``, the same, for a projection that is handed to several layers.
        method: ``"learnable"``; ``"convolution"``, a kernel as wide as a segment; ``"mean"`` and ``"max"`` of each segment;
            ``"no_params"``, random and not trained.
        start: ``"random"``, N(0, 1 / max_length), with which compressed keys keep the scale of the keys at full length; or
            ``"segments"``, each slot averages its own segment, plus a little noise.

    Example:
        >>> shared = Projection(max_length=512, projection_dim=64, sharing="layerwise")
        >>> first = LinearMultiHeadAttention(num_heads=4, key_dim=32, projection=shared)
        >>> second = LinearMultiHeadAttention(num_heads=4, key_dim=32, projection=shared)
    """

    def __init__(
        self,
        max_length: int,
        projection_dim: int,
        *,
        num_heads: int = 1,
        sharing: str = "headwise",
        method: str = "learnable",
        start: str = "random",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, value in {"max_length": max_length, "projection_dim": projection_dim, "num_heads": num_heads}.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        self.max_length, self.projection_dim, self.num_heads = max_length, projection_dim, num_heads
        self.sharing, self.method = one_of("sharing", sharing, SHARINGS), one_of("method", method, METHODS)
        self.start = one_of("start", start, STARTS)
        warn_of_slots("projection_dim", projection_dim, max_length)
        pooling = method in ("mean", "max")
        self.parts = 1 if pooling or sharing in ("kv", "layerwise") else 2
        self.heads = num_heads if sharing == "none" and not pooling else 1
        match method:
            case "learnable" | "no_params":
                means = segment_means(max_length, projection_dim).numpy()
                self.matrices = self.add_weight(
                    name="matrices",
                    shape=(self.parts, self.heads, max_length, projection_dim),
                    initializer=Start(max_length**-0.5) if start == "random" else Start(0.1 * means.std(), means),
                    trainable=method == "learnable",
                )
            case "convolution":
                width = -(-max_length // projection_dim)
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
        """Whether it commutes with a map of the channels, so that either may come first."""
        return bool(self.method != "max")

    def cost(self, length: int) -> int:
        """Multiplications per channel of shortening ``length`` positions once."""
        return length * self.projection_dim if self.method in ("learnable", "no_params") else length

    def check_length(self, length: int | None) -> None:
        """Raise a ValueError unless ``1 <= length <= max_length``; None, a length known only later, passes."""
        if length == 0:
            raise ValueError("got an empty sequence of keys; give at least one position")
        if length is not None and length > self.max_length:
            raise ValueError(
                f"got a sequence of {length}, but this projection was built for at most {self.max_length}; "
                f"build the layer with max_length={length} or more, or shorten the input"
            )

    def shorten(self, x: Tensor, keep: Tensor | None, part: int) -> Slots:
        """Shorten ``x``.

        Args:
            x: ``(b, s, c)``, or ``(b, s, h, e)`` if ``heads`` is more than 1.
            keep: ``(b or 1, s)``, True where the token is real; nothing else has any influence.
            part: ``KEY`` or ``VALUE``.

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
            case _:
                return self._pool(x, keep)

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
        windows, real = self._windows(x), self._windows(self._real(x, keep))
        slot_keep = self._filled(real, x, keep)
        if self.heads > 1:
            return Slots(ops.einsum("hw,bkwhe->bkhe", kernel, windows), None, slot_keep)
        mass = ops.matmul(ops.cast(real, kernel.dtype), kernel[0])  # (b or 1, k)
        return Slots(ops.einsum("w,bkwc->bkc", kernel[0], windows), mass, slot_keep)

    def _pool(self, x: Tensor, keep: Tensor | None) -> Slots:
        windows = self._windows(x)  # (b, k, w, c)
        member = ops.logical_and(self._own_positions(windows.shape[1]), self._windows(self._real(x, keep)))
        if self.method == "mean":
            windows = single(windows)
            share = ops.cast(member, windows.dtype)
            share = share / ops.maximum(ops.sum(share, axis=-1, keepdims=True), 1)
            content = ops.cast(ops.matmul(share[:, :, None], windows)[:, :, 0], x.dtype)  # (b, k, c)
        else:
            content = ops.max(ops.where(member[..., None], windows, -np.inf), axis=2)
            content = ops.where(ops.any(member, axis=-1)[..., None], content, 0.0)
        return Slots(content, None, self._filled(member, x, keep))

    def _windows(self, x: Tensor) -> Tensor:
        """Cut ``(b, s, ...)`` into the windows of its segments, ``(b, used, w, ...)``, zero or False past the end of ``x``.

        A window is the ``ceil(max_length / k)`` positions from the start of its segment on. Segments that begin past the end
        are left out, unless the length is known only when the graph runs: then there are k.
        """
        length, k = x.shape[1], self.projection_dim
        used = k if length is None else -(-length * k // self.max_length)
        index = self._window_positions(used)
        total = int(index[-1, -1]) + 1
        batch, known_length, *rest = ops.shape(x)
        if length != total:  # in a graph, a negative size stops a sequence that is too long
            gap = (batch, total - known_length, *rest)
            x = ops.concatenate([x, ops.zeros(gap, dtype=keras.backend.standardize_dtype(x.dtype))], axis=1)
        if self.max_length % k:  # otherwise the windows lie side by side
            x = ops.take(x, index.reshape(-1), axis=1)
        return ops.reshape(x, (batch, *index.shape, *rest))

    def _window_positions(self, used: int) -> np.ndarray:
        """The position that every place of every window looks at: ``(used, w)``."""
        starts = np.arange(used) * self.max_length // self.projection_dim
        return starts[:, None] + np.arange(-(-self.max_length // self.projection_dim))

    def _own_positions(self, used: int) -> np.ndarray:
        """Which places of the windows lie in their own segment, not in the next one: ``(used, w)``."""
        ends = np.arange(1, used + 1) * self.max_length // self.projection_dim
        return self._window_positions(used) < ends[:, None]

    def _real(self, x: Tensor, keep: Tensor | None) -> Tensor:
        return ops.ones((1, ops.shape(x)[1]), dtype="bool") if keep is None else keep

    def _filled(self, real: Tensor, x: Tensor, keep: Tensor | None) -> Tensor | None:
        """Which slots hold a token, from their windows ``(b or 1, k, w)``; None if all do for certain."""
        certain = keep is None and x.shape[1] is not None
        if certain and (self.method == "convolution" or self.projection_dim <= self.max_length):
            return None
        return ops.any(real, axis=-1)

    def get_config(self) -> dict[str, Any]:
        names = ("max_length", "projection_dim", "num_heads", "sharing", "method", "start")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


class Start(keras.initializers.Initializer):
    """Normal numbers around ``means``, which may be a number or an array that fits the last axes."""

    def __init__(self, spread: float, means: float | np.ndarray = 0.0) -> None:
        self.noise, self.means = keras.initializers.RandomNormal(stddev=float(spread)), means

    def __call__(self, shape: tuple[int, ...], dtype: str | None = None) -> Tensor:
        noise = self.noise(shape, dtype=dtype)
        return noise + ops.cast(self.means, noise.dtype)


def single(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is if it is larger: the type to add up in. In float16, TensorFlow's sums lose all later terms."""
    return ops.cast(x, keras.backend.result_type(keras.backend.standardize_dtype(x.dtype), "float32"))


def blank(x: Tensor, keep: Tensor | None) -> Tensor:
    """Zero what is not kept: ``(b, s, ...)`` with ``(b or 1, s)``. A choice, not a product: even NaN in padding is harmless.

    The result carries no Keras mask, which layers without masking would complain about.
    """
    if keep is None:
        return x
    for _ in x.shape[2:]:
        keep = ops.expand_dims(keep, -1)
    return ops.where(keep, x, ops.zeros((), dtype=keras.backend.standardize_dtype(x.dtype)))
