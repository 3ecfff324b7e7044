"""``linformers bench``: times and memory, one file a command."""

from cyclopts import App

from linformers.cli.bench.causal import causal
from linformers.cli.bench.complexity import complexity
from linformers.cli.bench.decode import decode
from linformers.cli.bench.peers import peers
from linformers.cli.bench.stream import stream
from linformers.cli.bench.time import time

app = App(name="bench", help="Measure time and memory.")
for command in (time, peers, complexity, causal, decode, stream):
    app.command(command)
