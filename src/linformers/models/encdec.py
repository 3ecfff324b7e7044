"""``LinformerEncDec``: an encoder, and a causal decoder with cross-attention to the source; their sizes may differ.

Axes: b batch, s source positions, t target positions, v tokens of the target vocabulary.
Masks: True where a token is real.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from linformers.models.generation import Generation, evaluating
from linformers.models.language import LinformerLM
from linformers.models.options import TokenOptions
from linformers.nn.memory import Memory
from linformers.nn.mismatch import explained

SIZES = ("num_tokens", "input_size", "channels")  # have no default: given for each side, or for both
SHARED = tuple(field.name for field in fields(TokenOptions))
CONTEXT = ("context_size", "context_channels")  # follow from the encoder
# The options of each side: the encoder is not causal and has no context, the decoder is causal.
ENCODER = tuple(
    name
    for name in SHARED
    if name not in ("causal", "block_size", "open_reach", "context_k", "cross_attention", *CONTEXT)
)
DECODER = tuple(name for name in (*SHARED, "tie_weights") if name not in ("causal", "local_window", *CONTEXT))


class LinformerEncDec(nn.Module):
    """Source tokens ``(b, s)`` and target tokens ``(b, t)`` to logits of the next target tokens ``(b, t, v)``.

    The encoder sees the whole source. The decoder is causal, and each of its layers compresses the source once, for all targets;
    with ``cross_attention="full"`` it sees every position of the source, at a cost of s times t.

    Args:
        enc_num_tokens: size of the source vocabulary.
        enc_input_size: the longest source; None for any length, with ``method="content"``.
        enc_channels: of the encoder.
        dec_num_tokens: size of the target vocabulary.
        dec_input_size: the longest target; None for any length, with ``method="content"``.
        dec_channels: of the decoder.
        options: those of :class:`LinformerLM` and :class:`Linformer`, with ``enc_`` or ``dec_`` before their name for one
            side, and without for both; ``num_tokens``, ``input_size`` and ``channels`` too.

    Example:
        >>> import torch
        >>> from linformers import LinformerEncDec
        >>> model = LinformerEncDec(num_tokens=100, enc_input_size=256, dec_input_size=64, channels=32, dim_k=16).eval()
        >>> source, start = torch.randint(100, (2, 200)), torch.zeros(2, 1, dtype=torch.long)
        >>> model.generate(source, start, max_new_tokens=7).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        enc_num_tokens: int | None = None,
        enc_input_size: int | None = None,
        enc_channels: int | None = None,
        dec_num_tokens: int | None = None,
        dec_input_size: int | None = None,
        dec_channels: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        sizes = (enc_num_tokens, enc_input_size, enc_channels, dec_num_tokens, dec_input_size, dec_channels)
        names = [f"{side}_{name}" for side in ("enc", "dec") for name in SIZES]
        given = options | {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
        encoder, decoder = side_options("enc", given, ENCODER), side_options("dec", given, DECODER)
        unknown = [n for n in given if n.removeprefix("enc_") not in ENCODER and n.removeprefix("dec_") not in DECODER]
        if unknown:
            raise TypeError(
                f"unknown option {unknown[0]!r}; the options are those of Linformer, with enc_, dec_ or neither"
            )
        for side, found in (("enc", encoder), ("dec", decoder)):
            if isinstance(method := found.get("method"), str) and method == "content":
                found.setdefault("input_size", None)
            for name in SIZES:
                if name not in found:
                    raise TypeError(f"{side}_{name} is missing; give it, or {name} for both sides")
        self.encoder = LinformerLM(**encoder, return_emb=True)
        self.decoder = LinformerLM(
            **decoder,
            causal=True,
            context_size=encoder["input_size"],
            context_channels=self.encoder.body.emb_dim,
        )

    @explained(ids=("src", "tgt"), masks=("src_mask", "tgt_mask"))
    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        """Logits of the token after each target token.

        Args:
            src: ``(b, s)``.
            tgt: ``(b, t)``, the input of the decoder: the target shifted right by one position.
            src_mask: ``(b, s)``, True where the source is real.
            tgt_mask: ``(b, t)``, True where the target is real.
        """
        return self.decoder(tgt, tgt_mask, memory=self.encode(src, src_mask))

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> list[Memory]:
        """Read a source ``(b, s)`` and prepare it for every layer of the decoder; needed once for any number of targets."""
        return self.decoder.memory(self.encoder(src, src_mask), src_mask)

    @explained(ids=("src", "prompt"), masks=("src_mask", "mask"))
    def generate(
        self,
        src: Tensor,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        src_mask: Tensor | None = None,
        mask: Tensor | None = None,
        **options: Unpack[Generation],
    ) -> Tensor:
        """Continue the target ``prompt`` ``(b, t)``, usually the start token alone, for the source; see :meth:`LinformerLM.generate`."""
        memory = self._encode_source(src, src_mask)
        return self.decoder.generate(prompt, max_new_tokens, mask=mask, memory=memory, **options)

    @explained(ids=("src", "prompt"), masks=("src_mask", "mask"))
    def stream(
        self,
        src: Tensor,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        src_mask: Tensor | None = None,
        mask: Tensor | None = None,
        **options: Unpack[Generation],
    ) -> Iterator[Tensor]:
        """:meth:`generate`, yielding the tokens ``(b,)`` as they are generated."""
        memory = self._encode_source(src, src_mask)
        return self.decoder.stream(prompt, max_new_tokens, mask=mask, memory=memory, **options)

    @torch.no_grad()
    def _encode_source(self, src: Tensor, src_mask: Tensor | None) -> Sequence[Memory]:
        """:meth:`encode` for generation: in eval mode and without gradients."""
        with evaluating(self):
            return self.encode(src, src_mask)


def side_options(side: str, given: dict[str, Any], allowed: Sequence[str]) -> dict[str, Any]:
    """The options of one side: those without a prefix, overridden by those with its own prefix."""
    both = {name: value for name, value in given.items() if name in allowed}
    own = {
        name.removeprefix(f"{side}_"): value
        for name, value in given.items()
        if name.startswith(f"{side}_") and name.removeprefix(f"{side}_") in allowed
    }
    return both | own
