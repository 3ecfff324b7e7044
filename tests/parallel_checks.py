"""How a sequence over processes is compared with the same sequence in one: losses and gradients, errors, bytes.

Used by ``parallel_cases.py``, in processes of their own.
"""

from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model_cases import (
    CAUSAL,
    CHANNELS,
    SOURCE,
    TARGET,
    N,
    holes,
    make_causal_lm,
    make_stack,
    source_ids,
    tokens,
)
from torch import nn

from linformers import LinearMultiheadAttention, resample, stream
from linformers.labels import IGNORED
from linformers.ops.span import enter
from linformers.parallel import gather_rows, own_rows, owned_parameters, sequence_parallel, split, sum_gradients

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5}


class Sequence:
    """One sequence over ``p`` processes, or whole."""

    def __init__(self, group, p, multiple=1):
        self.group, self.p, self.multiple = group, p, multiple

    def part(self, x, multiple=None):
        return None if x is None else split(x, self.group, multiple=multiple or self.multiple)

    def inside(self):
        return sequence_parallel(self.group)


def compare(model, loss, sequence, inputs=()):
    """Compare ``loss(part, context)``, whole and split, and the gradients of all parameters and of ``inputs``.

    Args:
        loss: gets a function that takes the own part of a whole tensor, and a context; returns a loss, and whether it is a part of a sum.
        inputs: whole tensors ``(b, n, ...)`` that want a gradient.
    """
    results = {}
    for name, part, context in (("whole", lambda x, *_: x, nullcontext), ("split", sequence.part, sequence.inside)):
        model.zero_grad()
        for x in inputs:
            x.grad = None
        with context():
            value, is_part = loss(part)
        value.backward()
        value = value.detach()
        if name == "split":
            sum_gradients(model, sequence.group)
            for x in inputs:  # each process fills its own positions
                dist.all_reduce(x.grad, group=sequence.group)
            if is_part:
                dist.all_reduce(value, group=sequence.group)
        gradients = {n: p.grad for n, p in model.named_parameters()} | {
            f"input {i}": x.grad for i, x in enumerate(inputs)
        }
        results[name] = value, {n: None if g is None else g.clone() for n, g in gradients.items()}
    (whole, expected), (found, gradients) = results["whole"], results["split"]
    tolerance = TOLERANCE[whole.dtype]
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None and g.numel())
    assert abs(float(found - whole)) <= tolerance * max(1.0, abs(float(whole))), f"loss {found} instead of {whole}"
    for name, g in expected.items():
        other = gradients[name]
        if g is None or other is None:
            assert g is other or not (g if other is None else other).any(), f"{name} has a gradient in one of them only"
            continue
        error = float((g - other).abs().max()) / largest if g.numel() else 0.0
        assert error <= tolerance, f"gradient of {name}: error {error:.2g} of the largest"


def run_stack(sequence, options, n=N, masked=False, dtype=torch.float64, b=2):
    model = make_stack(options).to(dtype)
    x = torch.randn(b, n, CHANNELS, dtype=dtype, requires_grad=True)
    weights = torch.randn(b, n, CHANNELS, dtype=dtype)
    mask = holes(b, n) if masked else None
    if masked and options.get("causal"):
        mask[:, 0] = True

    def loss(part):
        y = model(part(x), part(mask))
        y = y if mask is None else y.masked_fill(~part(mask)[..., None], 0.0)
        return (y * part(weights)).sum(), True

    compare(model, loss, sequence, [x])


def run_lm(sequence, model, n=N, masked=False, b=2):
    ids, labels = tokens(b, n), tokens(b, n)
    labels[:, 1::2] = IGNORED
    mask = holes(b, n) if masked else None
    if masked and model.body.linformer.causal:
        mask[:, 0] = True
    if masked:
        labels = labels.masked_fill(~mask, IGNORED)
    count = (labels != IGNORED).sum()

    def loss(part):
        logits = model(part(ids), part(mask))
        return F.cross_entropy(logits.flatten(0, 1), part(labels).flatten(), reduction="sum") / count, True

    compare(model, loss, sequence)


def run_classifier(sequence, model, n=N, masked=False, b=3):
    ids, classes = tokens(b, n), torch.arange(b)
    mask = holes(b, n) if masked else None
    if masked:
        mask[0] = False  # a row without a real token
        mask[1, : n // 2] = False

    def loss(part):
        return F.cross_entropy(model(part(ids), part(mask)), classes), False

    compare(model, loss, sequence)


def run_encdec(sequence, model, masked, b=2):
    source, target, labels = source_ids(b, SOURCE), tokens(b, TARGET), tokens(b, TARGET)
    mask = holes(b, SOURCE) if masked else None

    def loss(part):
        logits = model(part(source, 1), part(target), part(mask, 1))
        return F.cross_entropy(logits.flatten(0, 1), part(labels).flatten(), reduction="sum") / labels.numel(), True

    compare(model, loss, sequence)


def run_ddp(sequence, model, batches):
    """DDP: processes with samples of their own have the gradients of all samples, at every length; see ``parallel_cases.py``."""
    rank, size = dist.get_rank(sequence.group), sequence.p
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=sequence.group)

    def gradients(run, inputs):
        model.zero_grad()
        run(*inputs).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    for inputs in batches:
        whole = gradients(model, inputs)
        found = gradients(wrapped, [x[rank::size] for x in inputs])  # DDP takes the mean over processes
        largest = max(float(g.abs().max()) for g in whole.values())
        for name, g in whole.items():
            assert float((size * found[name] - g).abs().max()) <= 1e-8 * largest, name


