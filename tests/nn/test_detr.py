"""The drop-in's own examples, and DETR's transformer with its attention replaced."""

import pytest
import torch
from torch import nn

import linformers
from linformers import LinearMultiheadAttention

USAGE = """
from linear_multihead_attention import LinearMultiheadAttention
multihead_attn = LinearMultiheadAttention(embed_dim, num_heads)
attn_output, attn_output_weights = multihead_attn(query, key, value)
"""

LAYERWISE = """
from linear_multihead_attention import LinearMultiheadAttention
multihead_attn = LinearMultiheadAttention(embed_dim, num_heads, seq_len=512, proj_k=256, param_sharing='layerwise')
attn_output, attn_output_weights = multihead_attn(query, key, value)
"""


def run_example(code, length):
    query, key, value = (torch.randn(length, 3, 64) for _ in range(3))
    names = {"embed_dim": 64, "num_heads": 8, "query": query, "key": key, "value": value}
    exec(code.replace("linear_multihead_attention", linformers.__name__), names)
    return names


@pytest.mark.parametrize("length", [512, 101])
@pytest.mark.parametrize(("code", "k", "count"), [(USAGE, 128, 16), (LAYERWISE, 256, 1)])
def test_usage_examples(code, k, count, length):
    names = run_example(code, length)
    assert names["attn_output"].shape == (length, 3, 64)
    assert names["attn_output_weights"].shape == (3, length, k)
    assert names["multihead_attn"].projection.count == count


# DETR: positions are added to queries and keys but not to values, and images of different sizes give masks with holes.


class EncoderLayer(nn.Module):
    def __init__(self, d_model, nhead, attention, dropout=0.0):
        super().__init__()
        self.self_attn = attention(d_model, nhead, dropout=dropout)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, 17), nn.ReLU(), nn.Linear(17, d_model))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, src, src_key_padding_mask, pos):
        q = k = src + pos
        src = self.norm1(src + self.self_attn(q, k, value=src, key_padding_mask=src_key_padding_mask)[0])
        return self.norm2(src + self.feed_forward(src))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, nhead, self_attention, attention, dropout=0.0):
        super().__init__()
        self.self_attn = self_attention(d_model, nhead, dropout=dropout)
        self.multihead_attn = attention(d_model, nhead, dropout=dropout)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, 17), nn.ReLU(), nn.Linear(17, d_model))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, tgt, memory, memory_key_padding_mask, pos, query_pos):
        q = k = tgt + query_pos
        tgt = self.norm1(tgt + self.self_attn(q, k, value=tgt)[0])
        attended = self.multihead_attn(
            query=tgt + query_pos, key=memory + pos, value=memory, key_padding_mask=memory_key_padding_mask
        )[0]
        tgt = self.norm2(tgt + attended)
        return self.norm3(tgt + self.feed_forward(tgt))


class Transformer(nn.Module):
    """``forward(src, mask, query_embed, pos_embed)`` as DETR's; src is ``(b, c, h, w)``, mask True where it is padded."""

    def __init__(self, d_model, nhead, attention, self_attention, depth=2):
        super().__init__()
        self.encoder = nn.ModuleList(EncoderLayer(d_model, nhead, attention) for _ in range(depth))
        self.decoder = nn.ModuleList(DecoderLayer(d_model, nhead, self_attention, attention) for _ in range(depth))

    def forward(self, src, mask, query_embed, pos_embed):
        src, pos = (x.flatten(2).permute(2, 0, 1) for x in (src, pos_embed))  # (h w, b, c)
        query_pos, mask = query_embed[:, None].expand(-1, src.shape[1], -1), mask.flatten(1)
        memory, tgt = src, torch.zeros_like(query_pos)
        for layer in self.encoder:
            memory = layer(memory, mask, pos)
        for layer in self.decoder:
            tgt = layer(tgt, memory, mask, pos, query_pos)
        return tgt.transpose(0, 1)


D, HEADS, HEIGHT, WIDTH, QUERIES = 6, 3, 5, 7, 11


def linear_detr(proj_k, method):
    def attention(d_model, nhead, dropout):
        w, h = WIDTH, HEIGHT
        return LinearMultiheadAttention(d_model, nhead, dropout=dropout, seq_len=w * h, proj_k=proj_k, method=method)

    def self_attention(d_model, nhead, dropout):
        proj = min(proj_k, QUERIES)
        return LinearMultiheadAttention(d_model, nhead, dropout=dropout, seq_len=QUERIES, proj_k=proj, method=method)

    return Transformer(D, HEADS, attention, self_attention).double()


