"""One sequence over several processes: each has some of its positions, and a layer exchanges sums of its slots, whatever the length.

    mesh = init_device_mesh("cpu", (data, sequence), mesh_dim_names=("data", "sequence"))
    own = split(tokens, mesh["sequence"])
    with sequence_parallel(mesh["sequence"]):
        loss = F.cross_entropy(model(own).flatten(0, 1), split(labels, mesh["sequence"]).flatten(), reduction="sum") / count
    loss.backward()
    sum_gradients(model, mesh["sequence"])

The losses of the processes add up to the loss of the sequence: ``count`` is the number of labels of all of them. So the gradient of a parameter
in one process is a part of a sum. What all processes have alike, such as the logits of a classifier, counts once: the loss that each of them computes from it
is the loss of the sequence.

Axes: b batch, n positions, p processes.
"""

from linformers.parallel.rows import gather_rows, own_rows, owned_parameters, sum_gradients
from linformers.parallel.sequence import gather, sequence_parallel, split

__all__ = ["gather", "gather_rows", "own_rows", "owned_parameters", "sequence_parallel", "split", "sum_gradients"]