def run_owned(sequence, model, n=N - 1):
    """Rows that each process has for its own positions have the gradients that they have in one process."""
    ids, group = tokens(2, n), sequence.group
    model(ids).square().sum().backward()
    whole = {name: p.grad for name, p in model.named_parameters()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    own_rows(model, group)
    own = {name for name, p in model.named_parameters() if any(p is x for x in owned_parameters(model))}
    assert own == {name for name in before if "projection" in name or "pos_emb" in name}
    fails("rows of its own positions only already; use gather_rows first", own_rows, model, group)
    fails("rows of one process only; use linformers.parallel.gather_rows first", partial(resample, max_len=40), model)
    model.zero_grad()
    with sequence.inside():
        fails("split sequences with length=21", model, split(ids[:, : 2 * sequence.p], group))
        y = model(split(ids, group, length=N))
    y.square().sum().backward()
    fails("use the same mesh, or gather_rows first", model, ids)
    sum_gradients(model, group)
    for name, p in model.named_parameters():
        expected = split(whole[name], group, dim=0) if name in own else whole[name]
        torch.testing.assert_close(p.grad, expected, rtol=1e-8, atol=1e-8)
    gather_rows(model, group)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def refusals(x):
    """Messages, models and their inputs."""
    own = [nn.Linear(N, 7), nn.Linear(N, 7)]
    memory, layer = make_stack({"context_size": 13, "attention": "local", "local_window": 3}), make_layer()
    return [
        ("full attention needs the keys of all positions", make_stack({"attention": "full"}), [x]),
        ("full attention needs the keys of all positions", memory.memory, [x]),
        ("a user-defined projection module needs the whole input", make_stack({"method": own}), [x]),
        ("decoding cannot be split over processes", make_causal_lm().generate, [tokens(1, 3), 2]),
        ("decoding cannot be split over processes", make_causal_lm().new_state, [1]),
        ("LinearMultiheadAttention cannot be split over processes", layer, [x, x, x]),
        ("stream cannot be split over processes", stream, [make_stack({}).eval(), x]),
        ("some rows begin with padding", make_stack(CAUSAL["plain"]), [x, holes(2, 6)[:, 3:]]),
        ("this model has blocks of 2 positions, but the processes begin at 0, 3", make_stack({"local_window": 2}), [x]),
    ]


def make_layer():
    return LinearMultiheadAttention(CHANNELS, 2, seq_len=N, proj_k=7, batch_first=True, dtype=torch.float64)


def fails(message, run, *args, **more):
    try:
        run(*args, **more)
        found = "no error"
    except ValueError as error:
        found = str(error)
    assert message in found, f"{found}; expected: {message}"


@contextmanager
def counted():
    """Count the bytes that this process hands to collectives: by name, and how many calls."""
    names, sizes = ("all_reduce", "all_gather", "all_to_all_single"), []
    originals = {name: getattr(dist, name) for name in names}

    def counting(name):
        def call(*args, **more):
            x = args[0] if name == "all_reduce" else args[1]
            sizes.append(x.numel() * x.element_size())
            return originals[name](*args, **more)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield sizes
    finally:
        for name in names:
            setattr(dist, name, originals[name])


def bytes_of_step(sequence, model, n, **how):
    """The sizes of all exchanges of a training step, gradients included."""
    ids = tokens(1, n)
    with counted() as sizes:
        with sequence.inside():
            loss = model(split(ids, sequence.group, **how)).square().sum()
        loss.backward()
        sum_gradients(model, sequence.group)
    return sizes


def run_exact(sequence, projection, b=2, n=N, d=3):
    """Slots of small integers: the sums of the processes, added up, give those of the whole sequence to the last bit."""
    torch.manual_seed(0)
    with torch.no_grad():
        for x in (*projection.parameters(), *projection.buffers()):
            x.copy_(torch.randint(-3, 4, x.shape))
    x, keep = torch.randint(-4, 5, (b, projection.heads, n, d)).float(), holes(b, n)
    seen = []

    class Reader(nn.Module):
        def forward(self, x):
            seen.append(enter(self, x, None, lambda: None))

    rows = sequence.part(x.transpose(1, 2))  # (b, n, h, d)
    with sequence.inside():
        Reader()(rows)
    (span,) = seen
    for part in (0, 1):
        for mask in (None, keep):
            sums = projection.partial(rows.transpose(1, 2), span.offset, span.total, sequence.part(mask), part)
            found = projection.finish(projection.total([sums], span)[0])
            expected = projection(x, mask, part)
            assert torch.equal(found.content, expected.content)
            if expected.mass is not None:
                assert torch.equal(found.mass(), expected.mass().expand_as(found.mass()))
            if expected.keep is not None or found.keep is not None:
                everywhere = torch.ones(b, found.content.shape[2], dtype=torch.bool)
                both = [everywhere if y is None else y.expand_as(everywhere) for y in (found.keep, expected.keep)]
                assert torch.equal(*both)
