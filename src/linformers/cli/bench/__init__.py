"""``linformers bench``: times and memory, one file for each command."""

from cyclopts import App

from linformers.cli.bench.causal import causal
from linformers.cli.bench.complexity import complexity
from linformers.cli.bench.decode import decode
from linformers.cli.bench.memory import memory
from linformers.cli.bench.peers import peers
from linformers.cli.bench.precision import precision
from linformers.cli.bench.scaling import scaling
from linformers.cli.bench.stream import stream
from linformers.cli.bench.time import time
from linformers.cli.bench.variants import variants

app = App(name="bench", help="Measure time and memory.")
for command in (time, peers, variants, complexity, causal, decode, stream, memory, precision, scaling):
    app.command(command)