def images():
    """Two images in one batch; the second is smaller, so its padding lies at the end of every line and below."""
    src, pos = torch.randn(2, 2, D, HEIGHT, WIDTH, dtype=torch.float64)
    mask = torch.zeros(2, HEIGHT, WIDTH, dtype=torch.bool)
    mask[1, 3:] = mask[1, :, 4:] = True
    return src, mask, torch.randn(QUERIES, D, dtype=torch.float64), pos


def test_a_slot_for_each_pixel_is_detr_itself():
    full = Transformer(D, HEADS, nn.MultiheadAttention, nn.MultiheadAttention).double()
    linear = linear_detr(HEIGHT * WIDTH, "mean")
    linear.load_state_dict(full.state_dict())
    inputs = images()
    torch.testing.assert_close(linear(*inputs), full(*inputs))


@pytest.mark.parametrize("method", ["learnable", "convolution", "mean", "max", "no_params"])
def test_padding_of_the_smaller_image_has_no_influence(method):
    model = linear_detr(5, method)
    src, mask, queries, pos = images()
    expected = model(src, mask, queries, pos)
    assert expected.shape == (2, QUERIES, D)
    other = src.masked_fill(mask[:, None], 100.0)
    torch.testing.assert_close(model(other, mask, queries, pos), expected)
    other = src.masked_fill(~mask[:, None], 100.0)
    assert (model(other, mask, queries, pos) - expected).abs().max() > 1e-3
    expected.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("method", ["learnable", "convolution"])
def test_detr_starts_the_projections_at_their_scale(method):
    """By its ``_reset_parameters``, after everything is built."""
    found = {}
    for _ in range(32):  # kernels have few numbers
        model = linear_detr(5, method)
        for p in model.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)
        for name, p in model.named_parameters():
            if "projection." in name:
                found.setdefault(name, []).append(p.detach().square().mean() * len(p))
    assert len(found) == 6
    for name, squares in found.items():
        assert 0.5 < torch.stack(squares).mean().sqrt() < 2, name


def test_the_scale_of_many_columns_is_restored_by_a_reset():
    """The sizes of the three lines: 8 heads that share nothing have 1,024 columns, too many for 100 queries."""
    pixels, queries = (LinearMultiheadAttention(16, 8, seq_len=n, proj_k=64).projection for n in (850, 100))
    for projection in (pixels, queries):
        nn.init.xavier_uniform_(projection.weight)

    def ratio(projection):
        return projection.weight.std().item() * len(projection.weight) ** 0.5

    assert 0.5 < ratio(pixels) < 2
    assert ratio(queries) == pytest.approx((200 / 1124) ** 0.5, rel=0.05)  # as documented
    queries.reset_parameters()
    assert ratio(queries) == pytest.approx(1, rel=0.05)


def test_trained_detr_loads_but_for_the_projections():
    full = Transformer(D, HEADS, nn.MultiheadAttention, nn.MultiheadAttention)
    linear = linear_detr(5, "learnable")
    missing, unexpected = linear.load_state_dict(full.state_dict(), strict=False)
    assert not unexpected
    assert len(missing) == 6
    assert all(name.endswith("attn.projection.weight") for name in missing)


def test_the_three_lines():
    """The constructor calls, word for word."""
    d_model, nhead, dropout, num_queries = 32, 8, 0.1, 100
    bs, c, h, w = 2, d_model, 9, 11
    attentions = (
        LinearMultiheadAttention(d_model, nhead, dropout=dropout, seq_len=w*h, proj_k=64),
        LinearMultiheadAttention(d_model, nhead, dropout=dropout, seq_len=num_queries, proj_k=64),
        LinearMultiheadAttention(d_model, nhead, dropout=dropout, seq_len=w*h, proj_k=64),
    )  # fmt: skip
    pixels, queries = torch.randn(h * w, bs, c), torch.randn(num_queries, bs, c)
    for attention, (q, k) in zip(attentions, ((pixels, pixels), (queries, queries), (queries, pixels)), strict=True):
        output, weights = attention(q, k, k)
        assert output.shape == q.shape
        assert weights.shape == (bs, q.shape[0], 64)
