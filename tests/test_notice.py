"""The warning that there are more slots than positions: once for a model, attributed to the line that built it."""

import warnings

import pytest

from linformers import (
    LinearMultiheadAttention,
    Linformer,
    LinformerClassifier,
    LinformerEncDec,
    LinformerLM,
    make_projection,
)

SIZES = {"input_size": 13, "channels": 6, "dim_k": 17, "nhead": 2, "depth": 3}
SHARINGS = ("none", "headwise", "kv", "layerwise")
MESSAGE = (
    r"k = 17 slots for at most 13 positions: more slots than positions cost time and gain nothing; choose k below 13"
)


def notices(build, action="always"):
    """The warnings of ``build``."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action)
        build()
    return found


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize(
    "options", [{}, {"k_reduce_by_layer": 1}, {"method": "mean"}, {"method": "convolution"}], ids=str
)
@pytest.mark.parametrize(
    "kind",
    [
        Linformer,
        lambda **sizes: LinformerLM(11, **sizes),
        lambda **sizes: LinformerClassifier(11, 3, **sizes),
    ],
    ids=["stack", "language", "classifier"],
)
def test_once_for_a_stack(kind, options, sharing):
    (found,) = notices(lambda: kind(**SIZES, parameter_sharing=sharing, **options))
    assert str(found.message).startswith("k = 17 slots for at most 13 positions")
    assert found.filename == __file__


def test_once_for_an_encoder_and_a_decoder():
    def build():
        LinformerEncDec(11, 13, 6, 11, 12, 6, enc_dim_k=17, dec_dim_k=4, dec_block_size=3, nhead=2, depth=2)

    (found,) = notices(build)
    assert found.filename == __file__


def test_again_for_the_next_model():
    assert len(notices(lambda: [Linformer(**SIZES) for _ in range(2)])) == 2


def test_a_loop_over_layers_has_one_line():
    """Python's own filter, which shows a warning once for each line, shows it once."""

    def build():
        return [LinearMultiheadAttention(6, 2, seq_len=13, proj_k=17) for _ in range(3)]

    (found,) = notices(build, "default")
    assert found.filename == __file__
    assert len(notices(build)) == 3


def test_a_projection_alone_is_warned_of():
    for build in (lambda: make_projection(13, 17), lambda: LinearMultiheadAttention(6, 2, seq_len=13, proj_k=17)):
        with pytest.warns(UserWarning, match=MESSAGE) as found:
            build()
        assert [each.filename for each in found] == [__file__]
    assert not notices(lambda: make_projection(13, 13))


def test_an_error_inside_a_model_does_not_silence_the_next():
    with pytest.raises(ValueError, match="activation"):
        notices(lambda: Linformer(**SIZES, activation="none"))
    assert len(notices(lambda: Linformer(**SIZES))) == 1
