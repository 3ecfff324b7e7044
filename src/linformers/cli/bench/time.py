"""``linformers bench time``: the prediction-time experiment."""

from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

Size = Annotated[int, Parameter(negative="")]


def time(
    *,
    sequence_length: Size = 2000,
    batch_size: Size = 25,
    embedding_dim: Size = 256,
    projection_dim: Size = 64,
    num_heads: Size = 8,
    hidden_dim: Size = 128,
    framework: Literal["torch", "keras"] = "torch",
    quick: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Run a prediction time experiment: an embedding and one attention layer on random tokens.

    Example: linformers bench time --sequence-length 8192 --batch-size 4

    Parameters
    ----------
    sequence_length
        Tokens of an input.
    batch_size
        Inputs predicted at once.
    embedding_dim
        Channels of the embedding.
    projection_dim
        Slots that keys and values are projected to.
    num_heads
        Attention heads.
    hidden_dim
        Channels of a head.
    framework
        The framework of the layer: PyTorch or Keras.
    quick
        Two inputs of 200 tokens; --sequence-length and --batch-size are ignored.
    """
    from linformers.experiments import prediction_time

    settings = prediction_time.Settings(
        sequence_length=200 if quick else sequence_length,
        batch_size=2 if quick else batch_size,
        embedding_dim=embedding_dim,
        projection_dim=projection_dim,
        num_heads=num_heads,
        hidden_dim=hidden_dim,
    )
    console = Console(markup=False)
    if framework == "keras":
        from linformers.keras import prediction_time as keras_prediction_time

        seconds = keras_prediction_time.run(settings)
    else:
        rows, seconds = prediction_time.run(settings)
        table = Table("Layer (type)", "Output shape", title="Model")
        table.add_column("Param #", justify="right")
        for name, shape, count in rows:
            table.add_row(name, shape, f"{count:,}")
        console.print(table)
        console.print(f"Total params: {sum(count for *_, count in rows):,}")
    for name, value in vars(settings).items():
        console.print(f"{name.replace('_', ' ').upper() + ':':<17}{value}", highlight=False)
    console.print(f"{'TIME:':<17}{seconds:.3f} seconds", highlight=False)
