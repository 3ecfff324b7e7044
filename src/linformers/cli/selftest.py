"""``linformers selftest``: the laws and a short benchmark, on a device of your own."""

from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from linformers.checks import at_least_one


def selftest(*, device: str = "cpu", rounds: Annotated[int, Parameter(negative="")] = 5) -> None:
    """Check on a device what must hold on every device, and time attention beside full attention.

    Example: linformers selftest --device cuda

    Parameters
    ----------
    device
        A device of torch, such as cpu, cuda or cuda:1.
    rounds
        How often each time is measured; the best counts.
    """
    from linformers.experiments.selftest import benchmark, laws, usable

    at_least_one(**{"--rounds": rounds})
    place = usable(device)
    console, failed = Console(markup=False), 0
    for law, problem in laws(place):
        failed += problem is not None
        console.print(
            f"{'failed' if problem else 'holds '}  {law}" + (f": {problem}" if problem else ""),
            highlight=False,
            soft_wrap=True,
        )
    for n, ours, full in benchmark(place, rounds):
        console.print(
            f"n = {n:,}: Linformer {1e3 * ours:.2f} ms, full attention {1e3 * full:.2f} ms",
            highlight=False,
            soft_wrap=True,
        )
    if failed:
        raise ValueError(
            f"{failed} laws do not hold on {place}; please report it, with the output of `python -m torch.utils.collect_env`"
        )
