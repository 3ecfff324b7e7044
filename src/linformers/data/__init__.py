"""Data: corpora to tokens, tokens to examples, examples to batches."""

from linformers.data.baseline import frequency_baseline
from linformers.data.batches import LengthBatches, collate
from linformers.data.build import prepare
from linformers.data.counted import counted_baselines
from linformers.data.examples import TASKS, Examples, Task
from linformers.data.expressions import ListOps, listops
from linformers.data.noise import Noise
from linformers.data.passes import Progress
from linformers.data.prepared import Prepared, load
from linformers.data.python_docs import default_text
from linformers.data.records import KINDS, PARTS, Kind, Part
from linformers.data.several import several_baseline
from linformers.data.shards import join
from linformers.data.store import Documents
from linformers.labels import IGNORED

__all__ = [
    "IGNORED",
    "KINDS",
    "PARTS",
    "TASKS",
    "Documents",
    "Examples",
    "Kind",
    "LengthBatches",
    "ListOps",
    "Noise",
    "Part",
    "Prepared",
    "Progress",
    "Task",
    "collate",
    "counted_baselines",
    "default_text",
    "frequency_baseline",
    "join",
    "listops",
    "load",
    "prepare",
    "several_baseline",
]
